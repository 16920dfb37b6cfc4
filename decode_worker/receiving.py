"""Runs the attempts to have groups prefilled elsewhere and reports to the scheduler."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from decode_worker.config import DecodeConfig
from decode_worker.errors import PrefillFailed
from decode_worker.remote_prefill import RemotePrefill
from decode_worker.request import PrefillGroup, Request, TokenDelta
from decode_worker.scheduler import Scheduler
from decode_worker.wire import PrefillClient, PrefillResult
from kv_cache.layout import KVLayout
from kv_cache.page_pool import Quarantined
from kv_cache.page_storage import PageStorage
from kv_transfer.connections import ConnectionPool
from kv_transfer.driver import RunBlocking
from kv_transfer.errors import ConnectionBroken, TransferError
from kv_transfer.messages import Ticket
from kv_transfer.transport import Transport
from llm_engine.worker_identity import WorkerIdentity
from observability.logs import fields

logger = logging.getLogger(__name__)

EXPECTED_ERRORS = (PrefillFailed, TransferError, TimeoutError)  # others are bugs of ours


class PrefillReceivers:
    """All attempts of a decode worker, its channels and its connections to prefill workers.

    Args:
        on_deltas: Takes the first tokens of a group.
        on_change: Called when the scheduler has something new to decide on.
    """

    def __init__(
        self,
        *,
        config: DecodeConfig,
        identity: WorkerIdentity,
        layout: KVLayout,
        storage: PageStorage,
        scheduler: Scheduler,
        transports: Sequence[Transport],
        connect_channel: Callable[[str], grpc.aio.Channel],
        random_id: Callable[[], bytes],
        run_blocking: RunBlocking,
        on_deltas: Callable[[Sequence[TokenDelta]], None],
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._identity = identity
        self._layout = layout
        self._storage = storage
        self._scheduler = scheduler
        self._connect_channel = connect_channel
        self._random_id = random_id
        self._run_blocking = run_blocking
        self._on_deltas = on_deltas
        self._on_change = on_change
        self._connections = ConnectionPool(transports, random_id=lambda: random_id().hex())
        self._channels: dict[WorkerIdentity, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # until the attempts have closed
        self._running: dict[asyncio.Task[PrefillResult], PrefillGroup] = {}  # outcome not known yet

    def start(self, group: PrefillGroup) -> None:
        """Begin an attempt at the group's next candidate; its pages are reserved."""
        sender = group.candidate
        assert sender is not None
        attempt = self._make_attempt(group, sender)
        # Only this task is ever cancelled: what _finish does must happen in any case.
        running = asyncio.get_running_loop().create_task(attempt.run())
        self._running[running] = group
        self._hold(self._finish(group, sender, attempt, running))

    def cancel(self, request: Request) -> None:
        """Stop what is under way for choices that ended; pages are freed when nothing writes."""
        for task, group in self._running.items():
            if group.request is request and group.is_ended:
                task.cancel()

    async def close(self) -> None:
        """Wait until no attempt is left, and close connections and channels."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._connections.close()
        for channel in self._channels.values():
            await channel.close()

    async def _finish(
        self,
        group: PrefillGroup,
        sender: WorkerIdentity,
        attempt: RemotePrefill,
        running: asyncio.Task[PrefillResult],
    ) -> None:
        """Report the outcome of an attempt, then clean up after it."""
        await asyncio.wait({running})
        del self._running[running]
        quarantined: tuple[Quarantined, ...] = ()
        error = None if running.cancelled() else running.exception()
        if running.cancelled() or error is not None:
            # Whatever went wrong with one attempt, the group gets its turn elsewhere.
            self._log_failure(group, sender, error)
            await attempt.stop(f"{type(error).__name__}" if error else "cancelled")
            may_be_written = not attempt.is_quiescent
            quarantined = self._scheduler.receive_failed(group, may_be_written=may_be_written)
            loop = asyncio.get_running_loop()
            loop.call_later(self._config.distrust_s, self._scheduler.trust, sender)
        else:
            self._on_deltas(self._take(group, running.result()))
        self._on_change()
        try:
            await attempt.close()
        except ConnectionBroken as broken:
            logger.error("pages_stuck", extra=fields(pages=len(quarantined), error=str(broken)))
        if quarantined:
            attempt.call_when_quiescent(lambda: self._release_quarantine(quarantined))

    def _release_quarantine(self, pages: tuple[Quarantined, ...]) -> None:
        self._scheduler.release_quarantine(pages)
        self._on_change()

    def _take(self, group: PrefillGroup, result: PrefillResult) -> list[TokenDelta]:
        return self._scheduler.receive_done(
            group,
            result.tokens,
            num_cached_tokens=result.num_cached_tokens,
            num_computed_tokens=result.num_computed_tokens,
        )

    def _make_attempt(self, group: PrefillGroup, sender: WorkerIdentity) -> RemotePrefill:
        return RemotePrefill(
            group,
            ticket=Ticket(
                transfer_id=self._random_id(),
                attempt=len(group.failed),
                sender_incarnation=sender.incarnation,
                receiver_incarnation=self._identity.incarnation,
            ),
            receiver=self._identity,
            sender=sender,
            client=PrefillClient(self._channel(sender)),
            connections=self._connections,
            layout=self._layout,
            storage=self._storage,
            on_commit=lambda num_pages: self._commit(group, num_pages),
            deadlines=self._config.transfer_deadlines,
            result_s=self._config.result_s,
            run_blocking=self._run_blocking,
        )

    def _commit(self, group: PrefillGroup, num_pages: int) -> None:
        self._scheduler.receive_committed(group, num_pages)
        self._on_change()  # others may wait for these pages

    def _channel(self, sender: WorkerIdentity) -> grpc.aio.Channel:
        channel = self._channels.get(sender)
        if channel is None:
            for other in [each for each in self._channels if each.worker_id == sender.worker_id]:
                # Calls to an earlier incarnation end by themselves: their peer is gone.
                self._hold(self._channels.pop(other).close())
            channel = self._channels[sender] = self._connect_channel(sender.address)
        return channel

    def _hold(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
