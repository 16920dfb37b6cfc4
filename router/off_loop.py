"""Runs work that grows with a prompt, such as tokenizing, off the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from pagewire.protos.call_tasks import mark_seen
from protos.shares import Room
from router.errors import Overloaded
from router.tenants.line import Line
from router.tenants.tenant import TenantRules

T = TypeVar("T")

MAX_RUNNING = 4  # threads; the event loop competes with them for cores
MAX_BYTES = 256 << 20  # of prompts that wait or run


class RunBlocking(Protocol):
    """Runs a function that may take long: `asyncio.to_thread`, or in virtual time at once."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class OffLoop:
    """Bounds the number of functions that run at once and the size of the waiting ones.

    Tenants that wait take turns, and none fills all of the size. A cancelled caller gives up its
    place in the queue at once; a running function keeps its place to the end, because a thread
    cannot be stopped.
    """

    def __init__(self, run_blocking: RunBlocking, *, retry_delay_s: float) -> None:
        self._run_blocking = run_blocking
        self._retry_delay_s = retry_delay_s
        self._places: Line[None] = Line()
        for _ in range(MAX_RUNNING):
            self._places.put(None)
        self._room = Room(MAX_BYTES)

    async def run(self, function: Callable[[], T], num_bytes: int, tenant: TenantRules) -> T:
        """Return the result of a function that works on this many bytes for a tenant.

        Raises:
            Overloaded: Too much waits already.
        """
        if not self._room.take(tenant.name, num_bytes, tenant.weight_of_room):
            raise Overloaded(
                f"prompts of {self._room.taken >> 20} MiB wait to be tokenized",
                self._retry_delay_s,
            )
        try:
            await self._places.get(tenant)
        except BaseException:
            self._room.leave(tenant.name, num_bytes)
            raise

        def leave(running: "asyncio.Future[T]") -> None:
            self._room.leave(tenant.name, num_bytes)
            self._places.put(None)
            mark_seen(running)  # of a caller that left

        running = asyncio.ensure_future(self._run_blocking(function))
        running.add_done_callback(leave)
        return await asyncio.shield(running)
