"""A histogram of the time between tokens, cheap enough to count every token."""

from bisect import bisect_left
from itertools import accumulate

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)


class TokenGaps:
    """Counts gaps by their length; one thread adds.

    A Histogram of prometheus_client searches its bounds one by one and takes locks.
    """

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)  # of gaps up to each bound, and of longer ones

    def add(self, seconds: float, num_tokens: int) -> None:
        """Count tokens that arrived together, a given time after the token before them."""
        self.sum_s += seconds
        self._counts[bisect_left(BOUNDS_S, seconds / num_tokens)] += num_tokens

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts of gaps by upper bound, as Prometheus expects."""
        bounds = (*(str(float(each)) for each in BOUNDS_S), "+Inf")
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
