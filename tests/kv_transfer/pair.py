"""A sender and a receiver in one event loop, joined by an in-memory message stream."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from kv_transfer.connections import AcceptedConnections, ConnectCall, ConnectionPool
from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.driver import TransferStats
from kv_transfer.errors import DigestMismatch
from kv_transfer.joining import JoinedDigests
from kv_transfer.messages import Ticket
from kv_transfer.order import Incoming, Outgoing
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transport import Connection
from tests.support.fake_engine import FakePageStorage
from tests.support.loopback import LoopbackNetwork, LoopbackTransport
from tests.support.virtual_time import run_inline

KEY = bytes(range(32))  # of every connection
RECEIVER = ("decode-0", 9)
Digests = TypeVar("Digests")
TICKET = Ticket(transfer_id=b"t" * 16, attempt=0, sender_incarnation=7, receiver_incarnation=9)
DEADLINES = TransferDeadlines(
    grant_s=1, chunk_s=5, slot_s=5, post_s=1, transfer_s=2, digest_s=5, ack_s=5, abort_s=4
)


class Panic(BaseException):
    """What ends more than one call, as extension modules raise it."""


def make_storage(num_pages: int, seed: int) -> FakePageStorage:
    """Return a storage of random pages; different seeds share no page."""
    storage = FakePageStorage(num_pages=num_pages, page_size=4)
    storage.slots[:] = np.random.default_rng(seed).integers(
        0, 256, storage.slots.shape, dtype=np.uint8
    )
    return storage


class Workers:
    """Two workers' storages, transports and connections over one loopback network."""

    def __init__(self, network: LoopbackNetwork, *, num_pages: int = 64, seed: int = 1) -> None:
        self.network = network
        self.source = make_storage(num_pages, seed)
        self.target = make_storage(num_pages, seed + 1)
        self.sender_transport = LoopbackTransport(network, self.source)
        self.receiver_transport = LoopbackTransport(network, self.target)
        ids = iter(range(1000))
        self.pool = ConnectionPool(
            [self.receiver_transport],
            random_id=lambda: f"c{next(ids)}",
            key_of=lambda peer_key, connection_id: KEY,
        )
        self.accepted = AcceptedConnections([self.sender_transport], idle_s=60)
        self.num_connects = 0

    def accepting(
        self, *, after_s: float = 0.0, key: bytes = KEY, deadline: float = 5
    ) -> ConnectCall:
        """Return a call of the receiver that the sender accepts, some time after it comes."""

        async def call(connection_id: str, transport_name: str, offer: bytes) -> None:
            self.num_connects += 1
            await asyncio.sleep(after_s)
            await self.accepted.connect(
                peer_key=RECEIVER,
                connection_id=connection_id,
                transport_name=transport_name,
                offer=offer,
                key=key,
                deadline=deadline,
            )

        return call

    async def connect(self) -> tuple[Incoming, Outgoing]:
        """Return the receiver's side and the sender's."""
        deadline = asyncio.get_running_loop().time() + 1
        call = self.accepting(deadline=deadline)
        incoming = await self.pool.get(("prefill-0", 7), call, deadline)
        return incoming, self.accepted.get(RECEIVER, incoming.connection.connection_id).outgoing

    async def connections(self) -> tuple[Connection, Connection]:
        """Return what both sides share with their transfers."""
        incoming, outgoing = await self.connect()
        return incoming.connection, outgoing.connection


class Stream:
    """One direction of the control stream: in order, with a delay; can be cut."""

    def __init__(self, delay_s: float = 0.001) -> None:
        self.delay_s = delay_s
        self.is_cut = False
        self.seen: list[object] = []
        self.deliver: Callable[..., None] | None = None
        self.drop: Callable[[object], bool] = lambda message: False
        self._tail: asyncio.Task[None] | None = None

    def send(self, message: object) -> None:
        if self.is_cut:
            return
        self.seen.append(message)
        if not self.drop(message):
            self._tail = asyncio.create_task(self._carry(message, self._tail))

    async def _carry(self, message: object, before: asyncio.Task[None] | None) -> None:
        await asyncio.sleep(self.delay_s)
        if before is not None:
            await before
        if not self.is_cut:
            assert self.deliver is not None
            self.deliver(message)


class Attempt:
    """One transfer of `source_pages` into `target_pages`, computed in chunks."""

    def __init__(
        self,
        workers: Workers,
        sides: tuple[Incoming, Outgoing],
        *,
        source_pages: Sequence[int],
        target_pages: Sequence[int],
        first_page: int = 0,
        chunk_pages: int = 4,
        compute_s: float = 0.01,
        ticket: Ticket = TICKET,
        deadlines: TransferDeadlines = DEADLINES,
        digest_s: float = 0.0,
        streams: tuple[Stream, Stream] | None = None,  # to the receiver, to the sender
    ) -> None:
        incoming, outgoing = sides
        self.workers = workers
        self.source_pages = tuple(source_pages)
        self.target_pages = tuple(target_pages)
        self.first_page = first_page
        self.chunk_pages = chunk_pages
        self.compute_s = compute_s
        self.committed: list[int] = []
        self.acked: list[tuple[int, int]] = []
        self.to_receiver, self.to_sender = streams or (Stream(), Stream())

        async def digest(function: Callable[[], Digests]) -> Digests:
            digests = function()
            await asyncio.sleep(digest_s)
            return digests

        run_digests = digest if digest_s else run_inline
        self.receiver = Receiver(
            ticket=ticket,
            page_ids=target_pages,
            first_page=first_page,
            storage=workers.target,
            incoming=incoming,
            send=self.to_sender.send,
            on_commit=self.on_commit,
            deadlines=deadlines,
            digests=JoinedDigests(workers.target, run_blocking=run_digests),
        )
        self.sender = Sender(
            ticket=ticket,
            storage=workers.source,
            outgoing=outgoing,
            send=self.to_receiver.send,
            on_ack=self.on_ack,
            deadlines=deadlines,
            digests=JoinedDigests(workers.source, run_blocking=run_digests),
        )
        self.to_receiver.deliver = self.receiver.driver.post
        self.to_sender.deliver = self.sender.driver.post

    def on_commit(self, num_pages: int) -> None:
        self.committed.append(num_pages)

    def on_ack(self, first_page: int, num_pages: int) -> None:
        self.acked.append((first_page, num_pages))

    async def compute(self) -> None:
        """Play the sender's engine."""
        self.sender.grant()
        for first in range(self.first_page, len(self.source_pages), self.chunk_pages):
            await asyncio.sleep(self.compute_s)
            pages = self.source_pages[first : first + self.chunk_pages]
            is_last = first + self.chunk_pages >= len(self.source_pages)
            self.sender.pages_computed(first, pages, is_last)

    async def run(self) -> list[object]:
        """Run both sides; return their results or errors, receiver first."""
        return await asyncio.gather(
            self.receiver.run(), self.sender.run(), self.compute(), return_exceptions=True
        )

    async def wait_quiescent(self) -> None:
        await asyncio.gather(
            self.receiver.driver.wait_quiescent(), self.sender.driver.wait_quiescent()
        )

    def is_equal(self, num_pages: int) -> bool:
        """Tell whether the first pages arrived unchanged."""
        source = self.workers.source.export_pages(self.source_pages[self.first_page : num_pages])
        target = self.workers.target.export_pages(self.target_pages[self.first_page : num_pages])
        return bool((source == target).all())


class Storages(Protocol):
    """A pair of workers over a real transport, which their connections join."""

    @property
    def source(self) -> FakePageStorage: ...

    @property
    def target(self) -> FakePageStorage: ...


async def check_order(pair: Storages, receiving: Connection, sending: Connection) -> None:
    """Move pages several times; each must arrive in its place."""
    for seed in range(3):
        from_pages, to_pages = shuffled(10, seed), shuffled(10, seed + 50)

        await asyncio.gather(sending.send(from_pages, 5.0), receiving.receive(to_pages, 5.0))

        moved = pair.source.export_pages(from_pages)
        assert (moved == pair.target.export_pages(to_pages)).all()


def damage_exports(storage: FakePageStorage) -> None:
    """Let a sender send other bytes than it has computed digests of."""
    export = storage.export_pages
    storage.export_pages = (  # type: ignore[method-assign]
        lambda page_ids: export(page_ids) ^ np.uint8(1)
    )


async def check_whole_transfers(
    pair: Storages, receiving: Connection, sending: Connection, damage: Callable[[], None]
) -> None:
    """Run a transfer that succeeds, and after `damage` one that must find it."""
    workers = Workers(LoopbackNetwork())
    workers.source, workers.target = pair.source, pair.target
    sides = (Incoming(receiving), Outgoing(sending))
    good = Attempt(workers, sides, source_pages=shuffled(10, 1), target_pages=shuffled(10, 2))
    received, sent, _ = await good.run()
    assert isinstance(received, TransferStats)
    assert isinstance(sent, TransferStats)
    assert received.bytes_moved == 10 * pair.source.page_bytes
    assert good.is_equal(10)

    damage()

    bad = Attempt(workers, sides, source_pages=shuffled(10, 3), target_pages=shuffled(10, 4))
    received, _, _ = await bad.run()
    await bad.wait_quiescent()
    assert isinstance(received, DigestMismatch)
    assert bad.committed == []


def shuffled(num_pages: int, seed: int, of: int = 64) -> list[int]:
    """Return distinct page ids in random order."""
    return random.Random(seed).sample(range(of), num_pages)
