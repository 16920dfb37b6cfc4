"""Scenarios of calls that run on the in-memory gRPC and on the real one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from tests.support.memory_grpc import MemoryNetwork

Scenario = Callable[[Any, list[str]], Awaitable[list[Any]]]
ADDRESS = "server:1"


class Handlers:
    """Raw-bytes methods that do what the request says; `log` records what the server saw."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def unary(self, request: bytes, context: Any) -> bytes:
        if request == b"sleep":
            await self._sleep()
        if request == b"metadata":
            context.set_trailing_metadata((("trail", "t"),))
            await context.send_initial_metadata((("lead", "l"),))
            return dict(context.invocation_metadata())["asked"].encode()
        if request == b"code":
            context.set_code(grpc.StatusCode.DATA_LOSS)
            context.set_details("lost")
        if request == b"deadline":
            return b"none" if context.time_remaining() is None else b"some"
        return request * 2

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for index in range(3):
            yield b"%d" % index
        if request == b"abort":
            await context.abort(grpc.StatusCode.NOT_FOUND, "nothing here", (("a", "b"),))
        if request == b"raise":
            raise ValueError("a bug")
        if request == b"sleep":
            await self._sleep()

    async def collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            if request == b"bye":
                return
            if request == b"sleep":
                await self._sleep()
            yield request.upper()
        yield b"closed"

    async def write_style(self, request: bytes, context: Any) -> None:
        await context.write(b"one")
        await context.write(b"two")

    async def _sleep(self) -> None:
        self.log.append("sleeps")
        try:
            await asyncio.sleep(30.0)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    def register(self, server: Any) -> None:
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
            "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
            "Chat": grpc.stream_stream_rpc_method_handler(self.chat),
            "Write": grpc.unary_stream_rpc_method_handler(self.write_style),
        }
        generic = grpc.method_handlers_generic_handler("test.Test", handlers)
        server.add_generic_rpc_handlers((generic,))


class Client:
    def __init__(self, channel: Any, server: Any) -> None:
        self.server = server
        self.channel = channel
        self.unary = channel.unary_unary("/test.Test/Unary")
        self.stream = channel.unary_stream("/test.Test/Stream")
        self.collect = channel.stream_unary("/test.Test/Collect")
        self.chat = channel.stream_stream("/test.Test/Chat")
        self.write = channel.unary_stream("/test.Test/Write")
        self.missing = channel.unary_unary("/test.Test/Missing")


def _as_it_is(channel: Any) -> Any:
    return channel


async def on_memory(
    scenario: Scenario,
    latency_s: float,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    wrap: Callable[[Any], Any] = _as_it_is,
) -> list[Any]:
    """Run a scenario on the in-memory network; `wrap` makes the client's channel."""
    network = MemoryNetwork(latency_s=latency_s, jitter_s=latency_s)
    log: list[str] = []
    server = network.server(ADDRESS, interceptors)
    Handlers(log).register(server)
    await server.start()
    async with wrap(network.channel(ADDRESS)) as channel:
        seen = await scenario(Client(channel, server), log)
    await server.stop(None)
    assert network.num_open_calls == 0
    return seen


async def on_sockets(
    scenario: Scenario,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    wrap: Callable[[Any], Any] = _as_it_is,
) -> list[Any]:
    """Run a scenario over real gRPC."""
    log: list[str] = []
    server = grpc.aio.server(interceptors=interceptors)
    Handlers(log).register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with wrap(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) as channel:
        seen = await scenario(Client(channel, server), log)
    await server.stop(None)
    return seen
