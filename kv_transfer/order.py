"""Several transfers over one connection: the order in which both sides post, and how many may wait.

A connection moves one chunk after the other, and both sides must post in the same order. The
sender decides it: it numbers its sends and puts the number into ChunkPosted, and the receiver posts
by number. A missing number belongs to a transfer whose stream was lost after ChunkGo: that transfer
aborts the connection and so ends the wait of all others, such as those of the next stream.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.errors import ConnectionBroken
from kv_transfer.transport import Connection

# Chunks that a receiver asks for at a time; small ones move together. Part of the contract: a
# sender names as many before the first is read, and a receiver whose window is smaller breaks off.
WINDOW = 32


@dataclass(slots=True)
class Load:
    """Operations in progress on one side of a connection: each may take the time of all."""

    num_chunks: int = 0
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Count a chunk that is requested or posted."""
        self.num_chunks += 1
        self.num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        """Stop counting it."""
        self.num_chunks -= 1
        self.num_bytes -= num_bytes


class Outgoing:
    """The sender's side of a connection, shared by its transfers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.load = Load()
        self._num_posted = 0

    def next_order(self) -> int:
        """Return the number of a send; sends must then be called in the order of their numbers."""
        self._num_posted += 1
        return self._num_posted - 1


class Slots:
    """Places for chunks; who has waited longest gets the next one."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: dict[Callable[[], None], None] = {}  # in order
        self._is_handing_out = False

    def take(self, taken: Callable[[], None]) -> None:
        """Call back once with a slot, at once if one is free; it must be released."""
        self._waiting[taken] = None
        self._hand_out()

    def withdraw(self, taken: Callable[[], None]) -> None:
        """Wait no longer."""
        del self._waiting[taken]

    def release(self) -> None:
        """Give a slot back."""
        self._num_free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        # Not nested: who gets a slot of a broken connection gives it back at once.
        if self._is_handing_out:
            return
        self._is_handing_out = True
        try:
            while self._num_free and self._waiting:
                self._num_free -= 1
                taken = next(iter(self._waiting))
                del self._waiting[taken]
                taken()
        finally:
            self._is_handing_out = False


class Incoming:
    """The receiver's side of a connection, shared by its transfers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.slots = Slots(WINDOW)
        self.load = Load()
        self._is_broken = False  # a receive failed, so that no turn comes any more
        self._num_posted = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}  # number |-> set when its turn comes

    async def receive(self, order: int, page_ids: Sequence[int], seconds: float) -> None:
        """Receive pages over the connection, within a time from the end of the previous receive.

        Raises:
            ConnectionBroken: The connection failed, a number came twice, or an earlier receive
                failed or was cancelled.
        """
        await self._turn(order)
        self._num_posted += 1
        if (following := self._waiting.get(self._num_posted)) and not following.done():
            following.set_result(None)  # it is posted in a task of its own, so behind this one
        try:
            await self.connection.receive(page_ids, seconds)
        except BaseException:
            self._break()
            raise

    async def abort(self) -> None:
        """Abort the connection, and end all waits for turns that will not come."""
        self._break()
        await self.connection.abort()

    async def _turn(self, order: int) -> None:
        if self._is_broken or self.connection.is_broken:
            raise ConnectionBroken("the connection broke while another transfer used it")
        if order < self._num_posted or order in self._waiting:
            raise ConnectionBroken(f"the number {order} of a send comes twice")
        if order == self._num_posted:
            return
        turn = self._waiting[order] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            self._break()  # its pages come all the same, before those of any later receive
            raise
        self._waiting.pop(order, None)  # none after a failure

    def _break(self) -> None:
        self._is_broken = True
        waiting, self._waiting = self._waiting, {}
        for turn in waiting.values():
            if not turn.done():
                turn.set_exception(ConnectionBroken("a transfer before this one failed"))
