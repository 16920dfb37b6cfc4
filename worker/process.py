"""One worker in one process: loads the engine, serves gRPC, announces its address, stops.

Both pools' actors are thin shells around this; they supply the pool's class and the way to
announce. Nothing here knows Ray.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from credentials.cluster import ClusterCredentials
from credentials.door import ClusterLinks
from credentials.gate import ServerGate
from credentials.secret import PartyKeys
from grammars.tokenizer_file import tokenizer_digest
from kv_transfer.transport import open_transports
from llm_engine.load_progress import ReportLoaded
from observability.cluster_metrics import WorkerCollector
from observability.logs import fields
from observability.metrics_server import MetricsServer, ask_loop
from observability.process_metrics import process_registry
from observability.serving_process import process_age_s, settle_process
from observability.tracing import configure_tracing, stop_tracing
from options.ports import FreePorts
from pagewire.protos.grpc_options import WORKER_SERVER_OPTIONS
from protos.addresses import join_address
from protos.peer_limits import peer_guard
from protos.rpc_server import rpc_server
from worker.config import HostConfig
from worker.context import WorkerContext
from worker.executor import ThreadExecutor
from worker.host import Pool, WorkerHost
from worker.identity import ModelInfo, WorkerIdentity
from worker.settings import WorkerSettings

if TYPE_CHECKING:  # it imports torch
    from llm_engine.engine import Engine

log = logging.getLogger(__name__)

ANNOUNCE_PERIOD_S = 2.0  # a restarted controller knows this worker after that
MAX_OPEN_CALLS = 16_384  # of a method; a prefill worker has a few for each decode worker
LAST_WORDS_S = 0.5  # for the last messages to leave a process that stops

MakePool = Callable[[WorkerContext[Any]], Pool]
Announce = Callable[[WorkerIdentity, bool], Awaitable[None]]  # the bool: it leaves the cluster


class WorkerProcess:
    """Owns the executor, the server and the worker. Lives in the event loop that called start.

    Raises:
        PemError: A file for TLS cannot be used.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        config: HostConfig,
        keys: PartyKeys,
        *,
        announce: Announce,
        report_loaded: ReportLoaded,
    ) -> None:
        self._settings = settings
        self._config = config
        self._keys = keys
        self._announce = announce
        self._report_loaded = report_loaded  # called in a thread
        self.links = ClusterLinks(settings.tls)
        self._executor: ThreadExecutor | None = None
        self._server: grpc.aio.Server | None = None
        self._worker: WorkerHost | None = None
        self._metrics: MetricsServer | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._is_leaving = False
        self.identity: WorkerIdentity | None = None  # set by start

    async def start(self, make_pool: MakePool) -> None:
        """Load the model, serve, and announce; returns when requests can come.

        Args:
            make_pool: Makes the pool's part of the worker.

        Raises:
            OpenInClear: Other hosts could connect without encryption.
            NoPortFree: All ports of a range are taken.
            TracingUnavailable: Traces are configured, and OpenTelemetry is not installed.
        """
        settings = self._settings
        configure_tracing(
            settings.tracing,
            service=f"pagewire-{settings.worker_id.rpartition('-')[0]}",
            instance=settings.worker_id,
        )
        self.links.door.check(settings.host)  # the engine takes long to load
        engine, model = await asyncio.to_thread(_load, settings, self._report_loaded)
        executor = ThreadExecutor(engine, max_call_s=self._config.max_step_s)
        incarnation = secrets.randbits(63) + 1  # 0 means none
        credentials = ClusterCredentials(self._keys, incarnation)
        server, port = self._listen(credentials)
        identity = WorkerIdentity(
            worker_id=settings.worker_id,
            incarnation=incarnation,
            address=join_address(settings.host, port),
            device=_device_type(settings.device),
        )
        context = WorkerContext(
            config=self._config,
            identity=identity,
            model=model,
            executor=executor,
            credentials=credentials,
            transports=open_transports(
                executor.engine.storage,
                settings.device,
                settings.host,
                self.links.page_tls,
                settings.ports,
                settings.page_transport,
            ),
        )
        worker = WorkerHost(context, make_pool(context))
        worker.register(server)
        if settings.metrics_ports is not None:
            self._metrics = self._serve_metrics(worker, settings.metrics_ports)
        await server.start()
        await worker.start()
        settle_process()
        self._executor, self._server, self._worker = executor, server, worker
        self.identity = identity
        await self._announce(identity, self._is_leaving)
        self._announcing = asyncio.create_task(self._announce_for_ever(identity))
        log.info(
            "worker_ready",
            extra=fields(
                worker_id=identity.worker_id,
                incarnation=f"{identity.incarnation:016x}",
                address=identity.address,
                num_pages=executor.engine.storage.num_pages,
                page_bytes=executor.engine.storage.page_bytes,
                process_s=round(process_age_s(), 2),
            ),
        )

    async def wait_failed(self) -> None:
        """Return once the worker cannot go on and has told all callers."""
        assert self._worker, "start has returned"
        try:
            await self._worker.wait_failed()
        except Exception:
            log.exception("worker_failed", extra=fields(worker_id=self._settings.worker_id))
        if self._server:
            await self._server.stop(LAST_WORDS_S)

    async def drain(self, grace_s: float) -> None:
        """Stop and leave the cluster: it announces its departure until it has stopped."""
        self._is_leaving = True
        await self.stop(grace_s)

    async def stop(self, grace_s: float) -> None:
        """Give running requests `grace_s` seconds, then end everything."""
        try:
            if self._worker:
                await self._worker.stop(grace_s)
        finally:  # also if the worker does not end in time
            if self._announcing:
                self._announcing.cancel()
        if self._server:
            # Routers watch this worker with calls that stay open until they are ended.
            await self._server.stop(LAST_WORDS_S)
        if self._executor:
            await asyncio.to_thread(self._executor.close)
        if self._metrics:
            await asyncio.to_thread(self._metrics.close)
        await asyncio.to_thread(stop_tracing)

    def _listen(self, credentials: ClusterCredentials) -> tuple[grpc.aio.Server, int]:
        """Return a server without services, and the port on which it will serve."""
        server = rpc_server(
            interceptors=[ServerGate(credentials), peer_guard(MAX_OPEN_CALLS)],
            options=WORKER_SERVER_OPTIONS,
        )
        host, ports, door = self._settings.host, self._settings.ports, self.links.door
        return server, ports.listen(host, lambda port: door.add_port(server, host, port))

    def _serve_metrics(self, worker: WorkerHost, ports: FreePorts) -> MetricsServer:
        """Serve the worker's metrics behind the same door as its calls."""
        host, loop = self._settings.host, asyncio.get_running_loop()
        registry = process_registry()
        registry.register(WorkerCollector(lambda: ask_loop(loop, worker.status)))
        tls = self.links.door.ssl_context(host)
        server = ports.listen(host, partial(MetricsServer, registry, host, tls=tls))
        log.info(
            "metrics_ready",
            extra=fields(
                worker_id=self._settings.worker_id, address=join_address(host, server.port)
            ),
        )
        return server

    async def _announce_for_ever(self, identity: WorkerIdentity) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_PERIOD_S)
            try:
                await self._announce(identity, self._is_leaving)
            except Exception:
                # A bug must not make the worker unknown to a controller that restarts.
                log.exception("announce_crashed", extra=fields(worker_id=identity.worker_id))


def _device_type(device: str) -> str:
    """Return the type of the device that computes: with another type, tokens may differ."""
    if device == "cpu":
        return device
    import torch  # as in _load

    return torch.cuda.get_device_name()


def _load(settings: WorkerSettings, report_loaded: ReportLoaded) -> tuple["Engine", ModelInfo]:
    # torch takes seconds to import: only here, in the process that computes.
    import torch

    from llm_engine.load_engine import load_engine
    from llm_engine.memory_plan import MemoryPlan
    from llm_engine.model_files import text_folder

    if settings.device == "cpu":
        torch.set_num_threads(settings.cpu_threads)
    engine = load_engine(
        settings.model_dir,
        page_size=settings.page_size,
        num_pages=settings.num_pages or "auto",
        device=settings.device,
        dtype=settings.dtype,
        num_seats=settings.num_seats,
        max_step_tokens=settings.max_step_tokens,
        memory=MemoryPlan(
            cuda_free_fraction=settings.gpu_memory_fraction,
            workers_per_gpu=settings.workers_per_gpu,
            cpu_pool_bytes=settings.cpu_pages_bytes,
        ),
        report_loaded=report_loaded,
    )
    folder = text_folder(settings.model_dir)
    model = ModelInfo(
        name=settings.served_model_name,
        fingerprint=engine.layout.model_fingerprint,
        vocab_size=engine.config.vocab_size,
        max_context_tokens=engine.config.max_context_tokens,
        eos_token_ids=engine.config.eos_token_ids,
        text_folder=folder,
        tokenizer_digest=tokenizer_digest(folder),
    )
    return engine, model
