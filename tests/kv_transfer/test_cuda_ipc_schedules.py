"""Random schedules of a CUDA IPC connection, in which whoever may reuse a page does so at once.

A send that succeeded overwrites its pages, a receive that succeeded and an abort that returned
overwrite theirs: a copy that still reads or writes one of them is found.
"""

import asyncio
import contextlib
import random
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import pytest

from kv_transfer import joining
from kv_transfer.cuda_ipc import MAX_COPYING, Receiving, Sending
from kv_transfer.errors import ConnectionBroken
from kv_transfer.order import WINDOW
from tests.kv_transfer.ipc_pair import HostPages, Pair, a_pair, ipc_threads
from tests.kv_transfer.tcp_pair import run
from tests.support.waiting import until

NUM_PAGES = 256
REUSED, OWNED = 1, 2  # bytes of pages that have another owner: of the sender, of the receiver
LONG_S, SHORT_S = 5.0, 0.01

ENDS = [
    "nothing",
    "a send is cancelled",
    "a receive is cancelled",
    "a send is late",
    "a receive is late",
    "a copy fails",
    "the receiver expects other pages",
    "the sender aborts",
    "the receiver aborts",
    "the sender dies",
]


def run_seeds(num_seeds: int, scenario: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Run a schedule for each of so many seeds; an error tells its seed."""
    for seed in range(num_seeds):
        try:
            run(partial(scenario, seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


class WatchedPages(HostPages):
    """Copies that a schedule holds: some before they read, some before they write."""

    def __init__(self, pages: HostPages, seed: int) -> None:
        super().__init__(pages.source, pages.target)
        self.random = random.Random(seed)
        self.is_holding = True
        self.fails_on: int | None = None  # source page
        self.waiting: list[threading.Event] = []
        self.lock = threading.Lock()
        self.reading: set[int] = set()
        self.writing: set[int] = set()
        self.copied: set[int] = set()  # source pages
        self.num_copying = 0
        self.wrong: list[str] = []

    def copy(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        with self.lock:
            self.num_copying += 1
            self.reading.update(source_ids)
            self.writing.update(target_ids)
            if self.num_copying > MAX_COPYING:
                self.wrong.append(f"{self.num_copying} copies at a time")
            if self.is_closed.is_set():
                self.wrong.append("a copy began after the unmapping")
        try:
            self._hold()
            contents = self.source.export_pages(source_ids)
            self._hold()
            if self.fails_on in source_ids:
                raise RuntimeError("an illegal memory access was encountered")
            self.target.import_pages(target_ids, contents)
            self.copied.update(source_ids)
        finally:
            with self.lock:
                self.num_copying -= 1
                self.reading.difference_update(source_ids)
                self.writing.difference_update(target_ids)

    def close(self) -> None:
        if self.num_copying:
            self.wrong.append("unmapped under a copy")
        super().close()

    def release_one(self) -> None:
        with self.lock:
            if self.waiting:
                self.waiting.pop(self.random.randrange(len(self.waiting))).set()

    def release_all(self) -> None:
        with self.lock:
            self.is_holding = False
            for each in self.waiting:
                each.set()

    def _hold(self) -> None:
        with self.lock:
            if not self.is_holding or self.random.random() < 0.3:
                return
            event = threading.Event()
            self.waiting.append(event)
        if not event.wait(10):
            self.wrong.append("nobody released a copy")


class Schedule:
    """One connection, its operations and what ends it, in an order that a seed decides."""

    def __init__(self, pair: Pair, sides: tuple[Receiving, Sending], end: str, seed: int) -> None:
        self.pair, self.end = pair, end
        self.receiving, self.sending = sides
        self.random = random.Random(seed)
        assert isinstance(pair.mapped, WatchedPages)
        self.pages = pair.mapped
        sizes = [self.random.randint(1, 3) for _ in range(self.random.randint(3, 60))]
        self.source_ids = self._chunks(sizes)
        self.target_ids = self._chunks(sizes)
        self.contents = [pair.source.export_pages(each) for each in self.source_ids]
        self.victim = self.random.randrange(len(sizes))
        self.sends: list[asyncio.Task[None]] = []
        self.receives: list[asyncio.Task[None]] = []
        self.aborts: list[asyncio.Task[None]] = []
        self.owned: list[int] = []  # target pages that have their next owner

    async def run(self) -> None:
        num_posts = 2 * len(self.source_ids)
        ends_at = self.random.randrange(num_posts)
        for index in range(num_posts):
            self.random.choice([self._post_send, self._post_receive])()
            if index == ends_at:
                await asyncio.sleep(0)  # as drivers, which cancel only what has begun
                self._end()
            for _ in range(self.random.randint(0, 3)):
                await asyncio.sleep(0.0005 if self.random.random() < 0.1 else 0)
            if self.random.random() < 0.3:
                self.pages.release_one()
        for _ in self.source_ids:
            self._post_send()
            self._post_receive()
        await asyncio.sleep(3 * SHORT_S if "late" in self.end else 0.002)
        self.pages.release_all()
        operations = [*self.sends, *self.receives]
        _, hanging = await asyncio.wait(operations, timeout=LONG_S / 2)
        assert not hanging
        await asyncio.gather(*self.aborts)

        results = await asyncio.gather(*operations, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                assert self.end != "nothing", repr(result)
                if not isinstance(result, (ConnectionBroken, asyncio.CancelledError)):
                    raise result
        await self._abort_receiver()
        assert not self.pages.wrong
        assert (self.pair.target.export_pages(self.owned) == OWNED).all(), "written after its end"

    def _chunks(self, sizes: list[int]) -> list[list[int]]:
        ids = self.random.sample(range(NUM_PAGES), sum(sizes))
        return [[ids.pop() for _ in range(size)] for size in sizes]

    def _post_send(self) -> None:
        if (index := len(self.sends)) < len(self.source_ids):
            self.sends.append(asyncio.create_task(self._send(index)))

    def _post_receive(self) -> None:
        if (index := len(self.receives)) < len(self.target_ids):
            self.receives.append(asyncio.create_task(self._receive(index)))

    def _end(self) -> None:
        match self.end:
            case "a send is cancelled":
                if self.sends:
                    self.random.choice(self.sends).cancel()
            case "a receive is cancelled":
                if self.receives:
                    self.random.choice(self.receives).cancel()
            case "a copy fails":
                self.pages.fails_on = self.source_ids[self.victim][0]
            case "the sender aborts":
                self._begin(self.sending.abort())
            case "the receiver aborts":
                self._begin(self._abort_receiver())
            case "the sender dies":
                self.sending._wire.shut()

    def _seconds(self, side: str, index: int) -> float:
        return SHORT_S if self.end == f"a {side} is late" and index == self.victim else LONG_S

    async def _send(self, index: int) -> None:
        page_ids = self.source_ids[index]
        try:
            await self.sending.send(page_ids, self._seconds("send", index))
        except BaseException:
            self._begin(self.sending.abort())
            raise
        assert not self.pages.reading.intersection(page_ids), "reused while a copy reads it"
        assert self.pages.copied.issuperset(page_ids), "acknowledged without a copy"
        self.pair.source.slots[page_ids] = REUSED

    async def _receive(self, index: int) -> None:
        page_ids = self.target_ids[index]
        is_wrong = self.end == "the receiver expects other pages" and index == self.victim
        try:
            await self.receiving.receive(page_ids[is_wrong:], self._seconds("receive", index))
        except BaseException:
            self._begin(self._abort_receiver())
            raise
        assert not is_wrong
        assert (self.pair.target.export_pages(page_ids) == self.contents[index]).all()
        self._own(page_ids)

    def _begin(self, abort: Coroutine[Any, Any, None]) -> None:
        self.aborts.append(asyncio.create_task(abort))

    async def _abort_receiver(self) -> None:
        await self.receiving.abort()
        for page_ids in self.target_ids:
            self._own(page_ids)

    def _own(self, page_ids: list[int]) -> None:
        assert not self.pages.writing.intersection(page_ids), "reused while a copy writes it"
        self.pair.target.slots[page_ids] = OWNED
        self.owned.extend(page_ids)


def watch(pair: Pair, seed: int) -> None:
    """Let the pages that the receiver maps be watched."""
    memory = pair.receiver_memory
    unwatched = memory.open

    def open_watched(card: bytes, num_pages: int) -> HostPages:
        memory.opened[-1] = WatchedPages(unwatched(card, num_pages), seed)
        return memory.opened[-1]

    memory.open = open_watched  # type: ignore[method-assign]


@pytest.mark.parametrize("end", ENDS)
def test_no_page_is_reused_under_a_copy(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(seed: int) -> None:
        async with a_pair(num_pages=NUM_PAGES) as pair:
            watch(pair, seed)
            pages_at_once = random.Random(seed).choice([1, 8, NUM_PAGES])
            limit = pages_at_once * pair.source.page_bytes
            monkeypatch.setattr(joining, "JOINED_BYTES", limit)
            num_tasks = len(asyncio.all_tasks())
            sides = await pair.connect()
            await Schedule(pair, sides, end, seed).run()
            await sides[1].abort()
            await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 1)  # one listens
            await until(lambda: not ipc_threads())
            assert all(side._wire._socket.fileno() == -1 for side in sides), "a socket stayed"

    run_seeds(12, scenario)


def frame(number: int, page_ids: Sequence[int]) -> bytes:
    return struct.pack(f"!8sQI{len(page_ids)}I", b"PWIPCFR1", number, len(page_ids), *page_ids)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return what a broken sender sends in place of a frame."""
    at = rng.randrange(len(data))
    return rng.choice(
        [
            data[:at],
            data + data,
            data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            rng.randbytes(len(data)),
            data[:16] + struct.pack("!I", rng.choice([0, 64, 65, 2**32 - 1])),
        ]
    )


def test_no_sequence_of_bytes_is_copied_unless_it_is_frames_or_kept_beyond_its_end() -> None:
    async def scenario(seed: int) -> None:
        rng = random.Random(seed)
        async with a_pair() as pair:
            num_tasks = len(asyncio.all_tasks())
            receiving, sending = await pair.connect()
            contents = pair.source.export_pages(range(64))
            free = rng.sample(range(64), 64)
            sizes = [rng.randint(1, 6) for _ in range(60)]
            named: list[list[int]] = []  # in frames that are right, and before them were no others
            is_right = True
            receives: list[tuple[list[int], asyncio.Task[None]]] = []
            for index in range(rng.randint(1, 60)):
                if rng.random() < 0.4 and len(free) >= 6:
                    page_ids = [free.pop() for _ in range(sizes[len(receives)])]
                    receiving_them = receiving.receive(page_ids, rng.choice([0.02, 0.3]))
                    receives.append((page_ids, asyncio.create_task(receiving_them)))
                else:
                    page_ids = rng.choices(range(64), k=sizes[len(named)])
                    data = frame(len(named), page_ids)
                    if seed % 3 and rng.random() < 0.1:
                        sent, data = data, damaged(data, rng)
                        is_right = is_right and data == sent
                    if is_right:
                        named.append(page_ids)
                    with contextlib.suppress(OSError):
                        await sending._wire.send(data)
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
                kept = [*receiving._frames, *(each.source_ids for each in receiving._met)]
                assert sum(map(len, kept)) <= 64, index
                assert len(receiving._frames) <= WINDOW
            results = await asyncio.gather(*(each for _, each in receives), return_exceptions=True)
            for index, ((page_ids, _), result) in enumerate(zip(receives, results, strict=True)):
                assert result is None or isinstance(result, ConnectionBroken)
                if result is None and index < len(named):
                    assert (pair.target.export_pages(page_ids) == contents[named[index]]).all()
            await receiving.abort()
            await sending.abort()
            await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 1)  # one listens
            await until(lambda: not ipc_threads())

    run_seeds(60, scenario)
