"""How a link cuts pages into messages and alternates its slabs, with streams that do nothing."""

import contextlib
import enum
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kv_transfer import nccl_link
from kv_transfer.errors import ConnectionBroken
from kv_transfer.nccl_link import NcclLink
from kv_transfer.polling_thread import Steps


class Result(enum.Enum):
    Success = 0
    RemoteError = 6
    InProgress = 7


class Stream:
    cuda_stream = 0

    def wait_event(self, event: object) -> None:
        pass

    def query(self) -> bool:
        return True


class Streams:
    def __init__(self) -> None:
        self.given_back: list[Stream] = []

    def take(self) -> Stream:
        return Stream()

    def give_back(self, stream: Stream) -> None:
        self.given_back.append(stream)


class Memory:
    def __init__(self) -> None:
        self.taken: list[tuple[Tensor, Stream]] = []
        self.given_back: list[tuple[Tensor, Stream]] = []

    def take(self, num_words: int, stream: Stream) -> Tensor:
        self.taken.append((torch.zeros(num_words, dtype=torch.int32), stream))
        return self.taken[-1][0]

    def give_back(self, memory: Tensor, stream: Stream) -> None:
        self.given_back.append((memory, stream))


class Event:
    num_destroyed = 0

    def __del__(self) -> None:
        Event.num_destroyed += 1

    def record(self, stream: Stream) -> None:
        pass

    def query(self) -> bool:
        return True


class Communicator:
    """Moves messages through a queue; every call is in progress for two polls."""

    def __init__(self, wire: deque[Tensor]) -> None:
        self.wire = wire
        self.polls = 0
        self.error: Result | None = None
        self.is_aborted = False

    def initialize(self, num_ranks: int, rank: int, unique_id: bytes, config: object) -> None:
        assert num_ranks == 2
        self.polls = 2

    def send(self, message: Tensor, peer: int, *, stream: int) -> None:
        assert self.polls == 0, "a call was made before the last one settled"
        self.wire.append(message.clone())
        self.polls = 2

    def recv(self, message: Tensor, peer: int, *, stream: int) -> None:
        assert self.polls == 0, "a call was made before the last one settled"
        message.copy_(self.wire.popleft())
        self.polls = 2

    def get_async_error(self) -> Result:
        if self.polls:
            self.polls -= 1
            return Result.InProgress
        return self.error or Result.Success

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        Event=Event,
        stream=contextlib.nullcontext,
        set_device=lambda device: None,
    )
    monkeypatch.setattr(nccl_link, "cuda", cuda)
    monkeypatch.setattr(nccl_link, "gather", lambda words, ids, slab: slab.copy_(words[ids]))
    monkeypatch.setattr(
        nccl_link, "scatter", lambda slab, ids, words: words.index_copy_(0, ids, slab)
    )


def make_link(words: Tensor, wire: deque[Tensor], is_sender: bool, step: int) -> NcclLink:
    core = SimpleNamespace(
        Communicator=lambda: Communicator(wire),
        NCCLConfig=lambda **options: options,
        UniqueId=SimpleNamespace(from_bytes=lambda unique_id: unique_id),
    )
    device: Any = SimpleNamespace(
        core=core,
        result=Result,
        device=torch.device("cpu"),
        words=words,
        wire_streams=Streams(),
        copy_streams=Streams(),
        memory=Memory(),
    )
    return NcclLink(device, "c0", is_sender, b"x" * 128, step)


def drain(steps: Steps[None]) -> int:
    return sum(1 for _ in steps)


@pytest.mark.parametrize("step", [1, 3, 4, 100])
def test_every_page_arrives_where_it_belongs(step: int) -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(-1000, 1000, (16, 8), dtype=torch.int32, generator=generator)
    target = torch.zeros_like(source)
    wire: deque[Tensor] = deque()
    sender, receiver = make_link(source, wire, True, step), make_link(target, wire, False, step)
    drain(sender.open())
    drain(receiver.open())
    from_pages, to_pages = [3, 1, 15, 0, 7, 9, 2, 4, 8, 6], [5, 2, 0, 1, 14, 13, 12, 9, 8, 7]

    num_polls = drain(sender.send(from_pages))
    num_messages = len(wire)
    drain(receiver.receive(to_pages))

    assert num_messages == -(-len(from_pages) // step)
    assert num_polls >= 2 * num_messages
    assert torch.equal(target[to_pages], source[from_pages])
    untouched = sorted(set(range(16)) - set(to_pages))
    assert not target[untouched].any()


def test_an_error_of_nccl_breaks_the_connection() -> None:
    wire: deque[Tensor] = deque()
    link = make_link(torch.zeros(4, 8, dtype=torch.int32), wire, True, 2)
    drain(link.open())
    link._communicator.error = Result.RemoteError

    with pytest.raises(ConnectionBroken, match="RemoteError"):
        drain(link.send([1, 2]))
    link.abort()

    assert link._communicator.is_aborted
    assert not link._slabs, "nobody may use its memory"
    assert link._device.memory.given_back == link._device.memory.taken


def test_no_event_is_destroyed_before_the_abort() -> None:
    """To destroy one may wait for the message that hangs, which only the abort ends."""
    link = make_link(torch.zeros(16, 8, dtype=torch.int32), deque(), True, 2)
    drain(link.open())
    before = Event.num_destroyed
    drain(link.send(list(range(16))))
    steps = link.send(list(range(16)))
    for _ in range(12):
        next(steps)

    steps.close()

    assert Event.num_destroyed == before
    link.abort()
    assert Event.num_destroyed > before


def test_memory_and_streams_are_given_back_once_these_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries: list[bool] = []

    def query(_: Stream) -> bool:
        given_back = wires.given_back + copies.given_back + memory.given_back
        assert not given_back, "given back though the streams are not idle"
        queries.append(len(queries) > 4)
        return queries[-1]

    monkeypatch.setattr(Stream, "query", query)
    link = make_link(torch.zeros(4, 8, dtype=torch.int32), deque(), True, 2)
    wires: Any = link._device.wire_streams
    copies: Any = link._device.copy_streams
    memory: Any = link._device.memory
    drain(link.open())

    link.abort()

    # Each for the same use: torch keeps the memory of page ids for streams of copies.
    assert (wires.given_back, copies.given_back) == ([link._wire], [link._copy])
    assert memory.given_back == memory.taken
    assert queries.count(True) == 2


def test_a_link_that_was_never_opened_has_no_memory_to_give_back() -> None:
    link = make_link(torch.zeros(4, 8, dtype=torch.int32), deque(), True, 2)

    link.abort()

    assert not link._device.memory.given_back
