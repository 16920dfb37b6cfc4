"""Sends the pages of one attempt from a prefill worker; executes `sender_protocol`.

The worker calls `grant` when it accepts the request, `pages_computed` as its engine finishes
pages, posts the attempt's messages of the Prefill stream to `driver`, and awaits `run`. Pages stay
unchanged until `on_ack` named them, or until `driver.wait_quiescent` returned after a failure.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kv_cache.page_storage import PageStorage
from kv_transfer.deadlines import TransferDeadlines, Wait, WaitKind
from kv_transfer.driver import Driver, TransferStats
from kv_transfer.joining import JoinedDigests
from kv_transfer.messages import ChunkPosted, SenderMessage, Ticket
from kv_transfer.order import Outgoing
from kv_transfer.protocol import (
    AbortConnection,
    ConnectionAborted,
    ConnectionLost,
    DigestPages,
    PagesDigested,
    Send,
)
from kv_transfer.sender_protocol import (
    ChunkComputed,
    GrantGiven,
    PostSend,
    ReleasePages,
    SendDone,
    SenderAction,
    SenderEvent,
    SenderState,
    begin,
    step,
    waiting_for,
)


class Sender:
    """One attempt to send pages as they are computed.

    Args:
        outgoing: The connection, shared by all its senders.
        send: Sends a message to the receiver over the Prefill stream, unless that is closed.
        on_ack: Called in order with (first_page, num_pages) when the receiver has committed them.
        digests: Those of the storage, for all transfers of the worker.

    Attributes:
        driver: Takes the receiver's messages, cancels, and knows when nothing can read any more.
        stats: The amounts sent so far, acknowledged or not.
    """

    def __init__(
        self,
        *,
        ticket: Ticket,
        storage: PageStorage,
        outgoing: Outgoing,
        send: Callable[[SenderMessage], None],
        on_ack: Callable[[int, int], None],
        deadlines: TransferDeadlines,
        digests: JoinedDigests,
    ) -> None:
        self._storage = storage
        self._outgoing = outgoing
        self._send = send
        self._on_ack = on_ack
        self._deadlines = deadlines
        self._digests = digests
        self._page_ids: list[tuple[int, ...]] = []  # chunk |-> ids of its pages
        self._orders: dict[int, int] = {}  # chunk that was posted just now |-> number of the send
        self.stats = TransferStats()
        self.driver: Driver[SenderState, SenderEvent, SenderAction] = Driver(
            state=begin(ticket),
            step=step,
            waiting_for=waiting_for,
            seconds=self._seconds,
            execute=self._execute,
        )

    def grant(self) -> None:
        """Accept the request: pages named from now on stay until they are read."""
        self.driver.post(GrantGiven())

    def pages_computed(self, first_page: int, page_ids: Sequence[int], is_last: bool) -> None:
        """Hand over the next pages of the prompt, in order, as one or more chunks; never blocks."""
        most = max(1, self._outgoing.connection.max_chunk_bytes // self._storage.page_bytes)
        for start in range(0, len(page_ids), most):
            chunk = tuple(page_ids[start : start + most])
            self._page_ids.append(chunk)
            ends = start + most >= len(page_ids)
            self.driver.post(ChunkComputed(first_page + start, len(chunk), is_last and ends))

    async def run(self) -> TransferStats:
        """Return when the receiver has acknowledged all pages up to the last.

        Raises:
            TransferError: The attempt failed; sends may still be posted.
        """
        await self.driver.outcome()
        return self.stats

    def _seconds(self, wait: Wait) -> float:
        load = self._outgoing.load
        return self._deadlines.seconds(wait, load.num_bytes, load.num_chunks)

    def _execute(self, action: SenderAction) -> None:
        match action:
            case Send(message=message):
                assert isinstance(message, SenderMessage)
                if isinstance(message, ChunkPosted):
                    message = replace(message, order=self._orders.pop(message.chunk))
                self._send(message)
            case PostSend(chunk=chunk):
                self._post(chunk)
            case DigestPages(chunk=chunk):
                self.driver.spawn(self._digest(chunk))
            case ReleasePages(first_page=first_page, num_pages=num_pages):
                self._on_ack(first_page, num_pages)
            case AbortConnection():
                self.driver.spawn(self._abort())

    def _post(self, chunk: int) -> None:
        num_bytes = len(self._page_ids[chunk]) * self._storage.page_bytes
        self._orders[chunk] = self._outgoing.next_order()
        self._outgoing.load.add(num_bytes)
        # Tasks begin in the order in which they are made, so sends are posted in that of numbers.
        sending = self.driver.spawn(self._send_pages(chunk))
        sending.add_done_callback(lambda _: self._outgoing.load.remove(num_bytes))

    async def _send_pages(self, chunk: int) -> None:
        page_ids = self._page_ids[chunk]
        num_bytes = len(page_ids) * self._storage.page_bytes
        wait = Wait(kind=WaitKind.TRANSFER, chunk=chunk)
        try:
            seconds = self._deadlines.seconds(wait, num_bytes)
            await self._outgoing.connection.send(page_ids, seconds)
        except Exception as error:
            self.driver.post(ConnectionLost(f"send failed: {error}"))
            return
        self.stats = TransferStats(
            pages_moved=self.stats.pages_moved + len(page_ids),
            bytes_moved=self.stats.bytes_moved + num_bytes,
        )
        self.driver.post(SendDone(chunk))

    async def _digest(self, chunk: int) -> None:
        digests = await self._digests.of(self._page_ids[chunk])
        self.driver.post(PagesDigested(chunk, digests))

    async def _abort(self) -> None:
        await self._outgoing.connection.abort()
        self.driver.post(ConnectionAborted())
