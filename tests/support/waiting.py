"""Waits in real time for a state, however slow the host is."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Return once a condition holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
