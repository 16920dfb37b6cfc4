"""One attempt: a prompt, and the sender of its pages.

Life of an attempt:
1. grant     queue the prompt, and notify the receiver
2. pages     pass them to the sender chunk by chunk, as the step loop finishes them
3. result    send the first tokens to the receiver as soon as they are drawn
4. end       all pages acknowledged, or the sender failed: the receiver is told that nothing more
             comes, and the pages are released when nothing can read them any more
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from kv_cache.page_storage import PageStorage
from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.errors import ConnectionBroken, TransferAborted, TransferError
from kv_transfer.joining import JoinedDigests
from kv_transfer.messages import ReceiverMessage
from kv_transfer.order import Outgoing
from kv_transfer.protocol import Cancelled
from kv_transfer.sender import Sender
from observability.logs import fields
from observability.tracing import begin_part
from prefill_worker.request import FinishedPrompt, Progress, ReadyPages
from prefill_worker.scheduler import Scheduler
from prefill_worker.wire import (
    PrefillEnd,
    PrefillFailure,
    PrefillMessage,
    PrefillResult,
    PrefillStart,
)
from worker.load import WorkerTotals

logger = logging.getLogger(__name__)


class Attempt:
    """One prompt's work: `start` it, and let `run` be its task.

    Args:
        tell: Takes the messages for the receiver, as many as the prompt has chunks and a few more.
        on_change: Called when the scheduler has something new to decide on.
    """

    def __init__(
        self,
        start: PrefillStart,
        *,
        scheduler: Scheduler,
        storage: PageStorage,
        outgoing: Outgoing,
        tell: Callable[[PrefillMessage], None],
        deadlines: TransferDeadlines,
        digests: JoinedDigests,
        on_change: Callable[[], None],
    ) -> None:
        self.prompt = start.prompt
        self._span = begin_part("prefill", self.prompt.trace, request_id=self.prompt.request_id)
        self._on_change = on_change
        self._scheduler = scheduler
        self._is_told = False  # why it failed, or that it has ended
        self._tell = tell
        self._sender = Sender(
            ticket=start.ticket,
            storage=storage,
            outgoing=outgoing,
            send=tell,
            on_ack=partial(_count_moved, scheduler.totals, storage.page_bytes),
            deadlines=deadlines,
            digests=digests,
        )

    def start(self) -> None:
        """Tell the receiver that the prompt is accepted, and queue it."""
        self._sender.grant()
        self._scheduler.submit(self.prompt)
        self._on_change()

    async def run(self) -> None:
        """Return when nothing of the prompt is left, whatever its outcome."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        outcome = "done"
        try:
            await self._sender.run()
        except TransferError as error:
            outcome = f"{type(error).__name__}: {error}"
            # The receiver counts an aborted transfer, if it was a failure.
            if not isinstance(error, TransferAborted):
                self._scheduler.totals.transfer_failures += 1
        except Exception:
            # A bug; logged here, because one attempt's must not end the others.
            logger.exception("attempt_crashed", extra=fields(request_id=self.prompt.request_id))
            outcome = "crashed"
            self._sender.driver.stream_lost("an internal error")
        self._scheduler.end(self.prompt)
        self._on_change()
        self._is_told = True
        self._tell(PrefillEnd())
        account: dict[str, object] = {
            "outcome": outcome,
            "tokens": len(self.prompt.tokens),
            "cached_tokens": self.prompt.num_cached,
            "computed_tokens": self.prompt.num_computed - self.prompt.num_cached,
            "moved_pages": self._sender.stats.pages_moved,
            "s": round(loop.time() - started_at, 3),
        }
        self._span.end("" if outcome == "done" else outcome, **account)
        logger.info(
            "prefill_ended",
            extra=fields(request_id=self.prompt.request_id, **account, **self._span.log_fields),
        )
        await self._release_pages()

    def handle(self, message: ReceiverMessage) -> None:
        """Take a message from the receiver."""
        self._sender.driver.post(message)

    def receiver_left(self) -> None:
        """Stop, unless everything is acknowledged: nothing more comes from the receiver."""
        self._sender.driver.stream_lost("the receiver has left")

    def refuse(self, end: PrefillEnd) -> None:
        """End the attempt instead of starting it."""
        self._span.end(end.message)
        self._tell(end)

    def fail(self, failure: PrefillFailure) -> None:
        """Give up and tell the receiver why; the first reason counts."""
        if not self._is_told:
            self._is_told = True
            self._tell(failure)
            self._sender.driver.post(Cancelled(failure.message))

    def progressed(self, progress: Progress) -> None:
        """Take finished pages, or the first tokens, from the step loop."""
        if isinstance(progress, ReadyPages):
            self._sender.pages_computed(progress.first_page, progress.page_ids, progress.is_last)
            return
        assert isinstance(progress, FinishedPrompt)
        self._span.event("computed", passes_ms=round(1000 * self.prompt.passes_s, 3))
        self._tell(
            PrefillResult(
                tokens=progress.tokens,
                num_cached_tokens=self.prompt.num_cached,
                num_computed_tokens=self.prompt.num_computed - self.prompt.num_cached,
            )
        )

    async def _release_pages(self) -> None:
        try:
            await self._sender.driver.wait_quiescent()
        except ConnectionBroken as error:
            logger.error(
                "pages_stuck", extra=fields(request_id=self.prompt.request_id, error=str(error))
            )
        self._sender.driver.call_when_quiescent(self._transfer_ended)

    def _transfer_ended(self) -> None:
        self._scheduler.transfer_ended(self.prompt)
        self._on_change()  # a queued prompt may wait for pages


def _count_moved(totals: WorkerTotals, page_bytes: int, first_page: int, num_pages: int) -> None:
    """Count acknowledged pages; not a method, since an attempt and its sender form no cycle."""
    totals.pages_moved += num_pages
    totals.bytes_moved += num_pages * page_bytes
