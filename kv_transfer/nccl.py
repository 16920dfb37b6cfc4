"""Pages over NCCL: one two-rank communicator per pair of GPUs, the receiver is rank 0.

All NCCL calls of a GPU come from one PollingThread; the asyncio side only waits for its results,
each with a deadline. A dead peer shows no NCCL error: the deadline passes, and abort, in a helper
thread, ends posted operations.
"""

import asyncio
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from kv_cache.page_storage import PageStorage
from kv_transfer.errors import ConnectionBroken, LayoutMismatch
from kv_transfer.ordered_connection import LiveConnections, OrderedConnection
from kv_transfer.polling_thread import PollingThread, Steps

UNIQUE_ID_BYTES = 128
STAGING_BYTES = 64 << 20  # per connection, two slabs
WARM_UP_S = 120.0  # Triton may compile

# unique id | NCCL version | pages in a message | bytes of a page
_OFFER = struct.Struct(f"!{UNIQUE_ID_BYTES}sIIQ")


class Link(Protocol):
    """The device side of one connection. Generators run in the GPU's PollingThread."""

    def open(self) -> Steps[None]: ...

    def send(self, page_ids: Sequence[int]) -> Steps[None]: ...

    def receive(self, page_ids: Sequence[int]) -> Steps[None]: ...

    def abort(self) -> None:
        """Block until nothing is posted and the streams are idle; from any thread."""
        ...


class Device(Protocol):
    """One GPU with its pages; implemented by nccl_link.NcclDevice."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def nccl_version(self) -> int: ...

    def warm_up(self) -> Steps[None]:
        """Make the thread use this GPU, and load every kernel that transfers need."""
        ...

    def unique_id(self) -> bytes: ...

    def link(
        self, name: str, *, is_sender: bool, unique_id: bytes, pages_in_message: int
    ) -> Link: ...


class NcclTransport:
    """Implements `kv_transfer.transport.Transport` for a storage in GPU memory.

    The process should run with CUDA_MODULE_LOADING=EAGER, and its engine should be warm: a kernel
    that is first loaded while a transfer hangs would hang with it.

    Raises:
        TransportRefused: The storage is not on a CUDA device, nccl4py or libnccl is missing, or
            CUDA gives no stream or no memory.
    """

    name = "nccl"

    def __init__(
        self,
        storage: PageStorage,
        *,
        staging_bytes: int = STAGING_BYTES,
        make_device: Callable[[PageStorage], Device] | None = None,
    ) -> None:
        self._device = (make_device or _nccl_device)(storage)
        self._pages_in_message = max(1, staging_bytes // 2 // self._device.page_bytes)
        self._thread = PollingThread("nccl")
        self._thread.submit(self, self._device.warm_up()).result(WARM_UP_S)
        self._offers: dict[str, bytes] = {}  # connection_id |-> unique id
        self._connections = LiveConnections[NcclConnection]()

    def offer(self, connection_id: str, key: bytes) -> bytes:
        # NCCL has no keys: anybody with the unique id can join. It travels in proven calls only.
        unique_id = self._device.unique_id()
        self._offers[connection_id] = unique_id
        return _OFFER.pack(
            unique_id, self._device.nccl_version, self._pages_in_message, self._device.page_bytes
        )

    async def accept(self, connection_id: str, deadline: float) -> "NcclConnection":
        unique_id = self._offers.pop(connection_id)
        return await self._open(connection_id, False, unique_id, self._pages_in_message, deadline)

    async def connect(
        self, connection_id: str, offer: bytes, key: bytes, deadline: float
    ) -> "NcclConnection":
        if len(offer) != _OFFER.size:
            raise ConnectionBroken(f"the offer has {len(offer)} bytes, must have {_OFFER.size}")
        unique_id, nccl_version, pages_in_message, page_bytes = _OFFER.unpack(offer)
        found = (nccl_version, page_bytes)
        own = (self._device.nccl_version, self._device.page_bytes)
        if found != own:
            raise LayoutMismatch(
                f"NCCL version and page bytes are {found} at the receiver, {own} here; "
                "both workers must run the same installation"
            )
        if not 1 <= pages_in_message <= self._pages_in_message:  # its staging buffer is made here
            raise LayoutMismatch(
                f"a message of {pages_in_message} pages is offered, at most"
                f" {self._pages_in_message} fit here"
            )
        return await self._open(connection_id, True, unique_id, pages_in_message, deadline)

    async def close(self) -> None:
        try:
            await self._connections.abort()
        finally:
            self._thread.close(timeout_s=1.0)

    async def _open(
        self,
        connection_id: str,
        is_sender: bool,
        unique_id: bytes,
        pages_in_message: int,
        deadline: float,
    ) -> "NcclConnection":
        link = self._device.link(
            connection_id,
            is_sender=is_sender,
            unique_id=unique_id,
            pages_in_message=pages_in_message,
        )
        connection = self._connections.add(NcclConnection(connection_id, link, self._thread))
        await connection.open(deadline)
        return connection


class NcclConnection(OrderedConnection):
    """Implements `kv_transfer.transport.Connection` over a Link."""

    def __init__(self, connection_id: str, link: Link, thread: PollingThread) -> None:
        super().__init__(connection_id)
        self._link = link
        self._thread = thread

    async def open(self, deadline: float) -> None:
        """Run this side's half of the set-up; on failure abort and raise ConnectionBroken."""
        try:
            await self._run(self._link.open, deadline - asyncio.get_running_loop().time())
        except BaseException:
            # Not awaited: the caller has a deadline, and abort of a dead peer takes seconds.
            self._begin_abort()
            raise

    async def send(self, page_ids: Sequence[int], seconds: float) -> None:
        await self._run(lambda: self._link.send(page_ids), seconds)

    async def receive(self, page_ids: Sequence[int], seconds: float) -> None:
        await self._run(lambda: self._link.receive(page_ids), seconds)

    async def _run(self, steps: Callable[[], Steps[None]], seconds: float) -> None:
        async with self._operating(seconds):
            await asyncio.wrap_future(self._thread.submit(self, steps()))

    async def _stop(self) -> None:
        # NCCL forbids abort while a thread is inside another call on the communicator.
        await asyncio.wrap_future(self._thread.drop(self))
        await _in_daemon_thread(self._link.abort)


async def _in_daemon_thread(function: Callable[[], None]) -> None:
    """Run a function that may hang forever, in a thread that cannot keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            function()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name="nccl-abort", daemon=True).start()
    await done


def _nccl_device(storage: PageStorage) -> Device:
    # Imported here: hosts without GPUs have neither nccl4py nor use for it.
    from kv_transfer.nccl_link import NcclDevice

    return NcclDevice(storage)
