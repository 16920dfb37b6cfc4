import pytest

from pagewire import ClusterStatus
from pagewire.cli.rates import Answer, RateWindow, rates_between
from tests.cli.shown_workers import worker


def answer(at, *workers, finished=0):
    status = ClusterStatus(
        workers=workers,
        active_requests=0,
        finished_requests=finished,
        resumed_requests=0,
        index_pages=0,
    )
    return Answer(at, status)


def test_rates_are_what_sums_grew_by_in_the_time_between_two_answers():
    earlier = answer(
        10.0,
        worker(worker_id="prefill-0", pool="prefill", computed_tokens=100, bytes_moved=1000),
        worker(
            generated_tokens=50,
            looked_up_tokens=10,
            cached_tokens=5,
            bytes_moved=1000,
            attention_needed_bytes=100,
            attention_read_bytes=100,
        ),
        finished=7,
    )
    later = answer(
        12.0,
        worker(worker_id="prefill-0", pool="prefill", computed_tokens=500, bytes_moved=5000),
        worker(
            generated_tokens=80,
            looked_up_tokens=50,
            cached_tokens=35,
            bytes_moved=5000,
            attention_needed_bytes=500,
            attention_read_bytes=150,
        ),
        finished=10,
    )

    rates = rates_between(earlier, later)

    assert rates.seconds == 2
    assert rates.requests_per_s == 1.5
    assert rates.generated_tokens_per_s == 15
    assert rates.computed_tokens_per_s == 200
    assert rates.bytes_moved_per_s == 2000, "both sides tell of the same pages"
    assert rates.hit_rate == 0.75
    assert rates.read_share == rates.workers["decode-0", 255].read_share == 0.125
    assert rates.workers["prefill-0", 255].read_share is None
    assert rates.workers["decode-0", 255].hit_rate == 0.75
    assert rates.workers["prefill-0", 255].hit_rate is None
    assert rates.workers["prefill-0", 255].computed_tokens_per_s == 200


def test_a_workers_time_is_that_between_its_heartbeats():
    earlier = answer(10.0, worker(generated_tokens=0, heartbeat_age_ms=400))
    later = answer(11.0, worker(generated_tokens=60, heartbeat_age_ms=900))
    same_beat = answer(10.5, worker(generated_tokens=0, heartbeat_age_ms=900))

    assert rates_between(earlier, later).generated_tokens_per_s == pytest.approx(120)
    assert rates_between(earlier, same_beat).generated_tokens_per_s == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"incarnation": 1}, {"incarnation": 2}),  # its sums began anew
        ({"state": "dead"}, {}),
        ({}, {"state": "dead"}),
        ({"worker_id": "decode-1"}, {}),
    ],
)
def test_only_a_start_of_a_worker_that_lived_at_both_times_has_rates(before, after):
    earlier = answer(1.0, worker(generated_tokens=1000, **before))
    later = answer(2.0, worker(generated_tokens=5, **after))

    rates = rates_between(earlier, later)

    assert rates.workers == {}
    assert (rates.generated_tokens_per_s, rates.hit_rate) == (0, None)


def test_requests_that_another_router_counts_have_no_rate():
    assert rates_between(answer(1.0, finished=5), answer(2.0, finished=3)).requests_per_s is None


def test_a_window_begins_with_the_second_answer_and_forgets_old_ones():
    window = RateWindow(window_s=5.0)

    found = [window.add(answer(at, finished=at**2)) for at in (0.0, 1.0, 3.0, 5.0, 7.0, 30.0)]

    assert found[0] is None
    assert [each.seconds for each in found[1:]] == [1, 3, 5, 6, 23]
    assert found[-1].requests_per_s == (30**2 - 7**2) / 23


def test_no_time_has_no_rates():
    assert rates_between(answer(1.0), answer(1.0)) is None
