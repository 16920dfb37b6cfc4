"""A histogram of the time between tokens, cheap enough to count every token."""

from bisect import bisect_left

from observability.tallies import Spread

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)


class TokenGaps(Spread):
    """Counts gaps by their length, in seconds."""

    def __init__(self) -> None:
        super().__init__(BOUNDS_S)

    def add(self, seconds: float, num_tokens: int) -> None:
        """Count tokens that arrived together, a given time after the token before them."""
        self.sum += seconds
        self._counts[bisect_left(self._bounds, seconds / num_tokens)] += num_tokens
