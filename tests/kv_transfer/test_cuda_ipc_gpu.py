"""Pages copied out of another process's GPU memory, and the death of a peer; one GPU is enough."""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from kv_cache.layout import KVLayout
from kv_cache.torch_storage import TorchPageStorage
from kv_transfer.cuda_ipc_memory import CudaMemory, CudaPeerPages
from kv_transfer.errors import TransportRefused
from tests.kv_transfer.gpu_worker import (
    ALL,
    PAGES,
    Worker,
    check_death_of_sender,
    check_moves,
    connect,
    move,
)

pytestmark = [pytest.mark.gpu, pytest.mark.cluster, pytest.mark.timeout(300)]

POOL_BYTES = PAGES * 256 * 1024
LAYOUT = KVLayout(
    num_layers=2,
    num_kv_heads=2,
    page_size=16,
    head_dim=64,
    dtype="bfloat16",
    model_fingerprint="test",
)

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = [
    pytest.param(0, id="one GPU"),
    pytest.param(1, id="two GPUs", marks=needs_two),
]


@contextlib.contextmanager
def workers(receiver_device: int) -> Iterator[tuple[Worker, Worker]]:
    with (
        Worker(0, 1, "cuda_ipc") as sender,
        Worker(receiver_device, 2, "cuda_ipc") as receiver,
    ):
        yield sender, receiver


@pytest.mark.parametrize("device", DEVICES)
def test_pages_arrive_unchanged_and_touch_no_other_page(device: int) -> None:
    with workers(device) as (sender, receiver):
        check_moves(sender, receiver)


@pytest.mark.parametrize("device", DEVICES)
def test_the_death_of_the_sender_costs_its_connection_only(device: int) -> None:
    with workers(device) as (sender, receiver):
        check_death_of_sender(
            sender,
            receiver,
            lambda: Worker(0, 3, "cuda_ipc"),
            abort_s=1.0,
        )


def test_the_memory_of_a_dead_sender_is_free_though_nobody_aborts() -> None:
    with workers(0) as (sender, receiver):
        connect(sender, receiver, "c0")
        move(sender, receiver, ALL, ALL)
        before = receiver.ask("free bytes")

        sender.kill()

        deadline = time.monotonic() + 10
        while receiver.ask("free bytes") < before + POOL_BYTES:
            assert time.monotonic() < deadline, "the mapping keeps the pages of the dead sender"
            time.sleep(0.05)


def test_the_death_of_the_receiver_leaves_the_sender_able_to_serve_another() -> None:
    with workers(0) as (sender, receiver):
        connect(sender, receiver, "c0")
        move(sender, receiver, ALL, ALL)  # compiles kernels, which takes seconds
        receiver.tell("receive until broken", ALL, 2.0)
        sender.tell("send for ever", ALL)
        time.sleep(1.0)

        receiver.kill()

        assert isinstance(sender.hear(), Exception)
        assert sender.ask("abort") < 1.0
        with Worker(0, 3, "cuda_ipc") as again:
            connect(sender, again, "c1")
            move(sender, again, ALL[:50], ALL[50:100])
            assert again.ask("digest", ALL[50:100]) == sender.ask("digest", ALL[:50])


def test_a_second_mapping_outlives_the_first() -> None:
    """As when a receiver connects anew while the old connection is being aborted."""
    with workers(0) as (sender, receiver):
        connect(sender, receiver, "c0")
        connect(sender, receiver, "c1")  # the double forgets c0, which stays open
        move(sender, receiver, ALL, ALL[::-1])
        assert receiver.ask("abort") < 1.0

        connect(sender, receiver, "c2")
        move(sender, receiver, ALL, ALL)
        assert receiver.ask("digest", ALL) == sender.ask("digest", ALL)


def test_pages_beyond_the_memory_of_the_sender_are_refused() -> None:
    storage = TorchPageStorage(LAYOUT, 64, "cuda")
    card = CudaMemory(storage).card()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as peer:
        assert peer.submit(_opened, card, 64).result(120) == ""
        assert "which has" in peer.submit(_opened, card, 1_000_000).result(120)
        assert peer.submit(_opened, card, 64).result(120) == "", "it can go on"


def _opened(card: bytes, num_pages: int) -> str:
    """Return why a card is refused; "" if it is not."""
    memory = CudaMemory(TorchPageStorage(LAYOUT, 64, "cuda"))
    try:
        pages = memory.open(card, num_pages)
    except TransportRefused as refusal:
        return str(refusal)
    pages.copy([63, 0], [0, 63])
    pages.close()
    return ""


@pytest.mark.parametrize("way", ["kernel", "batch", "one by one"])
def test_all_ways_to_copy_agree(way: str) -> None:
    """Those of the copy engines work within one GPU, too, so one is enough to test them."""
    source, target = (TorchPageStorage(LAYOUT, 64, "cuda") for _ in range(2))
    source.pages.normal_()
    memory = CudaMemory(target)
    memory.copies_in_batches = way == "batch"
    pages = CudaPeerPages(memory, source.pages.data_ptr(), 0, 64, is_same_gpu=way == "kernel")
    source_ids = [3, 4, 5, 9, 60, 63, 0]
    target_ids = [10, 11, 12, 1, 2, 0, 63]
    torch.cuda.synchronize()

    pages.copy(source_ids, target_ids)

    assert target.digest_pages(target_ids) == source.digest_pages(source_ids)
    others = sorted(set(range(64)) - set(target_ids))
    assert not target.pages[others].any()


def test_mappings_that_come_and_go_leave_no_memory_behind() -> None:
    """torch keeps 2 MiB for each stream on which page ids were sent."""
    source, target = (TorchPageStorage(LAYOUT, 64, "cuda") for _ in range(2))
    memory = CudaMemory(target)
    memory.runtime = SimpleNamespace(cudaIpcCloseMemHandle=lambda base: (0,))  # none is mapped
    reserved = []
    for _ in range(6):
        both = [
            CudaPeerPages(memory, source.pages.data_ptr(), 0, 64, is_same_gpu=True)
            for _ in range(2)
        ]
        for each in both:
            each.copy([1, 2], [3, 4])
        for each in both:
            each.close()
        reserved.append(torch.cuda.memory_reserved())

    assert reserved[1:] == reserved[:-1]
