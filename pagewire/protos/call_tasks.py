"""What asyncio leaves open of tasks and calls: who was cancelled, and whose error nobody sees.

A call that is cancelled, by itself or because its channel is closed, raises the same CancelledError
in whoever waits for it as the cancellation of the waiting task does. So does a task that several
wait for.
"""

import asyncio
from typing import Any


def is_own_cancellation() -> bool:
    """Tell, where a CancelledError was caught, whether the current task itself is cancelled.

    If not, what it waited for was.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def mark_seen(future: "asyncio.Future[Any]") -> None:
    """Keep asyncio from complaining that nobody asks for an exception; of a future that is done."""
    if not future.cancelled():
        future.exception()
