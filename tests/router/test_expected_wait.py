import random

import pytest

from router.expected_wait import (
    PRIOR_HOLDING_S,
    DecodeQueue,
    Demand,
    HoldingTime,
    TokenRate,
    wait_to_hold_s,
)


def queue(**fields: int | float) -> DecodeQueue:
    return DecodeQueue(**{"num_pages": 70, "num_free_pages": 70, "holding_s": 8.0} | fields)


def demand(num_pages: int = 7, num_sequences: int = 1) -> Demand:
    return Demand(num_pages=num_pages, mean_pages=num_pages + 3.0, num_sequences=num_sequences)


# Eight sequences hold nearly all of 70 pages.
FULL = {"num_free_pages": 4, "num_holding": 8}


@pytest.mark.parametrize(
    ("name", "found", "asked", "expected"),
    [
        ("nothing is known", DecodeQueue(), demand(10_000, 64), 0.0),
        ("idle", queue(), demand(70), 0.0),
        ("there is just enough", queue(num_free_pages=9, num_holding=2), demand(7), 0.0),
        ("a page too few: a seventh of one end", queue(num_free_pages=8, num_holding=2), demand(7),
         8 / 2 / 7),
        ("all in use: until one of eight ends", queue(**FULL), demand(), 1.0),
        ("50 requests come first", queue(**FULL, num_waiting=50, num_awaited_pages=350), demand(),
         51.0),
        ("some of those ahead fit",
         queue(num_free_pages=50, num_holding=8, num_waiting=11, num_awaited_pages=77), demand(),
         6.0),
        ("a burst at an idle worker, which holds seven at a time",
         queue(num_waiting=59, num_awaited_pages=413), demand(), 50 * 8 / 7),
        ("those ahead wait for a prefix that one holds, and most will fit beside it",
         queue(num_free_pages=60, num_holding=1, num_waiting=29, num_awaited_pages=87), demand(3),
         8 * (90 - 59) / 90 * 30 / (70 / 6)),
        ("a free place", queue(max_sequences=8, num_sequences=7), demand(), 0.0),
        ("no free place", queue(max_sequences=8, num_sequences=8), demand(), 1.0),
        ("several choices", queue(max_sequences=8, num_sequences=8), demand(1, 8), 8.0),
        ("more choices than places", queue(max_sequences=8, num_sequences=4), demand(1, 8), 4.0),
        ("a long queue for places", queue(max_sequences=8, num_sequences=39), demand(), 32.0),
        ("the longer of the two", queue(**FULL, max_sequences=8, num_sequences=9), demand(), 2.0),
    ],
)  # fmt: skip
def test_the_wait_for_pages_and_places(
    name: str, found: DecodeQueue, asked: Demand, expected: float
) -> None:
    assert wait_to_hold_s(found, asked) == pytest.approx(expected, rel=0.02), name


def test_before_anything_ended_the_holding_time_is_assumed() -> None:
    assert HoldingTime().mean_s(100.0) == PRIOR_HOLDING_S


def test_the_holding_time_follows_the_last_requests_that_ended() -> None:
    holding = HoldingTime()
    for index in range(100):
        holding.start(float(index))
        holding.end(float(index), index + 20.0)

    assert 16 < holding.mean_s(120.0) < 20
    assert holding.mean_s(1e6) == holding.mean_s(120.0), "an idle worker is as fast as it was"
    for index in range(200):
        holding.start(float(index))
        holding.end(float(index), index + 2.0)
    assert holding.mean_s(1e6) < 3


def test_requests_that_go_on_and_on_count_before_they_end() -> None:
    holding = HoldingTime()
    for _ in range(10):
        holding.start(0.0)

    estimates = [holding.mean_s(now) for now in (0.0, 10.0, 30.0, 100.0)]

    assert estimates[0] == PRIOR_HOLDING_S
    assert estimates == sorted(estimates)
    assert estimates[-1] > 100.0


@pytest.mark.parametrize("mean_s", [0.2, 2.0, 20.0, 200.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_holding_time_finds_the_mean_of_random_times(seed: int, mean_s: float) -> None:
    """A closed loop of 20 requests, looked at while all places are taken."""
    rng = random.Random(seed)
    holding = HoldingTime()
    now = 0.0
    ends = []
    for _ in range(20):
        holding.start(now)
        ends.append((rng.expovariate(1 / mean_s), 0.0))
    for _ in range(300):
        ends.sort()
        now, started_at = ends.pop(0)
        holding.end(started_at, now)
        holding.start(now)
        ends.append((now + rng.expovariate(1 / mean_s), now))

    assert 0.5 * mean_s < holding.mean_s(now) < max(2 * mean_s, mean_s + 5)


def observed(*beats: tuple[float, int, int]) -> TokenRate:
    """Return a rate that has seen heartbeats of (time, tokens computed, tokens queued)."""
    rate = TokenRate()
    for now, num_computed, num_queued in beats:
        rate.observe(num_computed=num_computed, num_queued=num_queued, now=now)
    return rate


@pytest.mark.parametrize(
    ("name", "beats", "expected"),
    [
        ("never seen", [], 0.0),
        ("idle", [(0.0, 0, 0), (5.0, 100, 0)], 0.0),
        ("busy, but for too short", [(0.0, 0, 9000), (0.5, 1000, 8000)], 0.0),
        ("busy for long enough", [(0.0, 0, 9000), (0.5, 1000, 8000), (1.1, 2200, 7000)], 5.0),
        ("what it computed had only just come", [(0.0, 0, 10), (0.5, 1000, 10), (1.1, 2200, 10)],
         0.0),
        ("it ran out of work in between",
         [(0.0, 0, 9000), (0.5, 1000, 8000), (1.1, 2200, 7000), (9.0, 9000, 0), (9.5, 9000, 0)],
         5.0),
        ("a pass takes longer than a heartbeat",
         [(0.0, 0, 9000), (0.5, 0, 9000), (1.0, 0, 9000), (2.0, 2000, 7000)], 10.0),
        ("idle between two bursts",
         [(0.0, 0, 9000), (0.5, 1000, 8000), (1.1, 2200, 7000), (2.0, 9200, 0), (60.0, 9200, 9000),
          (61.0, 11_200, 7000)], 5.0),
    ],
)  # fmt: skip
def test_the_time_that_queued_tokens_take(
    name: str, beats: list[tuple[float, int, int]], expected: float
) -> None:
    assert observed(*beats).seconds(10_000) == pytest.approx(expected, rel=0.02), name
