"""A cluster without Ray in one event loop: real engines, gRPC and TCP on the loopback address."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from credentials.config import TlsSettings
from credentials.door import ClusterLinks
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from kv_transfer.deadlines import TransferDeadlines
from llm_engine.model_files import text_folder
from options.ports import FreePorts
from pagewire import AsyncClient
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from router.config import RouterConfig
from router.front import make_server
from router.membership import WorkerMember
from router.process import connect_worker
from router.router import Router
from tests.support.cluster_keys import SECRET, credentials_of
from worker.process import WorkerProcess
from worker.settings import WorkerSettings

HOST = "127.0.0.1"
LONG_DEADLINES = TransferDeadlines(
    connect_s=60, grant_s=300, chunk_s=600, slot_s=600, post_s=60, transfer_s=60, ack_s=600
)

DEFAULT_PREFILL = PrefillConfig(chunk_pages=2, max_chunk_pages=2)
IN_CLEAR = TlsSettings()
DEFAULT_DECODE = DecodeConfig(local_prefill_max_tokens=0)


@asynccontextmanager
async def one_plus_one(model_dir: Path) -> AsyncIterator[AsyncClient]:
    """Serve a checkpoint with one worker in each pool; yields a client. Token ids only."""
    async with in_process_cluster(model_dir, num_prefill=1, num_decode=1) as client:
        yield client


@asynccontextmanager
async def in_process_cluster(
    model: Path,
    *,
    num_prefill: int,
    num_decode: int,
    page_size: int = 8,
    num_pages: int = 200,
    chunk_pages: int = 2,
    is_large: bool = False,
    has_text: bool = False,
    tls: TlsSettings = IN_CLEAR,
    metrics_ports: FreePorts | None = None,
) -> AsyncIterator[AsyncClient]:
    """Serve a checkpoint; yields a client.

    Args:
        model: Folder or GGUF file.
        num_prefill, num_decode: Workers of the pools.
        page_size: Token slots in a page.
        num_pages: The pages of each worker.
        chunk_pages: That are handed to the transfer at a time.
        is_large: Of a model whose passes take seconds, while others may want the cores: steps are
            short, and no deadline passes that is there to find the dead.
        has_text: Whether the router reads the model's tokenizer; else it takes token ids only.
        tls: Of the workers, and of the router's calls to them.
        metrics_ports: As in WorkerSettings.
    """
    transfer = LONG_DEADLINES if is_large else TransferDeadlines()
    limits = {"dead_after_s": 60, "stuck_after_s": 600} if is_large else {}
    prefill = PrefillConfig(
        chunk_pages=chunk_pages,
        max_chunk_pages=chunk_pages,
        max_step_tokens=256 if is_large else 2048,
        transfer_deadlines=transfer,
    )
    decode = DecodeConfig(local_prefill_max_tokens=0, transfer_deadlines=transfer)
    members: list[WorkerMember] = []
    names = [f"prefill-{index}" for index in range(num_prefill)]
    names += [f"decode-{index}" for index in range(num_decode)]
    async with AsyncExitStack() as stack:
        for name in names:
            process = await start_worker(
                model,
                name,
                members,
                page_size=page_size,
                num_pages=num_pages,
                prefill=prefill,
                decode=decode,
                tls=tls,
                metrics_ports=metrics_ports,
            )
            stack.push_async_callback(process.stop, 0.0)
        config = RouterConfig(**limits)
        router = Router(
            config=config,
            model_dir=text_folder(model) if has_text else None,
            connect_channel=partial(
                connect_worker, credentials_of("router", "router-0"), ClusterLinks(tls)
            ),
            random_id=lambda: secrets.token_hex(16),
        )
        server = make_server(config)
        port = server.add_insecure_port(f"{HOST}:0")
        router.register(server)
        await router.start()
        stack.push_async_callback(router.stop, 0.0)
        await server.start()
        stack.push_async_callback(server.stop, None)
        await router.set_workers(members)
        client = AsyncClient(f"{HOST}:{port}", default_timeout_s=600 if is_large else 30)
        await stack.enter_async_context(client)
        async with asyncio.timeout(10):
            # Until then a decode worker prefills by itself, as it should.
            while [each.state for each in (await client.status()).workers] != ["ready"] * len(
                names
            ):
                await asyncio.sleep(0.01)
        yield client


async def generate_all(client, prompts, **options):
    """Send all prompts at once, greedy unless told otherwise; return the completions."""
    options = {"temperature": 0.0, "ignore_eos": True} | options
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.generate(prompt, **options)) for prompt in prompts]
    return [task.result() for task in tasks]


async def start_worker(
    model,
    worker_id,
    members,
    *,
    page_size=8,
    num_pages=200,
    prefill=DEFAULT_PREFILL,
    decode=DEFAULT_DECODE,
    tls=IN_CLEAR,
    metrics_ports=None,
):
    pool, _, _ = worker_id.partition("-")
    settings = WorkerSettings(
        worker_id=worker_id,
        model_dir=model,
        served_model_name="tiny",
        device="cpu",
        dtype="auto",
        page_size=page_size,
        num_pages=num_pages,
        num_seats=0 if pool == "prefill" else 256,
        gpu_memory_fraction=0.85,
        workers_per_gpu=1,
        cpu_pages_bytes=2**20,
        cpu_threads=1,
        host=HOST,
        log_level="warning",
        log_format="text",
        tls=tls,
        metrics_ports=metrics_ports,
    )
    announced = {}

    async def announce(identity, is_leaving):
        announced[identity.worker_id] = identity

    def make_pool(context):
        if pool == "prefill":
            return PrefillWorker(context)
        return DecodeWorker(
            context,
            connect_channel=process.links.connect,
            random_id=lambda: secrets.token_bytes(16),
        )

    process = WorkerProcess(
        settings,
        prefill if pool == "prefill" else decode,
        SECRET.keys_of(pool, worker_id),
        announce=announce,
        report_loaded=lambda *_: None,
    )
    await process.start(make_pool)
    identity = announced[worker_id]
    members.append(
        WorkerMember(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            address=identity.address,
            pool=pool,
        )
    )
    return process
