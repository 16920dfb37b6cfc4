"""Client of a Pagewire cluster.

    from pagewire import Client

    with Client("localhost:50051") as client:
        print(client.generate("The page was", max_tokens=16).text)

`AsyncClient` has the same methods with `await`. `pagewire.errors` describes the errors.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

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

# gRPC reads this at import. By default its threads continue in a forked process, on the parent's
# connections, and crash it sooner or later, even if it never uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from pagewire.async_client import AsyncClient, AsyncStream
    from pagewire.client import Client, Stream
    from pagewire.tls import Tls
else:
    # name |-> module that the name's first use imports, with gRPC: a command can set up its
    # interrupts before, and a server that packs token ids needs no client.
    _CLIENTS = {
        "Client": "pagewire.client",
        "Stream": "pagewire.client",
        "AsyncClient": "pagewire.async_client",
        "AsyncStream": "pagewire.async_client",
        "Tls": "pagewire.tls",
    }

    def __getattr__(name):
        if name not in _CLIENTS:
            raise AttributeError(f"module 'pagewire' has no attribute {name!r}")
        return getattr(import_module(_CLIENTS[name]), name)


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
