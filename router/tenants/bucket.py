"""A rate with a burst: what is not used is saved up, to a limit. Pure: times are arguments."""

from dataclasses import dataclass

_ROUNDING = 1e-6  # units by which sums of floats may be off


@dataclass(eq=False, slots=True)
class _Span:
    """A period of a bucket that ends with undecided charges, or now.

    Each moment of the past bounds the level: by the capacity, and what came and was taken since.
    All moments of a span have the same undecided charges after them, so that the lowest of their
    bounds stands for them all, whatever is decided.
    """

    bound: float  # the lowest, without any undecided charge, and without the bucket's `_moved`
    num_charges: int = 0  # undecided ones, made after this span and before the next one
    charged: float = 0.0  # by these


@dataclass(eq=False, slots=True)  # not frozen: to make one would take many times as long
class Charge:
    """Units that were taken and may be given back."""

    amount: float
    span: _Span | None  # that of its bucket which it follows; None: nothing was counted


class Bucket:
    """Holds units that come at a steady rate.

    Invariant: the level is at most the capacity. It may be below 0: what was taken without asking
    is owed. When a charge is given back, the level becomes that of a bucket which was never charged
    with it: less than the amount comes back if that one would have been full meanwhile.

    Args:
        rate_per_s: Units that come each second; 0: everything is allowed.
        capacity: The most units that are saved up; at the beginning, the bucket is full.
        now: Seconds of any clock, always the same one.
    """

    def __init__(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._capacity = capacity
        self._at = now
        self._spans = [_Span(capacity)]  # oldest first; all but the last have charges
        self._moved = 0.0  # what came and was taken for good, of which the bounds do not know yet

    def change(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        """Continue at another rate; savings, up to the new capacity, and debts stay."""
        self._refill(now)
        if not self._rate_per_s:
            self._spans, self._moved = [_Span(capacity)], 0.0
        self._rate_per_s, self._capacity = rate_per_s, capacity
        self._limit()

    def wait_s(self, now: float) -> float:
        """Return how long it takes until a unit is there; 0: one is."""
        if not self._rate_per_s:
            return 0.0
        lacking = 1 - self.level(now)
        if lacking <= _ROUNDING:
            return 0.0
        return lacking / self._rate_per_s

    def level(self, now: float) -> float:
        """Return how many units are there; below 0: are owed."""
        self._refill(now)
        level, charged = self._capacity, 0.0
        for span in reversed(self._spans):
            charged += span.charged
            level = min(level, span.bound + self._moved - charged)
        return level

    def take(self, amount: float, now: float) -> None:
        """Take units for good, whether they are there or not."""
        if self._rate_per_s:
            self._refill(now)
            self._moved -= amount

    def charge(self, amount: float, now: float) -> Charge:
        """Take units, whether they are there or not, until `keep` or `give_back` decides."""
        if not self._rate_per_s:
            return Charge(amount, None)
        self._refill(now)
        last = self._spans[-1]
        last.num_charges += 1
        last.charged += amount
        return Charge(amount, last)

    def keep(self, charge: Charge, now: float) -> None:
        """Have an undecided charge count for good, from when it was made."""
        self._decide(charge, charge.amount, now)

    def give_back(self, charge: Charge, now: float) -> None:
        """Go on as if an undecided charge had not been made."""
        self._decide(charge, 0.0, now)

    def _decide(self, charge: Charge, taken: float, now: float) -> None:
        span = charge.span
        if span is None:  # there was no limit
            return
        self._refill(now)
        if span not in self._spans:  # refilled since
            return
        number = self._spans.index(span)
        for each in self._spans[: number + 1]:
            each.bound -= taken
        span.num_charges -= 1
        span.charged = span.charged - charge.amount if span.num_charges else 0.0
        if not span.num_charges and span is not self._spans[-1]:
            following = self._spans[number + 1]
            following.bound = min(following.bound, span.bound)
            del self._spans[number]

    def _refill(self, now: float) -> None:
        self._moved += (now - self._at) * self._rate_per_s
        self._at = now
        self._limit()

    def _limit(self) -> None:
        """Have the capacity bound the level from now on, whatever is given back."""
        spans, most = self._spans, self._capacity - self._moved
        if spans[-1].bound > most:
            if spans[-1].num_charges:
                spans.append(_Span(most))
            else:
                spans[-1].bound = most
        while len(spans) > 1 and spans[0].bound - spans[0].charged >= spans[1].bound:
            del spans[0]  # the bucket has refilled since, even if all its charges are kept
        if len(spans) == 1:  # so that rounding errors do not add up
            spans[0].bound += self._moved
            self._moved = 0.0
