"""Routers that a gateway looks up: before a call while it knows none, and after a loss."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from observability.logs import fields
from pagewire.protos.call_tasks import is_own_cancellation, mark_seen
from pagewire.routers import Connector, Routers, closed

log = logging.getLogger(__name__)

FindRouters = Callable[[], Awaitable[Sequence[str]]]  # returns addresses, host:port


class FoundRouters(Routers):
    """Owned by the event loop of the gateway.

    Args:
        find: Returns their current addresses.
        connector: Opens channels to them.
    """

    def __init__(self, find: FindRouters, connector: Connector) -> None:
        super().__init__((), connector, connector.explain)
        self._find = find
        self._looking: asyncio.Task[None] | None = None  # the latest look
        self._has_answered = False  # since the last loss

    async def locate(self) -> None:
        """Look up the routers, with all who wait for them; not while there is a stream to one.

        Raises:
            PagewireError: No address is known.
        """
        if self.addresses and self.has_stream:
            return
        try:
            await asyncio.shield(self._look())
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            raise closed() from None

    def leave(self, address: str) -> None:
        """Send calls to the next router, or to one found meanwhile."""
        super().leave(address)
        if self._has_answered:  # else it has been told, or there is nothing to lose yet
            log.warning("router_lost", extra=fields(address=address))
        self._has_answered = False
        if not self.has_stream:
            self._look()

    def note_answer(self) -> None:
        """Note that a router answers."""
        self._has_answered = True

    async def aclose(self) -> None:
        """End all calls and close all channels."""
        if self._looking:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await super().aclose()

    def _look(self) -> "asyncio.Task[None]":
        """Begin to look for routers, unless somebody has begun."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._move_to_found(), name="find-routers")
            self._looking.add_done_callback(mark_seen)  # after a loss, the next one asks again
        return self._looking

    async def _move_to_found(self) -> None:
        await self.move(await self._find())
