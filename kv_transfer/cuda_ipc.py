"""Pages copied straight out of another process's GPU memory: the transport within a host.

The sender maps its pages into the receiver's address space (CUDA IPC), and the receiver copies out
of them into its own: no staging, no message of the pages' size. What crosses the socket, after the
handshake of `kv_transfer.proven_sockets`, is small:

    sender    magic (8) | number of pages (8) | bytes of a page (8) | card length (2) | card
    receiver  1: the pages are mapped; 0: this host does not let it map them

and for each operation

    sender    magic (8) | frame number (8) | number of pages (4) | page ids (4 each)
    receiver  frame number (8): it has read them, and those of all frames before

The sender names the pages of up to WINDOW operations before those of the first one are read, and
a frame number says that all frames before it have been read, too. So the receiver copies what waits
in one call, and launches it behind the copy that still runs: operations wait for no round trip, and
small ones share the turns of threads. All integers are big-endian. A frame that the receiver does
not expect breaks the connection, and its ids are not taken. Pages that are named but not read go to
different pages of the receiver, so there are never more of them than it has: this bounds the memory
that a broken sender can fill.

Only the receiver writes, into its own pages and without its peer's help; so nothing hangs when the
peer dies, and an abort lasts no longer than two copies. A mapping keeps the memory of a dead sender
alive, which its successor needs: the receiver always reads the socket, whose end tells it to unmap.
"""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kv_cache.page_storage import PageStorage
from kv_transfer.errors import (
    ConnectionBroken,
    LayoutMismatch,
    TransferError,
    TransportRefused,
)
from kv_transfer.joining import take_joined
from kv_transfer.order import WINDOW
from kv_transfer.ordered_connection import LiveConnections, reason_of
from kv_transfer.page_socket import PageSocket
from kv_transfer.proven_sockets import ProvenSockets, read_offer
from kv_transfer.socket_connection import SocketConnection
from observability.logs import fields
from pagewire.protos.call_tasks import mark_seen

logger = logging.getLogger(__name__)

MAX_COPYING = 2  # calls at a time; on the device, the second one runs behind the first
MAX_CARD_BYTES = 512
MAX_CHUNK_BYTES = 1 << 40  # no network is between the GPUs: whatever is handed over

_CARD = struct.Struct("!8sQQH")
_CARD_MAGIC = b"PWCARD01"
_FRAME = struct.Struct("!8sQI")
_FRAME_MAGIC = b"PWIPCFR1"
_PAGE_ID = np.dtype(">u4")
_READ = struct.Struct("!Q")
_MAPPED, _NOT_MAPPED = b"\x01", b"\x00"


class PeerPages(Protocol):
    """The pages of a sender, mapped. All calls block."""

    def copy(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copy pages of the sender into pages of this worker; return when they are written.

        Another thread may call it meanwhile; its copy then comes behind this one.
        """
        ...

    def close(self) -> None:
        """Unmap; nothing copies."""
        ...


class Memory(Protocol):
    """One GPU with its pages; implemented by cuda_ipc_memory.CudaMemory."""

    @property
    def host_id(self) -> str:
        """Which running kernel this is."""
        ...

    def card(self) -> bytes:
        """Return the handle with which any process can map the pages, and write them."""
        ...

    def open(self, card: bytes, num_pages: int) -> PeerPages:
        """Map another worker's pages; raises TransportRefused if this host does not let it."""
        ...


class CudaIpcTransport:
    """Implements `kv_transfer.transport.Transport` for storages in the memory of one host's GPUs.

    A sender refuses receivers on other hosts.

    Args:
        sockets: Make its connections, and are closed with it.

    Raises:
        TransportRefused: When the pages cannot be shared: they are in host memory, the driver does
            not support it, or cuda.bindings is missing.
    """

    name = "cuda_ipc"

    def __init__(
        self,
        storage: PageStorage,
        sockets: ProvenSockets,
        *,
        memory: Memory | None = None,
    ) -> None:
        self._storage = storage
        self._memory = memory or _cuda_memory(storage)
        self._card = self._memory.card()
        self._sockets = sockets
        self._connections = LiveConnections[Sending | Receiving]()

    def offer(self, connection_id: str, key: bytes) -> bytes:
        return self._sockets.offer(connection_id, key, host_id=self._memory.host_id)

    async def accept(self, connection_id: str, deadline: float) -> "Receiving":
        wire = await self._sockets.accept(connection_id, deadline)
        threads = ThreadPoolExecutor(MAX_COPYING, thread_name_prefix=self.name)
        with _setting_up(wire, if_late="the sender sent no card in time"):
            try:
                async with asyncio.timeout_at(deadline):
                    pages, num_pages = await self._map(wire, threads)
            except BaseException:
                threads.shutdown(wait=False)
                raise
        receiving = Receiving(connection_id, wire, threads, pages, num_pages, self._storage)
        self._connections.add(receiving)
        return receiving

    async def connect(
        self, connection_id: str, offer: bytes, key: bytes, deadline: float
    ) -> "Sending":
        if read_offer(offer).get("host_id") != self._memory.host_id:
            raise TransportRefused("the receiver is on another host")
        wire = await self._sockets.connect(connection_id, offer, key, deadline)
        header = (_CARD_MAGIC, self._storage.num_pages, self._storage.page_bytes, len(self._card))
        with _setting_up(wire, if_late="the receiver did not answer"):
            async with asyncio.timeout_at(deadline):
                await wire.send(_CARD.pack(*header) + self._card)
                answer = await wire.receive(len(_MAPPED))
            if answer != _MAPPED:
                raise TransportRefused("the receiver cannot map the pages of this worker")
        sending = Sending(connection_id, wire)
        self._connections.add(sending)
        return sending

    async def close(self) -> None:
        await self._sockets.close()
        await self._connections.abort()

    async def _map(self, wire: PageSocket, threads: ThreadPoolExecutor) -> tuple[PeerPages, int]:
        magic, num_pages, page_bytes, card_length = _CARD.unpack(await wire.receive(_CARD.size))
        if magic != _CARD_MAGIC or not 0 < card_length <= MAX_CARD_BYTES:
            raise ConnectionBroken("what the sender sent is not a card")
        card = await wire.receive(card_length)
        if page_bytes != self._storage.page_bytes:
            raise LayoutMismatch(
                f"pages have {page_bytes} bytes at the sender, {self._storage.page_bytes} here"
            )
        loop = asyncio.get_running_loop()
        opening = threads.submit(self._memory.open, card, num_pages)
        opened = asyncio.wrap_future(opening)
        opened.add_done_callback(mark_seen)  # a caller that has left reads no error
        try:
            pages = await asyncio.shield(opened)
        except TransportRefused as error:
            logger.warning("pages_not_mapped", extra=fields(error=str(error)))
            await wire.send(_NOT_MAPPED)
            raise
        except asyncio.CancelledError:
            # The thread goes on; its mapping must not stay.
            threads.submit(_close_opened, opening)
            raise
        try:
            await wire.send(_MAPPED)
        except BaseException:
            await loop.run_in_executor(threads, pages.close)
            raise
        return pages, num_pages


class Sending(SocketConnection):
    """Implements the sender's half of `kv_transfer.transport.Connection`."""

    def __init__(self, connection_id: str, wire: PageSocket) -> None:
        super().__init__(connection_id, wire)
        self._places = asyncio.Semaphore(WINDOW)  # of frames that are not read
        self._naming = asyncio.Lock()  # of whoever writes a frame
        self._num_named = 0  # frames

    @property
    def max_chunk_bytes(self) -> int:
        return MAX_CHUNK_BYTES

    async def send(self, page_ids: Sequence[int], seconds: float) -> None:
        # Each `async with` takes turns in the order of the calls.
        with self._breaking():
            async with self._places:
                async with self._naming, asyncio.timeout(seconds):
                    self._check_healthy()
                    frame = await self._name(page_ids)
                async with self._order, asyncio.timeout(seconds):
                    self._check_healthy()
                    await self._await_read(frame)

    async def receive(self, page_ids: Sequence[int], seconds: float) -> None:
        raise AssertionError("a sender receives nothing")

    async def _name(self, page_ids: Sequence[int]) -> int:
        frame = self._num_named
        self._num_named += 1
        header = _FRAME.pack(_FRAME_MAGIC, frame, len(page_ids))
        await self._wire.send(header + struct.pack(f"!{len(page_ids)}I", *page_ids))
        return frame

    async def _await_read(self, frame: int) -> None:
        while self._num_done <= frame:
            (read,) = _READ.unpack(await self._wire.receive(_READ.size))
            if not self._num_done <= read < self._num_named:
                raise ConnectionBroken(
                    f"read frame: found {read}; allowed: {self._num_done} to {self._num_named - 1}"
                )
            self._num_done = read + 1

    async def _leave_wire(self) -> None:
        async with self._naming:
            await super()._leave_wire()


class _Copy(NamedTuple):
    """What a frame and the receive that it met ask for."""

    source_ids: NDArray[np.uint32]  # four bytes a page, where a tuple has 40
    target_ids: Sequence[int]
    copied: asyncio.Future[None]  # and the sender told


class Receiving(SocketConnection):
    """Implements the receiver's half of `kv_transfer.transport.Connection`.

    Frames and receives meet in order. What has met waits for one of the calls that copy.
    """

    def __init__(
        self,
        connection_id: str,
        wire: PageSocket,
        threads: ThreadPoolExecutor,
        pages: PeerPages,
        num_pages: int,
        storage: PageStorage,
    ) -> None:
        super().__init__(connection_id, wire)
        self._threads = threads
        self._pages = pages
        self._num_pages = num_pages  # of the sender
        self._storage = storage
        self._frames: deque[NDArray[np.uint32]] = deque()  # source pages
        self._posted: deque[tuple[Sequence[int], asyncio.Future[None]]] = deque()  # target pages
        self._met: deque[_Copy] = deque()
        self._num_unread_pages = 0  # of all frames that are not acknowledged
        self._calls: set[Future[None]] = set()  # that copy right now, whoever waits for them
        self._unread: set[asyncio.Future[None]] = set()  # of all receives that have not ended
        self._telling = asyncio.Lock()  # copies take it in their order
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def send(self, page_ids: Sequence[int], seconds: float) -> None:
        raise AssertionError("a receiver sends nothing")

    async def receive(self, page_ids: Sequence[int], seconds: float) -> None:
        with self._breaking():
            self._check_healthy()
            copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            copied.add_done_callback(mark_seen)  # a caller that has left reads no error
            self._unread.add(copied)
            copied.add_done_callback(self._unread.discard)
            self._posted.append((page_ids, copied))
            self._copy_what_met()
            try:
                async with self._order, asyncio.timeout(seconds):
                    await copied
            except BaseException:
                self._end(ConnectionBroken("another receive failed"))
                raise

    def _copy_what_met(self) -> None:
        while self._frames and self._posted:
            self._met.append(_Copy(self._frames.popleft(), *self._posted.popleft()))
        page_bytes = self._storage.page_bytes
        while self._met and len(self._copies) < MAX_COPYING:
            joined = take_joined(self._met, lambda each: len(each.source_ids), page_bytes)
            copying = asyncio.get_running_loop().create_task(self._copy(joined))
            self._copies.add(copying)
            copying.add_done_callback(self._copied)

    def _copied(self, copying: asyncio.Task[None]) -> None:
        self._copies.discard(copying)
        self._copy_what_met()

    async def _copy(self, joined: Sequence[_Copy]) -> None:
        """Copy pages in one call, and tell the sender and those who wait.

        Only who ends the event loop cancels it.
        """
        try:
            self._check_healthy()  # now: it may have broken since this task was made
            for each in joined:
                found, allowed = len(each.source_ids), len(each.target_ids)
                if found != allowed:
                    raise ConnectionBroken(f"pages of a frame: found {found}; allowed: {allowed}")
            source_ids = [page_id for each in joined for page_id in each.source_ids.tolist()]
            target_ids = [page_id for each in joined for page_id in each.target_ids]
            call = self._threads.submit(self._pages.copy, source_ids, target_ids)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            async with self._telling:
                await asyncio.wrap_future(call)
                self._check_healthy()  # or the number would count the pages of a copy that failed
                self._num_done += len(joined)
                self._num_unread_pages -= len(source_ids)
                await self._wire.send(_READ.pack(self._num_done - 1))
        except Exception as error:
            self._end(error)
            return
        except BaseException as error:
            self._end(ConnectionBroken(f"a copy ended with {type(error).__name__}"))
            raise
        for each in joined:
            if not each.copied.done():
                each.copied.set_result(None)

    def _end(self, error: Exception) -> None:
        """Fail all receives and begin no copy any more: what is named may be gone.

        Copies that have begun go on; an abort waits for them.
        """
        self._is_broken = True
        for copied in tuple(self._unread):
            if not copied.done():
                copied.set_exception(error)

    async def _stop(self) -> None:
        await super()._stop()
        closing = asyncio.get_running_loop().run_in_executor(self._threads, self._close_pages)
        self._threads.shutdown(wait=False)
        try:
            await closing
        except Exception:
            # Nothing writes any more, which is what an abort is for.
            logger.exception("pages_not_unmapped")

    def _close_pages(self) -> None:
        # Who ends the event loop cancels the tasks that copy, but not their threads.
        wait(tuple(self._calls))
        self._pages.close()

    async def _leave_wire(self) -> None:
        await asyncio.wait({self._reading})
        await super()._leave_wire()

    async def _read(self) -> None:
        """Take frames until the socket ends, which ends the connection."""
        num_frames = 0
        try:
            while True:
                self._frames.append(await self._next_frame(num_frames))
                num_frames += 1
                self._copy_what_met()
        except Exception as error:
            self._end(error)
        finally:
            self._begin_abort()

    async def _next_frame(self, number: int) -> NDArray[np.uint32]:
        """Return the source pages of a frame; what cannot be is refused before they are taken."""
        magic, frame, count = _FRAME.unpack(await self._wire.receive(_FRAME.size))
        if (magic, frame) != (_FRAME_MAGIC, number):
            raise ConnectionBroken(
                f"frame: found {magic!r} {frame}; allowed: {_FRAME_MAGIC!r} {number}"
            )
        if number - self._num_done >= WINDOW:
            raise ConnectionBroken(f"unread frames: found {WINDOW + 1}; allowed: {WINDOW}")
        most = self._storage.num_pages - self._num_unread_pages
        if count > most:
            raise ConnectionBroken(f"pages of frame {frame}: found {count}; allowed: {most}")
        self._num_unread_pages += count
        page_ids = np.frombuffer(await self._wire.receive(count * _PAGE_ID.itemsize), _PAGE_ID)
        if (last := page_ids.max(initial=0)) >= self._num_pages:
            raise ConnectionBroken(
                f"page id of frame {frame}: found {last}; allowed: 0 to {self._num_pages - 1}"
            )
        return page_ids


@contextmanager
def _setting_up(wire: PageSocket, *, if_late: str) -> Iterator[None]:
    """Close the socket on failure, and raise a TransferError whatever failed."""
    try:
        yield
    except BaseException as error:
        wire.close()
        if isinstance(error, TransferError) or not isinstance(error, Exception):
            raise
        raise ConnectionBroken(reason_of(error, if_late=if_late)) from error


def _close_opened(opening: Future[PeerPages]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _cuda_memory(storage: PageStorage) -> Memory:
    # Imported here: hosts without GPUs have neither cuda.bindings nor use for it.
    from kv_transfer.cuda_ipc_memory import CudaMemory

    return CudaMemory(storage)
