"""A pool whose children are no processes: they answer as a test says."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from router import child_pool
from router.child_pool import LENGTH_BYTES, ChildLimits, ChildPool


class Process:
    """Counts the processes that run."""

    num_running = 0

    def __init__(self) -> None:
        self.is_killed = False
        Process.num_running += 1

    def poll(self) -> int | None:
        return -9 if self.is_killed else None

    def kill(self) -> None:
        Process.num_running -= not self.is_killed
        self.is_killed = True

    def wait(self, timeout: float) -> int:
        return -9


class Writer:
    """A child's socket: each message gets the next of the child's answers."""

    def __init__(self, reader: asyncio.StreamReader, answers: list[bytes]) -> None:
        self.reader, self.answers = reader, answers

    def write(self, message: bytes) -> None:
        answer = self.answers.pop(0)
        self.reader.feed_data(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def children_that_answer(monkeypatch: pytest.MonkeyPatch, *scripts: list[bytes]) -> None:
    """Have each child that starts write the next script of answers, its settings' first."""
    left = iter(scripts)

    async def start(module: str, limits: ChildLimits, max_answer_bytes: int) -> Any:
        reader = asyncio.StreamReader()
        writer: Any = Writer(reader, next(left))
        process: Any = Process()
        return child_pool._Child(process, reader, writer, limits, max_answer_bytes)

    monkeypatch.setattr(child_pool._Child, "start", start)
    monkeypatch.setattr(Process, "num_running", 0)


def make_pool(num_children: int) -> ChildPool:
    def check_ready(answer: Mapping[str, str]) -> None:
        if answer:
            raise ValueError(answer["error"])

    return ChildPool(
        "module",
        dict,
        check_ready=check_ready,
        num_children=num_children,
        limits=ChildLimits(),
        max_answer_bytes=100,
        busy="questions wait",
    )
