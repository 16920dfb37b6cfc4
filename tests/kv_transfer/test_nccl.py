"""The NCCL transport's threads and deadlines, with a device that lives in host memory."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from kv_transfer.errors import ConnectionBroken, LayoutMismatch, TransportRefused
from kv_transfer.nccl import _OFFER, NcclConnection, NcclTransport, _in_daemon_thread
from kv_transfer.polling_thread import PollingThread, Steps
from tests.kv_transfer.pair import check_whole_transfers, damage_exports, make_storage
from tests.kv_transfer.tcp_pair import run, soon
from tests.support.waiting import until


class HostLink:
    """A Link over a shared list of messages; hangs when told to."""

    def __init__(self, device: "HostDevice", wire: list[Any], is_sender: bool) -> None:
        self.device = device
        self.wire = wire
        self.is_sender = is_sender
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.is_hanging = False
        self.is_aborted = False

    def open(self) -> Steps[None]:
        self.wire.append(self)
        while len(self.wire) < 2:
            yield

    def send(self, page_ids: Sequence[int]) -> Steps[None]:
        self.wire.append(self.device.storage.export_pages(page_ids))
        while self.wire[2:] or self.is_hanging:
            yield

    def receive(self, page_ids: Sequence[int]) -> Steps[None]:
        while not self.wire[2:] or self.is_hanging:
            yield
        self.device.storage.import_pages(page_ids, self.wire.pop())

    def abort(self) -> None:
        self.may_abort.wait(10)
        self.is_aborted = True


class HostDevice:
    wires: dict[bytes, list[Any]]

    def __init__(self, storage: Any, wires: dict[bytes, list[Any]]) -> None:
        self.storage = storage
        self.page_bytes = storage.page_bytes
        self.nccl_version = 22809
        self.wires = wires
        self.links: list[HostLink] = []
        self.warm_up_thread = ""

    def warm_up(self) -> Steps[None]:
        yield
        self.warm_up_thread = threading.current_thread().name

    def unique_id(self) -> bytes:
        return bytes([len(self.wires)]) * 128

    def link(
        self, name: str, *, is_sender: bool, unique_id: bytes, pages_in_message: int
    ) -> HostLink:
        link = HostLink(self, self.wires.setdefault(unique_id, []), is_sender)
        self.links.append(link)
        return link


class Pair:
    def __init__(self) -> None:
        self.source, self.target = make_storage(64, 1), make_storage(64, 2)
        wires: dict[bytes, list[Any]] = {}
        self.devices = HostDevice(self.source, wires), HostDevice(self.target, wires)
        self.sender = NcclTransport(self.source, make_device=lambda _: self.devices[0])
        self.receiver = NcclTransport(self.target, make_device=lambda _: self.devices[1])

    async def connect(self) -> tuple[NcclConnection, NcclConnection]:
        offer = self.receiver.offer("c0", b"")
        receiving, sending = await asyncio.gather(
            self.receiver.accept("c0", soon()), self.sender.connect("c0", offer, b"", soon())
        )
        return receiving, sending


@asynccontextmanager
async def a_pair() -> AsyncIterator[Pair]:
    pair = Pair()
    try:
        yield pair
    finally:
        await pair.sender.close()
        await pair.receiver.close()


def test_whole_transfers_run_over_the_polling_threads_and_find_damage() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            damage = partial(damage_exports, pair.source)

            await check_whole_transfers(pair, receiving, sending, damage)

            assert pair.devices[0].warm_up_thread == "nccl"

    run(scenario)


def test_a_hanging_peer_ends_at_the_deadline_and_abort_runs_beside_the_event_loop() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            pair.devices[1].links[0].is_hanging = True
            pair.devices[1].links[0].may_abort.clear()
            before = pair.target.slots.copy()
            posted = asyncio.create_task(sending.send([1, 2], 0.5))

            with pytest.raises(ConnectionBroken, match="deadline"):
                await receiving.receive([3, 4], 0.1)
            aborting = asyncio.create_task(receiving.abort())
            await asyncio.sleep(0.01)
            assert not aborting.done()
            pair.devices[1].links[0].may_abort.set()  # which a held up event loop would not
            await asyncio.wait_for(aborting, 5)

            assert pair.devices[1].links[0].is_aborted
            pair.devices[1].links[0].is_hanging = False
            await asyncio.sleep(0.01)
            assert (pair.target.slots == before).all()
            with pytest.raises(ConnectionBroken):
                await posted
            with pytest.raises(ConnectionBroken, match="is broken"):
                await receiving.receive([3], 5.0)

    run(scenario)


def test_an_abort_that_ends_after_the_event_loop_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    may_end = threading.Event()

    def abort() -> None:
        may_end.wait(10)

    async def scenario() -> None:
        aborting = asyncio.create_task(_in_daemon_thread(abort))
        await asyncio.sleep(0.01)
        aborting.cancel()

    asyncio.run(scenario())
    [thread] = [each for each in threading.enumerate() if each.name == "nccl-abort"]
    may_end.set()
    thread.join(10)

    assert not raised


def test_a_peer_that_never_comes_aborts_the_set_up() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            pair.receiver.offer("c0", b"")

            with pytest.raises(ConnectionBroken, match="deadline"):
                await pair.receiver.accept("c0", soon(0.05))

            await until(lambda: pair.devices[1].links[0].is_aborted)

    run(scenario)


def test_another_nccl_version_is_refused_before_the_set_up() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            pair.devices[0].nccl_version = 22907
            offer = pair.receiver.offer("c0", b"")

            with pytest.raises(LayoutMismatch, match=r"22809.*22907"):
                await pair.sender.connect("c0", offer, b"", soon())
            with pytest.raises(ConnectionBroken, match="offer has 3 bytes"):
                await pair.sender.connect("c0", b"abc", b"", soon())

    run(scenario)


@pytest.mark.parametrize("num_pages", [0, 2**32 - 1])
def test_a_message_that_the_staging_buffer_cannot_hold_is_refused(num_pages: int) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = pair.receiver.offer("c0", b"")
            unique_id, version, _, page_bytes = _OFFER.unpack(offer)
            forged = _OFFER.pack(unique_id, version, num_pages, page_bytes)

            with pytest.raises(LayoutMismatch, match=f"{num_pages} pages"):
                await pair.sender.connect("c0", forged, b"", soon())
            assert not pair.devices[0].links, "nothing was allocated"

    run(scenario)


def test_pages_in_host_memory_are_refused_by_name() -> None:
    with pytest.raises(TransportRefused, match="CUDA device"):
        NcclTransport(make_storage(4, 1))


def test_one_operation_that_fails_or_hangs_leaves_the_others_alone() -> None:
    def hang() -> Steps[None]:
        while True:
            yield

    def fail() -> Steps[None]:
        yield
        raise ValueError("broken")

    def count() -> Steps[int]:
        for _ in range(10):
            yield
        return 10

    thread = PollingThread("test")
    hanging = thread.submit("a", hang())
    failing = thread.submit("b", fail())

    assert thread.submit("c", count()).result(5) == 10
    with pytest.raises(ValueError, match="broken"):
        failing.result(5)
    assert not hanging.done()
    thread.drop("a").result(5)
    with pytest.raises(ConnectionBroken):
        hanging.result(0)
    left = thread.submit("a", hang())
    thread.close(5)
    with pytest.raises(ConnectionBroken):
        left.result(0)
