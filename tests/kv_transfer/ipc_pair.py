"""Both sides of a CUDA IPC connection without a GPU: memory is an object of the test."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kv_transfer.cuda_ipc import CudaIpcTransport, Receiving, Sending
from kv_transfer.errors import TransportRefused
from kv_transfer.page_socket import PageTls
from kv_transfer.proven_sockets import ProvenSockets
from tests.kv_transfer.pair import KEY, make_storage
from tests.kv_transfer.tcp_pair import soon
from tests.support.fake_engine import FakePageStorage

SOURCE_CARD, TARGET_CARD = b"source" * 4, b"target" * 4


class HostPages:
    """Another worker's pages in this process; counts what a GPU would do."""

    def __init__(self, source: FakePageStorage, target: FakePageStorage) -> None:
        self.source, self.target = source, target
        self.is_closed = threading.Event()
        self.closed_by = ""
        self.threads: set[str] = set()
        self.begun: list[int] = []  # first source page of each copy
        self.ended: list[int] = []
        self.held: dict[int, threading.Event] = {}  # likewise |-> set when that copy may go on

    def copy(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.append(source_ids[0])
        if held := self.held.get(source_ids[0]):
            assert held.wait(10)
        assert not self.is_closed.is_set(), "copied out of pages that are not mapped any more"
        self.target.import_pages(target_ids, self.source.export_pages(source_ids))
        self.ended.append(source_ids[0])

    def hold(self, page_id: int) -> threading.Event:
        """Let the copy that begins with a page wait until the event is set."""
        return self.held.setdefault(page_id, threading.Event())

    def close(self) -> None:
        self.closed_by = threading.current_thread().name
        self.is_closed.set()


class HostMemory:
    """Implements `kv_transfer.cuda_ipc.Memory`; `cards` has the memory of all workers."""

    def __init__(
        self, storage: FakePageStorage, card: bytes, cards: dict[bytes, FakePageStorage]
    ) -> None:
        self.storage = storage
        self.host_id = "host"
        self.opened: list[HostPages] = []
        self.opening_s = 0.0
        self._card, self._cards = card, cards
        cards[card] = storage

    def card(self) -> bytes:
        return self._card

    def open(self, card: bytes, num_pages: int) -> HostPages:
        if self.opening_s:
            threading.Event().wait(self.opening_s)
        if card not in self._cards:
            raise TransportRefused("cudaIpcOpenMemHandle failed")
        assert num_pages == self._cards[card].num_pages
        self.opened.append(HostPages(self._cards[card], self.storage))
        return self.opened[-1]


class Pair:
    """A sender and a receiver on one host."""

    def __init__(self, tls: PageTls | None = None, *, num_pages: int = 64) -> None:
        self.source, self.target = make_storage(num_pages, 1), make_storage(num_pages, 2)
        cards: dict[bytes, FakePageStorage] = {}
        self.sender_memory = HostMemory(self.source, SOURCE_CARD, cards)
        self.receiver_memory = HostMemory(self.target, TARGET_CARD, cards)
        self.cards = cards

        def transport(storage: FakePageStorage, memory: HostMemory) -> CudaIpcTransport:
            sockets = ProvenSockets(host="127.0.0.1", tls=tls)
            return CudaIpcTransport(storage, sockets, memory=memory)

        self.sender = transport(self.source, self.sender_memory)
        self.receiver = transport(self.target, self.receiver_memory)

    async def connect(self, connection_id: str = "c0") -> tuple[Receiving, Sending]:
        offer = self.receiver.offer(connection_id, KEY)
        receiving, sending = await asyncio.gather(
            self.receiver.accept(connection_id, soon()),
            self.sender.connect(connection_id, offer, KEY, soon()),
        )
        return receiving, sending

    @property
    def mapped(self) -> HostPages:
        return self.receiver_memory.opened[-1]


@asynccontextmanager
async def a_pair(tls: PageTls | None = None, *, num_pages: int = 64) -> AsyncIterator[Pair]:
    pair = Pair(tls, num_pages=num_pages)
    try:
        yield pair
    finally:
        await pair.sender.close()
        await pair.receiver.close()
        assert all(each.is_closed.is_set() for each in pair.receiver_memory.opened), (
            "a mapping stayed, which keeps the memory of the peer"
        )


def ipc_threads() -> int:
    return sum(each.name.startswith("cuda_ipc") for each in threading.enumerate())
