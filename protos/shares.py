"""Divides places among callers so that none takes the last ones.

The rule is that of shared buffers in network switches ("Dynamic queue length thresholds for
shared-memory packet switches", Choudhury and Hahne, 1998): a caller that takes one more place may
have up to GREED times as many as are free. A single caller gets nearly all, n callers of equal
weight get nearly an n-th each, and the next caller finds some free. The rule needs no list of
possible callers.
"""

from collections import Counter

GREED = 8  # a single caller gets 8 of 9 places


def may_take(num_own: int, num_taken: int, num_places: int, weight: float = 1.0) -> bool:
    """Return whether a caller may take one more place.

    Args:
        num_own: Places that it has.
        num_taken: Places that all callers have, including its own.
        num_places: All places.
        weight: 2 allows twice as many.
    """
    return num_own < GREED * weight * (num_places - num_taken)


class Room:
    """Bounds what callers hold, so that none fills all of it.

    Args:
        size: The most that fits, in any unit. Alone, anything fits.

    Attributes:
        taken: What all callers hold.
    """

    def __init__(self, size: int) -> None:
        self.taken = 0
        self._size = size
        self._own: Counter[str] = Counter()  # caller |-> what it holds; none is 0

    def take(self, caller: str, amount: int = 1, weight: float = 1.0) -> bool:
        """Take room until `leave`; False: there is none, or none for this caller.

        Args:
            caller: Its name.
            amount: How much.
            weight: As that of may_take; infinite: it may fill all.
        """
        if self.taken and not self._fits(caller, amount, weight):
            return False
        self.taken += amount
        self._own[caller] += amount
        return True

    def leave(self, caller: str, amount: int = 1) -> None:
        """Give room back."""
        self.taken -= amount
        self._own[caller] -= amount
        if not self._own[caller]:
            del self._own[caller]

    def _fits(self, caller: str, amount: int, weight: float) -> bool:
        if self.taken + amount > self._size:
            return False
        # It takes one unit after the other; this is the last.
        own, taken = self._own[caller] + amount - 1, self.taken + amount - 1
        return may_take(own, taken, self._size, weight)
