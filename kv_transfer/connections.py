"""The connections of one worker: made on first use, kept while healthy, forgotten when broken.

A connection belongs to one incarnation of the peer; a restarted worker gets a new one. Both sides
close one that nobody uses any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kv_transfer.errors import ConnectionBroken, TransferTimeout, TransportRefused
from kv_transfer.order import Incoming, Outgoing
from kv_transfer.transport import Connection, Transport
from kv_transfer.users import Users
from pagewire.protos.call_tasks import is_own_cancellation, mark_seen

CLOSE_S = 10.0  # close gives up on aborts that take longer

# (name of the worker, its incarnation)
PeerKey = tuple[str, int]

# Performs the Connect call at the sender: (connection_id, transport_name, offer).
ConnectCall = Callable[[str, str, bytes], Awaitable[None]]

# Returns the key of a connection to a peer, by its id: see Transport.
KeyOf = Callable[[PeerKey, str], bytes]


class ConnectionPool:
    """The receiver's connections, one per sender.

    Args:
        transports: Best first; the first that the sender offers is taken.
        random_id: Returns a new unique connection id.
        key_of: Returns the key of a new connection.
    """

    def __init__(
        self, transports: Sequence[Transport], *, random_id: Callable[[], str], key_of: KeyOf
    ) -> None:
        self._transports = tuple(transports)
        self._random_id = random_id
        self._key_of = key_of
        self._entries: dict[PeerKey, asyncio.Task[Incoming]] = {}
        self._aborts = _Aborts()

    async def get(self, peer_key: PeerKey, connect: ConnectCall, deadline: float) -> Incoming:
        """Return the connection to a peer.

        Callers that come while it is being made wait for the same one; the `connect` of the first
        caller runs until its deadline. Then the first caller with time left tries again. If
        `connect` raises TransportRefused, the next transport is tried.

        Raises:
            TransferTimeout: There is no connection at `deadline`.
            TransferError: The set-up failed; also errors of `connect`.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._forget_broken()
            is_first = peer_key not in self._entries
            if is_first:
                entry = loop.create_task(self._set_up(peer_key, connect, deadline))
                entry.add_done_callback(mark_seen)
                self._entries[peer_key] = entry
            entry = self._entries[peer_key]
            try:
                async with asyncio.timeout_at(deadline):
                    # Shielded: a caller that leaves must not end the set-up of other callers.
                    return await asyncio.shield(entry)
            except TimeoutError as error:
                raise TransferTimeout(f"no connection to {peer_key[0]} in time") from error
            except TransferTimeout:
                if is_first or loop.time() >= deadline:
                    raise
            except asyncio.CancelledError:
                if entry.cancelled() and not is_own_cancellation():
                    raise ConnectionBroken(f"the connection to {peer_key[0]} was dropped") from None
                raise

    def is_connected(self, peer_key: PeerKey) -> bool:
        """Return whether there is a healthy connection to a peer."""
        entry = self._entries.get(peer_key)
        connection = _connection_of(entry) if entry is not None else None
        return connection is not None and not connection.is_broken

    def drop(self, connection: Connection) -> None:
        """Forget a connection and abort it, if that has not happened yet."""
        for peer_key, entry in list(self._entries.items()):
            if _connection_of(entry) is connection:
                self._remove(peer_key)

    def forget(self, peer_key: PeerKey) -> None:
        """Forget the connection to a peer, if there is one, and abort it."""
        if peer_key in self._entries:
            self._remove(peer_key)

    async def close(self) -> None:
        """Abort all connections; wait for it, but not forever."""
        for peer_key in list(self._entries):
            self._remove(peer_key)
        await self._aborts.wait()

    async def _set_up(self, peer_key: PeerKey, connect: ConnectCall, deadline: float) -> Incoming:
        refusal: TransportRefused | None = None
        try:
            async with asyncio.timeout_at(deadline):
                for transport in self._transports:
                    try:
                        return Incoming(await self._connect(peer_key, transport, connect, deadline))
                    except TransportRefused as error:
                        refusal = error
        except Exception as error:
            # `connect` may end at the same deadline, with its own error.
            is_late = asyncio.get_running_loop().time() >= deadline
            if not (is_late or isinstance(error, TimeoutError)):
                raise
            raise TransferTimeout(f"no connection to {peer_key[0]} in time") from error
        raise refusal or TransportRefused("no transport is configured")

    async def _connect(
        self, peer_key: PeerKey, transport: Transport, connect: ConnectCall, deadline: float
    ) -> Connection:
        connection_id = self._random_id()
        offer = transport.offer(connection_id, self._key_of(peer_key, connection_id))
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(transport.accept(connection_id, deadline))
        try:
            await asyncio.sleep(0)  # it begins, so that a cancellation withdraws the offer
            await connect(connection_id, transport.name, offer)
            return await accepting
        except BaseException:
            accepting.cancel()
            accepting.add_done_callback(self._disown)
            await asyncio.wait({accepting})
            raise

    def _forget_broken(self) -> None:
        for peer_key, entry in list(self._entries.items()):
            if entry.done() and not self.is_connected(peer_key):
                self._remove(peer_key)

    def _disown(self, accepting: asyncio.Task[Connection]) -> None:
        """Abort what was accepted in a set-up that failed: nobody else has it."""
        mark_seen(accepting)  # the error of the set-up says more
        if not accepting.cancelled() and accepting.exception() is None:
            self._aborts.begin(accepting.result().abort())

    def _remove(self, peer_key: PeerKey) -> None:
        self._aborts.begin(_abort(self._entries.pop(peer_key)))


@dataclass(frozen=True, slots=True)
class Accepted:
    """A connection of a receiver; whoever uses it enters `users.one()` meanwhile."""

    outgoing: Outgoing
    users: Users


class AcceptedConnections:
    """The sender's connections, one per receiver; only that receiver can name and use it.

    Args:
        transports: Those that receivers may choose.
        idle_s: How long a connection may have no user before it is closed.
    """

    def __init__(self, transports: Sequence[Transport], *, idle_s: float) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._idle_s = idle_s
        self._connections: dict[tuple[PeerKey, str], Accepted] = {}  # (receiver, connection_id)
        self._of_peer: dict[str, tuple[PeerKey, str]] = {}  # name of the receiver |-> its key above
        self._aborts = _Aborts()

    async def connect(
        self,
        *,
        peer_key: PeerKey,
        connection_id: str,
        transport_name: str,
        offer: bytes,
        key: bytes,
        deadline: float,
    ) -> None:
        """Run the sender's half of a set-up. A receiver's new connection replaces its last one.

        The caller has authenticated the receiver, and derives the same `key`.

        Raises:
            TransportRefused: This worker has no transport of that name.
            ConnectionBroken: The receiver does not connect before `deadline`, or has a connection
                of this id.
        """
        transport = self._transports.get(transport_name)
        if transport is None:
            raise TransportRefused(
                f"transport {transport_name!r} is not offered, only {sorted(self._transports)}"
            )
        entry = peer_key, connection_id
        self._check_new(entry)
        connection = await transport.connect(connection_id, offer, key, deadline)
        try:
            self._check_new(entry)  # still: the receiver may have called twice
        except ConnectionBroken:
            self._aborts.begin(connection.abort())
            raise
        last = self._of_peer.get(peer_key[0])
        if last is not None:
            self._remove(last)
        self._connections[entry] = Accepted(
            Outgoing(connection), Users(self._idle_s, partial(self._remove, entry))
        )
        self._of_peer[peer_key[0]] = entry

    def get(self, peer_key: PeerKey, connection_id: str) -> Accepted:
        """Return a healthy connection of a receiver.

        Raises:
            ConnectionBroken: It has none of that id, or it is broken; it must reconnect.
        """
        accepted = self._connections.get((peer_key, connection_id))
        if accepted is None:
            raise ConnectionBroken(f"no connection {connection_id!r}; call Connect first")
        if accepted.outgoing.connection.is_broken:
            self._remove((peer_key, connection_id))
            raise ConnectionBroken(f"connection {connection_id!r} is broken; call Connect again")
        return accepted

    async def close(self) -> None:
        """Abort all connections; wait for it, but not forever."""
        for entry in list(self._connections):
            self._remove(entry)
        await self._aborts.wait()

    def _check_new(self, entry: tuple[PeerKey, str]) -> None:
        if entry in self._connections:
            raise ConnectionBroken(f"connection {entry[1]!r} exists already")

    def _remove(self, entry: tuple[PeerKey, str]) -> None:
        accepted = self._connections.pop(entry)
        accepted.users.forget()
        self._of_peer = {name: each for name, each in self._of_peer.items() if each != entry}
        self._aborts.begin(accepted.outgoing.connection.abort())


class _Aborts:
    """Aborts under way; nobody else waits for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, abort: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(abort)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Return when none is left, or after CLOSE_S."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)


def _connection_of(entry: asyncio.Task[Incoming]) -> Connection | None:
    if not entry.done() or entry.cancelled() or entry.exception() is not None:
        return None
    return entry.result().connection


async def _abort(entry: asyncio.Task[Incoming]) -> None:
    if not entry.done():
        entry.cancel()
        await asyncio.wait({entry})
    if _connection_of(entry) is not None:
        await entry.result().abort()
