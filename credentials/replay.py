"""Detects replayed calls: an observer could send a proof again that it has seen.

Each caller numbers its calls, so no clock is needed. Calls may overtake each other. Like IPsec's
window (RFC 4303, 3.4.3), the guard remembers the largest numbers and refuses all smaller ones.
"""

import heapq
from collections import OrderedDict

from credentials.party import Party

WINDOW = 1024  # numbers remembered for each caller
MAX_CALLERS = 4096  # starts of callers; the one that called longest ago is forgotten


class ReplayGuard:
    """The calls that one server has seen. Only proven calls may reach it, so it stays small."""

    def __init__(self) -> None:
        self._windows: OrderedDict[Party, _Window] = OrderedDict()

    def is_new(self, caller: Party, number: int) -> bool:
        """Return whether a caller's call is new, and remember it."""
        window = self._windows.get(caller)
        if window is None:
            window = self._windows[caller] = _Window()
            if len(self._windows) > MAX_CALLERS:
                self._windows.popitem(last=False)
        self._windows.move_to_end(caller)
        return window.take(number)


class _Window:
    """The largest numbers seen."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._order: list[int] = []  # a heap of the same numbers
        self._floor = -1  # this number and all lower ones count as seen

    def take(self, number: int) -> bool:
        if number <= self._floor or number in self._seen:
            return False
        self._seen.add(number)
        heapq.heappush(self._order, number)
        if len(self._order) > WINDOW:
            self._floor = heapq.heappop(self._order)
            self._seen.discard(self._floor)
        return True
