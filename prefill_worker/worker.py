"""The prefill worker: composes cache, scheduler, step loop, attempts and services."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from kv_cache.prefix_cache import PrefixCache
from kv_transfer.connections import AcceptedConnections
from kv_transfer.driver import RunBlocking
from kv_transfer.errors import ConnectionBroken, TransferError, TransportRefused
from kv_transfer.transport import Transport, close_transports
from llm_engine.cache_feed import CacheFeed
from llm_engine.engine_api import EngineExecutor
from llm_engine.server import WorkerServicer, register_worker_services
from llm_engine.worker_identity import ModelInfo, WorkerIdentity
from llm_engine.worker_load import WorkerLoad
from observability.logs import fields
from prefill_worker.admission import check_prompt
from prefill_worker.attempt import Attempt
from prefill_worker.config import PrefillConfig
from prefill_worker.errors import (
    ConnectionFailed,
    ConnectionUnknown,
    Draining,
    IncompatibleLayout,
    StaleIncarnation,
    TransportUnknown,
)
from prefill_worker.request import Progress, Prompt
from prefill_worker.scheduler import Scheduler
from prefill_worker.server import SERVICES, register_prefill_service
from prefill_worker.step_loop import StepLoop
from prefill_worker.wire import PrefillStart

logger = logging.getLogger(__name__)


class PrefillWorker:
    """One prefill worker. Everything runs in the event loop that called `start`.

    Args:
        config: Limits and deadlines.
        identity: Which start of which worker this is.
        model: What the executor's engine serves.
        executor: Runs the engine without blocking the event loop. The caller closes it after
            `stop`.
        transports: What pages can move over, best first; made for the engine's storage. `stop`
            closes them.
        run_blocking: Runs page digests; `kv_transfer.driver.run_inline` in virtual time.
    """

    def __init__(
        self,
        *,
        config: PrefillConfig,
        identity: WorkerIdentity,
        model: ModelInfo,
        executor: EngineExecutor,
        transports: Sequence[Transport],
        run_blocking: RunBlocking = asyncio.to_thread,
    ) -> None:
        self._layout = executor.engine.layout
        self._storage = executor.engine.storage
        self.cache = PrefixCache(
            num_pages=self._storage.num_pages,
            page_size=self._layout.page_size,
            fingerprint=self._layout.model_fingerprint,
            hash_key=config.hash_key,
        )
        self._config = config
        self._identity = identity
        self._model = model.within(self._storage.num_pages * self._layout.page_size)
        self._transports = tuple(transports)
        self._run_blocking = run_blocking
        self._feed = CacheFeed(self.cache, identity.incarnation)
        self._scheduler = Scheduler(
            config=config, cache=self.cache, page_size=self._layout.page_size
        )
        self._loop = StepLoop(
            scheduler=self._scheduler,
            executor=executor,
            eos_token_ids=model.eos_token_ids,
            on_progress=self._progressed,
            on_failure=self._failed,
            before_step=self._feed.publish,
        )
        self._accepted = AcceptedConnections(transports)
        self._health = health.aio.HealthServicer()
        self._attempts: dict[Prompt, Attempt] = {}  # until nothing is left of them
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._stepping: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Add PrefillService, WorkerService and the health service to a server."""
        register_prefill_service(server, self)
        servicer = WorkerServicer(
            identity=self._identity,
            pool="prefill",
            model=self._model,
            layout=self._layout,
            transports=[transport.name for transport in self._transports],
            pages=self.cache.pool,
            feed=self._feed,
            load=self._load,
            totals=self._scheduler.totals,
            heartbeat_s=self._config.heartbeat_s,
        )
        register_worker_services(server, servicer, self._health)

    async def start(self) -> None:
        """Begin to step; returns at once."""
        for service in SERVICES:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._stepping = asyncio.get_running_loop().create_task(self._loop.run())

    async def wait_failed(self) -> None:
        """Raise what ended the step loop, if a bug does: the process should exit then.

        Returns after an orderly stop.
        """
        assert self._stepping is not None, "start comes first"
        await asyncio.wait({self._stepping})
        if not self._stepping.cancelled():
            self._stepping.result()

    async def stop(self, grace_s: float) -> None:
        """Refuse new prompts, give running ones `grace_s` seconds, then end everything."""
        self._is_draining = True
        await self._health.enter_graceful_shutdown()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace_s)
        for attempt in list(self._attempts.values()):
            self._hold(attempt.cancel("the worker stops"))
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait({self._stepping})
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._accepted.close()
        await close_transports(self._transports, self._config.transfer_deadlines.abort_s)
        self._scheduler.free_ended()
        self._feed.publish()

    # What calls ask for (see server.PrefillSink).

    @property
    def start_s(self) -> float:
        """How long a call may take to send its first message."""
        return self._config.start_s

    async def connect(
        self,
        *,
        receiver: WorkerIdentity,
        sender_incarnation: int,
        connection_id: str,
        transport: str,
        offer: bytes,
        layout: str,
    ) -> None:
        """Run this side's half of a connection's set-up, or raise PrefillError."""
        self._check_incarnation(sender_incarnation)
        if layout != self._layout.describe():
            raise IncompatibleLayout(
                f"layout {layout!r} is not this worker's {self._layout.describe()!r}"
            )
        deadlines = self._config.transfer_deadlines
        try:
            await self._accepted.connect(
                peer_name=receiver.worker_id,
                connection_id=connection_id,
                transport_name=transport,
                offer=offer,
                deadline=asyncio.get_running_loop().time() + deadlines.connect_s,
            )
        except TransportRefused as error:
            raise TransportUnknown(str(error)) from error
        except TransferError as error:
            raise ConnectionFailed(str(error)) from error

    async def open_attempt(self, start: PrefillStart) -> Attempt:
        """Begin to compute a prompt, or raise PrefillError."""
        self._check_incarnation(start.ticket.sender_incarnation)
        if self._is_draining:
            raise Draining("the worker is draining")
        check_prompt(
            start.prompt,
            config=self._config,
            model=self._model,
            page_size=self._layout.page_size,
            num_waiting=self._scheduler.num_waiting,
        )
        try:
            connection = self._accepted.get(start.connection_id)
        except ConnectionBroken as error:
            raise ConnectionUnknown(str(error)) from error
        attempt = Attempt(
            start,
            scheduler=self._scheduler,
            storage=self._storage,
            connection=connection,
            deadlines=self._config.transfer_deadlines,
            run_blocking=self._run_blocking,
            on_change=self._loop.wake,
        )
        self._attempts[start.prompt] = attempt
        await attempt.start()
        self._hold(self._run(attempt))
        return attempt

    def _check_incarnation(self, incarnation: int) -> None:
        if incarnation != self._identity.incarnation:
            raise StaleIncarnation(
                f"incarnation {incarnation} is asked for, this is {self._identity.incarnation}"
            )

    async def _run(self, attempt: Attempt) -> None:
        try:
            await attempt.run()
        except Exception:
            # Logged here, because one attempt's bug must not end the others.
            logger.exception("attempt_failed", extra=fields(request_id=attempt.prompt.request_id))
        finally:
            del self._attempts[attempt.prompt]

    def _hold(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _progressed(self, progress: Progress) -> None:
        self._attempts[progress.prompt].progressed(progress)

    def _failed(self, prompt: Prompt, reason: str) -> None:
        self._hold(self._attempts[prompt].cancel(reason))

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            steps=self._loop.num_steps,
            running=self._scheduler.num_computing,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            is_draining=self._is_draining,
        )
