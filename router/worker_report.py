"""What workers say about themselves, as values."""

from dataclasses import dataclass

from router.membership import PoolName
from router.request import ServedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A worker's answer to GetInfo."""

    worker_id: str
    incarnation: int
    pool: PoolName | None  # None: it did not say
    model: ServedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHeartbeat:
    """The part of a heartbeat that the router decides by."""

    incarnation: int
    steps: int  # grows with each engine step
    num_running: int  # sequences in the batch
    num_waiting: int  # requests that wait
    queued_tokens: int  # prompt tokens not yet computed
    num_pages: int
    num_used_pages: int  # that cannot be evicted
    is_draining: bool
    message: bytes  # all of it, as it came, for the cluster status

    @property
    def used_page_share(self) -> float:
        return self.num_used_pages / self.num_pages if self.num_pages else 0.0
