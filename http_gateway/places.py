"""The places of a gateway's connections: how many there are, and who gives way to a newcomer.

A client that opens a connection need not send anything. Without a rule, as many silent connections
as there are places would keep everybody else out, probes included, until their time for a head has
passed. A client that then opens them again at once would keep others out forever.
"""

from typing import Protocol

SILENT_S = 1.0  # for a connection's first head, while all places are taken


class Guest(Protocol):
    """A connection that has a place."""

    def give_way(self) -> None:
        """End, because a newcomer takes the place."""


class Places:
    """Gives out places. A connection that has sent the head of a request keeps its own.

    Args:
        num_places: How many there are.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._silent: dict[Guest, float] = {}  # may have to give way |-> since when; oldest first
        self._kept: set[Guest] = set()  # the others

    def take(self, guest: Guest, now: float) -> bool:
        """Give a newcomer a place, if need be the oldest silent one's; False: there is none.

        Args:
            guest: The newcomer.
            now: The event loop's time.
        """
        if len(self._silent) + len(self._kept) >= self._num_places:
            oldest, since = next(iter(self._silent.items()), (None, now))
            if oldest is None or now - since < SILENT_S:
                return False
            del self._silent[oldest]
            oldest.give_way()
        self._silent[guest] = now
        return True

    def keep(self, guest: Guest) -> None:
        """Let a connection keep its place: it has sent the head of a request, or is closing."""
        if self._silent.pop(guest, None) is not None:
            self._kept.add(guest)

    def leave(self, guest: Guest) -> None:
        """Take back the place of a connection that has ended, if it has one."""
        self._silent.pop(guest, None)
        self._kept.discard(guest)
