"""A router that hangs, or whose host has lost its power, sends nothing: pings tell."""

import asyncio
import multiprocessing
import os
import signal
import time

import grpc
import pytest

from pagewire.routers import CHANNEL_OPTIONS
from router.config import RouterConfig
from router.front import server_options
from tests.support.wall_clock import assert_within

NOTICED_S = 12  # seven, and what a busy host adds; without a limit of its own a ping has a minute


def serve_for_ever(ports):
    async def count(request, context):
        while True:
            yield b"."
            await asyncio.sleep(0.01)

    async def run():
        server = grpc.aio.server(options=server_options(RouterConfig()))
        handler = grpc.unary_stream_rpc_method_handler(count)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test", {"Count": handler}),)
        )
        ports.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await asyncio.Event().wait()

    asyncio.run(run())


async def read_all(call):
    while await call.read() is not grpc.aio.EOF:
        pass


def test_a_stream_from_a_router_that_hangs_breaks_within_seconds():
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    router = context.Process(target=serve_for_ever, args=(ports,), daemon=True)
    router.start()

    async def read():
        address = f"127.0.0.1:{ports.get(timeout=30)}"
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            call = channel.unary_stream("/test/Count")(b"")
            await call.read()
            os.kill(router.pid, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await read_all(call)
            return broken.value.code(), time.monotonic() - began

    try:
        code, seconds = asyncio.run(asyncio.wait_for(read(), 60))
    finally:
        router.kill()
        router.join()
    assert code is grpc.StatusCode.UNAVAILABLE
    assert_within(seconds, NOTICED_S)
