"""Configuration of a decode worker; the composition root fills it from the cluster's."""

import math
from dataclasses import dataclass, field

from kv_transfer.deadlines import TransferDeadlines


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """Limits and deadlines. Times are seconds."""

    # Batch
    max_running_sequences: int = 256  # sequences in the batch
    max_step_tokens: int = 2048  # computed in one step: one per sequence, rest local prefill;
    # 512 on CPUs

    # Admission
    max_waiting_requests: int = 1024  # without a first token yet; more are refused before any work
    max_request_choices: int = 64  # n of one request

    # Where a prompt is prefilled
    local_prefill_max_tokens: int = 64  # an uncached suffix up to this is cheaper to compute here
    # than to ask for; 0: never while a prefill worker is available

    # Remote prefill
    transfer_deadlines: TransferDeadlines = field(default_factory=TransferDeadlines)
    distrust_s: float = (
        2.0  # after a failed attempt others go first; routers hear of deaths by then
    )
    result_s: float = 10.0  # from the last page to the drawn token of the same prompt

    # Sessions
    max_outbox_tokens: int = 1 << 20  # undelivered tokens of a router that does not read; then its
    # session ends

    heartbeat_s: float = 0.5  # between two heartbeats to a router
    hash_key: bytes = b""  # of the page hashes; the same in the whole cluster

    @property
    def max_choices(self) -> int:
        """The largest n that a batch has room for, too."""
        return min(self.max_request_choices, self.max_running_sequences)

    def __post_init__(self) -> None:
        """Raise ValueError with one line for each wrong option, beginning with its name."""
        wrong = [
            f"{name} is {getattr(self, name)}; it must be positive and finite"
            for name in ("distrust_s", "result_s", "heartbeat_s")
            if not 0 < getattr(self, name) < math.inf
        ]
        wrong += [
            f"{name} is {getattr(self, name)}; it must be 1 or more"
            for name in (
                "max_running_sequences",
                "max_waiting_requests",
                "max_request_choices",
                "max_outbox_tokens",
            )
            if getattr(self, name) < 1
        ]
        if self.max_step_tokens <= self.max_running_sequences:
            # Otherwise a full batch would starve local prefills.
            wrong.append(
                f"max_step_tokens is {self.max_step_tokens}; it must exceed "
                f"max_running_sequences, which is {self.max_running_sequences}"
            )
        if self.local_prefill_max_tokens < 0:
            wrong.append(
                f"local_prefill_max_tokens is {self.local_prefill_max_tokens}; it must be 0 or more"
            )
        if wrong:
            raise ValueError("\n".join(wrong))
