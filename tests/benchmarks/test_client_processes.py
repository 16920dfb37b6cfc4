"""The processes of a benchmark's clients, without a cluster."""

import asyncio
import signal
from typing import Any

import pytest

from benchmarks import client_processes


class LauncherOfThreeWaves:
    """The process's end of its pipe."""

    def __init__(self) -> None:
        self.num_left = 3
        self.answers: list[object] = []

    def recv(self) -> object:
        if not self.num_left:
            raise EOFError
        self.num_left -= 1
        return None

    def send(self, answer: object) -> None:
        self.answers.append(answer)


def test_all_waves_of_a_process_are_read_in_one_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def running_loop(share: object, pipe: object) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    monkeypatch.setattr(client_processes, "_read_share", running_loop)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own handlers stay
    pipe: Any = LauncherOfThreeWaves()
    client_processes._serve(pipe)

    assert len(pipe.answers) == 3
    assert len(set(pipe.answers)) == 1
