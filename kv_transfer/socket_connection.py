"""Base of connections over a socket: copies of pages beside it, which an abort waits for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kv_transfer.driver import RunBlocking
from kv_transfer.ordered_connection import OrderedConnection
from kv_transfer.page_socket import PageSocket
from pagewire.protos.call_tasks import mark_seen

T = TypeVar("T")


class SocketConnection(OrderedConnection):
    """Owns a proven socket, and the work that touches pages on its behalf."""

    def __init__(self, connection_id: str, wire: PageSocket, run_blocking: RunBlocking) -> None:
        super().__init__(connection_id)
        self._wire = wire
        self._run_blocking = run_blocking
        self._copies: set[asyncio.Task[Any]] = set()  # touch the storage right now

    async def _stop(self) -> None:
        self._wire.shut()
        await self._leave_wire()
        if self._copies:
            # A thread cannot be stopped; each ends on its own with its copy.
            await asyncio.wait(self._copies)
        self._wire.close()

    async def _leave_wire(self) -> None:
        """Return when nothing waits on the socket, which is shut."""
        async with self._order:
            pass

    def _touch(self, function: Callable[[], T]) -> Awaitable[T]:
        """Begin work that touches pages; `abort` waits for it, even if the caller has left."""

        async def run() -> T:
            return await self._run_blocking(function)

        copy = asyncio.get_running_loop().create_task(run())
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)
        # Shielded: a deadline must not make the copy look finished.
        touched = asyncio.shield(copy)
        touched.add_done_callback(mark_seen)  # a caller that has left reads no error
        return touched
