"""What a result file has after runs that end, fail, are cut off and are taken up again."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import disaggregation, relay, soak
from benchmarks.case_runs import Case, CaseFailed, Clock, run_cases, selected
from benchmarks.result_file import ResultFile
from benchmarks.run_arguments import SCALES

HEAD = {"hardware": "h", "commit": "one", "configuration": {"seed": 1}}


def no_rows(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    return []


def results_at(path: Path, *, head: dict[str, Any] = HEAD, resumes: bool = False) -> ResultFile:
    return ResultFile(path, dict(head), derive=no_rows, resumes=resumes)


def run(cases: list[Case], results: ResultFile, deadline_s: float = 60.0) -> None:
    run_cases(
        cases,
        {},
        results,
        sizes=SCALES["small"],
        clock=Clock(deadline_s, seed=1),
        num_clients=1,
        warm_up=lambda run: None,
    )


def takes(ms: float) -> Any:
    return lambda clock: {"ms": ms}


def fails(clock: Clock) -> dict[str, Any]:
    raise CaseFailed("no page moved", {"ms": 3.0})


def test_each_case_is_written_when_it_ends_and_failures_say_why(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    seen = []

    def look(clock: Clock) -> dict[str, Any]:
        seen.append(json.loads(path.read_text()))
        return {"ms": 2.0}

    results = results_at(path)
    run(
        [
            Case(name="a", measure_start=takes(1.0)),
            Case(name="b", measure_start=look),
            Case(name="c", measure_start=fails),
        ],
        results,
    )

    assert [row["case"] for row in seen[0]["cases"]] == ["a"]
    written = json.loads(path.read_text())
    assert written["cases"] == [
        {"case": "a", "ms": 1.0},
        {"case": "b", "ms": 2.0},
        {"case": "c", "ms": 3.0, "error": "CaseFailed: no page moved"},
    ]
    assert written["not_run"] == []
    assert results.num_failed == 1


def test_cases_that_the_deadline_leaves_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    times = iter([100.0, 0.0])

    class Ending(Clock):
        def left_s(self) -> float:
            self._ends_at = 0.0 if next(times) == 0.0 else float("inf")
            return super().left_s()

    run_cases(
        [Case(name=name, measure_start=takes(1.0)) for name in "abc"],
        {},
        results_at(path),
        sizes=SCALES["small"],
        clock=Ending(60.0, seed=1),
        num_clients=1,
        warm_up=lambda run: None,
    )

    written = json.loads(path.read_text())
    assert [row["case"] for row in written["cases"]] == ["a"]
    assert written["not_run"] == ["b", "c"]


def test_a_run_that_is_taken_up_keeps_what_was_measured_and_repeats_what_failed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.json"
    cases = [Case(name="a", measure_start=takes(1.0)), Case(name="b", measure_start=fails)]
    run(cases, results_at(path))

    again = [Case(name="a", measure_start=takes(9.0)), Case(name="b", measure_start=takes(2.0))]
    run(again, results_at(path, head=HEAD | {"commit": "two"}, resumes=True))

    written = json.loads(path.read_text())
    assert written["cases"] == [{"case": "a", "ms": 1.0}, {"case": "b", "ms": 2.0}]
    assert (written["commit"], written["earlier_commits"]) == ("two", ["one"])


def test_a_file_of_another_configuration_is_not_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    run([Case(name="a", measure_start=takes(1.0))], results_at(path))

    with pytest.raises(ValueError, match="configuration is"):
        results_at(path, head=HEAD | {"configuration": {"seed": 2}}, resumes=True)


def test_patterns_select_cases_in_order_and_one_without_any_is_refused() -> None:
    names = ["decode/1@1024", "ttft/cached", "decode/8@1024"]

    assert selected(names, ["decode/*", "ttft/cached"]) == names
    assert selected(names, ["decode/8*"]) == ["decode/8@1024"]
    with pytest.raises(SystemExit, match="shared"):
        selected(names, ["shared/*"])


def test_a_small_scale_keeps_single_streams_single() -> None:
    small = SCALES["small"]

    assert (small.streams(1), small.streams(8), small.streams(256)) == (1, 2, 16)
    assert (small.tokens(128), small.tokens(8192), small.tokens(32_768)) == (16, 512, 2048)
    assert SCALES["full"].tokens(32_768) == 32_768


@pytest.mark.parametrize(
    ("program", "argument"),
    [
        (disaggregation.main, "--routers"),
        *((soak.main, each) for each in ("--cases", "--repeats", "--routers")),
    ],
)
def test_a_program_refuses_arguments_that_it_would_ignore(
    program: Callable[[], None],
    argument: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", argument, "2"])

    with pytest.raises(SystemExit):
        program()

    assert f"unrecognized arguments: {argument} 2" in capsys.readouterr().err


def test_a_relay_whose_routers_would_not_all_have_clients_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relay, "measure", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(sys, "argv", ["relay", "--routers", "3", "--clients", "2"])

    with pytest.raises(SystemExit):
        relay.main()

    assert "--clients: found 2; allowed: at least 3" in capsys.readouterr().err
