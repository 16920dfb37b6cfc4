import asyncio

import grpc
import pytest

from llm_engine.worker_process import SERVER_OPTIONS
from pagewire import async_client
from router.actor import server_options
from router.config import RouterConfig


def test_a_client_that_waits_long_does_not_ping_more_often_than_a_router_allows():
    allowed = dict(server_options(RouterConfig()))["grpc.http2.min_ping_interval_without_data_ms"]
    sent = dict(async_client.CHANNEL_OPTIONS)["grpc.keepalive_time_ms"]

    assert 2 * allowed <= sent


@pytest.mark.parametrize(
    "options", [server_options(RouterConfig()), SERVER_OPTIONS], ids=["router", "worker"]
)
def test_of_thousands_of_calls_at_once_none_is_cancelled_before_it_is_seen(options):
    async def echo(request, context):
        return request

    async def scenario():
        server = grpc.aio.server(options=options)
        method = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test", {"Echo": method}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test/Echo")
            answers = await asyncio.gather(*(call(b"x") for _ in range(3500)))
        await server.stop(None)
        assert answers == [b"x"] * 3500

    asyncio.run(scenario())
