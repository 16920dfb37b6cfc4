"""One Prefill call: a prompt, the sender of its pages, and the leases that pin them.

Life of an attempt:
1. grant     the prompt is queued; the receiver is told
2. pages     handed to the sender as the step loop finishes them, each chunk under a lease
3. result    the first tokens, told to the receiver as soon as they are drawn
4. end       all pages acknowledged, or the sender failed: the messages end, and the leases when
             nothing can read the pages any more
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from kv_cache.page_storage import PageStorage
from kv_cache.prefix_cache import Lease
from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.driver import RunBlocking
from kv_transfer.errors import ConnectionBroken, TransferAborted, TransferError
from kv_transfer.messages import ReceiverMessage, SenderMessage
from kv_transfer.sender import Sender
from kv_transfer.transport import Connection
from observability.logs import fields
from prefill_worker.request import FinishedPrompt, Progress, ReadyPages
from prefill_worker.scheduler import Scheduler
from prefill_worker.wire import PrefillResult, PrefillStart

logger = logging.getLogger(__name__)


class Attempt:
    """One call's work: `start` it, then let `run` be its task.

    Args:
        on_change: Called when the scheduler has something new to decide on.
    """

    def __init__(
        self,
        start: PrefillStart,
        *,
        scheduler: Scheduler,
        storage: PageStorage,
        connection: Connection,
        deadlines: TransferDeadlines,
        run_blocking: RunBlocking,
        on_change: Callable[[], None],
    ) -> None:
        self.prompt = start.prompt
        self._on_change = on_change
        self._scheduler = scheduler
        self._page_bytes = storage.page_bytes
        self._leases: dict[int, Lease] = {}  # first page of a chunk |-> its lease
        # What to tell the receiver; None ends the call. Bounded by the prompt's chunks.
        self._messages: asyncio.Queue[SenderMessage | PrefillResult | None] = asyncio.Queue()
        self._sender = Sender(
            ticket=start.ticket,
            storage=storage,
            connection=connection,
            send=self._messages.put,
            on_ack=self._acknowledged,
            deadlines=deadlines,
            run_blocking=run_blocking,
        )

    async def start(self) -> None:
        """Tell the receiver that the prompt is accepted, and queue it."""
        await self._sender.grant()
        self._scheduler.submit(self.prompt)
        self._on_change()

    async def run(self) -> None:
        """Return when nothing is left of the prompt, whatever its outcome."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        outcome = "done"
        try:
            await self._sender.run()
        except TransferError as error:
            outcome = f"{type(error).__name__}: {error}"
            # The side that gave up counts it, if it was a failure.
            if not isinstance(error, TransferAborted):
                self._scheduler.totals.transfer_failures += 1
        finally:
            self._scheduler.end(self.prompt)
            self._on_change()
            self._messages.put_nowait(None)
        logger.info(
            "prefill_ended",
            extra=fields(
                request_id=self.prompt.request_id,
                outcome=outcome,
                tokens=len(self.prompt.tokens),
                cached_tokens=self.prompt.num_cached,
                computed_tokens=self.prompt.num_computed - self.prompt.num_cached,
                moved_pages=self._sender.stats.pages_moved,
                s=round(loop.time() - started_at, 3),
            ),
        )
        await self._release_leases()

    async def messages(self) -> AsyncIterator[SenderMessage | PrefillResult]:
        """Yield what to tell the receiver, until the attempt ends."""
        while (message := await self._messages.get()) is not None:
            yield message

    async def handle(self, message: ReceiverMessage) -> None:
        """Take a message of the receiver."""
        await self._sender.handle(message)

    def call_ended(self) -> None:
        """Stop, unless everything is acknowledged: the receiver cannot be told or heard."""
        self._sender.stream_lost("the call ended")

    async def cancel(self, reason: str) -> None:
        """Give up and tell the receiver."""
        await self._sender.cancel(reason)

    def progressed(self, progress: Progress) -> None:
        """Take finished pages, or the first tokens, from the step loop."""
        if isinstance(progress, ReadyPages):
            self._leases[progress.first_page] = progress.lease
            self._sender.chunk_computed(
                progress.first_page, progress.lease.page_ids, progress.is_last
            )
            return
        assert isinstance(progress, FinishedPrompt)
        self._messages.put_nowait(
            PrefillResult(
                tokens=progress.tokens,
                num_cached_tokens=self.prompt.num_cached,
                num_computed_tokens=self.prompt.num_computed - self.prompt.num_cached,
            )
        )

    def _acknowledged(self, first_page: int, num_pages: int) -> None:
        totals = self._scheduler.totals
        totals.pages_moved += num_pages
        totals.bytes_moved += num_pages * self._page_bytes
        self._scheduler.release_lease(self._leases.pop(first_page))
        self._on_change()  # a queued prompt may wait for pages

    async def _release_leases(self) -> None:
        try:
            await self._sender.wait_quiescent()
        except ConnectionBroken as error:
            logger.error(
                "pages_stuck", extra=fields(request_id=self.prompt.request_id, error=str(error))
            )
        self._sender.call_when_quiescent(self._end_leases)

    def _end_leases(self) -> None:
        while self._leases:
            self._scheduler.release_lease(self._leases.popitem()[1])
        self._on_change()
