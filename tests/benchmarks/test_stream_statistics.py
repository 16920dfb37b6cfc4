"""What clients saw of streams, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from benchmarks.stream_statistics import (
    StreamRecord,
    first_token_ms,
    gaps_after_pause_ms,
    gaps_ms,
    last_first_token_ms,
    longest_pause_ms,
    num_in_time,
    percentile,
    percentiles,
    spread,
    step_between_ms,
    step_window,
    tokens_within,
    wall_s,
    work_done,
)
from pagewire import Usage

USAGE = Usage(
    prompt_tokens=100,
    completion_tokens=5,
    decode_cached_tokens=64,
    prefill_cached_tokens=80,
    prefill_computed_tokens=20,
    decode_computed_tokens=0,
    pages_moved=3,
    bytes_moved=300,
    preemptions=0,
    prefill_retries=0,
    resumptions=0,
    cached_tokens=80,
    ttft_ms=1.0,
    total_ms=2.0,
    tpot_ms=0.5,
    decode_workers=("decode-0",),
)


def stream(*times: float, counts: tuple[int, ...] = (), started: float = 0.0) -> StreamRecord:
    return StreamRecord(started=started, times=times, counts=counts or (1,) * len(times))


def test_a_step_is_measured_while_all_streams_are_active() -> None:
    early = stream(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    late = stream(2.5, 3.5, 4.5, 5.5, 6.5, 7.5)

    window = step_window([early, late])

    # From 2.5 to 6.0: the first has tokens at 3, 4, 5, 6 and the second at 2.5, 3.5, 4.5, 5.5.
    assert window is not None
    assert window.seconds == pytest.approx(3.5)
    assert window.tokens == 3
    assert window.step_ms == pytest.approx(1000.0)


def test_tokens_that_come_together_count_each() -> None:
    single = stream(0.0, 0.1, 0.2, 0.3, 0.4)
    double = stream(0.0, 0.2, 0.4, counts=(2, 2, 2))

    window = step_window([single, double])

    # Four tokens after the first in 0.4 s, for either: the two at 0.0 end before what is divided.
    assert window is not None
    assert window.tokens == 4
    assert window.step_ms == pytest.approx(100.0)


def test_the_step_is_that_of_the_median_stream() -> None:
    streams = [stream(0.0, 0.3), stream(0.0, 0.1, 0.2, 0.3), stream(0.0, 0.15, 0.3)]

    window = step_window(streams)

    # 0.3 s over 1, 3 and 2 tokens.
    assert window is not None
    assert (window.tokens, window.step_ms) == (2, pytest.approx(150.0))


@pytest.mark.parametrize(
    "streams",
    [
        [],
        [stream(1.0, 2.0), stream()],
        [stream(1.0, 2.0), stream(2.5, 3.0)],
        [stream(1.0, 2.0), stream(1.9, 2.5)],  # a token of each, and no step between two
    ],
)
def test_streams_that_are_never_all_active_have_no_window(streams: list[StreamRecord]) -> None:
    assert step_window(streams) is None


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    values = [40.0, 10.0, 30.0, 20.0]

    assert percentile(values, 0) == 10.0
    assert percentile(values, 50) == 25.0
    assert percentile(values, 90) == pytest.approx(37.0)  # rank 2.7 of 0..3
    assert percentile(values, 100) == 40.0
    assert percentile([7.0], 99) == 7.0
    assert percentiles(values, "x") == {"x_p50": 25.0, "x_p90": 37.0, "x_p99": 39.7, "x_max": 40.0}
    assert percentiles([], "x") == {}


def test_a_spread_names_the_median_ms() -> None:
    assert spread([3.0, 1.0, 8.0]) == {"ms": 3.0, "min_ms": 1.0, "max_ms": 8.0, "repeats": 3}


def test_gaps_are_those_before_each_token_within_a_time() -> None:
    record = stream(1.0, 1.5, 3.5, counts=(2, 1, 3))

    assert gaps_ms([record]) == pytest.approx([500.0, 2000.0, 0.0, 0.0])
    assert gaps_ms([record], begin=2.0) == pytest.approx([2000.0, 0.0, 0.0])
    assert gaps_ms([record], end=2.0) == pytest.approx([500.0])


def test_steps_are_compared_at_the_same_tokens() -> None:
    busy = stream(1.0, 1.5, 3.5, 4.0, 9.0, counts=(1, 1, 2, 1, 1))

    assert tokens_within(busy, 1.5, 4.5) == (2, 5)
    assert tokens_within(busy, 3.6, 4.5) is None
    assert tokens_within(busy, 5.0, 6.0) is None
    assert step_between_ms(busy, 2, 5) == pytest.approx(2500 / 3)
    alone = stream(0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
    assert step_between_ms(alone, 2, 5) == pytest.approx(250.0)


def test_a_pause_is_counted_that_began_before_a_moment_but_not_one_that_was_over() -> None:
    assert longest_pause_ms(stream(1.0, 6.0, 6.5, 7.5), 6.2) == 1000.0
    assert longest_pause_ms(stream(1.0, 6.0), 5.0) == 5000.0
    assert longest_pause_ms(stream(6.0, started=4.0), 5.0) == 2000.0
    assert longest_pause_ms(stream(1.0, 2.0), 5.0) == 0.0


def test_gaps_after_a_pause_leave_out_the_pause_and_what_was_before() -> None:
    paused = stream(1.0, 3.0, 4.0, 9.0, 9.5, 9.75, counts=(1, 1, 1, 1, 2, 1))

    assert gaps_after_pause_ms([paused], since=3.5) == pytest.approx([500.0, 0.0, 250.0])
    assert gaps_after_pause_ms([paused], since=9.25) == pytest.approx([250.0])  # the pause is over
    assert gaps_after_pause_ms([paused], since=10.0) == []
    assert gaps_after_pause_ms([stream(6.0, 6.5, started=4.0)], since=5.0) == [500.0]


def test_first_tokens_and_the_whole_time_count_from_the_calls() -> None:
    records = [stream(1.5, 4.0, started=1.0), stream(2.25, 3.0, started=2.0)]

    assert first_token_ms(records) == pytest.approx([500.0, 250.0])
    assert last_first_token_ms(records) == pytest.approx(1250.0)
    assert wall_s(records) == pytest.approx(3.0)


def test_work_is_summed_over_the_streams_that_ended() -> None:
    ended = replace(stream(1.0), usage=USAGE)

    assert work_done([ended, ended, stream(1.0)]) == {
        "requests": 2,
        "prompt_tokens": 200,
        "tokens": 10,
        "hit_tokens": 160,
        "prefill_prompt_tokens": 40,
        "decode_prompt_tokens": 0,
        "pages_moved": 6,
        "bytes_moved": 600,
    }


def test_streams_are_in_time_if_their_first_token_and_p99_of_the_others_are() -> None:
    limits = {"ttft_ms": 2000.0, "itl_ms_p99": 50.0}
    steady = tuple(2.0 + 0.04 * index for index in range(1000))
    one_pause = (*steady[:500], *(each + 1.0 for each in steady[500:]))
    many_pauses = tuple(2.0 + 0.04 * index + index // 50 for index in range(1000))

    assert num_in_time([stream(*steady), stream(*one_pause), stream(2.0)], **limits) == 3
    assert num_in_time([stream(*many_pauses)], **limits) == 0
    assert num_in_time([stream(*steady, started=-0.1), stream()], **limits) == 0
    # Of 30 times, p99 lies between the two longest, 0.71 of the way.
    for longest_ms, is_in_time in ((66.0, True), (69.0, False)):
        late = stream(*(2.0 + 0.01 * index for index in range(30)), 2.29 + longest_ms / 1000)
        assert num_in_time([late], **limits) == is_in_time
