"""Configuration of a decode worker; the composition root fills it from the cluster's."""

from dataclasses import dataclass

from llm_engine.limits import MAX_SEATS
from options.kept_by_name import kept_by_name
from options.option import option
from worker.config import HostConfig


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig(HostConfig):
    """Limits and deadlines. Times are seconds."""

    # Batch
    max_running_sequences: int = option(
        256, "Sequences in the batch.", at_least=1, at_most=MAX_SEATS
    )
    max_step_tokens: int = option(  # equal, a full batch would starve local prefills
        2048,
        "Tokens computed in one step: one per sequence, the rest for local prefill; 512 on CPUs.",
        exceeds="max_running_sequences",
    )
    step_budget_ms: float = option(
        30.0,
        "Time limit of a step that decodes and prefills: prompts are cut into chunks that fit, "
        "as measured, of at least a page, so that tokens keep coming while prompts are computed "
        "here. Prompts get a third of such a step even if it is longer by that. A step that only "
        "prefills is not cut. 0, also on CPUs: max_step_tokens alone is the limit.",
        at_least=0,
    )

    # Admission
    max_waiting_requests: int = option(
        1024, "Requests without a first token; more are refused before any work.", at_least=1
    )
    max_request_choices: int = option(64, "Choices of one request, its n.", at_least=1)

    # Passes that fail
    max_request_failures: int = option(
        2,
        "Failed passes of one request, on all workers, before it fails with INTERNAL.",
        at_least=1,
    )

    # Where a prompt is prefilled
    local_prefill_max_tokens: int = option(
        64,
        "An uncached suffix up to this length is computed here, which is cheaper than a "
        "transfer; 0: never while a prefill worker is available.",
        at_least=0,
    )

    # Remote prefill
    distrust_s: float = option(
        2.0,
        "How long a prefill worker is asked last after a failed attempt at it; by then routers "
        "know of deaths.",
        above=0,
    )
    result_s: float = option(
        10.0, "Time limit from the last page to the drawn token of the same prompt.", above=0
    )

    # Sessions
    max_outbox_tokens: int = option(
        1 << 20,
        "Undelivered tokens that a router may leave unread; more end its session.",
        at_least=1,
    )

    @property
    def max_choices(self) -> int:
        """The largest n that also fits into a batch."""
        return min(self.max_request_choices, self.max_running_sequences)
