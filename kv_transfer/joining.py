"""Small pieces of work that wait for the same thread, done in one turn of it."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from kv_cache.page_storage import PageStorage
from kv_transfer.driver import RunBlocking
from pagewire.protos.call_tasks import is_own_cancellation

T = TypeVar("T")

JOINED_BYTES = 256 << 20  # of pages in one turn: 1 ms of a GPU, or less


def take_joined(waiting: deque[T], num_pages: Callable[[T], int], page_bytes: int) -> list[T]:
    """Remove and return what is first in a queue: one piece, and more up to JOINED_BYTES.

    Args:
        waiting: Not empty.
        num_pages: Of a piece.
        page_bytes: Of a page.
    """
    taken = [waiting.popleft()]
    num_taken = num_pages(taken[0])
    while waiting and (num_taken + num_pages(waiting[0])) * page_bytes <= JOINED_BYTES:
        num_taken += num_pages(waiting[0])
        taken.append(waiting.popleft())
    return taken


class _Asked(NamedTuple):
    page_ids: tuple[int, ...]
    digests: asyncio.Future[tuple[bytes, ...]]


class JoinedDigests:
    """Digests of the pages of all transfers of a worker.

    What is asked for while digests are computed is computed together afterwards. A turn of a thread
    costs more than the digests of a page, and threads that wait for the interpreter lock at the
    same time delay the steps of the engine.

    Args:
        run_blocking: Runs digests; see driver.RunBlocking.
    """

    def __init__(
        self, storage: PageStorage, *, run_blocking: RunBlocking = asyncio.to_thread
    ) -> None:
        self._storage = storage
        self._run_blocking = run_blocking
        self._asked: deque[_Asked] = deque()
        self._computing: asyncio.Task[None] | None = None  # ends when nobody waits

    async def of(self, page_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Return the digests of pages; raises whatever the storage does."""
        loop = asyncio.get_running_loop()
        asked = _Asked(tuple(page_ids), loop.create_future())
        self._asked.append(asked)
        if self._computing is None:
            self._computing = loop.create_task(self._compute(), name="digests")
        return await asked.digests

    async def _compute(self) -> None:
        try:
            while self._asked:
                page_bytes = self._storage.page_bytes
                some = take_joined(self._asked, lambda each: len(each.page_ids), page_bytes)
                await self._compute_some(some)
        finally:
            self._computing = None

    async def _compute_some(self, some: Sequence[_Asked]) -> None:
        page_ids = [page_id for each in some for page_id in each.page_ids]
        try:
            digests = await self._run_blocking(lambda: self._storage.digest_pages(page_ids))
            if len(digests) != len(page_ids):
                raise AssertionError(
                    f"digests: found {len(digests)}; allowed: {len(page_ids)}, one for each page"
                )
        except BaseException as error:
            if is_own_cancellation():
                raise
            if len(some) > 1:  # a bug of one of them must not end the others
                for each in some:
                    await self._compute_some([each])
            elif not some[0].digests.done():
                some[0].digests.set_exception(error)
            return
        remaining = iter(digests)
        for each in some:
            found = tuple(islice(remaining, len(each.page_ids)))
            if not each.digests.done():  # whoever asked may have left
                each.digests.set_result(found)
