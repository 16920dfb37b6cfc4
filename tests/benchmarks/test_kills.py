"""What rounds of kills note of the worker that was not hit."""

from dataclasses import replace
from typing import Any

from benchmarks.kills import MIB, allocator_growth_mib, sum_up
from tests.support.cluster_status import ONE_OF_EACH

IDLE = ONE_OF_EACH.workers[0]


def test_tensors_and_what_the_allocator_keeps_grow_apart() -> None:
    before = replace(IDLE, gpu_allocated_bytes=10 * MIB, gpu_reserved_bytes=20 * MIB)
    after = replace(IDLE, gpu_allocated_bytes=10 * MIB, gpu_reserved_bytes=54 * MIB)

    assert allocator_growth_mib(before, after) == {"allocated": 0, "reserved": 34}


def test_a_worker_without_a_gpu_has_no_such_memory() -> None:
    on_cpus = replace(IDLE, gpu_allocated_bytes=0, gpu_reserved_bytes=0)

    assert allocator_growth_mib(on_cpus, on_cpus) == {}


def test_a_case_notes_the_most_that_a_round_has_kept() -> None:
    keys = ("noticed_ms", "failed_ms", "quiet_ms", "restarted_ms", "last_ms")
    rounds: list[dict[str, Any]] = [
        {
            **dict.fromkeys(keys),
            **dict.fromkeys(("streams", "hit_the_moment", "lost_requests", "wrong_tokens"), 0),
            "usable_ms": 1.0,
            "pauses_ms": [1.0],
            "memory_grew_mib": [],
            "survivor_grew_mib": {"allocated": allocated, "reserved": reserved},
        }
        for allocated, reserved in ((0, 34), (2, 0))
    ]

    assert sum_up(rounds)["survivor_grew_mib"] == {"allocated": 2, "reserved": 34}
