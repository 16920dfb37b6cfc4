"""Whatever a method is called, its call ends by itself, and the server goes on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.server import MemberServer
from credentials.config import TlsSettings
from credentials.door import ClusterLinks
from protos.rpc_server import rpc_server
from router.config import RouterConfig
from router.front import make_server
from tests.support.cluster_keys import SECRET
from tests.support.raw_call import raw_call

UNREADABLE = b"/\xff\xfe/x"
CHECK = health_pb2.HealthCheckRequest()
SERVING = health_pb2.HealthCheckResponse.SERVING


class Interceptor(grpc.aio.ServerInterceptor):
    """Notes which methods it is asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        self.asked.append(details.method)
        return await continuation(details)


@asynccontextmanager
async def serving(server: grpc.aio.Server) -> AsyncIterator[str]:
    """Serve health on a server, and yield its address."""
    checker = health.aio.HealthServicer()
    await checker.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def test_a_call_of_no_method_is_unimplemented_and_ends_no_other() -> None:
    async def main() -> None:
        seen = Interceptor()
        async with (
            serving(rpc_server(interceptors=[seen], options=())) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            stub = health_pb2_grpc.HealthStub(channel)
            watching = stub.Watch(CHECK)
            assert (await watching.read()).status == SERVING
            for name in (UNREADABLE, b"/grpc.health.v1.Health/Unknown", b"", b"\x00", UNREADABLE):
                assert b"Method not found!" in await raw_call(address, name), name
            assert (await stub.Check(CHECK)).status == SERVING
            assert not watching.done()
            assert seen.asked == ["/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"]

    asyncio.run(main())


def test_a_grpcio_whose_servers_a_call_could_end_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"grpcio: found 1\.\d+\.\d+; allowed: 1\.85"):
            rpc_server(interceptors=[], options=())

    monkeypatch.delattr(cygrpc, "_handle_rpc")
    asyncio.run(main())


def test_no_stranger_ends_a_router() -> None:
    async def main() -> None:
        async with serving(make_server(RouterConfig())) as address:
            for _ in range(2):
                assert b"Method not found!" in await raw_call(address, UNREADABLE)

    asyncio.run(main())


def test_no_stranger_ends_a_controller() -> None:
    async def main() -> None:
        keys, door = SECRET.keys_of("controller", "controller"), ClusterLinks(TlsSettings()).door
        server = MemberServer(keys, "127.0.0.1", 0, door)
        address = await server.start()
        for _ in range(2):
            assert b"Method not found!" in await raw_call(address, UNREADABLE)
        await server.stop()

    asyncio.run(main())
