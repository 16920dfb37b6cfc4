"""Runs the attempts to have groups prefilled remotely and reports to the scheduler."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from decode_worker.config import DecodeConfig
from decode_worker.errors import PrefillPassFailed
from decode_worker.prefill_peers import EXPECTED_ERRORS, PrefillPeers
from decode_worker.remote_prefill import RemotePrefill
from decode_worker.request import PrefillGroup, Request, TokenDelta
from decode_worker.scheduler import Scheduler
from decode_worker.wire import PrefillResult
from kv_cache.page_pool import Quarantined
from kv_transfer.driver import RunBlocking
from kv_transfer.errors import ConnectionBroken
from kv_transfer.joining import JoinedDigests
from kv_transfer.messages import Ticket
from observability.logs import fields
from observability.tracing import NoSpan
from pagewire.protos.call_tasks import mark_seen
from pagewire.protos.trace_context import TraceContext
from worker.context import WorkerContext
from worker.errors import InternalError, WorkerError
from worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)


class PrefillReceivers:
    """All attempts of a decode worker.

    Args:
        peers: What is kept for prefill workers.
        on_deltas: Takes the first tokens of a group.
        on_failure: Ends a request that met a bug.
        on_failed_pass: Called for each failed pass of a prefill worker, with the request.
    """

    def __init__(
        self,
        context: WorkerContext[DecodeConfig],
        *,
        scheduler: Scheduler,
        peers: PrefillPeers,
        random_id: Callable[[], bytes],
        run_blocking: RunBlocking,
        on_deltas: Callable[[Sequence[TokenDelta]], None],
        on_failure: Callable[[Request, WorkerError], None],
        on_failed_pass: Callable[[Request], None],
    ) -> None:
        self._context = context
        self._config = context.config
        self._scheduler = scheduler
        self._peers = peers
        self._random_id = random_id
        self._digests = JoinedDigests(context.storage, run_blocking=run_blocking)
        self._on_deltas = on_deltas
        self._on_failure = on_failure
        self._on_failed_pass = on_failed_pass
        self._distrusted: dict[WorkerIdentity, asyncio.TimerHandle] = {}  # |-> ends the distrust
        self._running: dict[asyncio.Task[None], PrefillGroup] = {}  # outcome not known yet

    def start(self, group: PrefillGroup) -> None:
        """Begin an attempt at the group's next candidate; its pages are reserved."""
        assert group.candidate is not None
        self._context.tasks.start(
            self._receive(group, group.candidate), name=f"receive-{group.request.request_id}"
        )

    def cancel(self, request: Request) -> None:
        """Stop attempts for choices that ended; pages are freed once nothing writes them."""
        for task, group in self._running.items():
            if group.request is request and group.is_ended:
                task.cancel()

    def cancel_unneeded(self) -> None:
        """At the end: stop attempts for ended requests, now and from now on."""
        for task, group in self._running.items():
            if group.is_ended:
                task.cancel()

    def close(self) -> None:
        """Stop the timers; no attempt may be left."""
        for timer in self._distrusted.values():
            timer.cancel()

    async def _receive(self, group: PrefillGroup, sender: WorkerIdentity) -> None:
        with self._peers.using(sender):
            await self._attempt(group, sender)

    async def _attempt(self, group: PrefillGroup, sender: WorkerIdentity) -> None:
        """Run one attempt, report its outcome, and clean up after it."""
        attempt: RemotePrefill | None = None
        quarantined: tuple[Quarantined, ...] = ()
        span = group.request.span.child("receive", prefill_worker=sender.worker_id)
        try:
            attempt = self._make_attempt(group, sender, span.context)
            quarantined = await self._run(group, sender, attempt, span)
        except Exception:
            # A bug: the group's progress is unknown from now on, so its request ends.
            logger.exception("receive_crashed", extra=fields(request_id=group.request.request_id))
            self._on_failure(group.request, InternalError())
            if attempt is not None and attempt.receiver is not None:
                attempt.receiver.driver.stream_lost("an internal error")
            quarantined = self._scheduler.abandon(group, may_be_written=_may_write(attempt))
            span.end("internal error")
        self._context.wake.set_by_arrival()
        if attempt is not None:
            await self._clean_up(group.request.request_id, attempt, quarantined)

    async def _run(
        self, group: PrefillGroup, sender: WorkerIdentity, attempt: RemotePrefill, span: NoSpan
    ) -> tuple[Quarantined, ...]:
        """Run an attempt and report its outcome; return pages that may still be written."""
        # Only this task is ever cancelled: the code below must run in any case.
        running = asyncio.get_running_loop().create_task(attempt.run())
        running.add_done_callback(mark_seen)
        self._running[running] = group
        if group.is_ended:  # before there was anything to cancel
            running.cancel()
        try:
            either: set[asyncio.Future[Any]] = {running, attempt.result}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if attempt.result.done() and attempt.result.exception() is None:
                span.event("first_token")
                # A client that waits for a token need not wait for pages.
                self._on_deltas(self._take(group, attempt.result.result()))
            await asyncio.wait({running})
        except Exception:
            attempt.stop("an internal error")  # then it is known which pages may be written
            raise
        finally:
            del self._running[running]
            running.cancel()  # a no-op, unless a bug led here
        error = None if running.cancelled() else running.exception()
        reason = "cancelled" if running.cancelled() else str(error) if error else ""
        span.end(reason, **attempt.moved)
        if not running.cancelled() and error is None:
            transfer_s, exposed_s = attempt.wire_s
            self._scheduler.receive_done(group, transfer_s=transfer_s, exposed_s=exposed_s)
            return ()
        # Whatever ended this attempt, the group may try the next candidate.
        self._log_failure(group, sender, error)
        if isinstance(error, PrefillPassFailed):
            self._on_failed_pass(group.request)
        attempt.stop(type(error).__name__ if error else "cancelled")
        if not group.is_ended:
            self._distrust(sender)
        return self._scheduler.receive_failed(group, may_be_written=_may_write(attempt))

    def _distrust(self, sender: WorkerIdentity) -> None:
        """Ask a prefill worker last for a while, counted from this failure."""
        earlier = self._distrusted.pop(sender, None)
        if earlier is not None:
            earlier.cancel()
        self._distrusted[sender] = asyncio.get_running_loop().call_later(
            self._config.distrust_s, self._trust, sender
        )

    def _trust(self, sender: WorkerIdentity) -> None:
        del self._distrusted[sender]
        self._scheduler.candidates.trust(sender)

    async def _clean_up(
        self, request_id: str, attempt: RemotePrefill, quarantined: tuple[Quarantined, ...]
    ) -> None:
        try:
            await attempt.close()
        except ConnectionBroken as broken:
            stuck = fields(request_id=request_id, pages=len(quarantined), error=str(broken))
            logger.error("pages_stuck", extra=stuck)
        except Exception:
            logger.exception("attempt_close_crashed", extra=fields(request_id=request_id))
        if quarantined:
            assert attempt.receiver is not None
            attempt.receiver.driver.call_when_quiescent(
                lambda: self._release_quarantine(quarantined)
            )

    def _release_quarantine(self, pages: tuple[Quarantined, ...]) -> None:
        self._scheduler.release_quarantine(pages)
        self._context.wake.set()

    def _take(self, group: PrefillGroup, result: PrefillResult) -> list[TokenDelta]:
        return self._scheduler.receive_result(
            group,
            result.tokens,
            num_cached_tokens=result.num_cached_tokens,
            num_computed_tokens=result.num_computed_tokens,
        )

    def _make_attempt(
        self, group: PrefillGroup, sender: WorkerIdentity, trace: TraceContext
    ) -> RemotePrefill:
        return RemotePrefill(
            group,
            ticket=Ticket(
                transfer_id=self._random_id(),
                attempt=len(group.failed),
                sender_incarnation=sender.incarnation,
                receiver_incarnation=self._context.identity.incarnation,
            ),
            contract_version=self._context.identity.contract_version,
            model=self._context.model,
            stream=partial(self._peers.stream, sender),
            connect=partial(self._peers.connection, sender),
            drop=self._peers.drop,
            storage=self._context.storage,
            on_commit=lambda num_pages: self._commit(group, num_pages),
            deadlines=self._config.transfer_deadlines,
            result_s=self._config.result_s,
            digests=self._digests,
            trace=trace,
        )

    def _commit(self, group: PrefillGroup, num_pages: int) -> None:
        self._scheduler.receive_committed(group, num_pages)
        self._context.wake.set()  # other groups may wait for these pages

    def _log_failure(
        self, group: PrefillGroup, sender: WorkerIdentity, error: BaseException | None
    ) -> None:
        is_expected = error is None or isinstance(error, EXPECTED_ERRORS)
        logger.log(
            logging.INFO if is_expected else logging.ERROR,
            "prefill_attempt_ended",
            extra=fields(
                request_id=group.request.request_id,
                prefill_worker=sender.worker_id,
                error=f"{type(error).__name__}: {error}" if error else "cancelled",
            ),
        )


def _may_write(attempt: RemotePrefill | None) -> bool:
    """Whether a posted receive of the attempt may still write into a page."""
    if attempt is None or attempt.receiver is None:
        return False
    return not attempt.receiver.driver.is_quiescent
