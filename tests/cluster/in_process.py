"""A cluster without Ray in one event loop: real engines, gRPC and TCP on the loopback address."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from kv_transfer.tcp import TcpTransport
from llm_engine.worker_process import WorkerProcess, WorkerSettings, connect_channel
from pagewire import AsyncClient
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from router.config import RouterConfig
from router.membership import WorkerMember
from router.router import Router

HOST = "127.0.0.1"


@asynccontextmanager
async def one_plus_one(model_dir: Path) -> AsyncIterator[AsyncClient]:
    """Serve a checkpoint with one worker in each pool; yields a client. Token ids only."""
    members: list[WorkerMember] = []
    async with AsyncExitStack() as stack:
        for pool in ("prefill", "decode"):
            process = await _start_worker(model_dir, pool, members)
            stack.push_async_callback(process.stop, 0.0)
        router = Router(
            config=RouterConfig(),
            model_dir=None,
            connect_channel=connect_channel,
            random_id=lambda: secrets.token_hex(16),
        )
        server = grpc.aio.server()
        port = server.add_insecure_port(f"{HOST}:0")
        router.register(server)
        await router.start()
        stack.push_async_callback(router.stop, 0.0)
        await server.start()
        stack.push_async_callback(server.stop, None)
        await router.set_workers(members)
        client = AsyncClient(f"{HOST}:{port}", default_timeout_s=30)
        await stack.enter_async_context(client)
        async with asyncio.timeout(10):
            # Until then a decode worker prefills by itself, as it should.
            while [each.state for each in (await client.status()).workers] != ["ready"] * 2:
                await asyncio.sleep(0.01)
        yield client


async def _start_worker(model_dir, pool, members):
    settings = WorkerSettings(
        worker_id=f"{pool}-0",
        model_dir=model_dir,
        served_model_name="tiny",
        device="cpu",
        dtype="auto",
        page_size=8,
        num_pages=200,
        deterministic=True,
        gpu_memory_fraction=0.85,
        workers_per_gpu=1,
        cpu_pages_bytes=2**20,
        cpu_threads=1,
        host=HOST,
        log_level="warning",
        log_format="text",
    )
    announced = {}

    async def announce(identity):
        announced[identity.worker_id] = identity

    def build(identity, model, executor):
        common = {
            "identity": identity,
            "model": model,
            "executor": executor,
            "transports": [TcpTransport(executor.engine.storage, host=HOST)],
        }
        if pool == "prefill":
            return PrefillWorker(config=PrefillConfig(chunk_pages=2), **common)
        return DecodeWorker(
            config=DecodeConfig(local_prefill_max_tokens=0),
            connect_channel=connect_channel,
            random_id=lambda: secrets.token_bytes(16),
            **common,
        )

    process = WorkerProcess(settings, announce=announce, report_loaded=lambda *_: None)
    service = "PrefillService" if pool == "prefill" else "DecodeService"
    await process.start(build, [f"pagewire.v1.{service}", "pagewire.v1.WorkerService"])
    identity = announced[settings.worker_id]
    members.append(
        WorkerMember(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            address=identity.address,
            pool=pool,
        )
    )
    return process
