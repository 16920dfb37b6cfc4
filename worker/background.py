"""Background tasks of a worker, and the failure of one that breaks."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from observability.logs import fields

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """Holds tasks until they end.

    A task handles the errors that it expects, and bugs after which it can still free its resources.
    A task that raises all the same has left work half done: the worker must end.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: Exception | None = None
        self._crashed = asyncio.Event()

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run `work` in the background; the caller may cancel it; `name` is for logs."""
        task = asyncio.get_running_loop().create_task(self._guard(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Python warns of a coroutine that was cancelled before it began, unless it is closed.
        task.add_done_callback(lambda _: work.close())
        return task

    async def wait(self) -> None:
        """Return when no task is left, including tasks that start meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def wait_crashed(self) -> None:
        """Raise the error of the first task that broke."""
        await self._crashed.wait()
        assert self._crash is not None
        raise self._crash

    async def _guard(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception as error:
            logger.critical("task_crashed", exc_info=True, extra=fields(task=name))
            self._crash = self._crash or error
            self._crashed.set()
