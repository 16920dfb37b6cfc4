"""That benchmarks.linear checks and times every tile, in a rehearsal without a clock."""

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from attn_kernels.linear import launch as linear_launch
from attn_kernels.linear.launch import Tile, linear, shipped_tile
from attn_kernels.linear.launch_triton import linear_tiles
from attn_kernels.linear.plan import HOPPER_TILES
from benchmarks import linear as benchmark
from benchmarks.linear import TORCH, WEIGHTS, Bench, faults, name_of, summary, time_case
from tests.support.gluon_emulator import emulated
from tests.support.triton_interpreter import interpreted

RESULTS = Path(benchmark.__file__).parent / "results" / "linear-h200.json"
MULTIPROCESSORS = 132
# Rows that fill no tiles (docs/decisions/0019)
BETWEEN_TILES = {288: 1.06, 543: 1.15, 600: 1.07, 1100: 1.18}
TILES = (*linear_tiles(torch.bfloat16), *HOPPER_TILES)


class Rehearsal(Bench):
    """Runs each launch once; the first takes 1 us, the next one 2."""

    def __init__(self) -> None:
        super().__init__(repetitions=1, device="cpu")

    def operands(
        self, num_rows: int, num_out: int, num_in: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Integers: the interpreter's sums have another order than the emulation's.
        x, weight = super().operands(num_rows, num_out, num_in)
        return x.round(), weight.round()

    def times_us(self, launches: dict[str, Callable[[], object]]) -> dict[str, float]:
        for launch in launches.values():
            launch()
        return {name: index + 1.0 for index, name in enumerate(launches)}

    def kernels_of(self, launch: Callable[[], object]) -> tuple[str, ...]:
        return ("nvjet",)


@pytest.fixture(autouse=True)
def small_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(benchmark, "FLUSH_BYTES", 4)
    monkeypatch.setattr(benchmark, "WEIGHTS", {"output": (72, 40), "lm_head": (136, 24)})
    monkeypatch.setattr(benchmark, "CHECKED_ROWS", 40)
    monkeypatch.setattr(benchmark, "CHECKED_PARTS", ((0, 1), (3, 20)))
    with interpreted(), emulated(seed=0):
        yield


def test_tiles_with_the_same_bits_have_no_fault() -> None:
    assert not list(faults(Rehearsal(), TILES, 72, 40))


def test_other_bits_and_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, alone, *_ = TILES[1:]

    def flawed(x: torch.Tensor, weight: torch.Tensor, *, tile: Tile) -> torch.Tensor:
        out = linear(x, weight, tile=tile)
        if tile == wrong:
            out[7, 3] += 1
        return out + 1 if tile == alone and len(x) == 17 else out

    monkeypatch.setattr(benchmark, "linear", flawed)

    assert list(faults(Rehearsal(), TILES, 72, 40)) == [
        f"{name_of(wrong)}: 0.03% of the results have other bits",
        f"{name_of(alone)}: rows 3 to 20 have other bits by themselves",
    ]
    monkeypatch.setattr(benchmark, "MAX_ERROR", 0.0)
    assert "error" in next(faults(Rehearsal(), TILES, 72, 40))


def test_every_tile_worth_it_is_timed_and_the_choices_are_marked() -> None:
    timings = [
        each
        for name in ("output", "lm_head")
        for each in time_case(Rehearsal(), TILES, name, num_rows=17)
    ]

    names = [each.tile for each in timings if each.weight == "output"]
    assert names[0] == "torch"
    assert {name_of(tile) for tile in TILES if tile.block_m <= 64} <= set(names)
    assert [each.us for each in timings[: len(names)]] == [i + 1.0 for i in range(len(names))]
    assert [each.tile for each in timings if each.kernels == ("nvjet",)] == ["torch", "torch"]
    (shipped,) = (each for each in timings if each.is_shipped and each.weight == "lm_head")
    assert shipped.tflops == round(2 * 17 * 136 * 24 / shipped.us / 1e6, 1)
    line = summary(timings, 17)
    assert line.startswith("   17 | torch 0.03 ms 1.000 | shipped ")
    assert line.endswith("best 0.06 ms 2.000")


@pytest.mark.parametrize("num_rows", benchmark.NUM_ROWS)
def test_the_choice_is_about_as_fast_as_torch_and_as_the_best_tile(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    monkeypatch.undo()  # the real weights
    monkeypatch.setattr(linear_launch, "on_hopper", lambda _: True)
    monkeypatch.setattr(linear_launch, "programs_for", lambda *_: MULTIPROCESSORS)
    rows = [row for row in json.loads(RESULTS.read_text())["cases"] if row["num_rows"] == num_rows]
    us = {(row["weight"], row["tile"]): row["us"] for row in rows}
    names = {name_of(tile) for tile in TILES}

    over_torch, over_best = [], []
    for weight, (num_out, num_in) in WEIGHTS.items():
        if (weight, TORCH) in us:
            x, w = (torch.empty((n, num_in), dtype=torch.bfloat16) for n in (num_rows, num_out))
            chosen = us[weight, name_of(shipped_tile(x, w, is_recorded=True))]
            over_torch.append(chosen / us[weight, TORCH])
            best = min(
                each for (name, tile), each in us.items() if name == weight and tile in names
            )
            if (weight, num_rows) != ("lm_head", 1100):  # which no step computes
                over_best.append(chosen / best)

    assert statistics.median(over_torch) < BETWEEN_TILES.get(num_rows, 1.03)
    assert statistics.median(over_best) < 1.01
    assert max(over_best) < 1.05
