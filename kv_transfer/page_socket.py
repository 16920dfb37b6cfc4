"""Bytes over one TCP connection between two workers: in clear, or encrypted by TLS."""

import asyncio
import contextlib
import socket
import ssl
from typing import Any, Protocol

from kv_transfer.errors import ConnectionBroken

PIECE_BYTES = 256 << 10  # encrypted or decrypted before other tasks have their turn: 0.2 ms


class PageTls(Protocol):
    """Makes the two sides of TLS; what they read and write is in memory."""

    def server(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject: ...

    def client(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject: ...


class PageSocket:
    """Owns a connected, non-blocking socket. Its errors end the connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of it; OSError: the connection is broken."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def receive_into(self, view: memoryview) -> None:
        """Fill a view.

        Raises:
            OSError: The connection is broken.
            ConnectionBroken: It was closed.
        """
        while view:
            view = view[await self._receive_some(view) :]

    async def receive(self, num_bytes: int) -> bytes:
        """Return this many bytes; raises as receive_into does."""
        buffer = bytearray(num_bytes)
        await self.receive_into(memoryview(buffer))
        return bytes(buffer)

    def shut(self) -> None:
        """Fail waiting operations at once; closing the socket under them confuses the selector."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close; no operation may wait."""
        self._socket.close()

    async def _receive_some(self, view: memoryview) -> int:
        received = await asyncio.get_running_loop().sock_recv_into(self._socket, view)
        if not received:
            raise ConnectionBroken("the other side closed the connection")
        return received


class TlsSocket(PageSocket):
    """The same over TLS. Errors of TLS are OSErrors, as `ssl` has them."""

    def __init__(self, sock: socket.socket, tls: PageTls, *, is_server: bool) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        make = tls.server if is_server else tls.client
        self._tls = make(self._incoming, self._outgoing)
        self._arrived = bytearray(PIECE_BYTES)

    async def shake_hands(self) -> None:
        """Begin; raises as receive_into does, also if the peer's certificate is not accepted."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._take()
            else:
                return await self._flush()

    async def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            if start:
                await asyncio.sleep(0)  # lets others run: a socket that takes all does not wait
            self._tls.write(view[start : start + PIECE_BYTES])
            await self._flush()

    async def _receive_some(self, view: memoryview) -> int:
        while True:
            try:
                received: Any = self._tls.read(len(view), view)  # into the view, so it is a number
            except ssl.SSLWantReadError:
                await self._take()
                continue
            if not received:  # TLS has ended; its socket may be open
                raise ConnectionBroken("the other side closed the encrypted connection")
            return int(received)

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await super().send(self._outgoing.read())

    async def _take(self) -> None:
        num_bytes = await super()._receive_some(memoryview(self._arrived))
        self._incoming.write(memoryview(self._arrived)[:num_bytes])
        if num_bytes == PIECE_BYTES:
            await asyncio.sleep(0)  # nor does one in which more has arrived
