"""What first and second tokens of prompts say about their transfers."""

from typing import Any

from benchmarks.disaggregation import two_tokens
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


def test_the_second_token_of_a_stream_is_its_last() -> None:
    waves = [
        [StreamRecord(started=1.0, times=(1.010, 1.010 + late), counts=(1, 1))]
        for late in (0.002, 0.004, 0.003)
    ]
    found = two_tokens(waves)
    assert (found["ms"], found["second_ms"]) == (10.0, 13.0)
    assert (found["second_min_ms"], found["second_max_ms"]) == (12.0, 14.0)
