"""What benchmarks.faults counts, and the page that is written from it."""

import json
import sys
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest

from benchmarks import faults
from benchmarks.fault_cases import FAULTS
from benchmarks.fault_table import KILLS_HEADS, PAGE, RESULTS, kills, page, whole_page
from benchmarks.faults import requests, sum_up
from benchmarks.prompts import Seeds

RESULT = RESULTS / "faults-cpu.json"
KILLS_RESULT = RESULTS / "kills-ipc-h200-x2.json"


def test_half_of_the_requests_are_sampled_and_no_two_have_a_seed():
    specs = requests(Seeds(1))

    assert len({each.seed for each in specs}) == len(specs)
    assert sum(each.temperature > 0 for each in specs) == len(specs) // 2
    assert all(each.keeps_tokens for each in specs)


HARDWARE = {"cores": 2, "machine": "x86_64"}
ROUND = {
    "requests": 2,
    "errors": [],
    "wrong_tokens": 0,
    "resumed": 1,
    "decode_prompt_tokens": 0,
    "pages_moved": 7,
    "pause_ms": 10,
    "late_ms": 5,
    "whole_s": 1.0,
}


def test_rounds_are_summed_up_with_every_error_and_every_wrong_token():
    rounds = [ROUND, ROUND | {"errors": ["lost", "lost"], "wrong_tokens": 3, "pause_ms": 30}]

    found = sum_up(rounds)

    assert (found["times"], found["failed_requests"], found["wrong_tokens"]) == (2, 2, 3)
    assert found["pause_ms_p50"] == pytest.approx(20)


@pytest.fixture
def run_once(tmp_path, monkeypatch):
    """What faults.main runs, three times for one fault, on clusters that are none."""
    out = tmp_path / "faults.json"
    run_once = MagicMock(out=out)
    monkeypatch.setattr(faults, "run_once", run_once)
    monkeypatch.setattr(faults, "hosted_cluster", lambda *_, **__: nullcontext(MagicMock()))
    monkeypatch.setattr(faults, "ClientProcesses", MagicMock())
    for name, answer in (("why_no_hosts", ""), ("demo_model_dir", tmp_path)):
        monkeypatch.setattr(faults, name, lambda answer=answer: answer)
    monkeypatch.setattr(faults.shutil, "which", lambda name: name)
    command = ["faults", "--times=3", "--faults=kill/decode", "--resume", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", command)
    return run_once


def rows_of(run_once):
    return json.loads(run_once.out.read_text(encoding="utf-8"))["cases"]


def test_a_case_that_was_cut_off_goes_on_after_its_last_run(run_once):
    run_once.side_effect = [ROUND, ROUND | {"pause_ms": 1}, KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):  # after the one that warms up and a first one
        faults.main()
    run_once.side_effect = [ROUND, ROUND | {"pause_ms": 2}, ROUND | {"pause_ms": 3}]
    faults.main()

    (row,) = rows_of(run_once)
    assert [each["pause_ms"] for each in row["rounds"]] == [1, 2, 3]
    assert (row["times"], row["requests"]) == (3, 6)


def test_a_run_without_an_end_is_listed_and_costs_no_other_one(run_once):
    late = TimeoutError("not within 180 s: all workers ready")
    run_once.side_effect = [ROUND, ROUND, late, ROUND, ROUND, ROUND]  # the first of each warms up

    faults.main()

    (row,) = rows_of(run_once)
    assert row["times"] == 3
    assert row["broken"] == [f"TimeoutError: {late}"]
    text = page({"cases": [row], "commit": "", "hardware": HARDWARE, "command": ""}, "name")
    assert "SIGKILL of a decode worker: a further run was aborted (TimeoutError)." in text


def test_a_fault_that_always_breaks_its_cluster_ends_and_fails(run_once):
    run_once.side_effect = [ROUND, TimeoutError, ROUND, TimeoutError, ROUND, TimeoutError]

    faults.main()

    (row,) = rows_of(run_once)
    assert row["error"] == "TimeoutError: "
    assert len(row["broken"]) == faults.MAX_BROKEN


def test_clusters_that_do_not_start_leave_the_rest_out(run_once):
    run_once.side_effect = TimeoutError

    faults.main()

    result = json.loads(run_once.out.read_text(encoding="utf-8"))
    assert (result["cases"], result["not_run"]) == ([], ["kill/decode"])


def test_pauses_of_streams_stand_in_the_table_where_they_were_recorded():
    result = json.loads(KILLS_RESULT.read_text(encoding="utf-8"))
    old, new = result["cases"][:2]
    for key in ("pause_ms_p50", "pause_ms_p99"):  # from before they were recorded
        del old[key]
    result["cases"] = [old, new | {"pause_ms_p50": 940.4, "pause_ms_p99": 2340.0}]

    lines = kills({KILLS_RESULT.name: result}).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| CUDA IPC")]

    column = KILLS_HEADS.index("Pause, p50 and p99")
    assert sorted(row[column].strip() for row in rows) == ["", "940 ms, 2.3 s"]


def test_the_page_is_written_from_the_results():
    result = json.loads(RESULT.read_text(encoding="utf-8"))

    assert PAGE.read_text(encoding="utf-8") == whole_page()
    assert {row["case"] for row in result["cases"]} <= set(FAULTS)
    for row in result["cases"]:
        assert row["wrong_tokens"] == 0, row["case"]
        assert row["failed_requests"] == 0, row["case"]
        assert not row.get("broken"), row["case"]
        assert row["pages_moved"] > 0
        assert row["decode_prompt_tokens"] == 0
