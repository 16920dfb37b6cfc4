"""Limits of a worker, whatever its pool; the composition root fills them from the cluster's."""

from dataclasses import dataclass, field

from kv_transfer.deadlines import TransferDeadlines
from options.kept_by_name import kept_by_name
from options.option import check_options, option


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class HostConfig:
    """What both pools' configurations have in common. Times are seconds."""

    max_failed_passes: int = option(
        3, "Failed passes in a row, probes included, before the worker restarts.", at_least=1
    )
    max_step_s: float = option(
        60.0,
        "Time limit of an engine step. One that takes longer hangs, for instance in the GPU's "
        "driver, and the worker restarts.",
        above=0,
    )
    max_overtaken_s: float = option(
        20.0,
        "Engine time after which a prompt is computed before all that came later. Until then "
        "shorter ones go first, the more so the shorter they are. 0: in order of arrival. On "
        "prefill workers, the sum of this and router.max_expected_wait_s should be at most "
        "transfer.chunk_s; else decode workers give up long prompts.",
        at_least=0,
    )
    heartbeat_s: float = option(0.5, "Period of heartbeats to a router.", above=0)

    transfer_deadlines: TransferDeadlines = field(default_factory=TransferDeadlines)
    hash_key: bytes = field(
        default=b"", repr=False
    )  # of page hashes; the same in the whole cluster

    def __post_init__(self) -> None:
        check_options(self)
