"""TCP connections between two workers that have authenticated each other.

The receiver of pages listens; its offer names host and port. Both sides have the connection's key
(see `kv_transfer.transport.Transport`) and prove it by challenge and response, so neither the key
nor anything that could be used again crosses the wire:

    sender    magic (8) | connection id length (2) | sender's challenge (32) | connection id
    receiver  receiver's challenge (32) | proof (32)
    sender    proof (32)
    receiver  1

A proof is HMAC-SHA256, under the key, over the side's name and both challenges. All integers are
big-endian. With TLS all of this goes through it, and both sides have shown a certificate before.
Without it, what follows the handshake is neither encrypted nor authenticated: see docs/security.md.
"""

import asyncio
import hmac
import json
import logging
import secrets
import socket
import struct
from typing import Any

from kv_transfer.errors import ConnectionBroken
from kv_transfer.page_socket import PageSocket, PageTls, TlsSocket
from observability.logs import fields
from options.ports import ANY_PORT, FreePorts, NoPortFree
from protos.addresses import join_address

logger = logging.getLogger(__name__)

CHALLENGE_BYTES = 32
PROOF_BYTES = 32
MAX_ID_BYTES = 256  # of a connection id; ours have 32
MAX_HANDSHAKE_S = 5.0
MAX_GREETINGS = 64  # connections that have not proven themselves; the oldest gives way
ACCEPT_PAUSE_S = 0.1  # after a failed accept
MAX_OFFER_BYTES = 1024

_HELLO = struct.Struct(f"!8sH{CHALLENGE_BYTES}s")
_HELLO_MAGIC = b"PWHELLO2"
_ACCEPTED = b"\x01"


class ProvenSockets:
    """Makes proven connections, on both sides.

    Args:
        host: Address to listen on, and for senders to connect to.
        tls: Encrypts all connections; None: they are in clear.
        ports: From which the listener takes its own.
    """

    def __init__(
        self, *, host: str, tls: PageTls | None = None, ports: FreePorts = ANY_PORT
    ) -> None:
        self._host = host
        self._tls = tls
        self._ports = ports
        self._listener: socket.socket | None = None
        self._listening: asyncio.Task[None] | None = None
        self._greetings: dict[asyncio.Task[None], None] = {}  # oldest first
        # connection_id |-> (key, the accepted socket)
        self._offers: dict[str, tuple[bytes, asyncio.Future[PageSocket]]] = {}

    def offer(self, connection_id: str, key: bytes, **more: str) -> bytes:
        """Receiver: begin a connection; the first one starts the listener.

        Args:
            more: Further fields for the sender; see `read_offer`.

        Returns:
            The offer, by which the sender finds it.

        Raises:
            ConnectionBroken: No port is free.
        """
        loop = asyncio.get_running_loop()
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            try:
                self._listener = self._ports.listen(
                    self._host,
                    lambda port: socket.create_server((self._host, port), family=family),
                )
            except NoPortFree as error:
                raise ConnectionBroken(str(error)) from error
            self._listener.setblocking(False)
            self._listening = loop.create_task(self._listen(self._listener))
        self._offers[connection_id] = (key, loop.create_future())
        port = self._listener.getsockname()[1]
        return json.dumps({"host": self._host, "port": port, **more}).encode()

    async def accept(self, connection_id: str, deadline: float) -> PageSocket:
        """Receiver: return the connection begun by `offer`, once the sender has proven itself.

        Raises:
            ConnectionBroken: The sender does not connect before `deadline`.
        """
        _, accepted = self._offers[connection_id]
        try:
            async with asyncio.timeout_at(deadline):
                return await accepted
        except BaseException as error:
            if accepted.done() and not accepted.cancelled():
                accepted.result().close()
            if isinstance(error, TimeoutError):
                raise ConnectionBroken("the sender did not connect in time") from error
            raise
        finally:
            self._offers.pop(connection_id, None)

    async def connect(
        self, connection_id: str, offer: bytes, key: bytes, deadline: float
    ) -> PageSocket:
        """Sender: return the connection that the receiver offered; raises as `accept` does."""
        host, port = _address_of(offer)
        loop = asyncio.get_running_loop()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout_at(deadline):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                family, kind, protocol, _, address = found[0]
                sock = socket.socket(family, kind, protocol)
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                wire = await self._secured(sock, is_server=False)
                await self._introduce(wire, connection_id, key)
        except BaseException as error:
            if sock is not None:
                sock.close()
            # A host that cannot be a name raises ValueError.
            if isinstance(error, (OSError, TimeoutError, ValueError)):
                reason = str(error) or "no answer in time"
                message = f"no TCP connection to {join_address(host, port)}: {reason}"
                raise ConnectionBroken(message) from error
            raise
        return wire

    async def close(self) -> None:
        """Stop listening. Existing connections go on."""
        for task in (self._listening, *self._greetings):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._listener is not None:
            self._listener.close()

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # A caller that left at once, or no file descriptor is free: both pass.
                logger.warning("accept_failed", extra=fields(error=str(error)))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            sock.setblocking(False)
            if len(self._greetings) >= MAX_GREETINGS:
                # A genuine one takes two round trips; the oldest is a stranger, or too slow.
                oldest = next(iter(self._greetings))
                del self._greetings[oldest]  # at once, or the next to come would find it again
                oldest.cancel()
            greeting = loop.create_task(self._greet(sock))
            self._greetings[greeting] = None
            greeting.add_done_callback(lambda ended: self._greetings.pop(ended, None))
            await asyncio.sleep(0)  # it begins, so that a cancellation closes its socket

    async def _secured(self, sock: socket.socket, *, is_server: bool) -> PageSocket:
        """Return the connection, ready for use."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return PageSocket(sock)
        wire = TlsSocket(sock, self._tls, is_server=is_server)
        await wire.shake_hands()
        return wire

    async def _introduce(self, wire: PageSocket, connection_id: str, key: bytes) -> None:
        """Prove the key to the receiver, which must prove it, too."""
        encoded, own = connection_id.encode(), secrets.token_bytes(CHALLENGE_BYTES)
        if len(encoded) > MAX_ID_BYTES:
            raise ConnectionBroken(
                f"connection id: found {len(encoded)} bytes; allowed: at most {MAX_ID_BYTES}"
            )
        await wire.send(_HELLO.pack(_HELLO_MAGIC, len(encoded), own) + encoded)
        try:
            answer = await wire.receive(CHALLENGE_BYTES + PROOF_BYTES)
            theirs, proof = answer[:CHALLENGE_BYTES], answer[CHALLENGE_BYTES:]
            if not hmac.compare_digest(proof, _proof(key, b"receiver", own, theirs)):
                raise ConnectionBroken("its proof is not genuine")
            await wire.send(_proof(key, b"sender", own, theirs))
            await wire.receive(len(_ACCEPTED))
        except ConnectionBroken as error:
            message = f"the receiver refused connection {connection_id!r}: {error}"
            raise ConnectionBroken(message) from error

    async def _greet(self, sock: socket.socket) -> None:
        """Hand the socket to the offer whose key it proves, or close it."""
        is_taken = False
        try:
            async with asyncio.timeout(MAX_HANDSHAKE_S):
                wire = await self._secured(sock, is_server=True)
                offer = await self._proven_offer(wire)
                if offer is None or offer.done():
                    return
                await wire.send(_ACCEPTED)
                if not offer.done():
                    offer.set_result(wire)
                    is_taken = True
        except (OSError, TimeoutError, ConnectionBroken):
            # A stranger, or a sender that left: the waiter for the offer has a deadline.
            return
        finally:
            if not is_taken:
                sock.close()

    async def _proven_offer(self, wire: PageSocket) -> "asyncio.Future[PageSocket] | None":
        """Return the offer whose key the other side proves; none: it is a stranger."""
        magic, id_length, theirs = _HELLO.unpack(await wire.receive(_HELLO.size))
        if magic != _HELLO_MAGIC or id_length > MAX_ID_BYTES:
            return None
        connection_id = (await wire.receive(id_length)).decode(errors="replace")
        key, accepted = self._offers.get(connection_id, (b"", None))
        if accepted is None:
            return None
        own = secrets.token_bytes(CHALLENGE_BYTES)
        answer = own + _proof(key, b"receiver", theirs, own)
        await wire.send(answer)
        proof = await wire.receive(PROOF_BYTES)
        is_genuine = hmac.compare_digest(proof, _proof(key, b"sender", theirs, own))
        return accepted if is_genuine else None


def _proof(key: bytes, side: bytes, of_sender: bytes, of_receiver: bytes) -> bytes:
    """Return what a side proves the key with: HMAC of its name and both challenges."""
    return hmac.digest(key, side + of_sender + of_receiver, "sha256")


def read_offer(offer: bytes) -> dict[str, Any]:
    """Return the fields of an offer; raises ConnectionBroken unless it is a small JSON object."""
    wrong = ConnectionBroken("the offer is not one of TCP: host and port")
    if len(offer) > MAX_OFFER_BYTES:
        raise wrong
    try:
        offered = json.loads(offer)
    except (ValueError, RecursionError):
        raise wrong from None
    if not isinstance(offered, dict):
        raise wrong
    return offered


def _address_of(offer: bytes) -> tuple[str, int]:
    """Return host and port of an offer."""
    offered = read_offer(offer)
    host, port = offered.get("host"), offered.get("port")
    if not isinstance(host, str) or type(port) is not int:
        raise ConnectionBroken("the offer is not one of TCP: host and port")
    if not 0 < port < 1 << 16:
        raise ConnectionBroken(f"the offer names port {port}")
    return host, port
