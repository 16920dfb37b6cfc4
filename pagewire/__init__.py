"""Client of a Pagewire cluster.

    from pagewire import Client

    with Client("localhost:50051") as client:
        print(client.generate("The page was", max_tokens=16).text)

`AsyncClient` is the same with `await`. Errors are described in `pagewire.errors`.
"""

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
    TransportError,
    UnavailableError,
)
from pagewire.types import (
    Choice,
    ClusterStatus,
    Completion,
    Delta,
    Message,
    Model,
    PageCounts,
    SamplingOptions,
    TokenLogprob,
    Tokens,
    ToolCall,
    Usage,
    WorkerStatus,
)

__all__ = [
    "Client",
    "Stream",
    "AsyncClient",
    "AsyncStream",
    "SamplingOptions",
    "Message",
    "ToolCall",
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
    "PagewireError",
    "RequestError",
    "InvalidRequestError",
    "FieldViolation",
    "NotFoundError",
    "AuthenticationError",
    "OverloadedError",
    "TransportError",
    "ConnectionFailedError",
    "UnavailableError",
    "TimeoutError",
    "CancelledError",
    "ServerError",
    "ClosedError",
]
