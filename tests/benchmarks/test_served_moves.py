"""Times of received chunks within a worker: what is written, and what is made of it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import move_times, step_times
from benchmarks.move_times import MoveTimes
from benchmarks.served_moves import parts_of
from kv_transfer.cuda_ipc_memory import CudaPeerPages
from kv_transfer.receiver import Receiver

MS = 1e-3


def test_a_transfers_time_has_parts() -> None:
    first = MoveTimes(
        posted_s=0.0,
        begun_s=1 * MS,
        launched_s=2 * MS,
        copied_s=6 * MS,
        received_s=7 * MS,
        device_ms=4.5,
    )
    second = MoveTimes(  # was posted while the first came
        posted_s=3 * MS,
        begun_s=8 * MS,
        launched_s=10 * MS,
        copied_s=13 * MS,
        received_s=15 * MS,
        device_ms=4.0,
    )
    third = MoveTimes(  # and copied behind the second
        posted_s=7 * MS,
        begun_s=11 * MS,
        launched_s=12 * MS,
        copied_s=18 * MS,
        received_s=19 * MS,
        device_ms=5.0,
    )

    parts = parts_of([first, second])
    overlapping = parts_of([first, second, third])

    assert parts == pytest.approx(
        {"receive_ms": 15.0, "device_ms": 8.5, "launch_ms": 3.0, "wake_ms": 1.5, "between_ms": 5.0}
    )
    assert overlapping == pytest.approx(
        {"receive_ms": 19.0, "device_ms": 13.5, "launch_ms": 4.0, "wake_ms": 1.5, "between_ms": 4.0}
    )


def test_each_chunk_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def launch(pages: Any, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        nonlocal now
        now += 0.25

    def copy(pages: Any, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        nonlocal now
        pages._copy_by_engine(source_ids, target_ids)
        now += 2.0

    async def receive(receiver: Any, post: Any) -> None:
        nonlocal now
        now += 4.0
        if post.num_copied:
            CudaPeerPages.copy(object.__new__(CudaPeerPages), [1, 2, 3], [4, 5, 6])
        now += 8.0

    monkeypatch.setattr(CudaPeerPages, "copy", copy)
    monkeypatch.setattr(CudaPeerPages, "_copy_by_engine", launch)
    monkeypatch.setattr(Receiver, "_receive", receive)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(step_times, "time", clock)
    monkeypatch.setattr(move_times, "time", clock)
    move_times.time_moves(tmp_path)
    receiver: Any = object.__new__(Receiver)
    receiver._storage = SimpleNamespace(page_bytes=100)

    # The second one's page is copied with the first ones; the third one fails before its copies.
    for num_pages, num_copied in ((2, 3), (1, 0), (3, 0)):
        post = SimpleNamespace(num_pages=num_pages, num_copied=num_copied)
        asyncio.run(receiver._receive(post))

    (path,) = tmp_path.iterdir()
    first, second = (MoveTimes(**json.loads(line)) for line in path.read_text().splitlines())
    assert first == MoveTimes(
        num_bytes=200,
        posted_s=0.0,
        begun_s=4.0,
        launched_s=4.25,
        copied_s=6.25,
        received_s=14.25,
        device_ms=250.0,
    )
    assert second == MoveTimes(
        num_bytes=100,
        posted_s=14.25,
        begun_s=6.25,
        launched_s=6.25,
        copied_s=6.25,
        received_s=26.25,
        device_ms=0.0,
    )
