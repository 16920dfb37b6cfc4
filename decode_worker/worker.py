"""The decode worker: composes cache, scheduler, step loop, receivers, sessions and services."""

import asyncio
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2

from decode_worker.admission import check_request
from decode_worker.config import DecodeConfig
from decode_worker.errors import Draining, RequestError, RequestTimeout, StaleIncarnation
from decode_worker.outbox import Outbox, RequestFailure
from decode_worker.receiving import PrefillReceivers
from decode_worker.request import Request, TokenDelta
from decode_worker.scheduler import Scheduler
from decode_worker.server import SERVICES, register_decode_service
from decode_worker.step_loop import StepLoop
from kv_cache.prefix_cache import PrefixCache
from kv_transfer.driver import RunBlocking
from kv_transfer.transport import Transport, close_transports
from llm_engine.cache_feed import CacheFeed
from llm_engine.engine_api import EngineExecutor
from llm_engine.server import WorkerServicer, register_worker_services
from llm_engine.worker_identity import ModelInfo, WorkerIdentity
from llm_engine.worker_load import WorkerLoad
from observability.logs import fields

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Active:
    """A request that has not ended."""

    request: Request
    outbox: Outbox
    submitted_at: float
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _Session:
    """A router's open session."""

    router_id: str
    requests: dict[str, Request] = field(default_factory=dict)  # request_id |-> not ended


class DecodeWorker:
    """One decode worker. Everything runs in the event loop that called `start`.

    Args:
        config: Limits and deadlines.
        identity: Which start of which worker this is.
        model: What the executor's engine serves.
        executor: Runs the engine without blocking the event loop. The caller closes it after
            `stop`.
        transports: What pages can move over, best first; made for the engine's storage. `stop`
            closes them.
        connect_channel: Makes a grpc.aio channel to a prefill worker's address.
        random_id: Returns 16 random bytes; source of transfer and connection ids.
        run_blocking: Runs page digests; `kv_transfer.driver.run_inline` in virtual time.
    """

    def __init__(
        self,
        *,
        config: DecodeConfig,
        identity: WorkerIdentity,
        model: ModelInfo,
        executor: EngineExecutor,
        transports: Sequence[Transport],
        connect_channel: Callable[[str], grpc.aio.Channel],
        random_id: Callable[[], bytes],
        run_blocking: RunBlocking = asyncio.to_thread,
    ) -> None:
        layout = executor.engine.layout
        num_pages = executor.engine.storage.num_pages
        self.cache = PrefixCache(
            num_pages=num_pages,
            page_size=layout.page_size,
            fingerprint=layout.model_fingerprint,
            hash_key=config.hash_key,
        )
        self._config = config
        self._identity = identity
        self._model = model.within(num_pages * layout.page_size)
        self._layout = layout
        self._transports = tuple(transports)
        self._feed = CacheFeed(self.cache, identity.incarnation)
        self._scheduler = Scheduler(
            config=config,
            cache=self.cache,
            model=self._model,
            page_size=layout.page_size,
            page_bytes=layout.page_bytes,
        )
        self._receivers = PrefillReceivers(
            config=config,
            identity=identity,
            layout=layout,
            storage=executor.engine.storage,
            scheduler=self._scheduler,
            transports=transports,
            connect_channel=connect_channel,
            random_id=random_id,
            run_blocking=run_blocking,
            on_deltas=self._deliver,
            on_change=self._wake,
        )
        self._loop = StepLoop(
            scheduler=self._scheduler,
            executor=executor,
            eos_token_ids=model.eos_token_ids,
            on_deltas=self._deliver,
            on_failure=self._fail,
            start_receive=self._receivers.start,
            before_step=self._feed.publish,
        )
        self._health = health.aio.HealthServicer()
        self._sessions: dict[Outbox, _Session] = {}
        self._active: dict[Request, _Active] = {}
        self._is_draining = False
        self._all_ended = asyncio.Event()  # set while nothing is active
        self._all_ended.set()
        self._stepping: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Add DecodeService, WorkerService and the health service to a server."""
        register_decode_service(server, self)
        servicer = WorkerServicer(
            identity=self._identity,
            pool="decode",
            model=self._model,
            layout=self._layout,
            transports=[transport.name for transport in self._transports],
            max_choices=self._config.max_choices,
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
        """Refuse new requests, give running ones `grace_s` seconds, then end everything."""
        self._is_draining = True
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(grace_s):
                await self._all_ended.wait()
        except TimeoutError:
            for request in list(self._active):
                self._fail(request, Draining("the worker stops"))
        for outbox in list(self._sessions):
            outbox.close()
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait({self._stepping})
        await self._receivers.close()
        await close_transports(self._transports, self._config.transfer_deadlines.abort_s)
        self._scheduler.free_ended()
        self._feed.publish()

    # What sessions ask for (see server.RequestSink).

    def open_session(self, router_id: str, incarnation: int) -> Outbox:
        """Begin a session; its answers appear in the outbox that is returned."""
        if incarnation != self._identity.incarnation:
            raise StaleIncarnation(
                f"incarnation {incarnation} is asked for, this is {self._identity.incarnation}"
            )
        if self._is_draining:
            raise Draining("the worker is draining")
        outbox = Outbox(max_tokens=self._config.max_outbox_tokens)
        self._sessions[outbox] = _Session(router_id)
        logger.info("session_opened", extra=fields(router=router_id))
        return outbox

    def close_session(self, outbox: Outbox) -> None:
        """Cancel all requests that answer to the outbox."""
        session = self._sessions.pop(outbox)
        for request in list(session.requests.values()):
            self._end(request, "session_ended")
        logger.info("session_closed", extra=fields(router=session.router_id))

    def submit(self, request: Request, outbox: Outbox) -> None:
        """Take a request; what is wrong with it is told through the outbox."""
        if outbox.is_overrun:
            return  # the router learns it with all the rest, from the end of the session
        session = self._sessions[outbox]
        # A resumption replaces the attempt that the router has given up.
        self.cancel(request.request_id, outbox)
        try:
            if self._is_draining:
                raise Draining("the worker is draining")
            check_request(
                request,
                config=self._config,
                model=self._model,
                num_waiting=self._scheduler.num_waiting,
            )
        except RequestError as error:
            self._tell_failure(request, error, outbox)
            return
        loop = asyncio.get_running_loop()
        active = _Active(request, outbox, submitted_at=loop.time())
        if request.timeout_s is not None:
            late = RequestTimeout(f"the request took longer than {request.timeout_s:g} s")
            active.timer = loop.call_later(request.timeout_s, self._fail, request, late)
        session.requests[request.request_id] = request
        self._active[request] = active
        self._all_ended.clear()
        self._scheduler.submit(request)
        self._wake()

    def cancel(self, request_id: str, outbox: Outbox) -> None:
        """Forget a request and free what it holds; a no-op when it has ended."""
        request = self._sessions[outbox].requests.get(request_id)
        if request is not None:
            outbox.discard(request)
            self._end(request, "cancelled")

    def cancel_choices(self, request_id: str, choices: Container[int], outbox: Outbox) -> None:
        """End some choices of a request, and with the last one the request.

        What they drew before stays in the outbox: it may carry the account of the others.
        """
        request = self._sessions[outbox].requests.get(request_id)
        if request is None:
            return
        self._scheduler.end(request, choices)
        if request.is_ended:
            self._end(request, "cancelled")
        else:
            self._receivers.cancel(request)
            self._wake()

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            active = self._active.get(delta.request)
            if active is None:  # the outbox was overrun by a delta before this one
                continue
            active.outbox.push(delta)
            if active.outbox.is_overrun:
                # A router that reads nothing does not see its session end, so nobody else will.
                for request in list(self._sessions[active.outbox].requests.values()):
                    self._end(request, "slow_router")
            elif delta.is_last_of_request:
                self._end(delta.request, "done")

    def _fail(self, request: Request, error: RequestError) -> None:
        active = self._active.get(request)
        if active is not None:
            self._tell_failure(request, error, active.outbox)
            self._end(request, type(error).__name__)

    def _tell_failure(self, request: Request, error: RequestError, outbox: Outbox) -> None:
        outbox.fail(
            RequestFailure(request_id=request.request_id, attempt=request.attempt, error=error)
        )

    def _end(self, request: Request, outcome: str) -> None:
        """Forget a request, whatever ended it, and have its pages freed."""
        active = self._active.pop(request)
        if active.timer is not None:
            active.timer.cancel()
        session = self._sessions.get(active.outbox)
        if session is not None:
            del session.requests[request.request_id]
        self._scheduler.end(request)
        self._receivers.cancel(request)
        self._wake()
        if not self._active:
            self._all_ended.set()
        stats = request.stats
        logger.info(
            "request_ended",
            extra=fields(
                request_id=request.request_id,
                attempt=request.attempt,
                outcome=outcome,
                prompt_tokens=len(request.prompt),
                output_tokens=sum(len(choice.output) for choice in request.choices),
                s=round(asyncio.get_running_loop().time() - active.submitted_at, 3),
                cached_tokens=stats.decode_cached_tokens,
                computed_tokens=stats.decode_computed_tokens,
                moved_pages=stats.pages_moved,
                prefill_retries=stats.prefill_retries,
                preemptions=stats.preemptions,
            ),
        )

    def _wake(self) -> None:
        self._loop.wake()

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            steps=self._loop.num_steps,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            is_draining=self._is_draining,
        )
