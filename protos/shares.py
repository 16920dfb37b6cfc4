"""Divides places among those who want some, so that nobody takes the last ones.

The rule is that of shared buffers in network switches ("Dynamic queue length thresholds for
shared-memory packet switches", Choudhury and Hahne, 1998): whoever wants one more place may have up
to GREED times as many as are free. One alone gets nearly all, n of equal weight get nearly an n-th
each, and whoever comes next finds some free. It needs no list of who could come.
"""

GREED = 8  # one alone gets 8 of 9 places


def may_take(num_own: int, num_taken: int, num_places: int, weight: float = 1.0) -> bool:
    """Return whether someone may take one more place.

    Args:
        num_own: Places that it has.
        num_taken: Places that all have, its own among them.
        num_places: All that there are.
        weight: Of one with 2, twice as many.
    """
    return num_own < GREED * weight * (num_places - num_taken)
