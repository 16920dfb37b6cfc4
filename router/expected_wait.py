"""How long a request would wait before it starts: pure estimates, from heartbeats and own counts.

A request starts when its decode worker has pages for its prompt and a place in the batch, and a
prefill worker has computed all earlier prompts. The three queues drain at the same time, so the
longest wait counts:

- Pages: when they are short, each request that ends makes room for about one that waits. Requests
  that hold pages end once per `HoldingTime`, on average.
- Places: likewise.
- Prefill: tokens in the queue over `TokenRate`, as observed; nothing before that.

Doubt favours the request: unknown load, old reports and merely cached pages do not delay it.
"""

from dataclasses import dataclass

EXPECTED_NEW_TOKENS = 250
PRIOR_HOLDING_S = 5.0  # as many tokens, of 20 ms each
PRIOR_WEIGHT = 8.0  # as many requests as have to end before the prior counts half
KEPT_SHARE = 0.98  # weight of earlier requests when another one ends
RATE_HALF_LIFE_S = 30.0
MIN_OBSERVED_S = 1.0


@dataclass(kw_only=True, slots=True)  # not frozen, which would make construction many times slower
class DecodeQueue:
    """The state of a decode worker that a request would meet; a limit of 0 is unknown."""

    num_pages: int = 0  # of the pool
    num_free_pages: int = 0  # free or evictable
    num_holding: float = 0.0  # sequences that hold pages: in the batch, or being prefilled
    num_waiting: float = 0.0  # requests ahead that hold no pages
    num_awaited_pages: float = 0.0  # that these need
    max_sequences: int = 0  # places in the batch
    num_sequences: int = 0  # that have a place or come first
    holding_s: float = 0.0  # how long a request keeps its place and pages


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class Demand:
    """The resources that a request would take of a decode worker."""

    num_pages: int  # to start: those that the worker's cache lacks
    mean_pages: float  # on average until it ends
    num_sequences: int  # choices


def wait_to_hold_s(queue: DecodeQueue, demand: Demand) -> float:
    """Return how long a request would wait for its pages and its places in the batch."""
    wait_s = 0.0
    if queue.max_sequences:
        excess = queue.num_sequences + demand.num_sequences - queue.max_sequences
        if excess > 0:
            wait_s = excess / queue.max_sequences * queue.holding_s
    if not queue.num_pages:
        return wait_s
    wanted = queue.num_awaited_pages + demand.num_pages
    # A worker keeps a page free for each sequence that grows.
    lacking = wanted - (queue.num_free_pages - queue.num_holding)
    if lacking <= 0:
        return wait_s
    num_blocked = (queue.num_waiting + 1) * min(1.0, lacking / wanted)
    # Unblocked requests ahead begin to hold pages, as far as there is room for their growth.
    num_starting = max(0.0, queue.num_waiting - num_blocked)
    num_at_once = min(queue.num_holding + num_starting, queue.num_pages / demand.mean_pages)
    num_holding = max(1.0, queue.num_holding, num_at_once)
    return max(wait_s, num_blocked / num_holding * queue.holding_s)


class HoldingTime:
    """Estimates how long requests hold their pages, even while none has ended yet.

    The estimate is the total time of all requests over the number of ended ones: the
    maximum-likelihood mean of exponential times, some still running. About the last fifty ended
    requests count.
    """

    def __init__(self) -> None:
        self._num_ended = 0.0
        self._ended_s = 0.0  # how long these took
        self._num_running = 0
        self._sum_started_at = 0.0  # of running requests

    def start(self, now: float) -> None:
        """Note that a request begins to hold pages; times are those of any one clock."""
        self._num_running += 1
        self._sum_started_at += now

    def end(self, started_at: float, now: float) -> None:
        """Note the end of a request and its start time."""
        self._num_running -= 1
        self._sum_started_at -= started_at
        if not self._num_running:
            self._sum_started_at = 0.0  # rounding errors do not add up
        self._num_ended = KEPT_SHARE * self._num_ended + 1
        self._ended_s = KEPT_SHARE * self._ended_s + (now - started_at)

    def mean_s(self, now: float) -> float:
        """Return the estimate."""
        running_s = max(0.0, self._num_running * now - self._sum_started_at)
        total_s = self._ended_s + running_s + PRIOR_WEIGHT * PRIOR_HOLDING_S
        return total_s / (self._num_ended + PRIOR_WEIGHT)


class TokenRate:
    """Tokens that a worker computes per second while it has tokens to compute.

    Only periods count in which it was certainly busy: at their end it still had tokens to compute,
    and at their beginning more than it computed.
    """

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._busy_s = 0.0
        self._last = (0, 0, 0.0)  # of a heartbeat, the last with progress: computed, queued, time

    def observe(self, *, num_computed: int, num_queued: int, now: float) -> None:
        """Note a heartbeat.

        Args:
            num_computed: Tokens that the worker has computed since its start.
            num_queued: Tokens that it has to compute.
            now: Time of the heartbeat.
        """
        computed_before, queued_before, at = self._last
        num_new = num_computed - computed_before
        if num_queued and queued_before and not num_new:
            return  # one pass may outlast the period between heartbeats
        self._last = (num_computed, num_queued, now)
        if num_queued and 0 < num_new <= queued_before:
            factor = 0.5 ** ((now - at) / RATE_HALF_LIFE_S)
            self._num_tokens = self._num_tokens * factor + num_new
            self._busy_s = self._busy_s * factor + (now - at)

    def seconds(self, num_tokens: int) -> float:
        """Return how long a number of tokens takes; 0 while the rate is unknown."""
        if self._busy_s < MIN_OBSERVED_S:
            return 0.0
        return num_tokens * self._busy_s / self._num_tokens
