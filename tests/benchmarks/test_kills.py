"""What rounds of kills note of GPU memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import kills
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


def test_memory_is_compared_while_no_workers_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [{"decode-0": 7, "prefill-0": 5}, {}, {"decode-0": 9, "prefill-0": 5}]
    asked_at: list[float] = []

    def gpu_memory_of(pids: Mapping[int, str]) -> dict[str, int]:
        assert pids == {1: "prefill-0", 2: "decode-0"}
        asked_at.append(time.monotonic())
        return levels[min(len(asked_at) // 3, 2)]  # once it could not be asked

    monkeypatch.setattr(kills, "gpu_memory_of", gpu_memory_of)
    monkeypatch.setattr(kills, "STEADY_S", 0.2)

    assert kills._steady_memory_mib(make_run()) == [5, 9]
    assert asked_at[-1] - asked_at[5] > 0.2


def test_on_cpus_there_is_no_memory_to_wait_for() -> None:
    assert kills._steady_memory_mib(make_run("cpu")) == []


def make_run(device: str = "cuda") -> Any:
    """Return what stands for a run: two processes, and a wait without a deadline."""

    def until(is_true: Callable[[], bool], timeout_s: float, what: str) -> None:
        while not is_true():
            time.sleep(0.01)

    pids = {"prefill-0": 1, "decode-0": 2}
    cluster = SimpleNamespace(pid=pids.__getitem__, device=device)
    return SimpleNamespace(cluster=cluster, until=until)
