"""One worker in one process: loads the engine, serves gRPC, says where it is, stops.

Both pools' actors are thin shells around this; they bring the worker class, the transports and the
way to announce. Nothing here knows Ray.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from llm_engine.engine_api import EngineExecutor
from llm_engine.executor import ThreadExecutor
from llm_engine.load_progress import ReportLoaded
from llm_engine.worker_identity import ModelInfo, WorkerIdentity
from observability.logs import fields
from protos.grpc_options import LISTEN_OPTIONS, MESSAGE_OPTIONS

log = logging.getLogger(__name__)

ANNOUNCE_PERIOD_S = 2.0  # bounds how long a restarted controller does not know this worker
# A process that hangs keeps its connections: only pings tell. gRPC's own threads answer them, also
# while Python computes.
KEEPALIVE_MS = 1000
PING_TIMEOUT_MS = 2000
CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # the lower of the two; its default is 60 s
    ("grpc.http2.max_pings_without_data", 0),  # no limit
    ("grpc.min_reconnect_backoff_ms", PING_TIMEOUT_MS),  # also the longest time to connect
)
SERVER_OPTIONS = (
    *MESSAGE_OPTIONS,
    *LISTEN_OPTIONS,
    # Otherwise a server ends connections that are pinged so often.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What a worker process is started with; the cluster's configuration fills it."""

    worker_id: str  # "prefill-0"
    model_dir: Path
    served_model_name: str
    device: str  # "cpu" or "cuda"; a CUDA worker sees exactly one GPU
    dtype: str  # "auto", "float32", "float16" or "bfloat16"
    deterministic: bool  # on a GPU; see load_engine
    page_size: int  # token slots
    num_pages: int  # 0: as many as memory allows
    gpu_memory_fraction: float  # for pages, of what is free after the weights
    workers_per_gpu: int  # that share the GPU's memory
    cpu_pages_bytes: int  # for pages, without a GPU
    cpu_threads: int  # without a GPU
    host: str  # address that the worker binds and is reached at; empty: the actor's own host
    log_level: str
    log_format: str  # "text" or "json"


class ServedWorker(Protocol):
    """PrefillWorker or DecodeWorker."""

    def register(self, server: grpc.aio.Server) -> None: ...

    async def start(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...

    async def wait_failed(self) -> None: ...


BuildWorker = Callable[[WorkerIdentity, ModelInfo, EngineExecutor], ServedWorker]
Announce = Callable[[WorkerIdentity], Awaitable[None]]


def connect_channel(address: str) -> grpc.aio.Channel:
    """Open a channel to another worker."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class WorkerProcess:
    """Owns the executor, the server and the worker. Lives in the event loop that called start."""

    def __init__(
        self, settings: WorkerSettings, *, announce: Announce, report_loaded: ReportLoaded
    ) -> None:
        self._settings = settings
        self._announce = announce
        self._report_loaded = report_loaded  # called in a thread
        self._executor: ThreadExecutor | None = None
        self._server: grpc.aio.Server | None = None
        self._worker: ServedWorker | None = None
        self._announcing: asyncio.Task[None] | None = None
        self.identity: WorkerIdentity | None = None  # set by start

    async def start(self, build: BuildWorker, services: Sequence[str]) -> None:
        """Load the model, serve, and announce; returns when requests can come.

        Args:
            build: Makes the worker around the loaded engine.
            services: Full names of its gRPC services, for reflection.
        """
        settings = self._settings
        executor = await asyncio.to_thread(_load_executor, settings, self._report_loaded)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        port = server.add_insecure_port(f"{settings.host}:0")
        identity = WorkerIdentity(
            worker_id=settings.worker_id,
            incarnation=secrets.randbits(63) + 1,  # 0 means none
            address=f"{settings.host}:{port}",
        )
        worker = build(identity, _model_info(settings, executor), executor)
        worker.register(server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection([*services, health, reflection.SERVICE_NAME], server)
        await server.start()
        await worker.start()
        self._executor, self._server, self._worker = executor, server, worker
        self.identity = identity
        await self._announce(identity)
        self._announcing = asyncio.create_task(self._announce_for_ever(identity))
        log.info(
            "worker_ready",
            extra=fields(
                worker_id=identity.worker_id,
                incarnation=f"{identity.incarnation:016x}",
                address=identity.address,
                num_pages=executor.engine.storage.num_pages,
                page_bytes=executor.engine.storage.page_bytes,
            ),
        )

    async def wait_failed(self) -> None:
        """Return only if the worker's step loop dies."""
        assert self._worker, "start has returned"
        try:
            await self._worker.wait_failed()
        except Exception:
            log.exception("step_loop_failed", extra=fields(worker_id=self._settings.worker_id))

    async def stop(self, grace_s: float) -> None:
        """Give running requests `grace_s` seconds, then end everything."""
        if self._announcing:
            self._announcing.cancel()
        if self._worker:
            await self._worker.stop(grace_s)
        if self._server:
            await self._server.stop(None)
        if self._executor:
            await asyncio.to_thread(self._executor.close)

    async def _announce_for_ever(self, identity: WorkerIdentity) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_PERIOD_S)
            await self._announce(identity)


def _load_executor(settings: WorkerSettings, report_loaded: ReportLoaded) -> ThreadExecutor:
    # torch takes seconds to import: only here, in the process that computes.
    import torch

    from llm_engine.load_engine import load_engine
    from llm_engine.memory_plan import MemoryPlan

    if settings.device == "cpu":
        torch.set_num_threads(settings.cpu_threads)
    engine = load_engine(
        settings.model_dir,
        page_size=settings.page_size,
        num_pages=settings.num_pages or "auto",
        device=settings.device,
        dtype=settings.dtype,
        deterministic=settings.deterministic,
        memory=MemoryPlan(
            cuda_free_fraction=settings.gpu_memory_fraction,
            workers_per_gpu=settings.workers_per_gpu,
            cpu_pool_bytes=settings.cpu_pages_bytes,
        ),
        report_loaded=report_loaded,
    )
    return ThreadExecutor(engine)


def _model_info(settings: WorkerSettings, executor: ThreadExecutor) -> ModelInfo:
    from llm_engine.model_config import read_model_config

    config = read_model_config(settings.model_dir)
    return ModelInfo(
        name=settings.served_model_name,
        fingerprint=executor.engine.layout.model_fingerprint,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        eos_token_ids=config.eos_token_ids,
    )
