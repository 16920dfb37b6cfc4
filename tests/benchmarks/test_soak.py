"""What the rounds of a soak say together."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.case_runs import Clock, Run
from benchmarks.client_processes import ClientProcesses
from benchmarks.run_arguments import SCALES
from benchmarks.soak import WARM_ROUNDS, Load, play_round, sum_up
from benchmarks.stream_statistics import Row, StreamRecord

COUNTED = ("streams", "left", "lost_requests", "checked", "wrong_tokens", "resumed", "tokens")


def rounds_of(*victims: str) -> dict[str, Row]:
    """Rounds in which each memory grows by 10 MiB."""
    return {
        f"round/{number:03}": {
            "victim": victim,
            "seconds": 30.0,
            **dict.fromkeys((*COUNTED, "decode_prompt_tokens", "pages_moved"), 1),
            "memory_mib": {"router": 10 * number, "decode-0": 5, "prefill-0": 10 * number},
            "gpu_memory_mib": {"decode-0": 10 * number, "prefill-0": 10 * number},
        }
        for number, victim in enumerate(victims)
    }


def test_the_last_quarter_of_rounds_is_compared_with_the_first_one() -> None:
    [found] = sum_up(rounds_of(*["prefill-0", "decode-0"] * 5))

    assert (found["rounds"], found["streams"], found["minutes"]) == (10, 10, 5.0)
    assert found["router_growth_mib"] == 60.0  # of rounds 3 to 10: 9 and 10 beside 3 and 4
    # Each was killed in every second one: of the four others, the last two beside the first two.
    assert found["gpu_of_decode-0_growth_mib"] == found["gpu_of_prefill-0_growth_mib"] == 40.0
    assert "decode-0_growth_mib" not in found


def test_rounds_that_are_too_few_to_compare_say_nothing_of_growth() -> None:
    [found] = sum_up(rounds_of(*["prefill-0", "decode-0"] * 3))

    assert {each for each in found if "growth" in each} == {"router_growth_mib"}
    [found] = sum_up(rounds_of(*["decode-0"] * (WARM_ROUNDS + 3)))
    assert not any("growth" in each for each in found)


def test_a_worker_that_every_round_has_killed_has_no_growth() -> None:
    [found] = sum_up(rounds_of(*["decode-0"] * 8))

    names = {"router_growth_mib", "prefill-0_growth_mib", "gpu_of_prefill-0_growth_mib"}
    assert {each for each in found if "growth" in each} == names


def test_a_round_in_which_the_gpus_told_nothing_is_left_out() -> None:
    rounds = rounds_of(*["prefill-0"] * 7)
    rounds["round/004"]["gpu_memory_mib"] = {}

    [found] = sum_up(rounds)

    assert found["gpu_of_decode-0_growth_mib"] == 30.0  # of rounds 3, 4, 6 and 7


def test_a_round_that_lost_all_requests_says_that_it_checked_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = StreamRecord(started=0.0, times=(), counts=(), error="UnavailableError: gone")
    worker = SimpleNamespace(incarnation=1, pages=SimpleNamespace(cached=0, free=9))

    def kill(pid: int, number: int) -> None:
        worker.incarnation += 1

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(soak, "ROUND_S", 0.0)
    monkeypatch.setattr(soak, "newest_workers", lambda _: {"decode-0": worker})
    monkeypatch.setattr(soak, "is_idle", lambda _: True)
    for name in ("_memory_mib", "_gpu_memory_mib"):
        monkeypatch.setattr(soak, name, lambda *_: {})
    worker.worker_id = "decode-0"
    clients = ClientProcesses(0)
    monkeypatch.setattr(clients, "finish", lambda: [lost] * 4)
    cluster: Any = SimpleNamespace(
        addresses=["h:1"],
        model=SimpleNamespace(vocab_size=9),
        status=lambda: None,
        pid=lambda _: 1,
    )
    clock = Clock(60.0, seed=1)
    run = Run(cluster, clients, SCALES["small"], clock)

    row = play_round(Load(run.seeds, run.sizes, 4), "decode-0", run)

    assert (row["lost_requests"], row["checked"], row["wrong_tokens"]) == (4, 0, 0)
