"""Receives the pages of one attempt on a decode worker; executes `receiver_protocol`.

The worker posts the attempt's messages of the Prefill stream to `driver` and awaits `run`. After a
failure or a cancellation it keeps posting them until `driver.wait_quiescent` has returned, and only
then leaves the attempt and reuses the pages: so the connection usually survives, because the
sender's answer to Abort says whether a send is under way.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from kv_cache.page_storage import PageStorage
from kv_transfer.deadlines import TransferDeadlines, Wait, WaitKind
from kv_transfer.driver import Driver, TransferStats
from kv_transfer.joining import JoinedDigests
from kv_transfer.messages import ReceiverMessage, Ticket
from kv_transfer.order import Incoming
from kv_transfer.protocol import (
    AbortConnection,
    ConnectionAborted,
    ConnectionLost,
    DigestPages,
    PagesDigested,
    Send,
)
from kv_transfer.receiver_protocol import (
    Commit,
    LeaveSlot,
    PostReceive,
    ReceiveDone,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    SlotTaken,
    TakeSlot,
    begin,
    step,
    waiting_for,
)


class Receiver:
    """One attempt to receive the pages [first_page, len(page_ids)) of a sequence.

    Args:
        page_ids: All pages of the sequence, in order.
        incoming: The connection, shared by all its receivers.
        send: Sends a message to the sender over the Prefill stream, unless that is closed.
        on_commit: Called in order with n when the first n pages of the sequence are verified.
        digests: Those of the storage, for all transfers of the worker.

    Attributes:
        driver: Takes the sender's messages, cancels, and knows when nothing can write any more.
        stats: The amounts received so far, committed or not.
    """

    def __init__(
        self,
        *,
        ticket: Ticket,
        page_ids: Sequence[int],
        first_page: int,
        storage: PageStorage,
        incoming: Incoming,
        send: Callable[[ReceiverMessage], None],
        on_commit: Callable[[int], None],
        deadlines: TransferDeadlines,
        digests: JoinedDigests,
    ) -> None:
        self._page_ids = tuple(page_ids)
        self._storage = storage
        self._incoming = incoming
        self._send = send
        self._on_commit = on_commit
        self._deadlines = deadlines
        self._digests = digests
        self._slots: dict[int, Callable[[], None]] = {}  # chunk |-> called with its slot
        self._slot_bytes: dict[int, int] = {}  # chunk that has a slot |-> its size
        self.stats = TransferStats()
        # Begin and end in loop time; of those posted together, each begins when the last one ends.
        self._receives: list[tuple[float, float]] = []
        self.driver: Driver[ReceiverState, ReceiverEvent, ReceiverAction] = Driver(
            state=begin(ticket, first_page=first_page, num_pages=len(page_ids)),
            step=step,
            waiting_for=waiting_for,
            seconds=self._seconds,
            execute=self._execute,
        )

    async def run(self) -> TransferStats:
        """Return when all wanted pages are committed.

        Raises:
            TransferError: The attempt failed; committed pages stay committed.
        """
        await self.driver.outcome()
        return self.stats

    def wire_s(self, *, after: float = 0.0) -> float:
        """Return how long receives took together, as far as that lies after a loop time."""
        return sum(max(end - max(begin, after), 0.0) for begin, end in self._receives)

    def _seconds(self, wait: Wait) -> float:
        load = self._incoming.load
        return self._deadlines.seconds(wait, load.num_bytes, load.num_chunks)

    def _execute(self, action: ReceiverAction) -> None:
        match action:
            case Send(message=message):
                assert isinstance(message, ReceiverMessage)
                self._send(message)
            case TakeSlot(chunk=chunk):
                self._slots[chunk] = partial(self._slot_taken, action)
                self._incoming.slots.take(self._slots[chunk])
            case LeaveSlot(chunk=chunk):
                self._leave_slot(chunk)
            case PostReceive():
                self.driver.spawn(self._receive(action))
            case DigestPages():
                self.driver.spawn(self._digest(action))
            case Commit(num_pages=num_pages):
                self._on_commit(num_pages)
            case AbortConnection():
                self.driver.spawn(self._abort())

    def _slot_taken(self, take: TakeSlot) -> None:
        num_bytes = self._slot_bytes[take.chunk] = take.num_pages * self._storage.page_bytes
        self._incoming.load.add(num_bytes)
        if self._incoming.connection.is_broken:
            self.driver.post(ConnectionLost("the connection broke while another transfer used it"))
        else:
            self.driver.post(SlotTaken(take.chunk))
        if self.driver.is_over and take.chunk in self._slots:  # by a bug: no LeaveSlot will come
            self._leave_slot(take.chunk)

    def _leave_slot(self, chunk: int) -> None:
        taken = self._slots.pop(chunk)
        if (num_bytes := self._slot_bytes.pop(chunk, None)) is None:
            self._incoming.slots.withdraw(taken)
            return
        self._incoming.load.remove(num_bytes)
        self._incoming.slots.release()

    async def _receive(self, post: PostReceive) -> None:
        loop = asyncio.get_running_loop()
        posted_at = loop.time()
        page_ids = self._page_ids[post.first_page : post.first_page + post.num_pages]
        num_bytes = post.num_pages * self._storage.page_bytes
        wait = Wait(kind=WaitKind.TRANSFER, chunk=post.chunk)
        try:
            await self._incoming.receive(
                post.order, page_ids, self._deadlines.seconds(wait, num_bytes)
            )
        except Exception as error:
            self.driver.post(ConnectionLost(f"receive failed: {error}"))
            return
        last_end = self._receives[-1][1] if self._receives else posted_at
        self._receives.append((max(posted_at, last_end), loop.time()))
        self.stats = TransferStats(
            pages_moved=self.stats.pages_moved + post.num_pages,
            bytes_moved=self.stats.bytes_moved + num_bytes,
        )
        self.driver.post(ReceiveDone(post.chunk))

    async def _digest(self, action: DigestPages) -> None:
        page_ids = self._page_ids[action.first_page : action.first_page + action.num_pages]
        self.driver.post(PagesDigested(action.chunk, await self._digests.of(page_ids)))

    async def _abort(self) -> None:
        await self._incoming.abort()
        self.driver.post(ConnectionAborted())
