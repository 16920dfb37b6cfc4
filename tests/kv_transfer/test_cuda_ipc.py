"""Pages copied out of a peer's memory, without a GPU: that memory is an object of the test."""

import asyncio
import contextlib
import gc
import json
import struct
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kv_cache.page_storage import PageBytes
from kv_transfer import cuda_ipc_memory
from kv_transfer.cuda_ipc import CudaIpcTransport, Receiving, Sending
from kv_transfer.cuda_ipc_memory import runs_of_pages
from kv_transfer.driver import TransferStats
from kv_transfer.errors import (
    ConnectionBroken,
    LayoutMismatch,
    TransportRefused,
)
from kv_transfer.order import WINDOW, Incoming, Outgoing
from kv_transfer.proven_sockets import ProvenSockets
from prefill_worker.config import PrefillConfig
from tests.kv_transfer.ipc_pair import SOURCE_CARD, HostPages, Pair, a_pair, ipc_threads
from tests.kv_transfer.pair import (
    KEY,
    Attempt,
    Panic,
    Workers,
    check_order,
    check_whole_transfers,
    make_storage,
)
from tests.kv_transfer.tcp_pair import page_tls, run, soon, wire_tap
from tests.kv_transfer.test_cuda_runtime import make_streams
from tests.support.certificates import Authority
from tests.support.fake_engine import FakePageStorage
from tests.support.loopback import LoopbackNetwork
from tests.support.waiting import until

LARGE_PAGE_BYTES = 64 << 20  # several times that of large models


async def tapped(pair: Pair) -> list[bytes]:
    """Move a page past an observer; return what the sender sent."""
    offer = json.loads(pair.receiver.offer("c0", KEY))
    relay, tapped_port, sent = await wire_tap(offer["port"])
    past = json.dumps({**offer, "port": tapped_port}).encode()
    receiving, sending = await asyncio.gather(
        pair.receiver.accept("c0", soon()), pair.sender.connect("c0", past, KEY, soon())
    )
    await asyncio.gather(sending.send([1], 5.0), receiving.receive([2], 5.0))
    assert (pair.source.export_pages([1]) == pair.target.export_pages([2])).all()
    page = pair.source.export_pages([1]).tobytes()
    assert not any(page in each for each in sent), "pages themselves do not cross the socket"
    relay.close()
    return sent


def test_pages_arrive_in_order() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()

            await check_order(pair, receiving, sending)

            assert all(name.startswith("cuda_ipc") for name in pair.mapped.threads)
            assert sending.max_chunk_bytes >= PrefillConfig().max_chunk_pages * LARGE_PAGE_BYTES

    run(scenario)


def test_whole_transfers_run_and_find_damage() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            copy = pair.mapped.copy

            def copy_wrong(source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
                copy(source_ids, target_ids)
                last = target_ids[-1:]
                pair.target.import_pages(last, pair.target.export_pages(last) ^ np.uint8(1))

            def damage() -> None:
                pair.mapped.copy = copy_wrong  # type: ignore[method-assign]

            await check_whole_transfers(pair, receiving, sending, damage)

    run(scenario)


def test_a_receiver_on_another_host_is_refused_before_anything_is_sent() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            pair.receiver_memory.host_id = "elsewhere"
            offer = pair.receiver.offer("c0", KEY)

            with pytest.raises(TransportRefused, match="on another host"):
                await pair.sender.connect("c0", offer, KEY, soon())

    run(scenario)


def without_card(pair: Pair) -> None:
    del pair.cards[SOURCE_CARD]


def with_other_pages(pair: Pair) -> None:
    pair.sender._storage = FakePageStorage(num_pages=64, page_size=8)


def out_of_memory(pair: Pair) -> None:
    def fail(card: bytes, num_pages: int) -> HostPages:
        raise RuntimeError("CUDA error: out of memory")

    pair.receiver_memory.open = fail  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("spoil", "at_sender", "at_receiver"),
    [
        (
            without_card,
            (TransportRefused, "cannot map the pages"),
            (TransportRefused, "cudaIpcOpenMemHandle failed"),
        ),
        (
            with_other_pages,
            (ConnectionBroken, "closed the connection"),
            (LayoutMismatch, "bytes at the sender"),
        ),
        (
            out_of_memory,
            (ConnectionBroken, "closed the connection"),
            (ConnectionBroken, "RuntimeError: CUDA error: out of memory"),
        ),
    ],
    ids=["cannot be mapped", "of another size", "otherwise"],
)
def test_pages_that_are_not_mapped_are_told_on_both_sides(
    spoil: Callable[[Pair], None],
    at_sender: tuple[type[Exception], str],
    at_receiver: tuple[type[Exception], str],
) -> None:
    async def scenario() -> None:
        before = ipc_threads()
        async with a_pair() as pair:
            spoil(pair)
            offer = pair.receiver.offer("c0", KEY)
            accepting = asyncio.create_task(pair.receiver.accept("c0", soon()))

            with pytest.raises(at_sender[0], match=at_sender[1]):
                await pair.sender.connect("c0", offer, KEY, soon())
            with pytest.raises(at_receiver[0], match=at_receiver[1]):
                await accepting
            await until(lambda: ipc_threads() == before)

    run(scenario)


def test_a_sender_that_dies_is_unmapped_at_once_though_nobody_waits_for_it() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()

            sending._wire.shut()  # as the end of its process does

            await until(pair.mapped.is_closed.is_set)
            assert receiving.is_broken
            with pytest.raises(ConnectionBroken, match="is broken"):
                await receiving.receive([1], 5.0)

    run(scenario)


def test_the_death_of_the_sender_ends_a_posted_receive() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            posted = asyncio.create_task(receiving.receive([1], 60.0))
            await asyncio.sleep(0.05)

            sending._wire.shut()

            with pytest.raises(ConnectionBroken, match="closed"):
                await asyncio.wait_for(posted, 10)

    run(scenario)


def test_abort_waits_for_the_copy_and_then_unmaps() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            pages = pair.mapped
            may_copy = pages.hold(1)
            sends = asyncio.create_task(sending.send([1], 5.0))
            receives = asyncio.create_task(receiving.receive([2], 1.0))
            await until(lambda: pages.begun == [1])

            with pytest.raises(ConnectionBroken, match="no progress before the deadline"):
                await receives
            aborts = [asyncio.create_task(receiving.abort()) for _ in range(2)]
            await asyncio.sleep(0.1)

            assert not any(each.done() for each in aborts)
            assert not pages.is_closed.is_set()
            may_copy.set()
            await asyncio.wait_for(asyncio.gather(*aborts), 5)
            assert pages.is_closed.is_set()
            with pytest.raises(ConnectionBroken):
                await sends

    run(scenario)


def post_both(
    receiving: Receiving, sending: Sending, num_pages: int
) -> tuple[list[asyncio.Task[None]], list[asyncio.Task[None]]]:
    """Post a send of each of the first pages, and a receive into the page 32 places behind."""
    return (
        [asyncio.create_task(sending.send([page], 5.0)) for page in range(num_pages)],
        [asyncio.create_task(receiving.receive([32 + page], 5.0)) for page in range(num_pages)],
    )


def test_pages_are_named_before_those_of_the_copy_in_front_are_read() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            pages = pair.mapped
            may_copy = [pages.hold(page) for page in range(2)]
            sends, receives = post_both(receiving, sending, 5)

            await until(lambda: len(pages.begun) == 2)  # without any answer to the sender
            await asyncio.sleep(0.05)
            assert pages.begun == [0, 1]

            may_copy[1].set()  # out of turn, which copies of one stream are not
            await until(lambda: pages.ended == [1])
            await asyncio.sleep(0.05)
            assert not any(each.done() for each in (*sends, *receives)), "acknowledged out of turn"

            may_copy_rest = pages.hold(2)
            may_copy[0].set()
            await asyncio.gather(*sends[:2], *receives[:2])
            await until(lambda: pages.begun == [0, 1, 2])
            await asyncio.sleep(0.05)
            assert not any(each.done() for each in sends[2:]), "pages that are read may be reused"

            may_copy_rest.set()
            await asyncio.gather(*sends, *receives)
            assert pages.begun == [0, 1, 2], "what waited was not copied in one call"
            moved = pair.source.export_pages(range(5))
            assert (moved == pair.target.export_pages(range(32, 37))).all()

    run(scenario)


def test_a_transfer_copies_its_next_chunk_behind_the_one_in_front() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            workers = Workers(LoopbackNetwork())
            workers.source, workers.target = pair.source, pair.target
            attempt = Attempt(
                workers,
                (Incoming(receiving), Outgoing(sending)),
                source_pages=range(8),
                target_pages=range(32, 40),
                chunk_pages=2,
                compute_s=0.0,
            )
            may_copy = pair.mapped.hold(0)
            running = asyncio.create_task(attempt.run())

            await until(lambda: pair.mapped.begun == [0, 2])
            await until(lambda: pair.mapped.ended == [2])
            assert attempt.committed == []
            may_copy.set()
            received, sent, _ = await running

            assert isinstance(received, TransferStats)
            assert isinstance(sent, TransferStats)
            assert attempt.committed == [2, 4, 6, 8]
            assert attempt.is_equal(8)

    run(scenario)


def test_each_operation_has_its_time_from_the_end_of_the_one_before() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            may_copy = pair.mapped.hold(0)
            first = post_both(receiving, sending, 1)
            behind = [
                asyncio.create_task(sending.send([1], 0.5)),
                asyncio.create_task(receiving.receive([33], 0.5)),
            ]

            await asyncio.sleep(0.7)
            may_copy.set()

            await asyncio.gather(*first[0], *first[1], *behind)

    run(scenario)


@pytest.mark.parametrize("end", ["abort", "sender dies", "receive is cancelled"])
def test_when_a_connection_ends_two_copies_end_and_no_third_begins(end: str) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            pages = pair.mapped
            may_copy = [pages.hold(page) for page in range(2)]
            sends, receives = post_both(receiving, sending, 4)
            await until(lambda: len(pages.begun) == 2)

            match end:
                case "sender dies":
                    sending._wire.shut()
                case "receive is cancelled":
                    receives[0].cancel()
                    _, late = await asyncio.wait(receives, timeout=5)
                    assert not late, "pages behind those of a broken receive are waited for"
            aborting = asyncio.create_task(receiving.abort())
            for each in reversed(may_copy):
                await asyncio.sleep(0.05)
                assert not aborting.done()
                each.set()
            await asyncio.wait_for(aborting, 5)

            assert sorted(pages.ended) == sorted(pages.begun) == [0, 1]
            for each in (*sends, *receives):
                with pytest.raises((ConnectionBroken, asyncio.CancelledError)):
                    await each

    run(scenario)


def test_pages_that_a_dead_sender_has_named_are_not_read() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            sends = [asyncio.create_task(sending.send([page], 5.0)) for page in range(WINDOW + 1)]
            await until(lambda: len(receiving._frames) == WINDOW)
            await asyncio.sleep(0.05)
            assert not receiving.is_broken, "one more was named before the first was read"

            sending._wire.shut()
            await until(pair.mapped.is_closed.is_set)

            for ending in (receiving.receive([32], 5.0), *sends):
                with pytest.raises(ConnectionBroken):
                    await ending
            assert pair.mapped.begun == []

    run(scenario)


def test_an_abort_of_the_sender_leaves_the_socket_open_while_pages_are_named() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            _, sending = await pair.connect()
            may_end = asyncio.Event()

            async def send(data: bytes | memoryview) -> None:
                await may_end.wait()

            sending._wire.send = send  # type: ignore[method-assign]
            naming = asyncio.create_task(sending.send([1], 5.0))
            await asyncio.sleep(0)
            aborting = asyncio.create_task(sending.abort())
            await asyncio.sleep(0.05)

            assert not aborting.done()
            may_end.set()
            await asyncio.wait_for(aborting, 5)
            with pytest.raises(ConnectionBroken):
                await naming

    run(scenario)


def test_an_acknowledgement_of_other_pages_breaks_the_connection() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()

            await receiving._wire.send(struct.pack("!Q", 1))

            with pytest.raises(ConnectionBroken, match="read frame: found 1; allowed: 0 to 0"):
                await sending.send([1], 5.0)

    run(scenario)


@pytest.mark.parametrize(
    ("read", "message"),
    [(1, "read frame: found 1; allowed: 2 to 2"), (3, "read frame: found 3; allowed: 2 to 2")],
    ids=["again", "not named"],
)
def test_a_later_acknowledgement_of_other_pages_breaks_the_connection(
    read: int, message: str
) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            sends = [asyncio.create_task(sending.send([page], 5.0)) for page in range(3)]
            await until(lambda: len(receiving._frames) == 3)

            await receiving._wire.send(struct.pack("!Q", 1))  # one number for two frames
            await asyncio.gather(*sends[:2])
            await receiving._wire.send(struct.pack("!Q", read))

            with pytest.raises(ConnectionBroken, match=message):
                await sends[2]

    run(scenario)


def test_nothing_is_acknowledged_behind_a_copy_that_failed() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            pages = pair.mapped
            may_copy = [pages.hold(page) for page in range(2)]
            sends, receives = post_both(receiving, sending, 4)
            await until(lambda: len(pages.begun) == 2)
            copy = pages.target.import_pages

            def fail_first(page_ids: Sequence[int], contents: PageBytes) -> None:
                if page_ids[0] == 32:
                    raise RuntimeError("an illegal memory access was encountered")
                copy(page_ids, contents)

            pages.target.import_pages = fail_first  # type: ignore[method-assign]
            for held in may_copy:
                held.set()

            for receive in receives:
                with pytest.raises(ConnectionBroken, match="an illegal memory access"):
                    await receive
            await until(lambda: pages.ended == [1])
            await asyncio.sleep(0.05)
            assert not any(each.done() for each in sends), "a number covers what was not copied"
            await receiving.abort()
            for send in sends:
                with pytest.raises(ConnectionBroken):
                    await send
            assert pages.begun == [0, 1]

    run(scenario)


def test_a_copy_that_ends_in_any_way_breaks_the_connection_at_once() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()

            def fail(source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
                raise Panic

            pair.mapped.copy = fail  # type: ignore[method-assign]
            sends, receives = post_both(receiving, sending, 1)
            receives += [asyncio.create_task(receiving.receive([40], 60.0)) for _ in range(3)]

            ended, late = await asyncio.wait(receives, timeout=3)

            assert not late, "a copy has ended, and its receive waits for the deadline"
            for each in ended:
                with pytest.raises(ConnectionBroken, match="a copy ended with Panic"):
                    await each
            await receiving.abort()
            with pytest.raises(ConnectionBroken):
                await sends[0]

    run(scenario)


def test_a_copy_that_is_due_when_the_connection_breaks_does_not_begin() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            sends = asyncio.create_task(sending.send([1], 5.0))
            await until(lambda: receiving._frames)
            receives = asyncio.create_task(receiving.receive([2], 5.0))

            while not receiving._copies:
                await asyncio.sleep(0)
            await receiving.abort()

            for each in (receives, sends):
                with pytest.raises(ConnectionBroken):
                    await each
            assert pair.mapped.begun == []

    run(scenario)


def test_an_abort_ends_an_acknowledgement_that_the_sender_does_not_read() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            for num_bytes in (*(1 << 16,) * 10, 1):  # until buffers have grown and filled
                with contextlib.suppress(BlockingIOError):
                    while True:
                        receiving._wire._socket.send(bytes(num_bytes))
                await asyncio.sleep(0.02)
            frames = [struct.pack("!8sQII", b"PWIPCFR1", each, 1, each) for each in range(3)]
            await sending._wire.send(b"".join(frames))
            receives = [asyncio.create_task(receiving.receive([each], 0.3)) for each in range(3)]

            await until(lambda: pair.mapped.ended)
            with pytest.raises(ConnectionBroken, match="no progress before the deadline"):
                await receives[0]
            await asyncio.wait_for(receiving.abort(), 3)

            for each in receives[1:]:
                with pytest.raises(ConnectionBroken, match="another receive failed"):
                    await each
            assert pair.mapped.is_closed.is_set()
            assert receiving._wire._socket.fileno() == -1

    run(scenario)


def test_what_ends_the_reading_of_frames_ends_receives_at_once() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            posted = asyncio.create_task(receiving.receive([2], 60.0))
            await asyncio.sleep(0)

            def fail() -> None:
                raise MemoryError("no room for a frame")

            receiving._copy_what_met = fail  # type: ignore[method-assign]
            sends = asyncio.create_task(sending.send([1], 5.0))

            with pytest.raises(ConnectionBroken, match="MemoryError: no room for a frame"):
                await asyncio.wait_for(posted, 3)
            await until(pair.mapped.is_closed.is_set)
            with pytest.raises(ConnectionBroken):
                await sends

    run(scenario)


async def end_while_two_copy(
    receiving: Receiving, sending: Sending, pages: HostPages, *, num_pages: int
) -> tuple[list[threading.Event], list[asyncio.Task[None]]]:
    """Cancel the tasks that copy the first two pages, as whoever ends an event loop does to all.

    Returns:
        What lets the threads of both copies go on, and the sends and receives, of which all
        receives have ended.
    """
    may_copy = [pages.hold(page) for page in range(2)]
    sends, receives = post_both(receiving, sending, num_pages)
    await until(lambda: len(pages.begun) == 2)
    for copying in tuple(receiving._copies):
        copying.cancel()
    _, late = await asyncio.wait(receives, timeout=3)
    assert not late
    return may_copy, [*sends, *receives]


def test_the_end_of_the_event_loop_begins_no_copy() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            pages = pair.mapped
            may_copy, posted = await end_while_two_copy(receiving, sending, pages, num_pages=6)

            for held in may_copy:
                held.set()
            await until(lambda: len(pages.ended) == 2)
            await receiving.abort()
            assert pages.begun == [0, 1]
            for each in posted:
                with pytest.raises(ConnectionBroken):
                    await each

    run(scenario)


def test_pages_stay_mapped_while_threads_copy_whose_tasks_were_cancelled() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            pages = pair.mapped
            may_copy, posted = await end_while_two_copy(receiving, sending, pages, num_pages=2)

            abort = asyncio.create_task(receiving.abort())
            may_copy[1].set()
            await until(lambda: pages.ended == [1])
            await asyncio.sleep(0.05)
            is_closed = pages.is_closed.is_set()
            may_copy[0].set()

            await abort
            assert not is_closed
            assert pages.is_closed.is_set()
            assert pages.ended == [1, 0]
            await asyncio.gather(*posted, return_exceptions=True)

    run(scenario)


def test_a_copy_that_fails_breaks_the_connection() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()

            def fail(source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
                raise TransportRefused("cudaMemcpyAsync failed: 700")

            pair.mapped.copy = fail  # type: ignore[method-assign]
            sends = asyncio.create_task(sending.send([1], 5.0))

            with pytest.raises(ConnectionBroken, match="cudaMemcpyAsync failed: 700"):
                await receiving.receive([2], 5.0)
            await receiving.abort()
            with pytest.raises(ConnectionBroken):
                await sends

    run(scenario)


def test_an_abort_whose_caller_leaves_goes_on() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, _ = await pair.connect()
            leaving = asyncio.create_task(receiving.abort())
            await asyncio.sleep(0)
            leaving.cancel()

            await until(pair.mapped.is_closed.is_set)

    run(scenario)


@pytest.mark.parametrize("alone", ["receive", "send"])
def test_one_without_the_other_ends_at_the_deadline_and_writes_nothing(alone: str) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            before = pair.target.export_pages(range(64))

            with pytest.raises(ConnectionBroken, match="no progress before the deadline"):
                await (receiving.receive if alone == "receive" else sending.send)([1], 0.2)
            await receiving.abort()

            assert (pair.target.export_pages(range(64)) == before).all()
            with pytest.raises(ConnectionBroken):
                await sending.send([1], 5.0)

    run(scenario)


async def connect_too_slowly(pair: Pair, *, opening_s: float, deadline_s: float) -> None:
    """Let both sides fail because the receiver still maps at its deadline."""
    pair.receiver_memory.opening_s = opening_s
    offer = pair.receiver.offer("c0", KEY)
    connecting = asyncio.create_task(pair.sender.connect("c0", offer, KEY, soon()))

    with pytest.raises(ConnectionBroken):
        await pair.receiver.accept("c0", soon(deadline_s))
    with pytest.raises(ConnectionBroken):
        await connecting


def test_mapping_that_outlasts_the_deadline_leaves_nothing_mapped() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            await connect_too_slowly(pair, opening_s=0.5, deadline_s=0.2)

            await until(lambda: bool(pair.receiver_memory.opened))
            await until(pair.mapped.is_closed.is_set)
            assert pair.mapped.closed_by.startswith("cuda_ipc"), "it blocks the event loop"

    run(scenario)


def test_mapping_that_fails_after_the_deadline_is_no_error_that_nobody_reads() -> None:
    async def scenario() -> None:
        unread: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unread.append(what))
        async with a_pair() as pair:
            pair.cards.clear()  # so that nothing can be mapped
            await connect_too_slowly(pair, opening_s=0.3, deadline_s=0.1)
            await until(lambda: not ipc_threads())
            await asyncio.sleep(0.01)

        gc.collect()
        assert not unread

    run(scenario)


@pytest.mark.parametrize(
    ("num_pages", "offset", "refusal"),
    [
        (8, 0, "cudaStreamCreateWithFlags failed"),
        (7, 64, "cudaStreamCreateWithFlags failed"),
        (9, 0, "pages end at byte 576 of their memory, which has 512"),
        (8, 64, "pages end at byte 576 of their memory, which has 512"),
        (0, 2**64 - 1, "of their memory, which has 512"),
    ],
)
def test_what_fails_behind_a_mapping_unmaps_again(
    monkeypatch: pytest.MonkeyPatch, num_pages: int, offset: int, refusal: str
) -> None:
    closed: list[int] = []
    runtime = SimpleNamespace(
        cudaIpcMemLazyEnablePeerAccess=1,
        cudaIpcMemHandle_t=SimpleNamespace,
        cudaIpcOpenMemHandle=lambda handle, flags: (0, 4096),
        cudaIpcCloseMemHandle=closed.append,
    )
    monkeypatch.setattr(cuda_ipc_memory, "cuda", SimpleNamespace(set_device=lambda device: None))
    memory = object.__new__(cuda_ipc_memory.CudaMemory)
    memory.runtime, memory.device, memory._gpu_id = runtime, torch.device("cpu"), b"g" * 16
    memory.page_bytes, memory.streams = 64, make_streams(monkeypatch, code=2)  # out of memory
    memory._driver = SimpleNamespace(
        CUdeviceptr=int, cuMemGetAddressRange=lambda pointer: (0, pointer, 512)
    )

    with pytest.raises(TransportRefused, match=refusal):
        memory.open(b"h" * 64 + offset.to_bytes(8, "big") + b"o" * 16, num_pages)

    assert closed == [4096]


def test_an_unmapping_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaIpcCloseMemHandle=lambda base: (1,))
    monkeypatch.setattr(cuda_ipc_memory, "cuda", SimpleNamespace(set_device=lambda device: None))
    pages = object.__new__(cuda_ipc_memory.CudaPeerPages)
    memory = object.__new__(cuda_ipc_memory.CudaMemory)
    memory.runtime, memory.device = runtime, torch.device("cpu")
    memory.streams = make_streams(monkeypatch)
    pages._memory, pages._base, pages._stream, pages._words = memory, 4096, 7, None

    with pytest.raises(TransportRefused, match="cudaIpcCloseMemHandle failed: 1"):
        pages.close()

    assert memory.streams.take() == 7, "the stream is idle all the same"


def test_copies_that_were_launched_before_one_failed_have_ended_when_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []

    def copy(*_: object) -> tuple[int]:
        happened.append("copy")
        return (700 if len(happened) == 2 else 0,)

    def make_event(*, blocking: bool) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda: happened.append("record"), synchronize=lambda: happened.append("await")
        )

    runtime = SimpleNamespace(
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyDeviceToDevice=3), cudaMemcpyAsync=copy
    )
    cuda = SimpleNamespace(
        set_device=lambda device: None, Event=make_event, stream=contextlib.nullcontext
    )
    monkeypatch.setattr(cuda_ipc_memory, "cuda", cuda)
    memory = object.__new__(cuda_ipc_memory.CudaMemory)
    memory.runtime, memory.device, memory.page_bytes = runtime, torch.device("cpu"), 64
    memory.words, memory.copies_in_batches = torch.zeros(8, 16, dtype=torch.int32), False
    pages = object.__new__(cuda_ipc_memory.CudaPeerPages)
    pages._memory, pages._first, pages._words = memory, 4096, None
    pages._stream, pages._launching = SimpleNamespace(cuda_stream=1), threading.Lock()

    with pytest.raises(TransportRefused, match="cudaMemcpyAsync failed: 700"):
        pages.copy([0, 2, 4], [1, 3, 5])

    assert happened == ["copy", "copy", "record", "await"]


@pytest.mark.parametrize("end", ["abort", "twice", "sender dies", "no close"])
def test_connections_that_end_leave_no_thread_and_no_task(end: str) -> None:
    async def scenario() -> None:
        before = ipc_threads()
        async with a_pair() as pair:
            num_tasks = len(asyncio.all_tasks())
            for index in range(60):
                receiving, sending = await pair.connect(f"c{index}")
                if end == "no close":
                    pages = pair.mapped
                    close = pages.close

                    def fail(close: Callable[[], None] = close) -> None:
                        close()
                        raise RuntimeError("an illegal memory access was encountered")

                    pages.close = fail  # type: ignore[method-assign]
                if end != "sender dies":
                    for _ in range(1 + (end == "twice")):
                        with contextlib.suppress(RuntimeError):
                            await receiving.abort()
                await sending.abort()
            await until(lambda: ipc_threads() == before)
            await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 1)

    run(scenario)


FRAMES = {
    "another magic": (struct.pack("!8sQI", b"PWFRAME1", 0, 1), "allowed: .*PWIPCFR1"),
    "another number": (struct.pack("!8sQI", b"PWIPCFR1", 7, 1), "frame: .* 7; allowed: .* 0"),
    "more pages than there are": (
        struct.pack("!8sQI", b"PWIPCFR1", 0, 65),
        "pages of frame 0: found 65; allowed: 64",
    ),
    "a page that does not exist": (
        struct.pack("!8sQII", b"PWIPCFR1", 0, 1, 64),
        "page id of frame 0: found 64; allowed: 0 to 63",
    ),
    "the wrong number of pages": (
        struct.pack("!8sQIII", b"PWIPCFR1", 0, 2, 1, 2),
        "pages of a frame: found 2; allowed: 1",
    ),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_that_cannot_be_break_the_connection_and_copy_nothing(name: str) -> None:
    frame, message = FRAMES[name]

    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            before = pair.target.export_pages(range(64))
            posted = asyncio.create_task(receiving.receive([2], 5.0))
            await asyncio.sleep(0)

            await sending._wire.send(frame)

            with pytest.raises(ConnectionBroken, match=message):
                await posted
            assert receiving.is_broken
            await receiving.abort()
            assert pair.mapped.is_closed.is_set()
            assert (pair.target.export_pages(range(64)) == before).all()

    run(scenario)


def test_more_frames_than_a_receiver_asks_for_break_the_connection() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            frames = [struct.pack("!8sQII", b"PWIPCFR1", each, 1, 1) for each in range(WINDOW + 1)]

            await sending._wire.send(b"".join(frames))

            await until(pair.mapped.is_closed.is_set)
            assert receiving.is_broken
            assert pair.mapped.begun == []

    run(scenario)


def test_unread_frames_name_no_more_pages_than_the_receiver_has() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            posted = asyncio.create_task(receiving.receive([2], 5.0))
            held = pair.mapped.hold(1)
            first = struct.pack("!8sQII", b"PWIPCFR1", 0, 1, 1)  # being copied, so not read
            second = struct.pack("!8sQI40I", b"PWIPCFR1", 1, 40, *range(40))
            await sending._wire.send(first + second)
            await until(lambda: len(receiving._frames) == 1)

            await sending._wire.send(struct.pack("!8sQI", b"PWIPCFR1", 2, 24))  # without its ids

            with pytest.raises(ConnectionBroken, match="pages of frame 2: found 24; allowed: 23"):
                await posted
            held.set()

    run(scenario)


def test_unread_frames_may_name_all_pages_of_the_receiver_again_and_again() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            chunks = [[page, page + 32] for page in range(32)]
            for _ in range(3):
                sends = [asyncio.create_task(sending.send(each, 5.0)) for each in chunks]
                await until(lambda: sum(map(len, receiving._frames)) == 64)
                await asyncio.gather(*sends, *(receiving.receive(each, 5.0) for each in chunks))
            assert (
                pair.target.export_pages(range(64)) == pair.source.export_pages(range(64))
            ).all()

    run(scenario)


def test_unread_frames_take_four_bytes_a_page() -> None:
    num_pages = 1 << 16

    async def scenario() -> None:
        async with a_pair(num_pages=num_pages) as pair:
            receiving, sending = await pair.connect()
            frame = struct.pack(f"!8sQI{num_pages}I", b"PWIPCFR1", 0, num_pages, *range(num_pages))
            tracemalloc.start()
            try:
                await sending._wire.send(frame)
                await until(lambda: bool(receiving._frames))
                kept, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert kept < 2 * 4 * num_pages

    run(scenario)


@pytest.mark.parametrize(
    "card",
    [
        struct.pack("!8sQQH", b"PWFRAME1", 64, 64, 3) + b"abc",
        struct.pack("!8sQQH", b"PWCARD01", 64, 64, 0),
        struct.pack("!8sQQH", b"PWCARD01", 64, 64, 60000) + bytes(60000),
    ],
    ids=["another magic", "empty", "huge"],
)
def test_what_is_no_card_ends_the_set_up(card: bytes) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = pair.receiver.offer("c0", KEY)
            accepting = asyncio.create_task(pair.receiver.accept("c0", soon()))
            wire = await pair.sender._sockets.connect("c0", offer, KEY, soon())

            await wire.send(card)

            with pytest.raises(ConnectionBroken, match="not a card"):
                await accepting
            assert not pair.receiver_memory.opened
            wire.close()

    run(scenario)


def test_with_tls_the_card_is_not_in_clear(tmp_path: Path) -> None:
    async def scenario() -> None:
        for tls in (page_tls(Authority(tmp_path)), None):
            async with a_pair(tls) as pair:
                sent = b"".join(await tapped(pair))

                assert (SOURCE_CARD in sent) is (tls is None)

    run(scenario)


def test_pages_in_host_memory_are_refused_by_name() -> None:
    with pytest.raises(TransportRefused, match="needs pages in the memory of a CUDA device"):
        CudaIpcTransport(make_storage(4, 1), ProvenSockets(host="127.0.0.1"))


def test_pages_that_follow_each_other_on_both_sides_are_one_copy() -> None:
    assert runs_of_pages([], []) == []
    assert runs_of_pages([4, 5, 6, 9, 10, 2], [7, 8, 9, 10, 11, 1]) == [
        (4, 7, 3),
        (9, 10, 2),
        (2, 1, 1),
    ]
    assert runs_of_pages([4, 5], [7, 9]) == [(4, 7, 1), (5, 9, 1)]
    assert runs_of_pages([5, 4], [8, 7]) == [(5, 8, 1), (4, 7, 1)]
