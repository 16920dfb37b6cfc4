"""The decode worker: sessions and their requests on top of scheduler, receivers and host."""

import asyncio
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import grpc

from decode_worker.admission import check_request
from decode_worker.config import DecodeConfig
from decode_worker.masks import TokenMasks
from decode_worker.outbox import Outbox, RequestFailure
from decode_worker.prefill_peers import PrefillPeers
from decode_worker.receiving import PrefillReceivers
from decode_worker.request import Request, TokenDelta
from decode_worker.scheduler import Scheduler
from decode_worker.server import SERVICE, register_decode_service
from decode_worker.step_plan import StepPlan
from kv_transfer.driver import RunBlocking
from observability.logs import fields
from observability.tracing import begin_part
from worker.context import WorkerContext
from worker.errors import EngineFailed, PassFailed, TimedOut, WorkerError
from worker.grammar_threads import GrammarThreads
from worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Active:
    """A request that has not ended."""

    request: Request
    outbox: Outbox
    submitted_at: float
    is_begun: bool = False  # its prompt is being computed, or a prefill worker was asked for it
    has_token: bool = False  # of this attempt
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _Session:
    """A router's open session."""

    router_id: str
    requests: dict[str, Request] = field(default_factory=dict)  # request_id |-> not ended


class DecodeWorker:
    """Sessions of routers; implements worker.host.Pool and server.RequestSink.

    Args:
        context: State that it shares with the host.
        connect_channel: Makes a grpc.aio channel to a prefill worker's address.
        random_id: Returns 16 random bytes for ids of transfers and connections.
        run_blocking: Runs page digests and grammars.
    """

    name = "decode"
    service = SERVICE

    def __init__(
        self,
        context: WorkerContext[DecodeConfig],
        *,
        connect_channel: Callable[[str], grpc.aio.Channel],
        random_id: Callable[[], bytes],
        run_blocking: RunBlocking = asyncio.to_thread,
    ) -> None:
        config = context.config
        self.max_choices = config.max_choices
        self.scheduler = Scheduler(
            config=config,
            cache=context.cache,
            model=context.model,
            page_size=context.layout.page_size,
            page_bytes=context.layout.page_bytes,
            full_pass=context.executor.engine.full_pass,
        )
        self._config = config
        self._context = context
        self._peers = PrefillPeers(context, connect_channel=connect_channel, random_id=random_id)
        self._receivers = PrefillReceivers(
            context,
            scheduler=self.scheduler,
            peers=self._peers,
            random_id=random_id,
            run_blocking=run_blocking,
            on_deltas=self.progressed,
            on_failure=self.failed,
            on_failed_pass=self._prefill_pass_failed,
        )
        self._masks = TokenMasks(
            context.grammars,
            threads=GrammarThreads(run_blocking, context.tasks),
            wake=context.wake,
            on_failure=self.failed,
        )
        self._sessions: dict[Outbox, _Session] = {}
        self._active: dict[Request, _Active] = {}
        self._all_ended = asyncio.Event()  # set while nothing is active
        self._all_ended.set()
        self._session_closed = asyncio.Event()

    # What the host asks for.

    def register(self, server: grpc.aio.Server) -> None:
        """Add DecodeService to a server."""
        register_decode_service(server, self)

    def planned(self, plan: StepPlan) -> None:
        """Begin to ask prefill workers for groups, and note which requests wait no longer."""
        for group in plan.receives:
            self._receivers.start(group)
        now = asyncio.get_running_loop().time()
        for group in (*plan.receives, *(chunk.prompt for chunk in plan.chunks)):
            active = self._active.get(group.request)
            if active is not None and not active.is_begun:
                active.is_begun = True
                active.request.stats.queue_ms = round(1000 * (now - active.submitted_at))
                active.request.span.event("begun")

    def progressed(self, progress: Sequence[TokenDelta]) -> None:
        """Pass new tokens to the routers that wait for them."""
        self._masks.progressed(progress)
        for delta in progress:
            active = self._active.get(delta.request)
            if active is None:  # the outbox was overrun by a delta before this one
                continue
            if not active.has_token:
                active.has_token = True
                passes_ms = round(1000 * delta.request.passes_s, 3)
                delta.request.span.event("first_token", passes_ms=passes_ms)
            active.outbox.push(delta)
            if active.outbox.is_overrun:
                # A router that reads nothing does not see its session end: end its requests here.
                for request in list(self._sessions[active.outbox].requests.values()):
                    self._end(request, "slow_router")
            elif delta.is_last_of_request:
                self._end(delta.request, "done")

    def failed(self, work: Request, error: WorkerError) -> None:
        """End a request and tell its router why; a no-op when it has ended."""
        active = self._active.get(work)
        if active is None:
            return
        if isinstance(error, PassFailed):
            work.num_failed_passes += 1
            error = self._given_up(work) or error
        self._tell_failure(work, error, active.outbox)
        self._end(work, type(error).__name__)

    async def wait_idle(self) -> None:
        """Return when no request is left."""
        await self._all_ended.wait()
        self._receivers.cancel_unneeded()
        self._peers.stop_meeting()

    def end_all(self, error: WorkerError) -> None:
        """End all requests and sessions, and tell the routers the reason."""
        for request in list(self._active):
            self.failed(request, error)
        self._receivers.cancel_unneeded()
        self._peers.stop_meeting()
        for outbox in self._sessions:
            outbox.close()

    async def wait_told(self) -> None:
        """Return when no session is left."""
        while self._sessions:
            self._session_closed.clear()
            await self._session_closed.wait()

    async def close(self) -> None:
        """End the sessions, and close connections and channels."""
        for outbox in self._sessions:
            outbox.close()
        self._receivers.close()
        await self._peers.close()

    # What sessions ask for (see server.RequestSink).

    def open_session(self, router_id: str, incarnation: int, contract_version: int) -> Outbox:
        """Begin a session; its answers appear in the outbox that is returned."""
        self._context.check_contract(contract_version)
        self._context.check_incarnation(incarnation)
        self._context.check_open()
        outbox = Outbox(max_tokens=self._config.max_outbox_tokens)
        self._sessions[outbox] = _Session(router_id)
        logger.info("session_opened", extra=fields(router=router_id))
        return outbox

    def close_session(self, outbox: Outbox) -> None:
        """Cancel all requests of an outbox."""
        session = self._sessions.pop(outbox)
        self._session_closed.set()
        for request in list(session.requests.values()):
            self._end(request, "session_ended")
        logger.info("session_closed", extra=fields(router=session.router_id))

    def meet(self, prefill_workers: Sequence[WorkerIdentity]) -> None:
        """Connect to prefill workers that requests may need."""
        self.scheduler.meet(prefill_workers)
        if not self._context.is_draining:
            self._peers.connect(prefill_workers)

    def submit(self, request: Request, outbox: Outbox) -> None:
        """Take a request; rejections go to the outbox."""
        if outbox.is_overrun:
            return  # the end of the session tells the router
        session = self._sessions[outbox]
        # A resumption replaces the attempt that the router has given up.
        self.cancel(request.request_id, outbox)
        try:
            self._context.check_open()
            check_request(
                request,
                config=self._config,
                model=self._context.model,
                num_waiting=self.scheduler.num_waiting,
            )
        except WorkerError as error:
            self._tell_failure(request, error, outbox)
            return
        request.span = begin_part("decode", request.trace, request_id=request.request_id)
        loop = asyncio.get_running_loop()
        active = _Active(request, outbox, submitted_at=loop.time())
        if request.timeout_s is not None:
            late = TimedOut(f"the request took longer than {request.timeout_s:g} s")
            active.timer = loop.call_later(request.timeout_s, self.failed, request, late)
        session.requests[request.request_id] = request
        self._active[request] = active
        self._all_ended.clear()
        self.scheduler.submit(request)
        if request.params.constraint is not None:
            self._masks.follow(request.choices)
        self._context.wake.set_by_arrival()

    def cancel(self, request_id: str, outbox: Outbox) -> None:
        """Forget a request and free its pages; a no-op when it has ended."""
        request = self._sessions[outbox].requests.get(request_id)
        if request is not None:
            outbox.discard(request)
            self._end(request, "cancelled")

    def cancel_choices(self, request_id: str, choices: Container[int], outbox: Outbox) -> None:
        """End some choices of a request; the request ends with its last choice.

        Tokens drawn earlier stay in the outbox: their delta may carry the request's usage.
        """
        request = self._sessions[outbox].requests.get(request_id)
        if request is None:
            return
        self.scheduler.end(request, choices)
        if request.is_ended:
            self._end(request, "cancelled")
        else:
            self._receivers.cancel(request)
            self._context.wake.set()

    def fail(self, request_id: str, error: WorkerError, outbox: Outbox) -> None:
        """End a request and tell its router why; a no-op when it has ended."""
        if request := self._sessions[outbox].requests.get(request_id):
            self.failed(request, error)

    def _prefill_pass_failed(self, request: Request) -> None:
        """Count a failed pass of a prefill worker; the request goes on unless it had too many."""
        request.num_failed_passes += 1
        if error := self._given_up(request):
            self.failed(request, error)

    def _given_up(self, request: Request) -> EngineFailed | None:
        if request.num_failed_passes < self._config.max_request_failures:
            return None
        return EngineFailed(
            f"{request.num_failed_passes} passes failed that computed for it, the last one for it "
            "alone"
        )

    def _tell_failure(self, request: Request, error: WorkerError, outbox: Outbox) -> None:
        outbox.fail(
            RequestFailure(
                request_id=request.request_id,
                attempt=request.attempt,
                error=error,
                failed_passes=request.num_failed_passes,
            )
        )

    def _end(self, request: Request, outcome: str) -> None:
        """Forget a request, however it ended, and have its pages freed."""
        active = self._active.pop(request)
        if active.timer is not None:
            active.timer.cancel()
        session = self._sessions.get(active.outbox)
        if session is not None:
            del session.requests[request.request_id]
        self.scheduler.end(request)
        if outcome != "done":  # else pages that still arrive serve the next request with the prefix
            self._receivers.cancel(request)
        self._context.wake.set()
        if not self._active:
            self._all_ended.set()
        stats = request.stats
        account: dict[str, object] = {
            "outcome": outcome,
            "prompt_tokens": len(request.prompt),
            "output_tokens": sum(len(choice.output) for choice in request.choices),
            "s": round(asyncio.get_running_loop().time() - active.submitted_at, 3),
            "cached_tokens": stats.decode_cached_tokens,
            "computed_tokens": stats.decode_computed_tokens,
            "moved_pages": stats.pages_moved,
            "prefill_retries": stats.prefill_retries,
            "preemptions": stats.preemptions,
        }
        request.span.end(
            "" if outcome == "done" else outcome,
            queue_ms=stats.queue_ms,
            moved_bytes=stats.bytes_moved,
            **account,
        )
        logger.info(
            "request_ended",
            extra=fields(
                request_id=request.request_id,
                attempt=request.attempt,
                **account,
                **request.span.log_fields,
            ),
        )
        # They lead back to it. Cycles would be left to the collector, which stops the event loop.
        request.choices = []
