"""Figures that a worker reports in each heartbeat."""

from dataclasses import dataclass

from llm_engine.engine_api import GpuMemory
from llm_engine.kv_reads import KVReads


@dataclass(slots=True)
class WorkerTotals:
    """Totals since the start of this incarnation, named as in WorkerTotals of the contract."""

    looked_up_tokens: int = 0  # prompt tokens looked up in the cache
    cached_tokens: int = 0  # of them, those whose pages were found
    computed_tokens: int = 0  # prompt tokens computed
    generated_tokens: int = 0  # tokens drawn
    pages_moved: int = 0  # sent to, or received from, the other pool
    bytes_moved: int = 0
    transfer_failures: int = 0  # not those that were cancelled
    preemptions: int = 0
    needed_bytes: int = 0  # of all pages of prompts that another worker was to prefill
    transfer_s: float = 0.0  # in which pages of prompts came, of transfers that succeeded
    exposed_transfer_s: float = 0.0  # of it, after the prompt was computed: the pages were awaited
    prompt_step_s: float = 0.0  # engine time of steps that computed prompt tokens alone
    decode_step_s: float = 0.0  # of steps that decoded alone
    mixed_step_s: float = 0.0  # of steps that did both

    @property
    def steps_s(self) -> float:
        """Return the engine time of all steps."""
        return self.prompt_step_s + self.decode_step_s + self.mixed_step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoad:
    """The load of this moment."""

    steps: int  # engine steps so far; a worker that has work and makes none is stuck
    steps_ahead: int  # of them, those launched before the last one's tokens were known
    steps_alone: int  # of them, those with no other beside them, after a failed pass of a request
    reads: KVReads  # of attention, in all steps so far
    num_over_quota: int  # pages evicted so far because a tenant had more than it may keep
    running: int  # sequences or prompts that share the steps
    waiting: int  # requests that wait for pages, for a prefill or for a place
    queued_tokens: int  # prompt tokens not yet computed here
    gpu_memory: GpuMemory  # of this process
    is_draining: bool
    is_stepping: bool  # a step has not ended
