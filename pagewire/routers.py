"""The routers that a client knows, with a channel to each, and the one that it talks to."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

import grpc

from pagewire.errors import ClosedError, ConnectionFailedError, PagewireError
from pagewire.protos import inference_pb2_grpc
from pagewire.protos.grpc_options import MESSAGE_OPTIONS
from pagewire.protos.tls_channel import TlsChannel
from pagewire.tls import Tls, why_no_connection

CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    # A router that hangs, or whose host is gone, leaves the connection open: only pings tell, in
    # seven seconds at most. Routers end connections that are pinged more often than every 1.5 s.
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # without it a minute, whatever the other one says
    ("grpc.http2.max_pings_without_data", 0),  # no limit: who reads a stream sends nothing
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the longest time to connect
    # A router that has come back is found by the caller's next call, not minutes later.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Channel = Any  # grpc.aio.Channel, or what a test puts in its place
ChannelFactory = Callable[[str], Channel]
Explain = Callable[[PagewireError, str], Awaitable[PagewireError]]


class Connector:
    """Opens channels to routers, in clear or over TLS.

    Args:
        tls: Files and names; None: in clear.

    Raises:
        InvalidRequestError: A file cannot be used.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        self._pem = tls.load() if tls else None
        self._server_name = tls.server_name if tls else ""

    def __call__(self, address: str) -> Channel:
        """Open a channel to `host:port`; it connects on first use.

        Raises:
            ClosedError: gRPC has been used by the process that this one was forked from. Its
                threads are missing here, so calls would hang without end.
        """
        if _grpc_pid() != os.getpid():
            raise ClosedError(
                "gRPC does not survive a fork: use the start method spawn, or fork before the first"
                " call of a client"
            )
        if self._pem is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return TlsChannel(address, self._pem, self._server_name, CHANNEL_OPTIONS)

    async def explain(self, error: PagewireError, address: str) -> PagewireError:
        """Return the error of a call that reached nobody; where TLS is the reason, that one."""
        if not isinstance(error, ConnectionFailedError):
            return error
        pem = self._pem.current() if self._pem else None
        return await why_no_connection(address, pem, self._server_name) or error


class Routers:
    """Owned by the event loop of the first call.

    Args:
        addresses: One or more, `host:port`; the first one is used first.
        channel_factory: Opens a channel to one of them.
        explain: Given the error of a call that reached nobody, and the address, finds a better one.
        token: That says for whom calls are made; empty: none.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        channel_factory: ChannelFactory,
        explain: Explain,
        token: str = "",
    ) -> None:
        self.addresses = addresses
        self.explain = explain
        self.metadata = token_metadata(token)  # of each call
        self.is_closed = False
        self._channel_factory = channel_factory
        self._current = 0
        self._channels: dict[str, tuple[Channel, Any]] = {}  # address |-> channel, stub
        self._loop: asyncio.AbstractEventLoop | None = None  # of the channels

    @property
    def address(self) -> str:
        """The address of the one that calls go to."""
        return self.addresses[self._current]

    def stub(self) -> Any:
        """Return the service of the router that calls go to.

        Raises:
            ClosedError: The client was closed, or belongs to another event loop or process.
        """
        if self.is_closed:
            raise closed()
        # A channel belongs to the event loop that is running when it is made.
        loop = asyncio.get_running_loop()
        if self._channels and self._loop is not loop:
            raise ClosedError("the client belongs to another event loop; make one in each")
        address = self.address
        if address not in self._channels:
            channel = self._channel_factory(address)
            make_stub = inference_pb2_grpc.InferenceServiceStub
            self._channels[address] = channel, make_stub(channel)  # type: ignore[no-untyped-call]
            self._loop = loop
        return self._channels[address][1]

    def leave(self, address: str) -> None:
        """Have calls go to the next router, unless they go to another one than this already."""
        if address == self.address:
            self._current = (self._current + 1) % len(self.addresses)

    async def aclose(self) -> None:
        """Close all channels; harmless when repeated."""
        self.is_closed = True
        channels, self._channels = self._channels, {}
        if channels and self._loop is asyncio.get_running_loop():
            await asyncio.gather(*(channel.close() for channel, _ in channels.values()))


async def no_better(error: PagewireError, _: str) -> PagewireError:
    """Explain nothing: where the channels are others' own."""
    return error


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call that brings a bearer token; empty: none."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def closed() -> ClosedError:
    """Make the error of a client that was closed."""
    return ClosedError("the client is closed; make a new one")


@cache
def _grpc_pid() -> int:
    """Return the process that used gRPC first; a forked one inherits the answer."""
    return os.getpid()
