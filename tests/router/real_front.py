"""A router with one scripted worker over real sockets, as the actor serves it.

As a program it prints its address and serves until its standard input ends.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from pagewire.protos import worker_pb2_grpc
from protos import call_guard
from router.config import RouterConfig
from router.front import make_server
from router.router import Router
from tests.router.scripted_worker import ScriptedWorker


@asynccontextmanager
async def real_front(
    worker: ScriptedWorker, config: RouterConfig
) -> AsyncIterator[tuple[Router, str]]:
    """Start both; yields the router and its address."""
    workers = grpc.aio.server()
    worker_port = workers.add_insecure_port("127.0.0.1:0")
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, workers)
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(worker, workers)
    router = Router(
        config=config,
        model_dir=None,
        connect_channel=lambda _: grpc.aio.insecure_channel(f"127.0.0.1:{worker_port}"),
        random_id=lambda: secrets.token_hex(16),
    )
    front = make_server(config)
    router.register(front)
    port = front.add_insecure_port("127.0.0.1:0")
    for each in (workers, router, front):
        await each.start()
    await router.set_workers([worker.member])
    yield router, f"127.0.0.1:{port}"
    await router.stop(0.0)
    await front.stop(None)
    await workers.stop(None)


async def main() -> None:
    call_guard.YOUNG_S = 0.05
    async with real_front(ScriptedWorker("decode-0", token_s=0.02), RouterConfig()) as (_, address):
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
