"""Client of a Pagewire cluster.

    from pagewire import Client

    with Client("localhost:50051") as client:
        print(client.generate("The page was", max_tokens=16).text)

`AsyncClient` has the same methods with `await`. `pagewire.errors` describes the errors.
"""

import os

# gRPC reads these at import. By default its threads continue in a forked process, on the parent's
# connections, and crash it sooner or later, even if it never uses gRPC; and it reports each
# connection that a stopping router ends as if something were wrong. Errors are still reported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

TYPE_CHECKING = False  # as typing's, whose import takes longer than this whole module
if TYPE_CHECKING:
    from pagewire.async_client import AsyncClient, AsyncStream
    from pagewire.client import Client, Stream
    from pagewire.errors import (
        AuthenticationError,
        CancelledError,
        ClosedError,
        ConnectionFailedError,
        FieldViolation,
        InvalidRequestError,
        NotFoundError,
        OverloadedError,
        PagewireError,
        RequestError,
        ServerError,
        TimeoutError,  # noqa: A004 - like asyncio's, it is meant to be used with its module's name
        TlsError,
        TransportError,
        UnavailableError,
    )
    from pagewire.tls import Tls
    from pagewire.tool_calls import forced_calls
    from pagewire.types import (
        Choice,
        ClusterStatus,
        Completion,
        Constraint,
        Delta,
        Encryption,
        HotPrefix,
        Message,
        Model,
        PageCounts,
        SamplingDefaults,
        SamplingOptions,
        TenantStatus,
        TokenLogprob,
        Tokens,
        ToolCall,
        Usage,
        WorkerStatus,
    )
else:
    # Imported on the first use of a name, in this order up to the module that has it: a command can
    # set up its interrupts before, and who needs no client gets along without gRPC.
    _MODULES = ("errors", "types", "tool_calls", "tls", "async_client", "client")

    def __getattr__(name):
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"pagewire.{name}")
        if name in __all__:
            for each in _MODULES:
                if hasattr(module := import_module(f"pagewire.{each}"), name):
                    return getattr(module, name)
        raise AttributeError(f"module 'pagewire' has no attribute {name!r}")

    def __dir__():
        return [*globals(), *__all__]


__all__ = [
    "Client",
    "Stream",
    "AsyncClient",
    "AsyncStream",
    "Tls",
    "SamplingDefaults",
    "SamplingOptions",
    "Constraint",
    "Message",
    "ToolCall",
    "forced_calls",
    "Completion",
    "Choice",
    "Delta",
    "TokenLogprob",
    "Usage",
    "Tokens",
    "Model",
    "ClusterStatus",
    "WorkerStatus",
    "PageCounts",
    "HotPrefix",
    "Encryption",
    "TenantStatus",
    "PagewireError",
    "RequestError",
    "InvalidRequestError",
    "FieldViolation",
    "NotFoundError",
    "AuthenticationError",
    "OverloadedError",
    "TransportError",
    "ConnectionFailedError",
    "TlsError",
    "UnavailableError",
    "TimeoutError",
    "CancelledError",
    "ServerError",
    "ClosedError",
]
