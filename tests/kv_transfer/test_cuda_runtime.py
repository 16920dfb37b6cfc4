"""Streams and memory of transfers, with a runtime that only notes its calls."""

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_transfer import cuda_runtime
from kv_transfer.cuda_runtime import OwnMemory, OwnStreams
from kv_transfer.errors import TransportRefused

DEVICE = torch.device("cuda", 3)


def make_streams(monkeypatch: pytest.MonkeyPatch, *, code: int = 0) -> OwnStreams:
    """Return streams whose numbers count up from 1; a code other than 0 is that of an error."""
    numbers = itertools.count(1)
    runtime = SimpleNamespace(
        cudaStreamNonBlocking=1, cudaStreamCreateWithFlags=lambda flags: (code, next(numbers))
    )
    cuda = SimpleNamespace(
        device=contextlib.nullcontext, ExternalStream=lambda number, device: number
    )
    monkeypatch.setattr(cuda_runtime, "cuda", cuda)
    streams = object.__new__(OwnStreams)
    streams._runtime, streams._device, streams._idle = runtime, torch.device("cpu"), []
    return streams


def test_streams_that_were_given_back_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps memory for each stream that it has seen."""
    streams = make_streams(monkeypatch)
    assert [streams.take(), streams.take()] == [1, 2]
    streams.give_back(2)
    streams.give_back(1)

    assert [streams.take(), streams.take(), streams.take()] == [1, 2, 3]


class Runtime:
    """Notes calls in order; those of one name may fail."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[int, Any]:
            self.calls.append((name, *arguments))
            return (2 if name == self.fails else 0, 4096)

        return call


class Stream:
    cuda_stream = 7

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def synchronize(self) -> None:
        self.runtime.calls.append(("synchronized",))


def make_memory(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> OwnMemory:
    monkeypatch.setattr(
        cuda_runtime,
        "cuda",
        SimpleNamespace(
            device=lambda device: contextlib.nullcontext(runtime.calls.append((device,)))
        ),
    )
    memory = object.__new__(OwnMemory)
    memory._runtime, memory._device = runtime, DEVICE
    return memory


def test_memory_is_the_devices_when_it_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's pool keeps it until the stream is synchronized."""
    runtime = Runtime()
    memory = make_memory(monkeypatch, runtime)

    memory.give_back(torch.empty(0), Stream(runtime))

    assert runtime.calls == [(DEVICE,), ("cudaFreeAsync", 0, 7), ("synchronized",)]


def test_memory_is_taken_by_bytes_and_told_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    memory = make_memory(monkeypatch, runtime)
    described: list[tuple[int, int, torch.device]] = []
    monkeypatch.setattr(
        cuda_runtime, "words_at", lambda *arguments: described.append(arguments) or torch.empty(0)
    )

    memory.take(100, Stream(runtime))

    assert runtime.calls == [(DEVICE,), ("cudaMallocAsync", 400, 7)]
    assert described == [(4096, 100, DEVICE)]


@pytest.mark.parametrize("name", ["cudaMallocAsync", "cudaFreeAsync"])
def test_what_the_runtime_refuses_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    runtime = Runtime(fails=name)
    memory = make_memory(monkeypatch, runtime)
    monkeypatch.setattr(cuda_runtime, "words_at", lambda *arguments: torch.empty(0))

    with pytest.raises(TransportRefused, match=f"{name} failed: 2"):
        memory.give_back(memory.take(1, Stream(runtime)), Stream(runtime))
