"""An in-memory stand-in for grpc.aio: the same servicers and stubs, in one virtual-time loop.

    network = MemoryNetwork(latency_s=0.0005)
    server = network.server("prefill-0:1")
    add_WorkerServiceServicer_to_server(servicer, server)
    await server.start()
    stub = WorkerServiceStub(network.channel("prefill-0:1"))

Messages are serialized, ordered, delayed and flow-controlled; statuses, cancellation and deadlines
behave as grpc.aio's (tests/simulation/test_memory_grpc.py runs the same scenarios on both). A
server and a channel belong to the `Process` in which they are made; faults act on processes and
links.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from tests.support.memory_call import MULTI_CALLABLES, MultiCallable
from tests.support.memory_server import MemoryServer
from tests.support.memory_wire import Link, Pipe
from tests.support.virtual_time import Process, current_process

OUTSIDE = Process("outside")  # what runs in no process: the test itself


class MemoryNetwork:
    """All servers, channels, links and calls of one run."""

    def __init__(
        self,
        *,
        seed: int = 0,
        latency_s: float = 0.0,
        jitter_s: float = 0.0,
        window_bytes: int = 65536,
        ping_s: float | None = None,
    ) -> None:
        """Make a network without processes.

        Args:
            ping_s: A client gives up a connection whose server's threads, or the network between,
                have answered no ping for so long; None: clients do not ping.
        """
        self.ping_s = ping_s
        self.window_bytes = window_bytes  # a writer waits while more is unread
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self._rng = random.Random(f"network/{seed}")
        self._servers: dict[str, MemoryServer] = {}  # address |-> the running server
        self._links: dict[frozenset[str], Link] = {}  # names of two processes |-> link
        self._calls: dict[Any, None] = {}  # open calls, oldest first (client side)
        self._changed: asyncio.Event | None = None
        self.context = contextvars.Context()  # deliveries belong to no process
        self.num_calls = 0
        self.on_open: Callable[[Any], None] = lambda call: None  # sees each call as it is opened

    def server(
        self, address: str, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    ) -> MemoryServer:
        """Return a server that will listen at the address once started, in the current process."""
        process = current_process.get() or Process(address)
        return MemoryServer(self, address, process, interceptors)

    def channel(self, address: str) -> "MemoryChannel":
        """Return a channel from the current process to whatever listens at the address."""
        return MemoryChannel(self, address, current_process.get() or OUTSIDE)

    def link(self, one: str, other: str) -> Link:
        """Return the link between two processes by name, to slow it down or cut it."""
        names = frozenset((one, other))
        if names not in self._links:
            link = self._links[names] = Link(self._rng, self.latency_s, self.jitter_s)
            link.on_cut.append(self._ping_all)
        return self._links[names]

    def process_at(self, address: str) -> Process:
        return self._servers[address].process

    @property
    def num_open_calls(self) -> int:
        return len(self._calls)

    def kill(self, address: str, *, silently: bool = False) -> None:
        """Kill the process that listens at the address, as SIGKILL does.

        Its tasks freeze, its calls in both directions break with UNAVAILABLE at the peer, and
        connecting fails until a new server starts there. With `silently` (a host without power)
        its peers hear nothing and only their own deadlines help them; connecting hangs.
        """
        process = self._servers[address].process
        process.kill()
        for listening_at, server in list(self._servers.items()):
            if server.process is process and not silently:
                del self._servers[listening_at]
        for call in list(self._calls):
            if call.client_process is process or call.server_process is process:
                call.break_off(process, silently=silently)
        self._notify()

    def pause(self, address: str) -> None:
        """Stop the process that listens at the address, as SIGSTOP does."""
        self._servers[address].process.pause()

    def resume(self, address: str) -> None:
        self._servers[address].process.resume()

    def reset(self, one: str, other: str) -> None:
        """Break all calls between two processes, as a TCP reset does; new calls may follow."""
        for call in list(self._calls):
            names = {call.client_process.name, call.server_process and call.server_process.name}
            if names == {one, other}:
                call.break_off(None, silently=False)

    # What servers and calls use.

    def listen(self, address: str, server: MemoryServer) -> None:
        if address in self._servers and self._servers[address].process.state != "dead":
            raise RuntimeError(f"address {address} is in use")
        self._servers[address] = server
        self._notify()

    def stop_listening(self, address: str, server: MemoryServer) -> None:
        if self._servers.get(address) is server:
            del self._servers[address]
            self._notify()

    def server_at(self, address: str) -> MemoryServer | None:
        return self._servers.get(address)

    async def changed(self) -> None:
        """Wait until a server starts or stops somewhere."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def pipe(self, one: Process, other: Process, arrive: Callable[[Any], None]) -> Pipe:
        link = self.link(one.name, other.name)
        return Pipe(link, self.context, arrive, self.window_bytes)

    def reaches(self, call: Any) -> bool:
        """Whether the server of a call would answer a ping now."""
        link = self.link(call.client_process.name, call.server_process.name)
        return call.server_process.has_threads and not link.is_cut

    def connected(self, call: Any) -> None:
        """Ping for a call from now on."""
        server = call.server_process
        if self._ping_all not in server.on_stop:
            server.on_stop.append(self._ping_all)
        self._ping(call)

    def _ping_all(self) -> None:
        for call in list(self._calls):
            if call.server_process is not None:
                self._ping(call)

    def _ping(self, call: Any) -> None:
        """Break a call off when its server stays out of reach; only then time has to pass."""
        if self.ping_s is None or call.is_pinged or self.reaches(call):
            return
        call.is_pinged = True
        loop = asyncio.get_running_loop()
        lost_at = loop.time()

        def look() -> None:
            if self.reaches(call):
                call.is_pinged = False
            elif loop.time() - lost_at < self.ping_s:
                loop.call_later(self.ping_s / 8, look, context=self.context.copy())
            else:
                call.ping_failed()

        loop.call_later(self.ping_s / 8, look, context=self.context.copy())

    def opened(self, call: Any) -> None:
        self._calls[call] = None
        self.num_calls += 1
        self.on_open(call)

    def closed(self, call: Any) -> None:
        self._calls.pop(call, None)

    def _notify(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()


class MemoryChannel(grpc.aio.Channel):
    """From one process to one address."""

    def __init__(self, network: MemoryNetwork, address: str, process: Process) -> None:
        self.network = network
        self.address = address
        self.process = process
        self.is_closed = False
        self.calls: dict[Any, None] = {}

    def unary_unary(self, method: str, *serializers: Any, **options: Any) -> MultiCallable:
        return self._multi_callable("unary_unary", method, *serializers, **options)

    def unary_stream(self, method: str, *serializers: Any, **options: Any) -> MultiCallable:
        return self._multi_callable("unary_stream", method, *serializers, **options)

    def stream_unary(self, method: str, *serializers: Any, **options: Any) -> MultiCallable:
        return self._multi_callable("stream_unary", method, *serializers, **options)

    def stream_stream(self, method: str, *serializers: Any, **options: Any) -> MultiCallable:
        return self._multi_callable("stream_stream", method, *serializers, **options)

    def _multi_callable(
        self,
        kind: str,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> MultiCallable:
        return MULTI_CALLABLES[kind](self, method, request_serializer, response_deserializer)

    async def close(self, grace: float | None = None) -> None:
        self.is_closed = True
        calls = list(self.calls)
        if calls and grace:
            loop = asyncio.get_running_loop()
            until = loop.time() + grace
            for call in calls:
                await call.wait_done(until - loop.time())
        for call in calls:
            call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        if self.is_closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        if self.network.server_at(self.address) is None:
            return grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        while self.get_state() is last_observed_state:
            await self.network.changed()

    async def channel_ready(self) -> None:
        while self.get_state() is not grpc.ChannelConnectivity.READY:
            await self.network.changed()

    async def __aenter__(self) -> "MemoryChannel":
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.close()
