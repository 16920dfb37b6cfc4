"""A rate with a burst: what is not used is saved up to a limit. Pure: times are arguments."""

from dataclasses import dataclass

_ROUNDING = 1e-6  # units by which sums of floats may be off


@dataclass(eq=False, slots=True)  # not frozen: to make one would take many times as long
class Charge:
    """Units that were taken and may be given back."""

    amount: float
    bound: float = 0.0  # of the level, from the moments since the previous charge; see Bucket


class Bucket:
    """Holds units that come at a steady rate.

    The level is at most the capacity. It may be below 0: what was taken without asking is owed.
    When a charge is given back, the level becomes what it would be without that charge. It rises
    by less than the amount if, without the charge, the bucket would have been full meanwhile.

    So each moment of the past bounds the level: by the capacity, plus what came and minus what was
    taken since then. Of the moments between two undecided charges, the one with the lowest bound
    stands for all, however the charges are decided. The later charge stores that bound, computed as
    if no undecided charge had been made.

    Args:
        rate_per_s: Units that come each second; 0: everything is allowed.
        capacity: The most units that are saved up; the bucket begins full.
        now: Seconds of any clock, always the same one.
    """

    def __init__(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._capacity = capacity
        self._at = now
        # The undecided charges, oldest first, then the next one, which takes nothing yet.
        self._charges = [Charge(0.0, capacity)]
        self._moved = 0.0  # what came, less what was taken for good; not in the bounds yet

    def change(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        """Continue at another rate; savings, up to the new capacity, and debts stay."""
        self._refill(now)
        if not self._rate_per_s:
            self._charges, self._moved = [Charge(0.0, capacity)], 0.0
        self._rate_per_s, self._capacity = rate_per_s, capacity
        self._refill(now)

    def wait_s(self, now: float) -> float:
        """Return how long it takes until a unit is available; 0: one is."""
        if not self._rate_per_s:
            return 0.0
        lacking = 1 - self.level(now)
        return lacking / self._rate_per_s if lacking > _ROUNDING else 0.0

    def level(self, now: float) -> float:
        """Return how many units are available; below 0: how many are owed."""
        self._refill(now)
        level, charged = self._capacity, 0.0
        for each in reversed(self._charges):
            charged += each.amount
            level = min(level, each.bound - charged + self._moved)
        return level

    def take(self, amount: float, now: float) -> None:
        """Take units for good, whether they are available or not."""
        if self._rate_per_s:
            self._refill(now)
            self._moved -= amount

    def charge(self, amount: float, now: float) -> Charge:
        """Take units, available or not, until `keep` or `give_back` decides."""
        if not self._rate_per_s:
            return Charge(amount)
        self._refill(now)
        charge = self._charges[-1]
        charge.amount = amount
        self._charges.append(Charge(0.0, self._capacity - self._moved))
        return charge

    def keep(self, charge: Charge, now: float) -> None:
        """Let an undecided charge count for good, from the time when it was made."""
        self._decide(charge, charge.amount, now)

    def give_back(self, charge: Charge, now: float) -> None:
        """Go on as if an undecided charge had not been made."""
        self._decide(charge, 0.0, now)

    def _decide(self, charge: Charge, taken: float, now: float) -> None:
        if charge not in self._charges:  # there was no limit then, or for a while since
            return
        self._refill(now)
        number = self._charges.index(charge)
        for each in self._charges[: number + 1]:
            each.bound -= taken
        following = self._charges[number + 1]
        following.bound = min(following.bound, charge.bound)
        del self._charges[number]
        self._settle()

    def _refill(self, now: float) -> None:
        self._moved += (now - self._at) * self._rate_per_s
        self._at = now
        if len(self._charges) == 1:
            self._settle()
        last = self._charges[-1]
        last.bound = min(last.bound, self._capacity - self._moved)

    def _settle(self) -> None:
        """Add what moved to the bounds, so that rounding errors do not add up."""
        for each in self._charges:
            each.bound += self._moved
        self._moved = 0.0
