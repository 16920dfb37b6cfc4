from hypothesis import given
from hypothesis import strategies as st

from router.tenants.bucket import Bucket


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
