"""What the connections of all transports share: order, deadlines, errors, and a safe abort."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Generic, TypeVar

from kv_transfer.errors import ConnectionBroken
from kv_transfer.transport import Connection

Made = TypeVar("Made", bound=Connection)

NETWORK_CHUNK_BYTES = 256 << 20  # a quarter of a second at 10 Gbit/s


class OrderedConnection:
    """Base of connections; `_operating` runs the operations of this side one after the other.

    Subclasses implement `send`, `receive` and `_stop`.
    """

    def __init__(self, connection_id: str) -> None:
        self._connection_id = connection_id
        self._is_broken = False
        self._order = asyncio.Lock()
        self._num_done = 0  # operations
        self._aborting: asyncio.Task[None] | None = None

    @property
    def max_chunk_bytes(self) -> int:
        return NETWORK_CHUNK_BYTES

    @property
    def connection_id(self) -> str:
        return self._connection_id

    @property
    def is_broken(self) -> bool:
        return self._is_broken

    async def abort(self) -> None:
        # Shielded: a caller that gives up must not stop it half-way.
        await asyncio.shield(self._begin_abort())

    def _begin_abort(self) -> asyncio.Task[None]:
        self._is_broken = True
        if self._aborting is None:
            self._aborting = asyncio.get_running_loop().create_task(self._stop())
        return self._aborting

    async def _stop(self) -> None:
        """Stop all posted operations, and free everything; called once."""
        raise NotImplementedError

    @asynccontextmanager
    async def _operating(self, seconds: float) -> AsyncIterator[None]:
        """Run one operation when those before it have ended, and within a time from then."""
        with self._breaking():
            async with self._order, asyncio.timeout(seconds):
                self._check_healthy()
                yield
                self._num_done += 1

    def _check_healthy(self) -> None:
        if self._is_broken:
            raise ConnectionBroken(f"connection {self._connection_id!r} is broken")

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Let any failure within break the connection."""
        try:
            yield
        except BaseException as error:
            self._is_broken = True
            if isinstance(error, ConnectionBroken) or not isinstance(error, Exception):
                raise
            reason = reason_of(error, if_late="no progress before the deadline")
            raise ConnectionBroken(reason) from error


def reason_of(error: Exception, *, if_late: str) -> str:
    """Return what to say of an error that breaks a connection; a passed deadline has no text."""
    if isinstance(error, OSError):  # or a TimeoutError, which is one
        return str(error) or if_late
    return f"{type(error).__name__}: {error}"


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
