"""Thousands of small seeded runs under every family of faults, each checked against the oracle.

A failing seed prints its command. PAGEWIRE_SEEDS=17 runs one seed of each selected family,
PAGEWIRE_SEEDS=0:5000 a range.
"""

import os
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.config import DecodeConfig
from tests.support.scenario import DAMAGES, make_scenario, with_crowd, with_toxin
from tests.support.simulator import RunResult, explain, simulate

FEW = 5  # seeds of a family in each run
BLOCK = 25  # seeds in one test of the rest
MAX_REQUEST_FAILURES = DecodeConfig().max_request_failures

# family |-> (fault kinds, seeds)
FAMILIES: dict[str, tuple[tuple[str, ...], int]] = {
    "healthy": ((), 150),
    "prefill_dies": (("kill_prefill", "lose_prefill"), 250),
    "decode_dies": (("kill_decode", "lose_decode"), 250),
    "pages_go_wrong": (("damage", "delay"), 350),
    "stalls": (("pause_prefill", "pause_decode", "slow_down"), 200),
    "network": (("cut_control", "cut_data", "reset_control", "reset_data"), 200),
    "router_dies": (("kill_router",), 100),
    "passes_fail": (("fail_pass",), 100),
    "engines_break": (("break_engine",), 50),
    "toxic": ((), 25),  # one request makes each pass fail that computes for it
    "deadly": ((), 50),  # ... and costs the worker its engine
    "crowds": (("kill_prefill", "damage", "delay"), 25),  # many share one prefix in flight
    "everything": (
        (
            "kill_prefill",
            "lose_prefill",
            "kill_decode",
            "damage",
            "delay",
            "pause_prefill",
            "pause_decode",
            "slow_down",
            "cut_data",
            "reset_control",
            "reset_data",
        ),
        400,
    ),
}
# What else than OK a request may end with; its tokens must be right up to there.
ALLOWED_ENDS = {
    "router_dies": ("OK", "UNAVAILABLE"),
    "passes_fail": ("OK", "INTERNAL"),
}


def run(family: str, seed: int) -> RunResult:
    """Run one seed of a family; every third seed has pools that are too small for all at once."""
    kinds, _ = FAMILIES[family]
    scenario = make_scenario(seed, kinds, tiny_pools=seed % 3 == 0)
    allowed_ends = ALLOWED_ENDS.get(family, ("OK",))
    if family == "passes_fail" and len(scenario.faults) < MAX_REQUEST_FAILURES:
        allowed_ends = ("OK",)
    if family == "crowds":
        scenario = with_crowd(scenario)
    if family in ("toxic", "deadly"):
        scenario = with_toxin(scenario, is_deadly=family == "deadly")
    result = simulate(replace(scenario, allowed_ends=allowed_ends))
    allowed_losses = {"toxic": 0, "deadly": MAX_REQUEST_FAILURES}
    if len(result.lost_engines) > allowed_losses.get(family, 1000):
        result.violations.append(f"it cost the engines of {result.lost_engines}")
    if family in ("healthy", "toxic"):  # a toxic request, which tells no totals, harms itself only
        result.violations += [
            f"{number} {name} in a {family} cluster"
            for name in ("prefill_retries", "resumptions")
            if (number := result.total(name))
        ]
    return result


def _blocks() -> list[Any]:
    """Return blocks of seeds; all but the first, small one run only in `make thorough`."""
    wanted = os.environ.get("PAGEWIRE_SEEDS")
    blocks = []
    for family, (_, num_seeds) in FAMILIES.items():
        first, last = 0, num_seeds
        if wanted:
            start, _, end = wanted.partition(":")
            first, last = int(start), int(end or int(start) + 1)
        if not wanted:
            seeds = range(FEW)
            blocks.append(pytest.param(family, seeds, id=f"{family}-{seeds}"))
        for seed in range(first, last, BLOCK):
            seeds = range(seed, min(seed + BLOCK, last))
            marks = () if wanted else pytest.mark.thorough
            blocks.append(pytest.param(family, seeds, marks=marks, id=f"{family}-{seeds}"))
    return blocks


@pytest.mark.parametrize(("family", "seeds"), _blocks())
def test_every_request_gets_the_oracles_tokens(family: str, seeds: range) -> None:
    results = [run(family, seed) for seed in seeds]

    failed = [result for result in results if result.violations]
    assert not failed, "\n" + explain(
        failed,
        lambda seed: f"PAGEWIRE_SEEDS={seed} python -m pytest tests/simulation -k {family}",
    )
    if len(seeds) in (FEW, BLOCK):
        _check_that_it_tested_something(family, results)


def test_a_suspect_is_not_blamed_for_a_step_that_only_copied_its_pages() -> None:
    result = run("deadly", 171)  # of 6,000 seeds one of two in which it would be

    assert result.lost_engines == ["prefill-0", "decode-0"]
    assert result.violations == []


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in (1, 2, 3):
        one, other = run("everything", seed), run("everything", seed)
        assert one.histories == other.histories
        assert (one.faults, one.seconds) == (other.faults, other.seconds)


def _check_that_it_tested_something(family: str, results: list[RunResult]) -> None:
    """Pages moved, and the faults really happened."""
    assert sum(result.total("bytes_moved") for result in results) > 0
    happened = {kind for result in results for kind in result.faults}
    for kind in FAMILIES[family][0]:
        if family != "everything":
            assert kind in happened, f"{kind} never happened"
    if family in ("engines_break", "deadly"):
        assert any(result.lost_engines for result in results), "no worker lost its engine"
    if family == "pages_go_wrong":
        assert happened & set(DAMAGES), "no copy was damaged"
    for result in results:
        shape = result.scenario.shape
        if family == "healthy" and shape.decode_pages == 256:
            computed = result.total("decode_computed_tokens")
            assert shape.local_prefill_max_tokens or computed == 0, "decode computed prompt tokens"
