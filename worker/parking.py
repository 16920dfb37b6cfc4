"""Where requests wait for a prefix that is being computed or received for another one."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kv_cache.prefix_cache import PrefixCache

T = TypeVar("T")


class Parking(Generic[T]):
    """Who waits for which page. They stand in nobody's way, and cost nothing until it settles."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._waiters: dict[int, list[T]] = {}  # page id |-> who waits for it

    def __iter__(self) -> Iterator[T]:
        return (each for waiters in self._waiters.values() for each in waiters)

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    def park(self, waiter: T, page_id: int) -> None:
        """Have someone wait for a page that is pending now."""
        self._waiters.setdefault(page_id, []).append(waiter)

    def take_woken(self) -> list[T]:
        """Return those whose pages have settled since the last call; they wait no longer."""
        woken: list[T] = []
        for page_id in self._cache.drain_settled():
            woken += self._waiters.pop(page_id, ())
        return woken

    def remove(self, is_gone: Callable[[T], bool]) -> None:
        """Forget some of those who wait."""
        left = {
            page_id: [each for each in waiters if not is_gone(each)]
            for page_id, waiters in self._waiters.items()
        }
        self._waiters = {page_id: waiters for page_id, waiters in left.items() if waiters}
