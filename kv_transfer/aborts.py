"""What the connections of all transports share: how they are aborted, alone and all together."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from kv_transfer.transport import Connection

Made = TypeVar("Made", bound=Connection)


class Abort:
    """Runs a connection's abort once, however many callers ask for it and whoever of them leaves.

    Args:
        work: The abort itself.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> asyncio.Task[None]:
        """Start it, unless it has begun; returns its task."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return self._task

    async def finish(self) -> None:
        """Return when it has ended; raises what it raised."""
        # Shielded: a caller that gives up must not stop it half-way.
        await asyncio.shield(self.begin())


class LiveConnections(Generic[Made]):
    """The connections that a transport made, as long as they are healthy."""

    def __init__(self) -> None:
        self._made: list[Made] = []

    def add(self, connection: Made) -> Made:
        """Keep a connection until it is broken; returns it."""
        self._made = [each for each in self._made if not each.is_broken]
        self._made.append(connection)
        return connection

    async def abort(self) -> None:
        """Abort all at once, so that none waits for another; raises the first error of them."""
        aborts = (connection.abort() for connection in self._made)
        for result in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
