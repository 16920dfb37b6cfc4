"""Pages over plain TCP, through host memory: the transport of hosts without GPUs.

After the handshake of `kv_transfer.proven_sockets` the sender sends one frame per operation:

    magic (8) | frame number (8) | number of pages (4) | bytes of a page (8) | pages

All integers are big-endian. A frame that the receiver does not expect breaks the connection.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from kv_cache.page_storage import PageBytes, PageStorage
from kv_transfer.driver import RunBlocking
from kv_transfer.errors import ConnectionBroken
from kv_transfer.ordered_connection import LiveConnections
from kv_transfer.page_socket import PageSocket
from kv_transfer.proven_sockets import ProvenSockets
from kv_transfer.socket_connection import SocketConnection
from pagewire.protos.call_tasks import mark_seen

T = TypeVar("T")

CHUNK_BYTES = 8 << 20  # copied out of or into the storage at a time

_FRAME = struct.Struct("!8sQIQ")
_FRAME_MAGIC = b"PWFRAME1"


class TcpTransport:
    """Implements `kv_transfer.transport.Transport`.

    Args:
        sockets: Make its connections, and are closed with it.
    """

    name = "tcp"

    def __init__(self, storage: PageStorage, sockets: ProvenSockets) -> None:
        self._storage = storage
        self._sockets = sockets
        self._connections = LiveConnections[TcpConnection]()

    def offer(self, connection_id: str, key: bytes) -> bytes:
        return self._sockets.offer(connection_id, key)

    async def accept(self, connection_id: str, deadline: float) -> "TcpConnection":
        wire = await self._sockets.accept(connection_id, deadline)
        return self._connection(connection_id, wire)

    async def connect(
        self, connection_id: str, offer: bytes, key: bytes, deadline: float
    ) -> "TcpConnection":
        wire = await self._sockets.connect(connection_id, offer, key, deadline)
        return self._connection(connection_id, wire)

    async def close(self) -> None:
        await self._sockets.close()
        await self._connections.abort()

    def _connection(self, connection_id: str, wire: PageSocket) -> "TcpConnection":
        return self._connections.add(TcpConnection(connection_id, wire, self._storage))


class TcpConnection(SocketConnection):
    """Implements `kv_transfer.transport.Connection` over one TCP connection."""

    def __init__(self, connection_id: str, wire: PageSocket, storage: PageStorage) -> None:
        super().__init__(connection_id, wire)
        self._storage = storage
        self._run_blocking: RunBlocking = asyncio.to_thread
        self._pages_at_once = max(1, CHUNK_BYTES // storage.page_bytes)

    async def send(self, page_ids: Sequence[int], seconds: float) -> None:
        async with self._operating(seconds):
            header = (_FRAME_MAGIC, self._num_done, len(page_ids), self._storage.page_bytes)
            await self._wire.send(_FRAME.pack(*header))
            for some in self._pieces(page_ids):
                contents = await self._touch(partial(self._storage.export_pages, some))
                view = np.ascontiguousarray(contents).data.cast("B")
                await self._wire.send(view)

    async def receive(self, page_ids: Sequence[int], seconds: float) -> None:
        async with self._operating(seconds):
            header = _FRAME.unpack(await self._wire.receive(_FRAME.size))
            expected = (_FRAME_MAGIC, self._num_done, len(page_ids), self._storage.page_bytes)
            if header != expected:
                raise ConnectionBroken(f"frame: found {header}; allowed: {expected}")
            for some in self._pieces(page_ids):
                contents: PageBytes = np.empty((len(some), self._storage.page_bytes), np.uint8)
                await self._wire.receive_into(contents.data.cast("B"))
                await self._touch(partial(self._storage.import_pages, some, contents))

    def _touch(self, function: Callable[[], T]) -> Awaitable[T]:
        """Begin work that touches pages; `abort` waits for it, even if the caller has left."""

        async def run() -> T:
            return await self._run_blocking(function)

        copy = asyncio.get_running_loop().create_task(run())
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)
        copy.add_done_callback(mark_seen)  # a caller that has left reads no error
        # Shielded: a deadline must not make the copy look finished.
        return asyncio.shield(copy)

    def _pieces(self, page_ids: Sequence[int]) -> list[Sequence[int]]:
        step = self._pages_at_once
        return [page_ids[i : i + step] for i in range(0, len(page_ids), step)]
