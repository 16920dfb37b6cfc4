"""Base of connections over a socket: copies of pages beside it, which an abort waits for."""

import asyncio
from typing import Any

from kv_transfer.ordered_connection import OrderedConnection
from kv_transfer.page_socket import PageSocket


class SocketConnection(OrderedConnection):
    """Owns a proven socket, and the tasks that copy pages on its behalf."""

    def __init__(self, connection_id: str, wire: PageSocket) -> None:
        super().__init__(connection_id)
        self._wire = wire
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
