"""What a decode worker keeps for each prefill worker: a connection for pages, a channel, a stream.

Life of a peer, one per start of a prefill worker:
1. met         a router names it, and the worker connects ahead; or the first attempt connects
2. used        by attempts, however many at once
3. given up    nobody has used it for `idle_s`, or another start of the prefill worker has answered
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import grpc

from credentials.channel import ProvenChannel
from credentials.party import Party
from decode_worker import wire
from decode_worker.config import DecodeConfig
from decode_worker.errors import PrefillFailed
from decode_worker.prefill_client import PrefillClient, PrefillStream
from kv_transfer.connections import ConnectionPool, PeerKey
from kv_transfer.errors import TransferError
from kv_transfer.order import Incoming
from kv_transfer.transport import Connection
from kv_transfer.users import Users
from observability.logs import fields
from protos.contract import contract_difference
from worker.context import WorkerContext
from worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)

EXPECTED_ERRORS = (PrefillFailed, TransferError, TimeoutError)  # any other is a bug


@dataclass(eq=False, slots=True)
class _Peer:
    """What is kept for a prefill worker."""

    users: Users  # attempts, and the connecting ahead
    client: PrefillClient | None = None  # made when one needs it


class PrefillPeers:
    """The connections, channels and streams of a decode worker to prefill workers.

    Args:
        connect_channel: Makes a grpc.aio channel to a prefill worker's address.
        random_id: Returns 16 random bytes for the id of a connection.
    """

    def __init__(
        self,
        context: WorkerContext[DecodeConfig],
        *,
        connect_channel: Callable[[str], grpc.aio.Channel],
        random_id: Callable[[], bytes],
    ) -> None:
        self._context = context
        self._deadlines = context.config.transfer_deadlines
        self._connect_channel = connect_channel
        self._connections = ConnectionPool(
            context.transports, random_id=lambda: random_id().hex(), key_of=self._transfer_key
        )
        self._peers: dict[WorkerIdentity, _Peer] = {}  # whom a request has needed not long ago
        self._meeting: dict[WorkerIdentity, asyncio.Task[None]] = {}  # |-> connects ahead

    def connect(self, senders: Sequence[WorkerIdentity]) -> None:
        """Begin to connect to prefill workers, so that the first request need not wait.

        A worker of which another incarnation is known, or named earlier, is skipped until a request
        needs it: a router with a late membership must not break transfers of the present one. A
        connected worker is skipped, too: only this side would count the connection as used.
        """
        known = {each.worker_id: each for each in (*self._meeting, *self._peers)}
        for sender in senders:
            is_known = known.setdefault(sender.worker_id, sender) == sender
            is_connected = self._connections.is_connected(_peer_key(sender))
            if is_known and not is_connected and sender not in self._meeting:
                self._meeting[sender] = self._context.tasks.start(
                    self._connect_ahead(sender), name=f"connect-{sender.worker_id}"
                )
                self._meeting[sender].add_done_callback(partial(self._met, sender))

    def using(self, sender: WorkerIdentity) -> AbstractContextManager[None]:
        """Return a context in which what is kept for a prefill worker stays."""
        return self._peer(sender).users.one()

    async def connection(self, sender: WorkerIdentity) -> Incoming:
        """Return the connection to a prefill worker; the Connect call makes it if there is none.

        Raises:
            PrefillFailed: The worker refused, could not be reached or speaks another contract.
            TransferError: The connection was not made in time.
        """
        own_version = self._context.identity.contract_version
        if difference := contract_difference(sender.contract_version, own_version):
            raise PrefillFailed(difference)
        connect_s = self._deadlines.connect_s

        async def connect(connection_id: str, transport: str, offer: bytes) -> None:
            await wire.connect(
                self._client(sender).channel,
                receiver=self._context.identity,
                sender_incarnation=sender.incarnation,
                connection_id=connection_id,
                transport=transport,
                offer=offer,
                layout=self._context.layout.describe(),
                timeout_s=connect_s,
            )
            self._forget_other_starts(sender)

        return await self._connections.get(
            _peer_key(sender),
            connect,
            asyncio.get_running_loop().time() + connect_s,
        )

    def stream(self, sender: WorkerIdentity) -> PrefillStream:
        """Return the stream to a prefill worker; raises PrefillFailed if its channel is closed."""
        return self._client(sender).stream()

    def drop(self, connection: Connection) -> None:
        """Abort a connection that its prefill worker does not know; the next attempt makes one."""
        self._connections.drop(connection)

    def stop_meeting(self) -> None:
        """Stop what connects ahead."""
        for meeting in self._meeting.values():
            meeting.cancel()

    async def close(self) -> None:
        """Close connections and channels; nobody may use one."""
        for peer in self._peers.values():
            peer.users.forget()  # else the time of one may be over while another is awaited
        await self._connections.close()
        for peer in self._peers.values():
            if peer.client is not None:
                await _close(peer.client)

    def _met(self, sender: WorkerIdentity, _: asyncio.Task[None]) -> None:
        del self._meeting[sender]

    async def _connect_ahead(self, sender: WorkerIdentity) -> None:
        try:
            with self.using(sender):
                await self.connection(sender)
        except EXPECTED_ERRORS as error:
            # The first request tries again, and reports to its router if that fails, too.
            logger.info(
                "connection_failed",
                extra=fields(prefill_worker=sender.worker_id, error=str(error)),
            )
        except Exception:
            logger.exception("connect_crashed")  # a bug, which has left nothing behind

    def _peer(self, sender: WorkerIdentity) -> _Peer:
        peer = self._peers.get(sender)
        if peer is None:
            idle_s = self._deadlines.idle_s
            peer = self._peers[sender] = _Peer(Users(idle_s, partial(self._give_up, sender)))
        return peer

    def _give_up(self, sender: WorkerIdentity) -> None:
        """Free what is kept for a prefill worker that no request has needed for long."""
        logger.info("peer_forgotten", extra=fields(prefill_worker=sender.worker_id))
        peer = self._peers.pop(sender)
        peer.users.forget()
        if peer.client is not None:
            self._context.tasks.start(_close(peer.client), name=f"close-client-{sender.worker_id}")
        self._connections.forget(_peer_key(sender))

    def _forget_other_starts(self, present: WorkerIdentity) -> None:
        """Free what is kept for other starts of a prefill worker: this one has answered.

        A start that a router names may be gone: the router may have late news.
        """
        for other in [each for each in self._peers if each.worker_id == present.worker_id]:
            if other != present:
                self._give_up(other)

    def _client(self, sender: WorkerIdentity) -> PrefillClient:
        peer = self._peer(sender)
        if peer.client is None:
            callee = self._context.credentials.callee(sender.as_party("prefill"))
            peer.client = PrefillClient(
                ProvenChannel(self._connect_channel(sender.address), callee),
                write_s=self._deadlines.grant_s,
            )
        return peer.client

    def _transfer_key(self, peer_key: PeerKey, connection_id: str) -> bytes:
        name, incarnation = peer_key
        return self._context.credentials.transfer_key(
            connection_id,
            sender=Party(role="prefill", name=name, incarnation=incarnation),
            receiver=self._context.credentials.party,
        )


def _peer_key(sender: WorkerIdentity) -> PeerKey:
    return sender.worker_id, sender.incarnation


async def _close(client: PrefillClient) -> None:
    try:
        await client.close()
    except Exception:
        logger.exception("client_close_failed")  # it is no longer used
