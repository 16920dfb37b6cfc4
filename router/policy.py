"""Decides who serves a request: a pure function of the request, the workers and their overlaps.

A worker's cost is the time that the request would take it, in seconds: the work in its queue, plus
the tokens it would have to compute or receive, plus what its load slows down. The cheapest wins.
New work weighs more than waiting: computing a prefix again takes from everybody, waiting for one
that is being computed only from oneself.
Overlap alone never decides: it saves exactly the work that it saves, and a busy worker loses what
its queue costs. On decode workers overlap also groups requests that share a prefix: its pages are
held once for all of them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyWeights:
    """What turns counts into seconds; see RouterConfig for the meaning."""

    prefill_tokens_per_s: float
    new_work_weight: float
    decode_load_s: float
    page_pressure_s: float
    max_prefill_candidates: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoad:
    """One worker that may be chosen, and its load."""

    worker_id: str
    num_requests: int = 0  # that it has now
    queued_tokens: int = 0  # prompt tokens that wait to be computed there
    used_page_share: float = 0.0  # pages that cannot be evicted / all pages, 0..1


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteQuery:
    """What the decision depends on besides the workers."""

    num_tokens: int
    page_size: int
    affinity: bytes  # of the first page: sends cold prompts with one beginning to one place


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteDecision:
    """Who decodes, and who may prefill, best first."""

    decode_worker: str
    prefill_candidates: tuple[str, ...]
    decode_overlap: int  # tokens that the decode worker is expected to hold
    prefill_overlaps: tuple[int, ...]  # the same of each candidate


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
        decode_workers: Those that take requests; at least one.
        prefill_workers: Likewise; none means that the decode worker prefills.
        overlaps: worker_id |-> leading pages that it holds; absent is 0.
        weights: Of the costs.
    """
    decode = _order(query, decode_workers, overlaps, weights, load_s=weights.decode_load_s)
    prefill = _order(query, prefill_workers, overlaps, weights, load_s=0.0)
    candidates = tuple(prefill[: weights.max_prefill_candidates])
    return RouteDecision(
        decode_worker=decode[0],
        prefill_candidates=candidates,
        decode_overlap=_overlap(query, overlaps, decode[0]),
        prefill_overlaps=tuple(_overlap(query, overlaps, each) for each in candidates),
    )


def _order(
    query: RouteQuery,
    workers: Sequence[WorkerLoad],
    overlaps: Mapping[str, int],
    weights: PolicyWeights,
    *,
    load_s: float,
) -> list[str]:
    def cost(worker: WorkerLoad) -> tuple[float, bytes]:
        missing = query.num_tokens - _overlap(query, overlaps, worker.worker_id)
        seconds = (
            (worker.queued_tokens + weights.new_work_weight * missing)
            / weights.prefill_tokens_per_s
            + worker.num_requests * load_s
            + worker.used_page_share * weights.page_pressure_s
        )
        return seconds, _tie_break(query.affinity, worker.worker_id)

    return [worker.worker_id for worker in sorted(workers, key=cost)]


def _overlap(query: RouteQuery, overlaps: Mapping[str, int], worker_id: str) -> int:
    # The last token is always computed, also where its page is held.
    return min(overlaps.get(worker_id, 0) * query.page_size, query.num_tokens - 1)


def _tie_break(affinity: bytes, worker_id: str) -> bytes:
    """Order equal workers differently for different prompts, so that cold prompts spread."""
    return hashlib.blake2b(affinity + worker_id.encode(), digest_size=8).digest()
