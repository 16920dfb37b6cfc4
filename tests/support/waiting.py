"""Waits in real time for a state, however slow the host is."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Return once a condition holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], T], within_s: float = 30.0) -> T:
    """Block until a condition holds, and return what it gives; fails if that takes longer."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found
