"""What benchmarks.faults counts, and the page that is written from it."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmarks import faults
from benchmarks.fault_table import PAGE, page
from benchmarks.faults import FAULTS, longest_pause_ms, requests, sum_up
from benchmarks.prompts import Seeds
from benchmarks.stream_statistics import StreamRecord

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "faults-cpu.json"


def record(*times):
    return StreamRecord(started=0.0, times=times, counts=(1,) * len(times))


def test_a_pause_is_counted_that_began_before_the_fault_was_noticed_but_not_one_that_was_over():
    assert longest_pause_ms(record(1.0, 6.0, 6.5, 7.5), 6.2) == 1000.0
    assert longest_pause_ms(record(1.0, 6.0), 5.0) == 5000.0
    assert longest_pause_ms(record(1.0, 2.0), 5.0) == 0.0


def test_half_of_the_requests_are_sampled_and_no_two_have_a_seed():
    specs = requests(Seeds(1))

    assert len({each.seed for each in specs}) == len(specs)
    assert sum(each.temperature > 0 for each in specs) == len(specs) // 2
    assert all(each.keeps_tokens for each in specs)


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


def test_a_case_that_was_cut_off_goes_on_after_its_last_run(tmp_path, monkeypatch):
    out = tmp_path / "faults.json"
    run_once = MagicMock(side_effect=[ROUND, ROUND | {"pause_ms": 1}, KeyboardInterrupt])
    monkeypatch.setattr(faults, "run_once", run_once)
    monkeypatch.setattr(faults, "hosted_cluster", lambda *_, **__: nullcontext(MagicMock()))
    monkeypatch.setattr(faults, "ClientProcesses", MagicMock())
    for name, answer in (("why_no_hosts", ""), ("demo_model_dir", tmp_path), ("commit", "one")):
        monkeypatch.setattr(faults, name, lambda answer=answer: answer)
    monkeypatch.setattr(faults.shutil, "which", lambda name: name)
    command = ["faults", "--times=3", "--faults=kill/decode", "--resume", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", command)

    with pytest.raises(KeyboardInterrupt):  # after the one that warms up and a first one
        faults.main()
    run_once.side_effect = [ROUND, ROUND | {"pause_ms": 2}, ROUND | {"pause_ms": 3}]
    faults.main()

    (row,) = json.loads(out.read_text(encoding="utf-8"))["cases"]
    assert [each["pause_ms"] for each in row["rounds"]] == [1, 2, 3]
    assert (row["times"], row["requests"]) == (3, 6)


def test_the_page_is_written_from_the_result():
    result = json.loads(RESULT.read_text(encoding="utf-8"))

    assert PAGE.read_text(encoding="utf-8") == page(result, RESULT.name)
    assert {row["case"] for row in result["cases"]} <= set(FAULTS)
    for row in result["cases"]:
        assert (row["failed_requests"], row["wrong_tokens"]) == (0, 0), row["case"]
        assert row["pages_moved"] > 0
        assert row["decode_prompt_tokens"] == 0
