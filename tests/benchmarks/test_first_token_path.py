"""How the spans of a request become parts that follow one another."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.first_token_path import (
    PARTS,
    Event,
    Span,
    Trace,
    UnclearPath,
    is_whole,
    median_parts,
    pages_ms,
    parts_ms,
)

MS = 1_000_000


def span(began_ms: int, ended_ms: int = 190, **events: tuple[int, float]) -> list[Span]:
    found: Mapping[str, Event] = {
        name: Event(at_ns=at_ms * MS, passes_ms=passes_ms)
        for name, (at_ms, passes_ms) in events.items()
    }
    return [Span(began_ns=began_ms * MS, ended_ns=ended_ms * MS, events=found)]


REMOTE: Trace = {
    "generate": span(101, admitted=(102, 0), first_token=(180, 0)),
    "attempt": span(103),
    "decode": span(106, begun=(109, 0), first_token=(172, 0)),
    "receive": span(110, 174, first_token=(171, 0)),
    "prefill": span(115, computed=(165, 30.5)),
}
LOCAL: Trace = {
    "generate": span(101, first_token=(150, 0)),
    "attempt": span(103),
    "decode": span(106, begun=(107, 0), first_token=(146, 12.0)),
}


def test_waits_for_a_pass_are_told_apart_from_the_passes_of_the_prompt() -> None:
    parts = parts_ms(REMOTE, called_ns=100 * MS, token_ns=187 * MS)

    assert parts == {
        "to_router": 1,
        "router": 2,
        "to_decode": 3,
        "decode_wait": 4,
        "to_prefill": 5,
        "prefill_wait": 19.5,
        "passes": 30.5,
        "from_prefill": 6,
        "from_decode": 9,
        "to_client": 7,
    }
    assert list(parts) == list(PARTS)


def test_a_prompt_that_its_decode_worker_computes_has_no_way_to_another() -> None:
    assert parts_ms(LOCAL, called_ns=100 * MS, token_ns=151 * MS) == {
        "to_router": 1,
        "router": 2,
        "to_decode": 3,
        "decode_wait": 28,
        "passes": 12,
        "from_decode": 4,
        "to_client": 1,
    }


def test_a_request_that_was_attempted_twice_has_no_parts() -> None:
    twice = {**REMOTE, "receive": 2 * REMOTE["receive"]}

    with pytest.raises(UnclearPath, match="several spans receive"):
        parts_ms(twice, called_ns=0, token_ns=1)


@pytest.mark.parametrize("missing", REMOTE)
def test_a_trace_is_whole_when_each_process_has_sent_its_spans(missing: str) -> None:
    assert is_whole(REMOTE)
    # Without `receive` it is that of a prompt which the decode worker computes.
    left = {name: spans for name, spans in REMOTE.items() if name != missing}
    assert is_whole(left) is (missing == "receive")


def test_pages_come_later_than_passes_and_first_token_by_what_is_not_hidden() -> None:
    assert pages_ms(REMOTE) == {"pages_after_passes_ms": 9, "pages_after_token_ms": 3}
    assert pages_ms(LOCAL) == {}


def test_what_medians_of_parts_leave_of_the_median_of_the_whole_is_the_rest() -> None:
    found = [{"router": 1.0, "passes": 10.0}, {"router": 5.0, "passes": 20.0}]
    found.append({"router": 2.0, "passes": 30.0})

    assert median_parts(found) == {
        "ms": 25.0,
        "parts_ms": {"router": 2.0, "passes": 20.0},
        "rest_ms": 3.0,
    }


def test_tables_show_the_parts_of_each_request_and_the_time_of_each_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cells(text: str) -> list[list[str]]:
        lines = text.splitlines()[2:]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]

    remote, local = (
        median_parts([parts_ms(trace, called_ns=100 * MS, token_ns=187 * MS)])
        for trace in (REMOTE, LOCAL)
    )
    engine = {"prompt_ms": 1000.0, "decode_ms": 2000.0, "mixed_ms": 0.0, "no_step_ms": 500.0}
    rows = [
        {"case": "ttft/2x8", "cluster": "1+1", "first": remote, "last": remote, "untraced_ms": 86},
        {"case": "aggregated/ttft/1x8", "cluster": "0+1", "last": local, "untraced_ms": 85},
        {"case": "mixed/512", "cluster": "1+1", "engines": {"prefill-0": engine}}
        | {"ms": 3500.0, "traced_ms": 3600.0},
    ]
    cached = {"case": "ttft/cached", "cluster": "1+1", "last": local}
    older, newer = ([*rows, cached | {"untraced_ms": ms}] for ms in (20, 10))
    (tmp_path / tables.PARTS_RESULT).write_text(json.dumps({"cases": older}))
    (tmp_path / tables.CACHED_PARTS_RESULT).write_text(json.dumps({"cases": newer}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "MIX_RESULTS", (tables.PARTS_RESULT,))

    first, last, alone, of_cached = cells(tables.first_token_parts())
    [of_engine] = cells(tables.engine_time())

    assert first[:3] + first[-2:] == ["1 + 1", "`ttft/2x8`", "first", "87.00", ""]
    assert last[3:] == [
        *("1.00", "2.00", "3.00", "4.00", "5.00", "19.50", "30.50", "6.00", "9.00", "7.00"),
        *("0.00", "87.00", "86.00"),
    ]
    assert alone[:3] == ["0 + 1", "`ttft/1x8`", ""]
    assert alone[7:11] == ["", "", "12.00", ""]
    assert of_cached[1:3] + of_cached[-1:] == ["`ttft/cached`", "", "10.00"]
    assert of_engine == ["1 + 1", "prefill-0", "1.00", "2.00", "0.00", "0.50", "3.50", "3.60"]
