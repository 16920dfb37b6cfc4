"""Base of connections over a socket: one operation at a time, a deadline, a safe abort."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kv_transfer.aborts import Abort
from kv_transfer.driver import RunBlocking
from kv_transfer.errors import ConnectionBroken
from kv_transfer.page_socket import PageSocket

T = TypeVar("T")


class SocketConnection:
    """Owns a proven socket, and the work that touches pages on its behalf."""

    def __init__(self, connection_id: str, wire: PageSocket, run_blocking: RunBlocking) -> None:
        self._connection_id = connection_id
        self._wire = wire
        self._run_blocking = run_blocking
        self._is_broken = False
        self._order = asyncio.Lock()
        self._num_frames = 0
        self._copy: asyncio.Task[Any] | None = None  # touches the storage right now
        self._abort = Abort(self._do_abort)

    @property
    def connection_id(self) -> str:
        return self._connection_id

    @property
    def is_broken(self) -> bool:
        return self._is_broken

    async def abort(self) -> None:
        self._begin_abort()
        await self._abort.finish()

    def _begin_abort(self) -> None:
        self._is_broken = True
        self._abort.begin()

    async def _do_abort(self) -> None:
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

    @asynccontextmanager
    async def _operating(self, deadline: float) -> AsyncIterator[None]:
        """Run one operation; any failure in it breaks the connection."""
        try:
            async with asyncio.timeout_at(deadline), self._order:
                if self._is_broken:
                    raise ConnectionBroken(f"connection {self._connection_id!r} is broken")
                yield
                self._num_frames += 1
        except (OSError, TimeoutError) as error:
            self._is_broken = True
            raise ConnectionBroken(str(error) or "no progress before the deadline") from error
        except ConnectionBroken:
            self._is_broken = True
            raise
        except Exception as error:  # of a copy, as when a GPU reports an error
            self._is_broken = True
            raise ConnectionBroken(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self._is_broken = True
            raise
