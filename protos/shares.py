"""Divides places among callers so that none takes the last ones.

The rule is that of shared buffers in network switches ("Dynamic queue length thresholds for
shared-memory packet switches", Choudhury and Hahne, 1998): a caller that takes one more place may
have up to GREED times as many as are free. A single caller gets nearly all, n callers of equal
weight get nearly an n-th each, and the next caller finds some free. The rule needs no list of
possible callers.
"""

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
