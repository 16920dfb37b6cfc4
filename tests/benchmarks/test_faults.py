"""What benchmarks.faults counts, and the page that is written from it."""

import json
from pathlib import Path

import pytest

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


def test_rounds_are_summed_up_with_every_error_and_every_wrong_token():
    row = {
        "requests": 2,
        "resumed": 1,
        "decode_prompt_tokens": 0,
        "pages_moved": 7,
        "late_ms": 5,
        "whole_s": 1.0,
    }
    rounds = [
        row | {"errors": [], "wrong_tokens": 0, "pause_ms": 10},
        row | {"errors": ["lost", "lost"], "wrong_tokens": 3, "pause_ms": 30},
    ]

    found = sum_up(rounds)

    assert (found["times"], found["failed_requests"], found["wrong_tokens"]) == (2, 2, 3)
    assert found["pause_ms_p50"] == pytest.approx(20)


def test_the_page_is_written_from_the_result():
    result = json.loads(RESULT.read_text(encoding="utf-8"))

    assert PAGE.read_text(encoding="utf-8") == page(result, RESULT.name)
    assert {row["case"] for row in result["cases"]} <= set(FAULTS)
    for row in result["cases"]:
        assert (row["failed_requests"], row["wrong_tokens"]) == (0, 0), row["case"]
        assert row["pages_moved"] > 0
        assert row["decode_prompt_tokens"] == 0
