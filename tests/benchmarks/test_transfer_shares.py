"""What first and second tokens of prompts say about their transfers."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import disaggregation
from benchmarks.disaggregation import counted_transfers, move_again, two_tokens
from benchmarks.stream_statistics import StreamRecord
from benchmarks.transfer_shares import transfer_shares


def row(case: str, ms: float, second_ms: float, num_bytes: int = 0) -> dict[str, Any]:
    times = {"ms": ms, "second_ms": second_ms}
    return {"case": case, **times, "bytes_moved": num_bytes, "repeats": 2}


def test_pages_are_timed_by_second_tokens_and_first_tokens_only_by_first() -> None:
    rows = {
        each["case"]: each
        for each in (
            row("transfer/again@page", 10.0, 15.0, 2_000_000),
            row("transfer/again@4096", 30.0, 25.0, 402_000_000),
            row("transfer/new@page", 10.0, 16.0),
            row("transfer/aggregated@page", 9.0, 14.0),
            row("transfer/new@4096", 100.0, 108.0),
            row("transfer/aggregated@4096", 96.0, 102.0),
        )
    }
    moved, share = transfer_shares(rows)
    assert (moved["case"], moved["ms"]) == ("transfer/scattered@4096", 10.0)
    assert moved["gb_per_s"] == 20.0  # 200 MB in 10 ms
    assert (share["ms"], share["share"]) == (4.0, 0.04)
    # After the first token 8 instead of 6 ms, and 6 instead of 5 for a page; of 10.
    assert share["hidden_share"] == 0.9


def test_what_is_hidden_is_also_told_by_the_count_of_the_decode_worker() -> None:
    def shares(**counted: float) -> list[dict[str, Any]]:
        rows = [row("transfer/again@page", 10.0, 15.0), row("transfer/again@4096", 30.0, 25.0)]
        for length in ("page", "4096"):
            rows += [row(f"transfer/{kind}@{length}", 10.0, 15.0) for kind in ("new", "aggregated")]
        rows[-2] |= counted
        return transfer_shares({each["case"]: each for each in rows})

    _, share = shares(receive_ms=8.0, exposed_ms=2.0)
    assert share["hidden_share_counted"] == 0.75
    for counted in ({}, {"receive_ms": 0.0, "exposed_ms": 0.0}):
        _, share = shares(**counted)
        assert "hidden_share_counted" not in share


def test_transfers_are_counted_between_two_looks_at_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disaggregation, "STATUS_S", 0.0)
    answers: list[list[StreamRecord]] = []

    def status() -> Any:
        done = 0.005 * len(answers)
        times = [(10 + done, 3 + done / 5), (done, 0.0)]
        return SimpleNamespace(
            workers=[SimpleNamespace(transfer_s=all_s, exposed_transfer_s=s) for all_s, s in times]
        )

    def ask() -> list[StreamRecord]:
        answers.append([])
        return answers[-1]

    spec = SimpleNamespace(is_disaggregated=True)
    run: Any = SimpleNamespace(
        sizes=SimpleNamespace(repeats=3), cluster=SimpleNamespace(spec=spec, status=status)
    )

    found, counted = counted_transfers(ask, run)

    assert found == answers
    assert len(found) == 5
    assert counted == {"receive_ms": 10.0, "exposed_ms": 1.0}  # for each of the five
    spec.is_disaggregated = False
    assert counted_transfers(ask, run) == ([[]] * 5, {})


def test_pages_that_come_within_a_tick_of_the_workers_clock_have_no_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waves = [[StreamRecord(started=1.0, times=(1.010, 1.012), counts=(1, 1))]]
    counted = {"receive_ms": 0.0, "exposed_ms": 0.0}
    monkeypatch.setattr(disaggregation, "wave", lambda *_, **__: [])
    monkeypatch.setattr(disaggregation, "counted_transfers", lambda *_: (waves, counted))
    run: Any = SimpleNamespace(
        sizes=SimpleNamespace(tokens=lambda length: length),
        cluster=SimpleNamespace(model=SimpleNamespace(page_size=16)),
        seeds=None,
        wave=lambda _: [],
        check_waves=lambda _: {"bytes_moved": 4096},
        check_all_moved=lambda *_: None,
    )

    assert move_again(0, run)["receive_gb_per_s"] is None
    counted["receive_ms"] = 0.004
    assert move_again(0, run)["receive_gb_per_s"] == 1.02


def test_the_second_token_of_a_stream_is_its_last() -> None:
    waves = [
        [StreamRecord(started=1.0, times=(1.010, 1.010 + late), counts=(1, 1))]
        for late in (0.002, 0.004, 0.003)
    ]
    found = two_tokens(waves)
    assert (found["ms"], found["second_ms"]) == (10.0, 13.0)
    assert (found["second_min_ms"], found["second_max_ms"]) == (12.0, 14.0)
