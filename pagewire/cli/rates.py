"""Rates of a cluster: the growth of its totals between two answers of a router.

A worker's totals are from its last heartbeat, so its rates divide by the time between two
heartbeats, not between two answers.
"""

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from pagewire import Client, ClusterStatus, WorkerStatus

WINDOW_S = 5.0  # ten heartbeats by default

# Tells one start of a worker from the next, whose totals restart from zero.
WorkerStart = tuple[str, int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRates:
    """A worker's rates per second, and its cache hit rate."""

    generated_tokens_per_s: float
    computed_tokens_per_s: float  # of prompts
    bytes_moved_per_s: float
    hit_rate: float | None  # 0..1; None: nothing was looked up
    read_share: float | None  # what attention read of what it needed, 0..1; None: it needed nothing


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """A cluster's rates in a window of time; None or a missing worker: not known yet."""

    seconds: float  # of the window
    requests_per_s: float | None  # answered in full by the router
    generated_tokens_per_s: float
    computed_tokens_per_s: float
    bytes_moved_per_s: float  # each page once, though both of its workers report it
    hit_rate: float | None
    read_share: float | None
    workers: Mapping[WorkerStart, WorkerRates]


@dataclass(frozen=True, slots=True)
class Answer:
    """A router's answer."""

    at: float  # s, by any monotonic clock
    status: ClusterStatus


class RateWindow:
    """The answers of the last seconds.

    Args:
        window_s: How long an answer counts. From the second answer on there are rates, even if
            answers are less frequent.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._answers: deque[Answer] = deque()

    def add(self, answer: Answer) -> Rates | None:
        """Add the newest answer; return the rates since the oldest, or None for the first one."""
        self._answers.append(answer)
        while len(self._answers) > 2 and answer.at - self._answers[1].at >= self._window_s:
            self._answers.popleft()
        return rates_between(self._answers[0], answer)


def look_twice(client: Client, interval_s: float) -> tuple[ClusterStatus, Rates | None]:
    """Return a router's second answer and the rates since its first; raises PagewireError.

    A caller who is no operator sees nothing that has a rate: then the first answer is the only one.

    Args:
        client: Asks the router.
        interval_s: Seconds between both.
    """
    window = RateWindow()
    status = client.status()
    if status.is_partial:
        return status, None
    window.add(Answer(time.monotonic(), status))
    time.sleep(interval_s)
    status = client.status()
    return status, window.add(Answer(time.monotonic(), status))


def rates_between(earlier: Answer, later: Answer) -> Rates | None:
    """Return the rates between two answers; None if no time has passed."""
    seconds = later.at - earlier.at
    if seconds <= 0:
        return None
    before = {_start(each): each for each in earlier.status.workers if each.is_living}
    rates: dict[WorkerStart, WorkerRates] = {}
    looked_up = found = needed = read = 0
    moved: dict[str, float] = defaultdict(float)  # pool |-> bytes per second
    for each in later.status.workers:
        old = before.get(_start(each))
        if old is None or not each.is_living:
            continue
        beat_s = seconds + (old.heartbeat_age_ms - each.heartbeat_age_ms) / 1000
        rates[_start(each)] = worker = _worker_rates(old, each, beat_s)
        looked_up += each.looked_up_tokens - old.looked_up_tokens
        found += each.cached_tokens - old.cached_tokens
        needed += each.attention_needed_bytes - old.attention_needed_bytes
        read += each.attention_read_bytes - old.attention_read_bytes
        moved[each.pool] += worker.bytes_moved_per_s
    finished = later.status.finished_requests - earlier.status.finished_requests
    return Rates(
        seconds=seconds,
        # Negative: another router has answered.
        requests_per_s=finished / seconds if finished >= 0 else None,
        generated_tokens_per_s=sum(each.generated_tokens_per_s for each in rates.values()),
        computed_tokens_per_s=sum(each.computed_tokens_per_s for each in rates.values()),
        bytes_moved_per_s=max(moved.values(), default=0.0),
        hit_rate=_share(found, looked_up),
        read_share=_share(read, needed),
        workers=rates,
    )


def _worker_rates(old: WorkerStatus, new: WorkerStatus, seconds: float) -> WorkerRates:
    def per_s(before: int, after: int) -> float:
        # Below a millisecond both answers report the same heartbeat.
        return (after - before) / seconds if seconds > 0.001 else 0.0

    return WorkerRates(
        generated_tokens_per_s=per_s(old.generated_tokens, new.generated_tokens),
        computed_tokens_per_s=per_s(old.computed_tokens, new.computed_tokens),
        bytes_moved_per_s=per_s(old.bytes_moved, new.bytes_moved),
        hit_rate=_share(
            new.cached_tokens - old.cached_tokens, new.looked_up_tokens - old.looked_up_tokens
        ),
        read_share=_share(
            new.attention_read_bytes - old.attention_read_bytes,
            new.attention_needed_bytes - old.attention_needed_bytes,
        ),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def _start(worker: WorkerStatus) -> WorkerStart:
    return worker.worker_id, worker.incarnation
