"""A rate with a burst: what is not used is saved up, to a limit. Pure: times are arguments."""

_ROUNDING = 1e-6  # units by which sums of floats may be off


class Bucket:
    """Holds units that come at a steady rate.

    Invariant: `level <= capacity`. A level below 0 is a debt: units were taken before they came.

    Args:
        rate_per_s: Units that come each second; 0: everything is allowed.
        capacity: The most units that are saved up; at the beginning, the bucket is full.
        now: Seconds of any clock, always the same one.
    """

    def __init__(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._capacity = capacity
        self._level = capacity
        self._at = now

    def change(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        """Continue at another rate; savings, up to the new capacity, and debts stay."""
        self._refill(now)
        was_unlimited = not self._rate_per_s
        self._rate_per_s, self._capacity = rate_per_s, capacity
        self._level = capacity if was_unlimited else min(self._level, capacity)

    def wait_s(self, now: float) -> float:
        """Return how long it takes until a unit is available; 0: one is."""
        self._refill(now)
        lacking = 1 - self._level
        if not self._rate_per_s or lacking <= _ROUNDING:
            return 0.0
        return lacking / self._rate_per_s

    def take(self, amount: float, now: float) -> None:
        """Take units, available or not; a negative amount gives units back."""
        self._refill(now)
        self._level = min(self._capacity, self._level - amount)

    def _refill(self, now: float) -> None:
        came = (now - self._at) * self._rate_per_s
        self._level = min(self._capacity, self._level + came)
        self._at = now
