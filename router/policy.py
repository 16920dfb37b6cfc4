"""Decides where a request is served: a pure function of the request and the workers' state.

The cost of a worker is a time in seconds, and the cheapest worker wins.

A decode worker costs
    wait      until it has pages and a place in its batch (router/expected_wait.py)
  + load      num_requests x decode_load_s: the new request and those that run there slow each
              other's steps
  + pressure  share of the pool in use including the request x page_pressure_s
  + receive   tokens that its cache lacks x receive_s_per_token: bytes over bandwidth
  + compute   the cost of the best prefill worker. A decode worker that lacks at most
              local_prefill_max_tokens computes them itself, if that is cheaper.

A prefill worker costs the tokens in its queue, plus new_work_weight x the tokens that its cache
lacks, over prefill_tokens_per_s. New work weighs more than waiting: computing a prefix again takes
time from all requests, waiting for one being computed only from the request itself.

A decode worker receives the pages that it lacks, which takes milliseconds over NVLink. They are
computed only if the prefill worker lacks them, too, at the same cost for every decode worker. So a
prefix that a decode worker already holds saves little more than the transfer, and load decides.
Without prefill workers a decode worker computes all that it lacks, and overlap saves that work.

A request that another decode worker has begun stays on the type of device that drew its tokens if
a worker of it has room soon, however dear: on another type, the next tokens might be other ones.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.expected_wait import EXPECTED_NEW_TOKENS, DecodeQueue, Demand, wait_to_hold_s

# With a longer expected wait on all workers of its type, a request takes another type. A fault
# pauses a stream about as long.
SAME_DEVICE_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyWeights:
    """Factors that turn counts into seconds; see RouterConfig for their meaning."""

    prefill_tokens_per_s: float
    new_work_weight: float
    decode_load_s: float
    page_pressure_s: float
    local_prefill_max_tokens: int
    max_prefill_candidates: int


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class WorkerLoad:
    """One worker that may be chosen, and its load."""

    worker_id: str
    device: str = ""  # its type; empty: unknown
    num_requests: int = 0  # that it has now
    queued_tokens: int = 0  # prompt tokens that wait to be computed there
    prefill_wait_s: float = 0.0  # until these are computed, as far as that is known
    receive_s_per_token: float = 0.0  # of a decode worker: time to receive a token's part of pages
    queue: DecodeQueue = field(default_factory=DecodeQueue)  # of a decode worker


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class RouteQuery:
    """The inputs of the decision besides the workers."""

    num_tokens: int  # of the prompt
    num_sequences: int  # choices
    max_new_tokens: int  # of each
    page_size: int
    affinity: bytes  # of the first page: cold prompts with the same beginning go to the same place
    device: str = ""  # the type that drew its tokens so far; empty: none, or unknown


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class RouteDecision:
    """The decode worker, and the prefill candidates, best first."""

    decode_worker: str
    prefill_candidates: tuple[str, ...]
    computing_worker: str  # the one that is expected to compute the prompt
    num_computed_tokens: int  # that it will have to compute
    num_received_pages: int  # that the decode worker lacks
    least_wait_s: float  # expected until the request could start anywhere


def route(
    query: RouteQuery,
    *,
    decode_workers: Sequence[WorkerLoad],
    prefill_workers: Sequence[WorkerLoad],
    overlaps: Mapping[str, int],
    weights: PolicyWeights,
) -> RouteDecision:
    """Choose one decode worker and an order of prefill candidates.

    Args:
        query: The request.
        decode_workers: The ones that take requests; at least one.
        prefill_workers: The ones that take requests; none means that the decode worker prefills.
        overlaps: worker_id |-> leading pages that it holds; absent is 0.
        weights: The weights of the costs.
    """
    costs = _Costs(query, overlaps, weights)
    prefill = sorted(prefill_workers, key=lambda each: costs.ranked(each, costs.compute_s(each)))
    best = prefill[0] if prefill else None
    decode = decode_workers[0]
    if len(decode_workers) > 1:
        decode = min(
            costs.alike(decode_workers) or decode_workers,
            key=lambda each: costs.ranked(each, costs.decode_s(each, best)),
        )
    computing = costs.computing(decode, best)
    return RouteDecision(
        decode_worker=decode.worker_id,
        prefill_candidates=tuple(
            each.worker_id for each in prefill[: weights.max_prefill_candidates]
        ),
        computing_worker=computing.worker_id,
        num_computed_tokens=costs.num_lacking(computing),
        num_received_pages=costs.num_lacking_pages(decode),
        least_wait_s=min(costs.wait_s(each, prefill) for each in decode_workers),
    )


class _Costs:
    """The costs of all workers for one request, seconds."""

    def __init__(
        self, query: RouteQuery, overlaps: Mapping[str, int], weights: PolicyWeights
    ) -> None:
        self._query = query
        self._overlaps = overlaps
        self._weights = weights
        num_new_tokens = query.num_sequences * min(query.max_new_tokens, EXPECTED_NEW_TOKENS)
        self._mean_new_pages = num_new_tokens / query.page_size / 2

    def ranked(self, worker: WorkerLoad, seconds: float) -> tuple[float, bytes]:
        """Order equal workers differently for different prompts, so that cold prompts spread."""
        name = self._query.affinity + worker.worker_id.encode()
        return seconds, hashlib.blake2b(name, digest_size=8).digest()

    def alike(self, workers: Sequence[WorkerLoad]) -> list[WorkerLoad]:
        """Return those of the type of device that drew its tokens; none if none has room soon."""
        device = self._query.device
        same = [each for each in workers if device and each.device == device]
        has_room = any(self._hold_s(each) <= SAME_DEVICE_WAIT_S for each in same)
        return same if has_room else []

    def num_lacking(self, worker: WorkerLoad) -> int:
        """Return the tokens that a worker's cache lacks: at least one, the last."""
        num_tokens = self._query.num_tokens
        num_cached = self._overlaps.get(worker.worker_id, 0) * self._query.page_size
        return num_tokens - min(num_cached, num_tokens - 1)

    def num_lacking_pages(self, worker: WorkerLoad) -> int:
        return -(-self.num_lacking(worker) // self._query.page_size)

    def compute_s(self, worker: WorkerLoad) -> float:
        num_new = self._weights.new_work_weight * self.num_lacking(worker)
        return (worker.queued_tokens + num_new) / self._weights.prefill_tokens_per_s

    def decode_s(self, worker: WorkerLoad, prefill: WorkerLoad | None) -> float:
        queue = worker.queue
        share_in_use = 0.0
        if queue.num_pages:
            num_in_use = queue.num_pages - queue.num_free_pages + self.num_lacking_pages(worker)
            share_in_use = num_in_use / queue.num_pages
        receive_s = 0.0
        if prefill is not None:
            receive_s = self.num_lacking(worker) * worker.receive_s_per_token
        return (
            self._hold_s(worker)
            + worker.num_requests * self._weights.decode_load_s
            + share_in_use * self._weights.page_pressure_s
            + receive_s
            # At most the cost of a prefill worker, so that no worker loses by holding more.
            + min(
                self.compute_s(each) for each in (self.computing(worker, prefill), prefill) if each
            )
        )

    def computing(self, decode: WorkerLoad, prefill: WorkerLoad | None) -> WorkerLoad:
        """Return the worker that computes the prompt if this worker decodes it."""
        is_little = self.num_lacking(decode) <= self._weights.local_prefill_max_tokens
        return decode if prefill is None or is_little else prefill

    def wait_s(self, decode: WorkerLoad, prefill: Sequence[WorkerLoad]) -> float:
        """Return how long the request would wait before it could start on a decode worker."""
        computing = [self.computing(decode, each) for each in prefill] or [decode]
        return max(self._hold_s(decode), min(each.prefill_wait_s for each in computing))

    def _hold_s(self, worker: WorkerLoad) -> float:
        num_pages = self.num_lacking_pages(worker)
        demand = Demand(
            num_pages=num_pages,
            mean_pages=num_pages + self._mean_new_pages,
            num_sequences=self._query.num_sequences,
        )
        return wait_to_hold_s(worker.queue, demand)
