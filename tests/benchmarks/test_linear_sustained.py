"""How turns of two recordings are summed up."""

from collections import Counter
from typing import Any

import pytest
from torch.nn.functional import linear

from benchmarks import linear_sustained
from benchmarks.linear import Bench
from benchmarks.linear_sustained import measured


def test_ours_and_torch_take_turns_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.linear.FLUSH_BYTES", 4)
    monkeypatch.setattr(linear_sustained, "WEIGHTS", {"output": (8, 4), "lm_head": (16, 4)})
    turns: list[str] = []

    def recorded(product: Any, operands: list[Any]) -> str:
        assert [weight.shape for _, weight in operands] == [(8, 4)]
        return "torch" if product is linear else "ours"

    def replayed(product: str, seconds: float) -> dict[str, float]:
        turns.append(product)
        return {"ms": 10.0 ** Counter(turns)[product], "mhz": 1500.0, "watts": 700.0}

    monkeypatch.setattr(linear_sustained, "recorded", recorded)
    monkeypatch.setattr(linear_sustained, "replayed", replayed)

    row = measured(Bench(repetitions=1, device="cpu"), 512, turns=3)

    assert turns == ["ours", "torch"] * 3
    both = {"ms": 100.0, "mhz": 1500.0, "watts": 700.0}
    expected = {f"{name}_{key}": value for name in ("ours", "torch") for key, value in both.items()}
    assert row == {"case": "512 rows"} | expected
