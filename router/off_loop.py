"""Runs work that grows with a prompt, such as tokenizing, off the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from pagewire.protos.call_tasks import mark_seen
from router.errors import Overloaded

T = TypeVar("T")

MAX_RUNNING = 4  # threads; the event loop competes with them for cores
MAX_BYTES = 256 << 20  # of prompts that wait or run


class RunBlocking(Protocol):
    """Runs a function that may take long: `asyncio.to_thread`, or in virtual time at once."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class OffLoop:
    """Bounds the number of functions that run at once and the size of the waiting ones.

    A cancelled caller gives up its place in the queue at once; a running function keeps its place
    to the end, because a thread cannot be stopped.
    """

    def __init__(self, run_blocking: RunBlocking, *, retry_delay_s: float) -> None:
        self._run_blocking = run_blocking
        self._retry_delay_s = retry_delay_s
        self._places = asyncio.Semaphore(MAX_RUNNING)
        self._num_bytes = 0

    async def run(self, function: Callable[[], T], num_bytes: int) -> T:
        """Return the result of a function that works on this many bytes.

        Raises:
            Overloaded: Too much waits already.
        """
        if self._num_bytes and self._num_bytes + num_bytes > MAX_BYTES:
            raise Overloaded(
                f"prompts of {self._num_bytes >> 20} MiB wait to be tokenized", self._retry_delay_s
            )
        self._num_bytes += num_bytes
        try:
            await self._places.acquire()
        except BaseException:
            self._num_bytes -= num_bytes
            raise

        def leave(running: "asyncio.Future[T]") -> None:
            self._num_bytes -= num_bytes
            self._places.release()
            mark_seen(running)  # of a caller that left

        running = asyncio.ensure_future(self._run_blocking(function))
        running.add_done_callback(leave)
        return await asyncio.shield(running)
