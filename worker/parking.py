"""Parks requests whose prefix is being computed or received for another request."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kv_cache.prefix_cache import PrefixCache

T = TypeVar("T")


class Parking(Generic[T]):
    """Waiting work by page. It delays no other work and costs nothing until its page settles."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._waiters: dict[int, list[T]] = {}  # page id |-> the work that waits for it

    def __iter__(self) -> Iterator[T]:
        return (each for waiters in self._waiters.values() for each in waiters)

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    def park(self, waiter: T, page_id: int) -> None:
        """Park an item until a page that is pending now has settled."""
        self._waiters.setdefault(page_id, []).append(waiter)

    def take_woken(self) -> list[T]:
        """Remove and return the items whose pages have settled since the last call."""
        woken: list[T] = []
        for page_id in self._cache.drain_settled():
            woken += self._waiters.pop(page_id, ())
        return woken

    def remove(self, is_gone: Callable[[T], bool]) -> None:
        """Forget some parked items."""
        left = {
            page_id: [each for each in waiters if not is_gone(each)]
            for page_id, waiters in self._waiters.items()
        }
        self._waiters = {page_id: waiters for page_id, waiters in left.items() if waiters}
