"""Base of connections over a socket: copies of pages beside it, which an abort waits for."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from kv_transfer.driver import RunBlocking
from kv_transfer.ordered_connection import OrderedConnection
from kv_transfer.page_socket import PageSocket

T = TypeVar("T")


class SocketConnection(OrderedConnection):
    """Owns a proven socket, and the work that touches pages on its behalf."""

    def __init__(self, connection_id: str, wire: PageSocket, run_blocking: RunBlocking) -> None:
        super().__init__(connection_id)
        self._wire = wire
        self._run_blocking = run_blocking
        self._copy: asyncio.Task[Any] | None = None  # touches the storage right now

    async def _stop(self) -> None:
        self._wire.shut()
        async with self._order:
            pass
        if self._copy is not None:
            # A thread cannot be stopped; it ends on its own within one copy.
            await asyncio.wait({self._copy})
        self._wire.close()

    async def _touch(self, function: Callable[[], T]) -> T:
        """Run work that touches pages; `abort` waits for it, even if the caller has left."""

        async def run() -> T:
            return await self._run_blocking(function)

        copy = asyncio.get_running_loop().create_task(run())
        self._copy = copy
        # Shielded: a deadline must not make the copy look finished.
        return await asyncio.shield(copy)
