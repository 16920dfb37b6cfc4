import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.tenants.bucket import Bucket, Charge


def test_a_bucket_is_full_at_first_and_refills_at_its_rate() -> None:
    bucket = Bucket(rate_per_s=2, capacity=3, now=10.0)

    for _ in range(3):
        assert bucket.wait_s(10.0) == 0
        bucket.take(1, 10.0)
    assert bucket.wait_s(10.0) == 0.5
    assert bucket.wait_s(10.25) == 0.25
    assert bucket.wait_s(10.5) == 0
    bucket.take(10, 10.5)  # more than there is
    assert bucket.wait_s(10.5) == 5
    assert bucket.wait_s(100.0) == 0
    bucket.take(3, 100.0)
    assert bucket.wait_s(100.0) == 0.5, "no more than its capacity was saved up"


def test_a_bucket_without_a_rate_allows_everything() -> None:
    bucket = Bucket(rate_per_s=0, capacity=1, now=0.0)
    bucket.take(1e9, 0.0)

    assert bucket.wait_s(0.0) == 0


def test_what_is_owed_stays_owed_at_another_rate() -> None:
    bucket = Bucket(rate_per_s=1, capacity=10, now=0.0)
    bucket.take(15, 0.0)
    bucket.change(rate_per_s=2, capacity=100, now=0.0)

    assert bucket.wait_s(0.0) == 3
    bucket.change(rate_per_s=0, capacity=1, now=0.0)
    assert bucket.wait_s(0.0) == 0
    bucket.change(rate_per_s=1, capacity=2, now=0.0)
    assert bucket.wait_s(0.0) == 0, "nothing is owed of a time without a limit"


@given(
    rate=st.floats(0.001, 1e4),
    capacity=st.floats(1, 1e6),
    taken=st.floats(0, 1e7),
    start=st.floats(0, 1e6),
)
def test_after_the_wait_there_is_no_wait(
    rate: float, capacity: float, taken: float, start: float
) -> None:
    bucket = Bucket(rate_per_s=rate, capacity=capacity, now=start)
    bucket.take(taken, start)
    wait_s = bucket.wait_s(start)

    # As it travels: in whole milliseconds, rounded up.
    assert bucket.wait_s(start + wait_s + 0.001) == 0


def test_a_charge_outlives_a_time_without_a_limit() -> None:
    bucket = Bucket(rate_per_s=1, capacity=10, now=0.0)
    limited = bucket.charge(10, 0.0)
    bucket.change(rate_per_s=0, capacity=1, now=0.0)
    free = bucket.charge(10, 0.0)
    bucket.change(rate_per_s=1, capacity=10, now=0.0)
    bucket.take(10, 0.0)
    bucket.give_back(limited, 0.0)
    bucket.give_back(free, 0.0)

    assert bucket.wait_s(0.0) == 1, "neither was charged, so neither comes back"


Taken = tuple[float, float]  # time, amount


def level_after(taken: list[Taken], *, rate: float, capacity: float, now: float) -> float:
    """What a bucket has that saw just this."""
    level, at = capacity, 0.0
    for when, amount in [*taken, (now, 0.0)]:
        level = min(capacity, level + (when - at) * rate) - amount
        at = when
    return level


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["take", "charge", "keep", "give back"]),
            st.integers(0, 12),  # amount; of those that are undecided, which
            st.integers(0, 12),  # seconds since the last step
        ),
        max_size=30,
    ),
    rate=st.sampled_from([0.5, 1.0, 3.0]),
    capacity=st.sampled_from([1.0, 10.0, 40.0]),
)
@example(  # a charge of more than there was
    steps=[("charge", 61, 0), ("give back", 0, 0), ("take", 59, 0)], rate=1.0, capacity=60.0
)
@example(  # what would have overflowed without the charge does not come back with it
    steps=[("charge", 40, 0), ("take", 30, 20), ("give back", 0, 0), ("take", 30, 0)],
    rate=1.0,
    capacity=60.0,
)
@example(  # charges on both sides of a time at which the bucket would be full without them
    steps=[("charge", 8, 0), ("charge", 8, 9), ("keep", 0, 5), ("give back", 0, 0)],
    rate=1.0,
    capacity=10.0,
)
def test_whatever_is_given_back_the_rate_is_that_of_what_stays(
    steps: list[tuple[str, int, int]], rate: float, capacity: float
) -> None:
    """No order of decisions lets more be taken than the rate allows, or less."""
    bucket = Bucket(rate_per_s=rate, capacity=capacity, now=0.0)
    now = 0.0
    taken: dict[object, Taken] = {}
    undecided: list[Charge] = []
    for step, number, seconds in steps:
        now += seconds
        if step == "take":
            bucket.take(number, now)
            taken[object()] = now, number
        elif step == "charge":
            charge = bucket.charge(number, now)
            undecided.append(charge)
            taken[charge] = now, number
        elif undecided:
            charge = undecided.pop(number % len(undecided))
            if step == "keep":
                bucket.keep(charge, now)
            else:
                bucket.give_back(charge, now)
                del taken[charge]
        expected = level_after(list(taken.values()), rate=rate, capacity=capacity, now=now)
        assert bucket.level(now) == pytest.approx(expected)
