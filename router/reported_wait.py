"""Waits that a person may watch: one that lasts says what is missing."""

import asyncio
from collections.abc import Callable

PATIENCE_S = 2.0  # a first attempt may fail and the next succeed; workers that serve connect sooner


async def wait_reported(
    event: asyncio.Event, reason: Callable[[], str], waits: Callable[[str], None]
) -> None:
    """Wait for an event; the caller bounds the wait.

    Args:
        reason: Returns why the event has not come yet.
        waits: Called once, with that reason, if the wait takes longer than PATIENCE_S.
    """
    try:
        await asyncio.wait_for(event.wait(), PATIENCE_S)
    except TimeoutError:
        waits(reason())
        await event.wait()
