"""Workers' reports about themselves, as values, and what a router knows of a worker."""

from dataclasses import dataclass

from router.membership import WorkerMember, WorkerRole
from router.request import ServedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A worker's answer to GetInfo."""

    incarnation: int
    contract_version: int  # 0: it stated none
    pool: WorkerRole | None  # None: it did not say
    model: ServedModel
    transports: tuple[str, ...]  # for pages, best first
    page_bytes: int  # 0: it did not say
    device: str  # its type; empty: it did not say
    tokenizer_digest: str  # of its tokenizer.json; empty: it did not say


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHeartbeat:
    """The part of a heartbeat that the router uses for decisions."""

    incarnation: int
    steps: int  # grows with each engine step
    num_running: int  # sequences in the batch
    num_waiting: int  # requests that wait
    queued_tokens: int  # prompt tokens not yet computed
    num_pages: int
    num_used_pages: int  # that cannot be evicted
    num_computed_tokens: int  # prompt tokens, since the worker's start
    is_draining: bool
    is_stepping: bool  # an engine step has not ended
    message: bytes  # all of it, as it came, for the cluster status


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownWorker:
    """A worker as the cluster status shows it."""

    member: WorkerMember
    state: str  # a name of WorkerState in protos/inference.proto
    misfit: str  # why it can never serve beside the other workers; empty: it can
    silence: str  # why nothing is heard from it; empty: it is heard, or was not connected yet
    heartbeat: WorkerHeartbeat | None  # the last; None: none has come
    heartbeat_age_s: float
