"""Dispatches requests: places them on decode workers, receives their tokens, resumes them.

Life of a request here:
0. WAITING    with a tenants file, while the workers have enough work: see router/tenants/turns.py
1. PLACED     the policy chose a decode worker; load is counted there
2. SUBMITTED  on the one session that this router has with that worker
3. STREAMING  each message of the session feeds the `Generation`s it names; the client's call reads
              from them at its own pace and never blocks the session
4. FINISHED   all choices ended, or the request failed with an error of its own

When a session breaks, or its worker dies, refuses or skips a token, the request goes back to 1 with
its emitted tokens, as the next attempt; late messages of earlier attempts are dropped.
`Dispatcher.leave` cancels the rest at the worker.

A request whose first attempt can be placed at once and succeeds has no task: its session's reader
drives it. A task does where something must be waited for: a worker, a turn, another attempt.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from observability.logs import fields
from observability.tracing import NO_SPAN, NoSpan
from router import wire
from router.config import RouterConfig
from router.errors import (
    AttemptFailed,
    DeadlineExceeded,
    NoWorker,
    Overloaded,
    RequestCrashed,
    RequestFailed,
    RequestLost,
    RouterError,
    RouterStops,
)
from router.expected_wait import EXPECTED_NEW_TOKENS, Demand, wait_to_hold_s
from router.generation import Generation
from router.hot_prefixes import HotPrefixes
from router.pacing import Pace, Pacer
from router.placement import Placement
from router.policy import PolicyWeights, RouteDecision, RouteQuery, route
from router.prefix_index import PrefixIndex
from router.session import AttemptOver, Session, Stream
from router.tenants.turns import Turns
from router.worker import Worker
from router.worker_registry import WorkerRegistry

logger = logging.getLogger(__name__)

_MOST_PREFIXES = 1024  # most prefixes that are counted; a router shows a few of them
Decided = tuple[RouteDecision, Mapping[str, int]]  # and how many pages each worker holds, if any
_SMALLEST = Demand(num_pages=1, mean_pages=1.0, num_sequences=1)


class Dispatcher:
    """All requests and sessions of one router."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        registry: WorkerRegistry,
        index: PrefixIndex,
        has_tenants: bool,
        on_dispatched: Callable[[float], None],
    ) -> None:
        """Make the dispatcher of a router.

        Args:
            config: The configuration of the router.
            registry: The workers.
            index: The pages that they hold.
            has_tenants: Whether tenants take turns.
            on_dispatched: Called when a request is first sent to a worker, with the seconds that
                it waited for that.
        """
        self.num_resumed = 0  # see Generation.num_resumptions
        self.hot_prefixes = HotPrefixes(max_prefixes=_MOST_PREFIXES)
        self._config = config
        self._registry = registry
        self._index = index
        self._weights = PolicyWeights(
            prefill_tokens_per_s=config.prefill_tokens_per_s,
            new_work_weight=config.new_work_weight,
            decode_load_s=config.decode_load_s,
            page_pressure_s=config.page_pressure_s,
            local_prefill_max_tokens=config.local_prefill_max_tokens,
            max_prefill_candidates=config.max_prefill_candidates,
        )
        self._on_dispatched = on_dispatched
        self._turns = Turns(self._has_room) if has_tenants else None
        self._pacer = Pacer(config.coalesce_ms / 1000)
        self._sessions: dict[Worker, Session] = {}
        self._streams: set[Stream] = set()  # begun and not left
        self._drivers: set[asyncio.Task[None]] = set()  # held until they end

    def open(self, generation: Generation, pace: Pace, on_ready: Callable[[], None]) -> Stream:
        """Return the stream of a request, which `begin` begins and `leave` must end."""
        stream = Stream(generation, self._pacer, pace, on_ready)
        self._streams.add(stream)
        return stream

    def begin(self, stream: Stream) -> None:
        """Drive a request until it ends or is left; an error ends the stream."""
        generation = stream.generation
        stream.deadline = asyncio.get_running_loop().call_at(
            generation.request.deadline_at, self._expire, stream
        )
        self.num_resumed += generation.num_resumptions  # begun at another router
        if generation.is_finished:
            generation.finished_at = stream.began_at
            stream.end(None)
            return
        try:
            placement = self._place_at_once(generation)
        except RouterError as error:
            stream.end(error)
            return
        if placement is None:
            self._drive(stream, None)
        else:
            self._attempt(stream, placement, partial(self._first_attempt_over, stream))

    def leave(self, stream: Stream) -> None:
        """Forget a request; its choices that are not finished are cancelled at the worker."""
        self._streams.discard(stream)
        self._stop(stream, RouterStops("the router stopped"))  # no effect on an end before

    def check_room(self) -> None:
        """Refuse a request that could not start in time even with the smallest prompt."""
        now = asyncio.get_running_loop().time()
        waits = [
            wait_to_hold_s(worker.queue(now), _SMALLEST)
            for worker in self._registry.ready("decode")
        ]
        if waits:
            self._check_wait(min(waits))

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Resume all requests of a worker that died."""
        session = self._sessions.pop(worker, None)
        if session:
            session.fail(f"{worker.member.worker_id}: {reason}")
            if session.task:
                session.task.cancel()

    def abandon(self) -> None:
        """End all requests that still run."""
        for stream in list(self._streams):
            self._stop(stream, RouterStops("the router stopped"))

    async def stop(self) -> None:
        """End all sessions; call it when no request is left."""
        sessions, self._sessions = self._sessions, {}
        tasks = [session.task for session in sessions.values() if session.task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)

    def _expire(self, stream: Stream) -> None:
        late = f"not finished in time: {_progress(stream.generation)}"
        self._stop(stream, DeadlineExceeded(late))

    def _stop(self, stream: Stream, error: RouterError) -> None:
        """End a stream and all that is done for it."""
        stream.end(error)
        stream.end_attempt(AttemptFailed("cancelled"))
        if stream.deadline:
            stream.deadline.cancel()
        if stream.driver:
            stream.driver.cancel()

    def _first_attempt_over(
        self, stream: Stream, error: AttemptFailed | RequestFailed | None
    ) -> None:
        if stream.is_over:
            return
        if isinstance(error, AttemptFailed):
            self._drive(stream, error)
        else:
            stream.end(error)

    def _drive(self, stream: Stream, failed: AttemptFailed | None) -> None:
        """Go on in a task, after a failed attempt if there was one."""
        name = f"request-{stream.generation.request.request_id}"
        stream.driver = asyncio.create_task(self._run_driver(stream, failed), name=name)
        self._drivers.add(stream.driver)
        stream.driver.add_done_callback(self._drivers.discard)

    async def _run_driver(self, stream: Stream, failed: AttemptFailed | None) -> None:
        try:
            await self._attempt_until_done(stream, failed)
            stream.end(None)
        except RouterError as error:
            stream.end(error)
        except Exception:
            request_id = stream.generation.request.request_id
            logger.exception("request_crashed", extra=fields(request_id=request_id))
            stream.end(RequestCrashed(request_id))
        finally:
            stream.end(RouterStops("the router stopped"))  # no effect on an end before

    async def _attempt_until_done(self, stream: Stream, failed: AttemptFailed | None) -> None:
        generation = stream.generation
        # Names of workers that are tried again only if there is no other. Names, because a worker
        # whose engine fails comes back idle and would always be the first choice.
        refused: set[str] = set()
        num_lost = 0
        patience_ends_at: float | None = None  # with workers that take nothing more
        num_tokens = generation.num_tokens  # with another one, patience begins anew
        while True:
            if failed is not None:
                if generation.num_tokens > num_tokens:
                    num_tokens, patience_ends_at = generation.num_tokens, None
                if failed.is_overload and patience_ends_at is None:
                    patience_ends_at = asyncio.get_running_loop().time()
                    patience_ends_at += self._config.resume_wait_s
                # Each start of a worker hands a request over at most once: when it leaves, it gets
                # no new work.
                if not failed.is_hand_over:
                    refused.add(generation.decode_workers[-1])
                    num_lost += not failed.is_overload
                self._check_may_go_on(generation, failed, refused, num_lost, patience_ends_at)
                self._note_failed(generation, failed)
            placement = await self._place(generation, refused)
            over: asyncio.Future[AttemptFailed | RequestFailed | None]
            over = asyncio.get_running_loop().create_future()
            self._attempt(stream, placement, partial(_settle, over))
            error = await over
            if error is None:
                return
            if not isinstance(error, AttemptFailed):
                raise error
            failed = error

    def _check_may_go_on(
        self,
        generation: Generation,
        failed: AttemptFailed,
        refused: set[str],
        num_lost: int,
        patience_ends_at: float | None,
    ) -> None:
        """Refuse another attempt after one that failed."""
        if not failed.is_overload:
            if num_lost > self._config.max_resumptions:
                raise RequestLost(
                    f"gave up after {num_lost} lost attempts, {_progress(generation)};"
                    f" the last one: {failed}"
                ) from failed
            return
        assert patience_ends_at is not None
        is_new = generation.num_tokens == 0
        is_late = asyncio.get_running_loop().time() >= patience_ends_at
        if is_late or (is_new and not self._others(refused)):
            raise Overloaded(
                f"no decode worker takes more: {failed}", self._config.retry_delay_s
            ) from failed

    def _note_failed(self, generation: Generation, failed: AttemptFailed) -> None:
        """Count and log an attempt that another one follows."""
        is_begun = generation.num_tokens > 0 or not failed.is_refusal
        generation.num_resumptions += is_begun
        self.num_resumed += is_begun
        logger.info(
            "request_resumed" if is_begun else "request_passed_on",
            extra=fields(
                request_id=generation.request.request_id,
                attempt=generation.attempt + 1,
                emitted=generation.num_tokens,
                reason=str(failed),
            ),
        )

    def _others(self, refused: set[str]) -> list[Worker]:
        return [w for w in self._registry.ready("decode") if w.member.worker_id not in refused]

    async def _candidates(self, generation: Generation, refused: set[str]) -> list[Worker]:
        """Return the decode workers to choose from, waiting for one if there is none.

        Also waits for a prefill worker that is due: without one the decode worker would prefill.
        """
        loop = asyncio.get_running_loop()
        is_new = generation.num_tokens == 0
        wait_s = self._config.worker_wait_s if is_new else self._config.resume_wait_s
        if refused and not self._others(refused):
            # The remaining workers have just refused: wait a moment for them, or for a new one.
            await self._registry.wait_changed(loop.time() + self._config.retry_delay_s)
        until = loop.time() + wait_s
        while True:
            while not self._registry.ready("decode"):
                has_hanging = self._registry.has_hanging("decode")
                is_in_time = await self._registry.wait_changed(until)
                if has_hanging:
                    until = loop.time() + wait_s  # it has its own time limit, and then restarts
                elif not is_in_time:
                    raise NoWorker(
                        f"no decode worker for {wait_s:g} s{self._registry.told_misfits('decode')};"
                        f" {_progress(generation)}"
                    )
            prefill_until = loop.time() + self._config.connect_timeout_s
            while self._registry.is_due("prefill"):
                if not await self._registry.wait_changed(prefill_until):
                    break
            if ready := self._registry.ready("decode"):
                return (refused and self._others(refused)) or ready

    def _place_at_once(self, generation: Generation) -> Placement | None:
        """Do what `_place` does for a first attempt; None: something must be waited for."""
        decode_workers = self._registry.ready("decode")
        if not decode_workers or self._registry.is_due("prefill"):
            return None
        if self._turns is None:
            return self._place_now(generation, self._decide(generation, decode_workers))
        if self._turns.is_busy:
            return None
        decided = self._decide(generation, decode_workers)
        if not self._starts_soon(decided):
            return None
        placement = self._place_now(generation, decided)
        self._turns.go_on()
        return placement

    async def _place(self, generation: Generation, refused: set[str]) -> Placement:
        """Choose workers and count the request's load there."""
        while True:
            decode_workers = await self._candidates(generation, refused)
            # Requests that this router has already sent to a worker wait for no turn. That another
            # router has sent one is only the caller's word, which it can repeat.
            if self._turns is None or generation.attempt >= 0:
                return self._place_now(generation, self._decide(generation, decode_workers))
            tenant, cost = generation.request.tenant, _cost(generation)
            wait_s = self._turns.expected_wait_s(tenant.name, cost=cost, weight=tenant.weight)
            if not generation.num_resumptions:
                self._check_wait(wait_s)
            turn = self._turns.turn(
                tenant.name,
                generation,
                cost=cost,
                weight=tenant.weight,
                has_begun=generation.num_resumptions > 0,
            )
            async with turn:
                if decode_workers := self._registry.ready("decode"):
                    decode_workers = self._others(refused) or decode_workers
                    return self._place_now(generation, self._decide(generation, decode_workers))

    def _has_room(self, generation: Generation) -> bool:
        """Return whether a request would start soon; without workers, it waits for one."""
        decode_workers = self._registry.ready("decode")
        if not decode_workers:
            return True
        return self._starts_soon(self._decide(generation, decode_workers))

    def _starts_soon(self, decided: Decided) -> bool:
        return decided[0].least_wait_s <= self._config.max_backlog_s

    def _decide(self, generation: Generation, decode_workers: list[Worker]) -> Decided:
        """Choose workers by the load and the index of this moment."""
        now = asyncio.get_running_loop().time()
        request = generation.request
        overlaps = self._index.match(request.page_hashes, now)
        decision = route(
            RouteQuery(
                num_tokens=request.prompt_len,
                num_sequences=generation.num_unfinished,
                max_new_tokens=request.sampling.max_tokens,
                page_size=request.page_size,
                affinity=(request.page_hashes or (request.packed_token_ids,))[0],
                device=generation.device,
            ),
            decode_workers=[each.load(now) for each in decode_workers],
            prefill_workers=[each.load(now) for each in self._registry.ready("prefill")],
            overlaps=overlaps,
            weights=self._weights,
        )
        return decision, overlaps

    def _place_now(self, generation: Generation, decided: Decided) -> Placement:
        request = generation.request
        decision, overlaps = decided
        if generation.attempt < 0 and not generation.num_resumptions:
            self._check_wait(decision.least_wait_s)
            self.hot_prefixes.add(
                request.tenant.name,
                request.page_hashes,
                num_known=max(overlaps.values(), default=0),
                page_size=request.page_size,
            )
        expires_at = asyncio.get_running_loop().time() + self._config.speculative_ttl_s
        num_pages = len(request.page_hashes)
        for worker_id in dict.fromkeys((decision.decode_worker, decision.computing_worker)):
            if self._index.expects_pages or overlaps.get(worker_id, 0) < num_pages:
                self._index.expect(worker_id, request.page_hashes, expires_at)
        return Placement(
            self._registry.get(decision.decode_worker),
            [self._registry.get(each) for each in decision.prefill_candidates],
            computing=self._registry.get(decision.computing_worker),
            num_computed_tokens=decision.num_computed_tokens,
            prompt_len=request.prompt_len,
            num_pages=decision.num_received_pages,
            num_sequences=generation.num_unfinished,
        )

    def _check_wait(self, wait_s: float) -> None:
        """Refuse a new request that could not start in time; the error says when to retry."""
        excess_s = wait_s - self._config.max_expected_wait_s
        if excess_s > 0:
            raise Overloaded(
                f"a request waits about {wait_s:.0f} s before it starts, more than"
                f" {self._config.max_expected_wait_s:g} s",
                min(max(self._config.retry_delay_s, excess_s), self._config.max_expected_wait_s),
            )

    def _attempt(self, stream: Stream, placement: Placement, then: AttemptOver) -> None:
        """Begin an attempt; `then` gets how it ended, once its worker and place are free of it."""
        generation = stream.generation
        worker = placement.decode
        span = NO_SPAN
        if generation.span.is_traced:
            span = generation.span.child(
                "attempt",
                attempt=generation.attempt + 1,
                decode_worker=worker.member.worker_id,
            )
        session = self._session(worker)
        stream.placement = placement
        # First of all: whatever fails from here on ends the attempt, which frees the placement.
        stream.begin_attempt(partial(self._attempt_over, stream, session, span, then))
        choices = generation.begin_attempt(worker.member.worker_id)
        now = asyncio.get_running_loop().time()
        message = wire.submit(
            generation.request,
            attempt=generation.attempt,
            choices=choices,
            prefill_candidates=[worker.member for worker in placement.prefill],
            timeout_s=generation.request.deadline_at - now,
            failed_passes=generation.failed_passes,
            trace=span.context,
        )
        session.add(stream, message)
        if generation.attempt == 0:
            generation.sent_at = now
            self._on_dispatched(now - stream.began_at)

    def _attempt_over(
        self,
        stream: Stream,
        session: Session,
        span: NoSpan,
        then: AttemptOver,
        error: AttemptFailed | RequestFailed | None,
    ) -> None:
        session.remove(stream)
        assert stream.placement, "it was placed"
        stream.placement.release(asyncio.get_running_loop().time())
        if self._turns is not None:
            self._turns.go_on()
        if isinstance(error, AttemptFailed):
            stream.generation.num_refusals += error.is_refusal
        if span.is_traced:
            span.end(str(error) if error else "")
        then(error)

    def _session(self, worker: Worker) -> Session:
        session = self._sessions.get(worker)
        if session is None:
            session = Session(worker, self._config.router_id, self._config.contract_version)
            self._sessions[worker] = session
            session.task = asyncio.create_task(
                self._run_session(session), name=f"session-{worker.member.worker_id}"
            )
        return session

    async def _run_session(self, session: Session) -> None:
        reason = "the session ended"
        try:
            reason = await session.run()
        except Exception:
            logger.exception(
                "session_crashed", extra=fields(worker_id=session.worker.member.worker_id)
            )
            reason = "the session crashed"
        finally:
            if self._sessions.get(session.worker) is session:
                # Declares the worker dead, which calls worker_lost.
                self._registry.report_broken(session.worker, reason)
                self.worker_lost(session.worker, reason)


def _settle(
    over: "asyncio.Future[AttemptFailed | RequestFailed | None]",
    error: AttemptFailed | RequestFailed | None,
) -> None:
    if not over.done():  # its task may have been cancelled
        over.set_result(error)


def _cost(generation: Generation) -> int:
    """Return the tokens that a new request is expected to take of the workers."""
    sampling = generation.request.sampling
    num_new = sampling.n * min(sampling.max_tokens, EXPECTED_NEW_TOKENS)
    return generation.request.prompt_len + generation.num_tokens + num_new


def _progress(generation: Generation) -> str:
    return f"{generation.num_tokens} tokens were generated"
