"""The calls of one GenerateMany stream: runs each, and collects their results for its writer.

A call appends its new results, and one writer takes those of all calls at once. When the writer is
blocked, calls wait, and their generations merge the deltas that arrive meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from router.errors import InvalidRequest

_MOST_PENDING = 1024  # results that calls append before they wait for the writer

Send = Callable[[Any], Awaitable[None]]
# Runs a call to its end, given its caller's first message and a sink for its messages. Returns the
# serialized error status that ends it, or nothing.
Play = Callable[[Any, Send], Awaitable[bytes]]


class ManyCalls:
    """Owns the calls of a stream.

    Args:
        play: Runs one call.
        cancelled_status: Serialized status of a call that its caller cancels.
    """

    def __init__(self, play: Play, *, cancelled_status: bytes) -> None:
        self._play = play
        self._cancelled_status = cancelled_status
        self._tasks: dict[int, asyncio.Task[bytes]] = {}  # call id |-> its task
        self._pending: list[tuple[int, Any]] = []  # (call id, message or status)
        self._has_news = asyncio.Event()  # something is pending, or the calls are over
        self._is_taken = asyncio.Event()
        self._is_closed = False  # the caller starts no more
        self._error: Exception | None = None

    def start(self, call_id: int, request: Any) -> None:
        """Start a call.

        Raises:
            InvalidRequest: A call with this id still runs.
        """
        if call_id in self._tasks:
            raise InvalidRequest("call_id", f"{call_id}, which still runs", "one that does not")
        task = asyncio.create_task(self._run(call_id, request), name=f"call-{call_id}")
        # A callback: a task that is cancelled before its first step runs nothing, not even finally.
        task.add_done_callback(lambda ended: self._end(call_id, ended))
        self._tasks[call_id] = task

    def cancel(self, call_id: int) -> None:
        """Cancel a call, if it still runs."""
        if task := self._tasks.get(call_id):
            task.cancel()

    def close(self, error: Exception | None = None) -> None:
        """Note that no more calls start; an error ends the stream at once."""
        self._is_closed = True
        self._error = error
        self._has_news.set()

    async def take(self) -> list[tuple[int, Any]]:
        """Wait for results and return them, each call's in order; none: all calls are over.

        Raises:
            Exception: The argument of `close`.
        """
        while not self._pending and not (self._is_closed and not self._tasks) and not self._error:
            self._has_news.clear()
            await self._has_news.wait()
        if self._error:
            raise self._error
        pending, self._pending = self._pending, []
        self._is_taken.set()
        return pending

    async def wait_taken(self) -> None:
        """Wait while much is pending. Starting a call waits as well: each ends with a result."""
        while len(self._pending) >= _MOST_PENDING:
            self._is_taken.clear()
            await self._is_taken.wait()

    async def stop(self) -> None:
        """Cancel running calls and wait for their end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, call_id: int, request: Any) -> bytes:
        async def send(message: Any) -> None:
            await self.wait_taken()
            self._pending.append((call_id, message))
            self._has_news.set()

        return await self._play(request, send)

    def _end(self, call_id: int, task: "asyncio.Task[bytes]") -> None:
        del self._tasks[call_id]
        status = self._cancelled_status if task.cancelled() else task.result()
        if status:
            self._pending.append((call_id, status))
        self._has_news.set()
