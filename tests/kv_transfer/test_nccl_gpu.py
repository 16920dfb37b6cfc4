"""Pages over NCCL between two GPUs, or over sockets within one, and the death of a peer."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kv_transfer.nccl_link import NcclLink
from tests.kv_transfer.gpu_worker import (
    ALL,
    Worker,
    check_death_of_sender,
    check_moves,
    connect,
    move,
)
from tests.kv_transfer.no_nccl import Communicator, device_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@contextlib.contextmanager
def workers(staging_bytes: int) -> Iterator[tuple[Worker, Worker]]:
    options = {"staging_bytes": staging_bytes}
    with Worker(0, 1, "nccl", **options) as sender, Worker(1, 2, "nccl", **options) as receiver:
        yield sender, receiver


# A page has 256 KiB: one page a message, an odd number, and everything in one message.
@pytest.mark.parametrize("staging_bytes", [1, 7 << 19, 512 << 20])
def test_pages_arrive_unchanged_and_touch_no_other_page(staging_bytes: int) -> None:
    with workers(staging_bytes) as (sender, receiver):
        check_moves(sender, receiver)


def test_the_death_of_the_sender_costs_its_connection_only() -> None:
    with workers(8 << 20) as (sender, receiver):
        check_death_of_sender(
            sender, receiver, lambda: Worker(0, 3, "nccl", staging_bytes=8 << 20), abort_s=5.0
        )


def test_a_kernel_that_loads_while_a_message_hangs_does_not_stop_the_abort() -> None:
    """The driver loads it only when that message has ended, which takes the abort."""
    with workers(8 << 20) as (sender, receiver):
        connect(sender, receiver, "c0")
        move(sender, receiver, ALL, ALL)
        assert receiver.ask("load a kernel after", 1.0) is None
        receiver.tell("receive until broken", ALL, 5.0)
        sender.tell("send for ever", ALL)
        assert not receiver.pipe.poll(0.5)

        sender.kill()

        assert receiver.hear() > 0
        assert receiver.ask("abort") < 5.0
        assert receiver.ask("compute") == 1024.0


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


def test_connections_that_come_and_go_leave_no_memory_behind() -> None:
    """Not even those of which two live at once."""
    with workers(64 << 20) as (sender, receiver):
        reserved = []
        for number in range(6):
            connect(sender, receiver, f"c{number}")
            if number % 2 == 0:
                connect(sender, receiver, f"c{number} again")
                for worker in (sender, receiver):
                    assert worker.ask("abort") < 5.0
            move(sender, receiver, ALL, ALL)
            for worker in (sender, receiver):
                assert worker.ask("abort") < 5.0
            reserved.append([worker.ask("reserved bytes") for worker in (sender, receiver)])

    assert reserved[1:] == reserved[:-1]
    assert [in_pool for _, in_pool in reserved[0]] == [0, 0]


class _PeerOfSevens(Communicator):
    """Receives nothing but sevens, at once."""

    def recv(self, message: Tensor, peer: int, *, stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):  # type: ignore[no-untyped-call]
            message.fill_(7)


def test_what_arrives_leaves_the_memory_of_a_step_alone_that_still_runs() -> None:
    """What a step has freed is given out again before its kernels have run."""
    num_words = 8 << 20
    words = torch.zeros((16, num_words // 16), dtype=torch.int32, device="cuda:0")
    device = device_of(words, _PeerOfSevens)
    link = NcclLink(device, "c0", False, bytes(128), 16)
    activations = torch.ones(num_words, dtype=torch.int32, device="cuda")
    assert int(activations.sum()) == num_words
    torch.zeros(1, dtype=torch.uint8, device="cuda").fill_(7)  # loads the kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles: half a second
    step_result = activations.sum()
    del activations

    for _ in link.open():
        pass

    assert not torch.cuda.current_stream().query(), "the step has ended too early for this test"
    assert int(step_result) == num_words
