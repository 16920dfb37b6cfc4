"""The routers that a client knows, a connection to each, and the one in use."""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import grpc

from pagewire.calls import ENVELOPE_BYTES, CallStream, Metadata, Receiver, RunningCall, SingleCall
from pagewire.errors import ClosedError, ConnectionFailedError, PagewireError, TlsError
from pagewire.failures import CallFailure, failure_from
from pagewire.protos import inference_pb2, inference_pb2_grpc
from pagewire.protos.call_tasks import is_own_cancellation
from pagewire.protos.gathering import READS_TOKENS_KEY
from pagewire.protos.grpc_options import LARGE_REQUEST_BYTES, MESSAGE_OPTIONS
from pagewire.protos.tls_channel import TlsChannel
from pagewire.tls import Tls, why_no_connection

BEGIN_S = 1.0  # for a call that has not begun
RESTART_S = 5.0  # the same, while a router that has served may be starting again
STOPPING_S = 15.0  # the same, while a router that stops gives others time to end, and starts again
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between two calls; each pause doubles
MOST_IDLE_STREAMS = 64  # of idle callers, at each router

CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    # A router that hangs, or whose host is gone, leaves the connection open: only pings detect it,
    # in seven seconds at most. Routers end connections pinged more often than every 1.5 s.
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # otherwise a minute, whatever the option above says
    ("grpc.http2.max_pings_without_data", 0),  # no limit: the reader of a stream sends nothing
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the longest time to connect
    # The caller's next call finds a router that is back, not one minutes later.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Channel = Any  # grpc.aio.Channel, or a test's substitute
ChannelFactory = Callable[[str], Channel]
MakeStub = Callable[[Channel], Any]  # of one service
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
            ClosedError: The process that this one was forked from has used gRPC. Its threads are
                missing here, so calls would hang forever.
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
        """Return the error of a call that reached no router; a TlsError if TLS is the reason."""
        if not isinstance(error, ConnectionFailedError):
            return error
        pem = self._pem.current() if self._pem else None
        name = (pem.other_name if pem else "") or self._server_name
        return await why_no_connection(address, pem, name) or error


@dataclass(slots=True)
class _Connection:
    """To one router."""

    channel: Channel
    stub: Any
    # metadata |-> the stream on which calls with it start, last used last
    streams: OrderedDict[Metadata, CallStream] = field(default_factory=OrderedDict)

    def stream(self, metadata: Metadata, address: str) -> CallStream:
        """Return the stream for calls with these metadata."""
        stream = self.streams.get(metadata)
        if stream is None or not stream.is_open:
            self.drop_unused()
            open_call = partial(
                self.stub.GenerateMany, metadata=(*metadata, (READS_TOKENS_KEY, "1"))
            )
            stream = self.streams[metadata] = CallStream(open_call, address)
        self.streams.move_to_end(metadata)
        return stream

    def drop_unused(self) -> None:
        """Forget streams that take no calls, and end those that have been idle longest."""
        for key in [key for key, each in self.streams.items() if not each.is_open]:
            del self.streams[key]
        idle = [key for key, each in self.streams.items() if each.is_idle]
        for key in idle[: max(0, len(idle) - MOST_IDLE_STREAMS + 1)]:
            self.streams.pop(key).retire()


class Routers:
    """Owned by the event loop of the first call.

    Args:
        addresses: One or more, `host:port`; the first one is used first.
        channel_factory: Opens a channel to one of them.
        explain: Finds a better error, given that of a call that reached no router, and the address.
        token: Identifies the tenant of a client's calls; empty: none.
        patience_s: How long `call` keeps trying; 0: it tries each address once.

    Attributes:
        has_served: One of them has begun an answer, so the addresses are right.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        channel_factory: ChannelFactory,
        explain: Explain,
        token: str = "",
        *,
        patience_s: float = 0.0,
    ) -> None:
        self.addresses = addresses
        self.has_served = False
        self.explain = explain
        self.metadata = token_metadata(token)  # of a client's calls
        self.is_closed = False
        self._channel_factory = channel_factory
        self._patience_s = patience_s
        self._current = 0
        self._connections: dict[str, _Connection] = {}  # by address
        self._streams: set[CallStream] = set()  # including those with only older calls
        self._single_calls: set[SingleCall] = set()  # running ones
        self._loop: asyncio.AbstractEventLoop | None = None  # of the channels

    @property
    def address(self) -> str:
        """The address of the router in use."""
        return self.addresses[self._current]

    @property
    def has_stream(self) -> bool:
        """Whether there is a stream to the router in use, so that it is likely alive."""
        connection = self._connections.get(self.address)
        return connection is not None and any(each.is_open for each in connection.streams.values())

    def begin_s(self, failure: CallFailure) -> float:
        """Return how long a generate call that has received nothing keeps trying after a failure.

        Where no router has ever served, the address may be wrong, which its caller should hear.
        """
        if failure.is_stopping:
            return STOPPING_S
        return RESTART_S if failure.is_router_lost and self.has_served else BEGIN_S

    async def call(
        self,
        method: str,
        request: object,
        timeout_s: float,
        metadata: Metadata,
        make_stub: MakeStub | None = None,
    ) -> Any:
        """Make a call that changes nothing, at the next router if one is lost or cannot serve yet.

        Args:
            make_stub: Of the service that has the method; None: InferenceService.

        Raises:
            PagewireError: The call has failed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        ends_at = loop.time() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            failure = await self._call_each(
                method, request, timeout_s, deadline, metadata, make_stub
            )
            if not isinstance(failure, CallFailure):
                return failure
            now = loop.time()
            next_s = pause_within(ends_at - now, pause_s, failure)
            # Retrying does not fix TLS.
            is_barred = isinstance(failure.error, TlsError)
            if is_barred or next_s is None or now + next_s >= deadline:
                raise failure.error
            await asyncio.sleep(next_s)
            pause_s = min(2 * next_s, LONGEST_PAUSE_S)

    async def _call_each(
        self,
        method: str,
        request: object,
        timeout_s: float,
        deadline: float,
        metadata: Metadata,
        make_stub: MakeStub | None,
    ) -> Any:
        """Return the answer of the first router that serves, or else the last router's failure."""
        loop = asyncio.get_running_loop()
        last: CallFailure | None = None
        for _ in self.addresses:
            address, connection = self.address, self._connection()
            stub = make_stub(connection.channel) if make_stub else connection.stub
            try:
                remaining_s = deadline - loop.time()
                return await getattr(stub, method)(request, timeout=remaining_s, metadata=metadata)
            except grpc.aio.AioRpcError as failure:
                last = failure_from(failure, address, timeout_s)
                if last.is_unready:
                    self.pass_over(address)
                elif last.is_router_lost:
                    error = await self._explained(last.error, address, deadline)
                    last = replace(last, error=error)
                    self.leave(address)
                else:
                    raise last.error from failure
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                if self.is_closed:
                    raise closed() from None
                if address in self.addresses:
                    raise
                # `move` has closed its channel.
                return await self._call_each(
                    method, request, timeout_s, deadline, metadata, make_stub
                )
        assert last is not None, "there is an address"
        return last

    async def _explained(
        self, error: PagewireError, address: str, deadline: float
    ) -> PagewireError:
        """Return a better error than that of a call that reached no router, if there is time."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self.explain(error, address)
        except TimeoutError:
            return error

    def start(
        self,
        request: inference_pb2.GenerateRequest,
        receiver: Receiver,
        *,
        metadata: Metadata,
        timeout_s: float,
        interval_s: float,
    ) -> RunningCall:
        """Start a generate call; its tokens that arrive within `interval_s` share a message.

        Raises:
            ClosedError: The client was closed, or belongs to another event loop or process.
        """
        connection = self._connection()
        if request.ByteSize() + ENVELOPE_BYTES > LARGE_REQUEST_BYTES:
            opened = connection.stub.Generate(request, timeout=timeout_s, metadata=metadata)
            single = SingleCall(opened, self.address, receiver)
            self._single_calls.add(single)
            single.task.add_done_callback(lambda _: self._single_calls.discard(single))
            return single
        stream = connection.stream(metadata, self.address)
        if stream not in self._streams:
            self._streams = {each for each in self._streams if not each.is_over} | {stream}
        return stream.start(request, receiver, timeout_s=timeout_s, interval_s=interval_s)

    def use_after(self, address: str) -> None:
        """Use the router after this one; calls that have begun stay where they are."""
        self._current = (self.addresses.index(address) + 1) % len(self.addresses)

    def pass_over(self, address: str) -> None:
        """Use the next router for further calls, unless one other than this is already in use."""
        if address == self.address:
            self._current = (self._current + 1) % len(self.addresses)

    def leave(self, address: str) -> None:
        """Use the next router, unless one other than this is already in use.

        If there is no other one, reconnect to this address: another router may now be behind it.
        """
        self.pass_over(address)
        if connection := self._connections.get(address):
            for stream in connection.streams.values():
                stream.retire()

    async def move(self, addresses: Sequence[str]) -> None:
        """Use the routers at these addresses; calls to others are lost."""
        if tuple(addresses) == tuple(self.addresses):
            return
        current = self.address if self.addresses else ""
        self.addresses = tuple(addresses)
        self._current = addresses.index(current) if current in addresses else 0
        others = self._connections.keys() - set(addresses)
        channels = [self._connections.pop(each).channel for each in others]
        await asyncio.gather(*(each.close() for each in channels))

    async def aclose(self) -> None:
        """End all calls at once, then their streams in order, and close all channels.

        It takes as long as the routers need to end the streams, at most FINISH_S. Harmless when
        repeated.
        """
        self.is_closed = True
        connections, self._connections = self._connections, {}
        if connections and self._loop is asyncio.get_running_loop():

            def failure(_: object) -> CallFailure:
                return CallFailure(closed())

            for single in self._single_calls:
                single.end(failure)
            try:
                await asyncio.gather(*(each.finish(failure) for each in self._streams))
            finally:
                await asyncio.gather(*(each.channel.close() for each in connections.values()))

    def _connection(self) -> _Connection:
        """Return the connection to the router in use."""
        if self.is_closed:
            raise closed()
        # A channel belongs to the event loop that runs when it is created.
        loop = asyncio.get_running_loop()
        if self._connections and self._loop is not loop:
            raise ClosedError("the client belongs to another event loop; make one in each")
        address = self.address
        if address not in self._connections:
            channel = self._channel_factory(address)
            stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            self._connections[address] = _Connection(channel, stub)
            self._loop = loop
        return self._connections[address]


def pause_within(left_s: float, pause_s: float, failure: CallFailure) -> float | None:
    """Return the seconds to wait before the next call, the last at the end; None: it is too late.

    Args:
        left_s: The time within which another call may start.
        pause_s: The time to wait, unless less is left, or the router advises more.
        failure: That of the latest call.
    """
    pause_s = max(min(pause_s, left_s), FIRST_PAUSE_S, failure.retry_after_s)
    return pause_s if pause_s <= left_s else None


async def no_better(error: PagewireError, _: str) -> PagewireError:
    """Return the error unchanged: the caller made the channels, so nothing more is known."""
    return error


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with a bearer token; empty: none."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def closed() -> ClosedError:
    """Make the error of a client that was closed."""
    return ClosedError("the client is closed; make a new one")


@cache
def _grpc_pid() -> int:
    """Return the process that used gRPC first; a forked process inherits the answer."""
    return os.getpid()
