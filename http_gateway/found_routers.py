"""Routers that a gateway looks up: before a call while it knows none, and after a loss."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from observability.logs import fields
from pagewire import PagewireError
from pagewire.routers import Connector, Routers

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
        self._locating = asyncio.Lock()
        self._relocating: asyncio.Task[None] | None = None
        self._has_answered = False  # since the last loss

    async def locate(self) -> None:
        """Look up the routers; not while there is a stream to one.

        Raises:
            PagewireError: No address is known.
        """
        if self.addresses and self.has_stream:
            return
        async with self._locating:
            await self.move(await self._find())

    def leave(self, address: str) -> None:
        """Send calls to the next router, or to one found meanwhile."""
        super().leave(address)
        if self._relocating is None or self._relocating.done():
            if self._has_answered:  # else it has been told, or there is nothing to lose yet
                log.warning("router_lost", extra=fields(address=address))
            self._has_answered = False
            self._relocating = asyncio.create_task(self._relocate(), name="find-routers")

    def note_answer(self) -> None:
        """Note that a router answers."""
        self._has_answered = True

    async def aclose(self) -> None:
        """End all calls and close all channels."""
        if self._relocating:
            self._relocating.cancel()
        await super().aclose()

    async def _relocate(self) -> None:
        with suppress(PagewireError):  # the next loss asks again
            await self.locate()
