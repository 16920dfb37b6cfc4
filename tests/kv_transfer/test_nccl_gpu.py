"""Pages over NCCL between two GPUs, or over sockets within one, and the death of a peer."""

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch

from tests.kv_transfer.gpu_worker import PAGES, Worker, connect, move

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ALL = list(range(PAGES))


@contextlib.contextmanager
def workers(staging_bytes: int) -> Iterator[tuple[Worker, Worker]]:
    sender, receiver = (
        Worker(device, device + 1, "nccl", staging_bytes=staging_bytes) for device in (0, 1)
    )
    try:
        yield sender, receiver
    finally:
        sender.kill()
        receiver.kill()


# A page has 256 KiB: one page a message, an odd number, and everything in one message.
@pytest.mark.parametrize("staging_bytes", [1, 7 << 19, 512 << 20])
def test_pages_arrive_unchanged_and_touch_no_other_page(staging_bytes: int) -> None:
    with workers(staging_bytes) as (sender, receiver):
        connect(sender, receiver, "c0")
        generator = random.Random(0)
        for num_pages in (1, 2, 16, 17, 300):
            source = generator.sample(ALL, num_pages)
            target = generator.sample(ALL, num_pages)
            others = sorted(set(ALL) - set(target))
            before = receiver.ask("digest", others)

            move(sender, receiver, source, target)

            assert receiver.ask("digest", target) == sender.ask("digest", source)
            assert receiver.ask("digest", others) == before
        sender.tell("stop")
        receiver.tell("stop")
        assert sender.hear() is None
        assert receiver.hear() is None


def test_the_death_of_the_sender_costs_its_connection_only() -> None:
    with workers(8 << 20) as (sender, receiver):
        connect(sender, receiver, "c0")
        receiver.tell("receive until broken", ALL, 2.0)
        sender.tell("send for ever", ALL)
        assert not receiver.pipe.poll(1.0)

        sender.kill()

        assert receiver.hear() > 0
        assert receiver.ask("abort") < 5.0
        assert receiver.ask("compute") == 1024.0
        again = Worker(0, 3, "nccl", staging_bytes=8 << 20)
        try:
            connect(again, receiver, "c1")
            move(again, receiver, ALL[:100], ALL[100:200])
            assert receiver.ask("digest", ALL[100:200]) == again.ask("digest", ALL[:100])
        finally:
            again.kill()


def test_a_receive_that_is_aborted_leaves_the_sender_able_to_connect_anew() -> None:
    with workers(8 << 20) as (sender, receiver):
        connect(sender, receiver, "c0")

        assert "deadline" in str(receiver.ask("receive", ALL, 0.5))
        assert receiver.ask("abort") < 5.0
        # It may fail or be taken by NCCL's buffers; no acknowledgement would ever come for it.
        sender.tell("send", ALL, 1.0)
        sender.hear()
        assert sender.ask("abort") < 5.0

        connect(sender, receiver, "c1")
        move(sender, receiver, ALL, ALL[::-1])
        assert receiver.ask("digest", ALL[::-1]) == sender.ask("digest", ALL)
