"""Thousands of small seeded runs under every family of faults, each checked against the oracle.

A failing seed prints its command. PAGEWIRE_SEEDS=17 runs one seed of each selected family,
PAGEWIRE_SEEDS=0:5000 a range.
"""

import os
from typing import Any

import pytest

from tests.simulation.seeded_run import FAMILIES, run
from tests.support.scenario import DAMAGES
from tests.support.simulator import RunResult, explain

FEW = 5  # seeds of a family in each run
BLOCK = 25  # seeds in one test of the rest


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
