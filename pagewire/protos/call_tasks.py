"""Tells apart cancellations of tasks and of calls, and silences errors that no task reads.

A call that is cancelled, by itself or because its channel closes, raises the same CancelledError
in the waiting task as a cancellation of that task. So does a task that several tasks wait for.
"""

import asyncio
from typing import Any


def is_own_cancellation() -> bool:
    """Return, after a CancelledError, whether the current task itself was cancelled.

    If not, the call or task that it waited for was.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def mark_seen(future: "asyncio.Future[Any]") -> None:
    """Keep asyncio from warning that the exception of a finished future was never retrieved."""
    if not future.cancelled():
        future.exception()
