"""What clients saw of streams, as numbers: windows, percentiles, gaps, sums. Pure."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from pagewire import Usage

Row = dict[str, Any]  # a case as it stands in a result file


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRecord:
    """One stream as its client saw it. Times are seconds of the host's monotonic clock."""

    started: float  # when the call was made
    times: tuple[float, ...]  # when tokens came
    counts: tuple[int, ...]  # how many tokens came at each of these times
    usage: Usage | None = None  # None: the stream did not end
    error: str = ""  # empty: it ended as it should
    token_ids: tuple[int, ...] = field(default=(), repr=False)  # where they were asked for

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(self.counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """The time in which all streams of a wave are active."""

    seconds: float
    tokens: int  # of one stream in it, in the median
    step_ms: float  # seconds per token of a stream, in the median


def step_window(records: Sequence[StreamRecord]) -> StepWindow | None:
    """Return the time from the last first token to the first last one; None: there is none.

    A stream's step is measured between its own first and last token in that time, of which the
    first is not counted: what is divided is a whole number of steps.
    """
    if not records or not all(record.times for record in records):
        return None
    begin = max(record.times[0] for record in records)
    end = min(record.times[-1] for record in records)
    tokens, steps_ms = [], []
    for record in records:
        inside = [i for i, at in enumerate(record.times) if begin <= at <= end]
        count = sum(record.counts[i] for i in inside[1:])
        if not count:
            return None
        tokens.append(count)
        steps_ms.append(1e3 * (record.times[inside[-1]] - record.times[inside[0]]) / count)
    return StepWindow(
        seconds=end - begin,
        tokens=round(percentile(tokens, 50)),
        step_ms=percentile(steps_ms, 50),
    )


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile, interpolated between the two nearest ranks; at least one value."""
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def gaps_ms(
    records: Iterable[StreamRecord], begin: float = -math.inf, end: float = math.inf
) -> list[float]:
    """Return the time before each token but the first, ms, of tokens that came within a time.

    Tokens that came together have one gap before the first of them and none between them, as
    whoever reads them sees it.
    """
    gaps = []
    for record in records:
        for i in range(1, len(record.times)):
            if begin <= record.times[i] <= end:
                gaps.append(1e3 * (record.times[i] - record.times[i - 1]))
                gaps += [0.0] * (record.counts[i] - 1)
    return gaps


def tokens_within(record: StreamRecord, begin: float, end: float) -> tuple[int, int] | None:
    """Return the numbers of a stream's first and last token within a time; None: fewer than two."""
    numbers = list(accumulate(record.counts))
    inside = [each for each, at in zip(numbers, record.times, strict=True) if begin <= at <= end]
    return (inside[0], inside[-1]) if len(inside) > 1 else None


def step_between_ms(record: StreamRecord, first: int, last: int) -> float:
    """Return the mean time of a token, ms, from one token's arrival to another's, by number."""
    numbers = list(accumulate(record.counts))
    began, ended = (record.times[bisect_left(numbers, each)] for each in (first, last))
    return 1e3 * (ended - began) / (last - first)


def longest_pause_ms(record: StreamRecord, since: float) -> float:
    """Return the longest time before a token that came after a moment, ms; 0: none came."""
    pairs = pairwise([record.started, *record.times])
    return max((1e3 * (after - before) for before, after in pairs if after > since), default=0.0)


def gaps_after_pause_ms(records: Iterable[StreamRecord], since: float) -> list[float]:
    """Return the time before each token, ms, that came after a stream's longest pause.

    Of pauses, those count that a token ended after a moment; tokens are counted as by `gaps_ms`.
    """
    gaps = []
    for record in records:
        pauses = [
            (after - before, after)
            for before, after in pairwise([record.started, *record.times])
            if after > since
        ]
        if pauses:
            _, ended = max(pauses)
            gaps += gaps_ms([record], begin=math.nextafter(ended, math.inf))
    return gaps


def first_token_ms(records: Iterable[StreamRecord]) -> list[float]:
    """Return the time from each call to its first token, ms."""
    return [1e3 * (record.times[0] - record.started) for record in records if record.times]


def num_in_time(records: Iterable[StreamRecord], *, ttft_ms: float, itl_ms_p99: float) -> int:
    """Count the streams whose first token, and whose p99 of the times between tokens, is in time.

    Args:
        ttft_ms: Longest time from a call to its first token.
        itl_ms_p99: Longest p99 of the times between tokens, interpolated as by `percentile`.
    """
    return sum(
        max(first_token_ms([each]), default=math.inf) <= ttft_ms
        and percentile(gaps_ms([each]) or [0.0], 99) <= itl_ms_p99
        for each in records
    )


def last_first_token_ms(records: Sequence[StreamRecord]) -> float:
    """Return the time from the first call until all streams have a token, ms."""
    return 1e3 * (max(each.times[0] for each in records) - min(each.started for each in records))


def wall_s(records: Sequence[StreamRecord]) -> float:
    """Return the time from the first call to the last token, seconds."""
    return max(each.times[-1] for each in records) - min(each.started for each in records)


def spread(values: Sequence[float], digits: int = 3) -> Row:
    """Return median, least and greatest of repeats: `ms` is the median."""
    return {
        "ms": round(percentile(values, 50), digits),
        "min_ms": round(min(values), digits),
        "max_ms": round(max(values), digits),
        "repeats": len(values),
    }


def percentiles(values: Sequence[float], name: str, digits: int = 2) -> Row:
    """Return p50, p90, p99 and the greatest, named NAME_p50 and so on; {} for no values."""
    if not values:
        return {}
    found = {f"{name}_p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    found[f"{name}_max"] = max(values)
    return {key: round(value, digits) for key, value in found.items()}


def work_done(records: Iterable[StreamRecord]) -> Row:
    """Return what the streams that ended cost, in sums."""
    usages = [record.usage for record in records if record.usage]

    def total(name: str) -> int:
        return sum(getattr(usage, name) for usage in usages)

    return {
        "requests": len(usages),
        "prompt_tokens": total("prompt_tokens"),
        "tokens": total("completion_tokens"),
        "hit_tokens": total("cached_tokens"),
        "prefill_prompt_tokens": total("prefill_computed_tokens"),
        "decode_prompt_tokens": total("decode_computed_tokens"),
        "pages_moved": total("pages_moved"),
        "bytes_moved": total("bytes_moved"),
    }
