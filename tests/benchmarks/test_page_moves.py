"""Two real processes and TCP; the figures mean nothing here, but what arrived is compared."""

from benchmarks.page_moves import measure


def test_pages_move_and_the_row_says_how_fast() -> None:
    row = measure("tcp", ["cpu", "cpu"], 64 << 10, 3)

    assert row["case"] == "tcp/64x3"
    assert row["repeats"] == 15
    assert 0 < row["min_ms"] <= row["ms"] <= row["max_ms"]
    assert row["connect_ms"] > 0
