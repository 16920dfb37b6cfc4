"""Configuration of a prefill worker; the composition root fills it from the cluster's."""

import math
from dataclasses import dataclass, field

from kv_transfer.deadlines import TransferDeadlines


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """Limits and deadlines. Times are seconds."""

    max_step_tokens: int = 2048  # computed in one step, over all prompts; 256 on CPUs
    max_computing_prompts: int = 16  # prompts that hold pages and share the steps
    max_queued_prompts: int = 1024  # more are refused before any work
    max_overtakes: int = 8  # a queued prompt is passed over by at most so many later ones
    chunk_pages: int = 16  # pages handed to the transfer at a time

    start_s: float = 5.0  # from the opening of a Prefill call to its first message
    transfer_deadlines: TransferDeadlines = field(default_factory=TransferDeadlines)

    heartbeat_s: float = 0.5  # between two heartbeats to a router
    hash_key: bytes = b""  # of the page hashes; the same in the whole cluster

    def __post_init__(self) -> None:
        """Raise ValueError with one line for each wrong option, beginning with its name."""
        wrong = [
            f"{name} is {getattr(self, name)}; it must be positive and finite"
            for name in ("start_s", "heartbeat_s")
            if not 0 < getattr(self, name) < math.inf
        ]
        wrong += [
            f"{name} is {getattr(self, name)}; it must be 1 or more"
            for name in (
                "max_step_tokens",
                "max_computing_prompts",
                "max_queued_prompts",
                "chunk_pages",
            )
            if getattr(self, name) < 1
        ]
        if self.max_overtakes < 0:
            wrong.append(f"max_overtakes is {self.max_overtakes}; it must be 0 or more")
        if wrong:
            raise ValueError("\n".join(wrong))
