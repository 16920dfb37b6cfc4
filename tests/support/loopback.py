"""A transport within one event loop, for tests: it copies pages and can fail in every known way.

`LoopbackNetwork` joins the transports of many workers. A copy takes time (`latency_s` and
`bytes_per_s`), starts when both sides have posted, and lands at once at its end. Faults are chosen
by a policy: `(connection_id, index of the copy on it) |-> LoopbackFault`.

The network models the bad habits of NCCL: with `hang_on_peer_death`, an operation whose peer is
gone hangs until its deadline or an abort, instead of failing.
"""

import asyncio
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kv_cache.page_storage import PageBytes, PageStorage
from kv_transfer.errors import ConnectionBroken


class FaultKind(enum.Enum):
    """What goes wrong with one copy."""

    NONE = "none"
    HANG = "hang"  # neither side completes
    DROP = "drop"  # the sender completes, the receiver never does
    FLIP = "flip"  # one bit arrives wrong
    SWAP = "swap"  # the first page takes the place of the last and vice versa
    STALE = "stale"  # the last page keeps what was in it before
    TRUNCATE = "truncate"  # the last page ends with zeros
    LATE_WRITE = "late write"  # hangs, and lands while the receiver's abort is under way
    BREAK = "break"  # both sides fail at once


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopbackFault:
    """A fault of one copy; by default none."""

    kind: FaultKind = FaultKind.NONE
    delay_s: float = 0.0  # more time for the copy
    abort_s: float = 0.0  # time that aborting the connection takes from now on


FaultPolicy = Callable[[str, int], LoopbackFault]


def planned(faults: Iterable[LoopbackFault]) -> FaultPolicy:
    """Return a policy that spends `faults` in order, one a copy, and is healthy afterwards."""
    queue = iter(faults)
    return lambda connection_id, index: next(queue, LoopbackFault())


class LoopbackNetwork:
    """What the transports of one test share. `copies` counts the copies that landed whole."""

    def __init__(
        self,
        *,
        latency_s: float = 0.0001,
        bytes_per_s: float = 1e9,
        max_chunk_bytes: int = 1 << 40,
        hang_on_peer_death: bool = False,
        fault_policy: FaultPolicy | None = None,
    ) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.max_chunk_bytes = max_chunk_bytes
        self.hang_on_peer_death = hang_on_peer_death
        self.fault_policy = fault_policy or planned(())
        self.num_faults = 0  # copies that a fault really hit
        self.copies = 0
        # connection_id |-> the receiver's side, offered and not yet connected
        self.offers: dict[str, _Offer] = {}


@dataclass(slots=True)
class _Offer:
    transport: "LoopbackTransport"
    accepted: "asyncio.Future[LoopbackConnection]"
    key: bytes


class LoopbackTransport:
    """Implements `kv_transfer.transport.Transport` for one worker's storage."""

    name = "loopback"

    def __init__(self, network: LoopbackNetwork, storage: PageStorage) -> None:
        self._network = network
        self._storage = storage
        self._connections: list[LoopbackConnection] = []
        self._is_dead = False

    def offer(self, connection_id: str, key: bytes) -> bytes:
        accepted = asyncio.get_running_loop().create_future()
        self._network.offers[connection_id] = _Offer(self, accepted, key)
        return connection_id.encode()

    async def accept(self, connection_id: str, deadline: float) -> "LoopbackConnection":
        offer = self._network.offers[connection_id]
        try:
            async with asyncio.timeout_at(deadline):
                return await offer.accepted
        except TimeoutError as error:
            raise ConnectionBroken("the sender did not connect in time") from error
        finally:
            self._network.offers.pop(connection_id, None)

    async def connect(
        self, connection_id: str, offer: bytes, key: bytes, deadline: float
    ) -> "LoopbackConnection":
        found = self._network.offers.get(offer.decode(errors="replace"))
        if found is None or found.transport._is_dead or found.accepted.done() or self._is_dead:
            raise ConnectionBroken(f"no receiver offers connection {connection_id!r}")
        if found.key != key:
            raise ConnectionBroken(f"the key of connection {connection_id!r} is another one")
        link = _Link(connection_id, self._network, self._storage, found.transport._storage)
        sender, receiver = LoopbackConnection(link), LoopbackConnection(link)
        self._connections.append(sender)
        found.transport._connections.append(receiver)
        link.sides = (sender, receiver)
        found.accepted.set_result(receiver)
        return sender

    async def close(self) -> None:
        for connection in self._connections:
            await connection.abort()

    def kill(self) -> None:
        """Die as a process does: nothing of this side completes or writes any more."""
        self._is_dead = True
        for connection in self._connections:
            connection._die()


class LoopbackConnection:
    """One side of a connection; implements `kv_transfer.transport.Connection`."""

    def __init__(self, link: "_Link") -> None:
        self._link = link
        self._is_broken = False
        self._is_dead = False
        self._aborting: asyncio.Task[None] | None = None
        self._order = asyncio.Lock()  # operations of one side happen one after another

    @property
    def connection_id(self) -> str:
        return self._link.connection_id

    @property
    def is_broken(self) -> bool:
        return self._is_broken

    @property
    def max_chunk_bytes(self) -> int:
        return self._link.max_chunk_bytes

    async def send(self, page_ids: Sequence[int], seconds: float) -> None:
        await self._operate(self._link.sends, page_ids, seconds)

    async def receive(self, page_ids: Sequence[int], seconds: float) -> None:
        await self._operate(self._link.receives, page_ids, seconds)

    async def abort(self) -> None:
        self._is_broken = True
        if self._aborting is None:
            self._aborting = asyncio.get_running_loop().create_task(self._link.abort(self))
        await asyncio.shield(self._aborting)

    async def _operate(
        self, queue: "list[_Operation]", page_ids: Sequence[int], seconds: float
    ) -> None:
        try:
            async with self._order, asyncio.timeout(seconds):
                if self._is_broken:
                    raise ConnectionBroken(f"connection {self.connection_id!r} is broken")
                operation = _Operation(tuple(page_ids), asyncio.get_running_loop().create_future())
                queue.append(operation)
                self._link.match()
                await operation.completed
        except TimeoutError as error:
            # Not recalled: the write may still land until abort returns.
            self._is_broken = True
            raise ConnectionBroken("the operation did not complete in time") from error
        except BaseException:
            self._is_broken = True
            raise

    def _fail(self) -> None:
        self._is_broken = True

    def _die(self) -> None:
        self._is_dead = self._is_broken = True
        self._link.side_gone()


@dataclass(frozen=True, slots=True)
class _Operation:
    page_ids: tuple[int, ...]
    completed: "asyncio.Future[None]"

    def complete(self) -> None:
        if not self.completed.done():
            self.completed.set_result(None)

    def fail(self, error: ConnectionBroken) -> None:
        if not self.completed.done():
            self.completed.set_exception(error)


class _Link:
    """What both sides of a connection share; copies happen here, one at a time, in order."""

    def __init__(
        self,
        connection_id: str,
        network: LoopbackNetwork,
        source: PageStorage,
        target: PageStorage,
    ) -> None:
        self.connection_id = connection_id
        self.max_chunk_bytes = network.max_chunk_bytes
        self.sides: tuple[LoopbackConnection, ...] = ()
        self.sends: list[_Operation] = []
        self.receives: list[_Operation] = []
        self._network = network
        self._source = source
        self._target = target
        self._num_copies = 0
        self._landing: asyncio.TimerHandle | None = None
        self._late_write: tuple[_Operation, _Operation] | None = None
        self._abort_s = 0.0
        self._is_closed = False

    def match(self) -> None:
        """Start the next copy when both sides have posted."""
        if self._is_closed or self._landing or self._late_write:
            return
        if not (self.sends and self.receives):
            return
        send, receive = self.sends[0], self.receives[0]
        fault = self._network.fault_policy(self.connection_id, self._num_copies)
        self._num_copies += 1
        self._network.num_faults += fault != LoopbackFault()
        self._abort_s = max(self._abort_s, fault.abort_s)
        if fault.kind is FaultKind.LATE_WRITE:
            self._late_write = (send, receive)
            return
        num_bytes = len(send.page_ids) * self._source.page_bytes
        seconds = self._network.latency_s + num_bytes / self._network.bytes_per_s + fault.delay_s
        loop = asyncio.get_running_loop()
        self._landing = loop.call_later(seconds, self._land, send, receive, fault.kind)

    async def abort(self, side: LoopbackConnection) -> None:
        """Stop the copy under way; a late write lands during the call, nothing after it."""
        if not self._is_closed:
            self.side_gone()
        await asyncio.sleep(self._abort_s)
        if self._late_write is not None and side is self.sides[1]:
            late, self._late_write = self._late_write, None
            self._write(*late, FaultKind.NONE)
        self._end((self.sends, self.receives)[self.sides.index(side)])

    def side_gone(self) -> None:
        """Handle the end of one side: the other fails, or hangs until it aborts."""
        self._is_closed = True
        if self._landing is not None:
            self._landing.cancel()
            self._landing = None
        if not self._network.hang_on_peer_death:
            for side in self.sides:
                side._fail()
            self._end(self.sends)
            self._end(self.receives)

    def _end(self, operations: list[_Operation]) -> None:
        for operation in operations:
            operation.fail(ConnectionBroken(f"connection {self.connection_id!r} ended"))
        operations.clear()

    def _land(self, send: _Operation, receive: _Operation, fault: FaultKind) -> None:
        self._landing = None
        if fault is FaultKind.HANG:
            self._is_closed = True
            return
        if fault is FaultKind.BREAK:
            self.side_gone()
            self._end(self.sends)
            self._end(self.receives)
            return
        if len(send.page_ids) != len(receive.page_ids):
            # Two sides that disagree about the length hang, as two NCCL ranks do.
            self._is_closed = True
            return
        self.sends.remove(send)
        send.complete()
        if fault is FaultKind.DROP:
            self._is_closed = True
            return
        self._write(send, receive, fault)
        self.receives.remove(receive)
        receive.complete()
        self.match()

    def _write(self, send: _Operation, receive: _Operation, fault: FaultKind) -> None:
        contents = self._source.export_pages(send.page_ids)
        if fault is FaultKind.STALE:
            contents[-1:] = self._target.export_pages(receive.page_ids[-1:])
        self._target.import_pages(receive.page_ids, _damaged(contents, fault))
        self._network.copies += fault is FaultKind.NONE


def _damaged(contents: PageBytes, fault: FaultKind) -> PageBytes:
    damaged = contents.copy()
    match fault:
        case FaultKind.FLIP:
            damaged[-1, damaged.shape[1] // 2] ^= 1
        case FaultKind.SWAP:
            damaged[[0, -1]] = contents[[-1, 0]]
        case FaultKind.TRUNCATE:
            half = damaged.shape[1] // 2
            damaged[-1, half:] = np.zeros(damaged.shape[1] - half, dtype=np.uint8)
    return damaged
