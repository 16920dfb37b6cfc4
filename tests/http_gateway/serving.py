"""A gateway on a free port of this host, from a thread of its own, before what a test gives it."""

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from credentials.door import Door
from http_gateway.config import GatewayConfig
from http_gateway.handover import receive_listener
from http_gateway.server import GatewayServer
from pagewire import Tls
from pagewire.protos import inference_pb2, worker_pb2_grpc
from router.config import RouterConfig
from router.front import make_server
from router.router import Router
from router.tenants.registry import Tenants
from tests.pagewire import scripted_service
from tests.pagewire.scripted_service import ScriptedService
from tests.router.scripted_worker import ScriptedWorker

MODEL = {
    "name": "tiny",
    "max_context_tokens": 64,
    "vocab_size": 400,
    "page_size": 4,
    "max_request_bytes": 2**20,
    "max_request_fields": 1000,
}
Backend = AbstractAsyncContextManager[tuple[str, Any]]  # gives a router's address, and itself


@dataclass(frozen=True)
class Gateway:
    """A running gateway, as a test sees it."""

    address: str
    backend: Any
    loop: asyncio.AbstractEventLoop
    server: GatewayServer
    scheme: str
    router_address: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}"

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def run(self, work: Any, timeout_s: float = 10.0) -> Any:
        """Run a coroutine in the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)


@asynccontextmanager
async def scripted(
    script: scripted_service.Script, door: Door | None = None, **model: Any
) -> AsyncIterator[tuple[str, ScriptedService]]:
    """A router's service that plays a script."""
    async with scripted_service.serving(script, door) as (address, service):
        service.model = inference_pb2.Model(**{**MODEL, **model})
        yield address, service


@asynccontextmanager
async def real_router(
    worker: ScriptedWorker,
    model_dir: Path | None,
    *,
    tenants: Tenants | None = None,
    **config: Any,
) -> AsyncIterator[tuple[str, Router]]:
    """A router with one scripted worker, on real sockets."""
    worker_server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, worker_server)
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(worker, worker_server)
    worker_port = worker_server.add_insecure_port("127.0.0.1:0")
    await worker_server.start()
    numbers = iter(range(10**6))
    router = Router(
        config=RouterConfig(**config),
        model_dir=model_dir,
        connect_channel=lambda _: grpc.aio.insecure_channel(f"127.0.0.1:{worker_port}"),
        random_id=lambda: f"{next(numbers):032x}",
        tenants=tenants,
    )
    server = make_server(RouterConfig(**config), tenants)
    port = server.add_insecure_port("127.0.0.1:0")
    router.register(server)
    await router.start()
    await server.start()
    await router.set_workers([worker.member])
    try:
        async with asyncio.timeout(10):
            while not router.registry.ready("decode"):
                await asyncio.sleep(0.01)
        yield f"127.0.0.1:{port}", router
    finally:
        await router.stop(0.0)
        await server.stop(None)
        await worker_server.stop(None)


@contextmanager
def gateway(
    backend: Callable[[], Backend],
    *,
    door: Door | None = None,
    router_tls: Tls | None = None,
    needs_tenants: bool = False,
    predecessor: Gateway | None = None,
    **config: Any,
) -> Iterator[Gateway]:
    """Serve HTTP before a backend; nobody may log an error meanwhile.

    With a predecessor, at its address, and from its listener.
    """
    started: list[Gateway] = []
    failures: list[BaseException] = []
    is_up = threading.Event()

    async def run() -> None:
        stop = asyncio.Event()
        async with backend() as (router_address, behind):

            async def find_routers() -> list[str]:
                return [router_address]

            server = GatewayServer(
                find_routers,
                config=GatewayConfig(**config),
                host="127.0.0.1",
                port=0,
                door=door,
                router_tls=router_tls,
                needs_tenants=needs_tenants,
            )
            address = await server.start(predecessor and await _listener_of(predecessor))
            stops.append(stop)
            scheme = "https" if door else "http"
            loop = asyncio.get_running_loop()
            started.append(Gateway(address, behind, loop, server, scheme, router_address))
            is_up.set()
            await stop.wait()
            await server.stop(0.0)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failures.append(error)
            is_up.set()

    errors = _Errors(logging.ERROR)
    logging.getLogger().addHandler(errors)
    stops: list[asyncio.Event] = []
    thread = threading.Thread(target=main)
    thread.start()
    assert is_up.wait(20)
    if failures:
        raise failures[0]
    try:
        yield started[0]
    finally:
        started[0].loop.call_soon_threadsafe(stops[0].set)
        thread.join(20)
        logging.getLogger().removeHandler(errors)
    assert not thread.is_alive()
    assert not failures, failures
    assert not errors.lines, errors.lines


async def _listener_of(other: Gateway) -> socket.socket:
    async def ask(path: str) -> None:
        other.server.hand_over(path)

    return await receive_listener(ask)


class _Errors(logging.Handler):
    """Keeps what goes wrong unseen: crashed requests, tasks whose errors nobody took."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("grpc"):
            return  # of servers that stop while calls run
        self.lines.append(f"{record.name} {record.getMessage()} {record.exc_info}")
