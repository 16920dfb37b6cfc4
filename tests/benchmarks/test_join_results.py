"""Results of runs that shared a host become one file, unless they do not belong together."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.join_results import joined
from benchmarks.kills import sum_up

CONDITIONS = {
    "date": "2026-01-01",
    "hardware": {"cores": 2},
    "versions": {"torch": "2"},
    "commit": "one",
    "configuration": {"seed": 1},
}


def part(case: str, **changed: Any) -> dict[str, Any]:
    return {
        "command": f"run {case}",
        **CONDITIONS,
        "not_run": [],
        "cases": [{"case": case, "ms": 1.0}],
        **changed,
    }


def test_a_joined_file_has_the_cases_and_commands_of_all_parts() -> None:
    whole = joined([part("a", not_run=["b", "c"]), part("b")])
    assert whole == {
        "command": "run a and 1 more",
        "commands": ["run a", "run b"],
        **CONDITIONS,
        "not_run": ["c"],
        "cases": [{"case": "a", "ms": 1.0}, {"case": "b", "ms": 1.0}],
    }


def test_rounds_of_a_case_in_two_parts_are_summed_up_together() -> None:
    def of(*usable_ms: float) -> dict[str, Any]:
        keys = ("noticed_ms", "failed_ms", "quiet_ms", "restarted_ms", "last_ms")
        rounds = [
            {
                **dict.fromkeys(keys),
                "streams": 8,
                "hit_the_moment": True,
                "lost_requests": 1,
                "wrong_tokens": 0,
                "usable_ms": each,
                "pauses_ms": [each, 10 * each],
                "resumed_gap_ms_p99": each,
                "memory_grew_mib": [],
            }
            for each in usable_ms
        ]
        return part("a", cases=[{"case": "a", "cluster": "1+1", **sum_up(rounds)}])

    (row,) = joined([of(1.0, 2.0), of(9.0)])["cases"]

    assert (row["case"], row["cluster"]) == ("a", "1+1")
    assert (row["times"], row["lost_requests"], len(row["rounds"])) == (3, 3, 3)
    assert (row["usable_ms"], row["usable_ms_max"]) == (2.0, 9.0)
    assert (row["pause_ms_p50"], row["pause_ms_max"]) == (9.5, 90.0)  # of 1, 2, 9, 10, 20 and 90
    assert row["resumed_gap_ms_p99"] == 2.0


@pytest.mark.parametrize("name", sorted(CONDITIONS))
def test_parts_of_other_conditions_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: found else"):
        joined([part("a"), part("b", **{name: "else"})])


def test_a_case_in_two_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="cases: found a in two parts"):
        joined([part("a"), part("a")])


def test_the_command_writes_the_file_or_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import join_results

    for name in "ab":
        (tmp_path / name).write_text(json.dumps(part(name)))
    files = [str(tmp_path / name) for name in "ab"]
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["join_results", "--out", str(out), *files])
    join_results.main()
    assert [row["case"] for row in json.loads(out.read_text())["cases"]] == ["a", "b"]
    monkeypatch.setattr("sys.argv", ["join_results", "--out", str(out), *files, files[0]])
    with pytest.raises(SystemExit, match="in two parts"):
        join_results.main()
