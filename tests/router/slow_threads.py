"""Threads that are slow, and a text that is large enough for one."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LARGE = "the quick brown fox " * 100


class Threads:
    """Pretends to run functions in threads, for a second each."""

    def __init__(self) -> None:
        self.num_running = 0
        self.most_running = 0
        self.num_started = 0

    async def __call__(self, function: Callable[[], T], /) -> T:
        self.num_started += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(1.0)
        self.num_running -= 1
        return function()
