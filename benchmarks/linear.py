"""Times the linear layer on one GPU beside torch's (cuBLAS).

    python -m benchmarks.linear --out benchmarks/results/linear-h200.json
    python -m benchmarks.linear --rows 512,543 --weights gate_up,down

First every tile of every kernel must give the same bits for all rows of Llama-3-8B's weights, also
for parts of them, and be as close to float64 as one rounding allows; a tile that fails is reported
at once, and the exit code is 1.

Then all are timed. Method: Llama-3-8B's weight shapes, bfloat16, random data; the launch in a CUDA
graph; 256 MB are written between runs, so that the L2 cache is cold; time from events around the
replay; tiles and torch take turns, so that all see the same clocks; median. "tbps" counts the
weights' bytes, "tflops" all operations. A star marks the tile that `linear` chooses in a graph.
"kernels" are those that torch launches, by its profiler; their names tell cuBLAS' tiles.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from attn_kernels.linear.launch import Tile, linear, shipped_tile, shipped_tiles
from attn_kernels.linear.launch_triton import LinearTile
from benchmarks.measured_host import add_commit, conditions
from benchmarks.result_file import write_result
from benchmarks.step_profile import spans_of

# name |-> (num_out, num_in)
WEIGHTS = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
    "lm_head": (128_256, 4096),
}
NUM_LAYERS = 32
NUM_ROWS = (1, 8, 16, 17, 32, 64, 128, 256, 288, 512, 543, 600, 1024, 1100, 2048, 8192)
CHECKED_ROWS = 543
CHECKED_PARTS = ((0, 1), (0, 17), (542, 543), (3, 40), (250, 506))
MAX_ERROR = 4e-3  # of the norm; rounding to bfloat16 alone gives 1.7e-3
FLUSH_BYTES = 256 << 20
TORCH = "torch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One row of the results."""

    weight: str
    num_rows: int
    tile: str  # "torch", or the tile's numbers
    is_shipped: bool
    us: float
    tbps: float  # 10**12 bytes of weights per second
    tflops: float
    kernels: tuple[str, ...] = ()  # torch's


class Bench:
    """Random operands, and the clock."""

    def __init__(self, repetitions: int, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self._repetitions = repetitions
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)

    def operands(self, num_rows: int, num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
        """Return inputs and weights."""
        shapes = ((num_rows, num_in), (num_out, num_in))
        x, weight = (
            torch.randn(shape, dtype=torch.bfloat16, device=self.device) for shape in shapes
        )
        return x, weight

    def times_us(self, launches: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the medians of launches, in microseconds."""
        graphs = {}
        for name, launch in launches.items():
            launch()  # compiles outside the capture
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                launch()
        events = []
        for _ in range(self._repetitions):
            for name, graph in graphs.items():
                start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._flush.fill_(1)
                start.record()
                graph.replay()
                end.record()
                events.append((name, start, end))
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for name, start, end in events:
            times[name].append(start.elapsed_time(end) * 1000)
        return {name: statistics.median(each) for name, each in times.items()}

    def kernels_of(self, launch: Callable[[], object]) -> tuple[str, ...]:
        """Return the names of the kernels that a launch runs."""
        launch()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            launch()
            torch.cuda.synchronize()
        return tuple(span.name for span in spans_of(profiler.events()))


def name_of(tile: Tile) -> str:
    """Return the tile's numbers."""
    if isinstance(tile, LinearTile):
        num_rows, kind = tile.block_m, f"w{tile.num_warps}"
    else:
        num_rows, kind = tile.num_rows, "hopper"
    swapped = " swapped" if tile.is_swapped else ""
    return f"{num_rows}x{tile.block_n}x{tile.block_k} s{tile.num_stages} {kind}{swapped}"


def is_worth_timing(tile: Tile, num_rows: int) -> bool:
    """Tell whether a tile is neither mostly empty nor far too small."""
    is_mostly_empty = num_rows <= tile.block_m // 2 and tile.block_m > 64
    return not is_mostly_empty and (tile.block_m >= 128 or num_rows <= 4 * tile.block_m)


def faults(bench: Bench, tiles: tuple[Tile, ...], num_out: int, num_in: int) -> Iterator[str]:
    """Say what is wrong with the results of each tile on one weight."""
    x, weight = bench.operands(CHECKED_ROWS, num_out, num_in)
    expected = linear(x, weight, tile=tiles[0])
    exact = x[:16].double() @ weight.double().T
    error = float((expected[:16] - exact).norm() / exact.norm())
    if not error < MAX_ERROR:
        yield f"{name_of(tiles[0])}: error {error:.1e}, at most {MAX_ERROR:.1e}"
    for tile in tiles:
        out = linear(x, weight, tile=tile)
        if not torch.equal(out, expected):
            share = float((out != expected).float().mean())
            yield f"{name_of(tile)}: {share:.2%} of the results have other bits"
            continue
        for first, last in CHECKED_PARTS:
            if not torch.equal(linear(x[first:last], weight, tile=tile), expected[first:last]):
                yield f"{name_of(tile)}: rows {first} to {last} have other bits by themselves"


def time_case(
    bench: Bench, tiles: tuple[Tile, ...], weight_name: str, num_rows: int
) -> list[Timing]:
    """Time torch and every tile on one shape; the fastest first."""
    x, weight = bench.operands(num_rows, *WEIGHTS[weight_name])
    shipped = shipped_tile(x, weight, is_recorded=True)
    launches: dict[str, Callable[[], object]] = {TORCH: lambda: functional.linear(x, weight)}
    for tile in tiles:
        if tile == shipped or is_worth_timing(tile, num_rows):
            launches[name_of(tile)] = partial(linear, x, weight, tile=tile)
    kernels = bench.kernels_of(launches[TORCH])
    return [
        Timing(
            weight=weight_name,
            num_rows=num_rows,
            tile=name,
            is_shipped=name == name_of(shipped),
            us=round(us, 2),
            tbps=round(weight.nbytes / us / 1e6, 3),
            tflops=round(2 * num_rows * weight.numel() / us / 1e6, 1),
            kernels=kernels if name == TORCH else (),
        )
        for name, us in sorted(bench.times_us(launches).items(), key=lambda each: each[1])
    ]


def summary(timings: list[Timing], num_rows: int) -> str:
    """Return a line for a number of rows: torch, the choice, and the best there is."""
    kinds: dict[str, Callable[[Timing], bool]] = {
        TORCH: lambda each: each.tile == TORCH,
        "shipped": lambda each: each.is_shipped,
        "best": lambda each: each.tile != TORCH,
    }
    us: dict[str, dict[str, float]] = {kind: {} for kind in kinds}  # by weight
    for each in timings:
        for kind, is_kind in kinds.items():
            if each.num_rows == num_rows and is_kind(each):
                us[kind][each.weight] = min(each.us, us[kind].get(each.weight, math.inf))
    parts = [f"{num_rows:5}"]
    for kind, by_weight in us.items():
        ratio = statistics.median(by_weight[weight] / us[TORCH][weight] for weight in by_weight)
        layers_us = sum(each for weight, each in by_weight.items() if weight != "lm_head")
        parts.append(f"{kind} {layers_us * NUM_LAYERS / 1000:.2f} ms {ratio:.3f}")
    return " | ".join(parts)


def main() -> None:
    """Check and time all shapes; print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--repetitions", type=int, default=20, help="timed runs of a launch")
    parser.add_argument("--rows", default=",".join(map(str, NUM_ROWS)))
    parser.add_argument("--weights", default=",".join(WEIGHTS))
    add_commit(parser)
    arguments = parser.parse_args()
    head = conditions("linear", arguments.commit)
    weights = arguments.weights.split(",")
    all_num_rows = [int(each) for each in arguments.rows.split(",")]

    bench = Bench(arguments.repetitions)
    tiles = shipped_tiles(*bench.operands(8, 8, 8))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    num_faults = 0
    for weight_name in weights:
        for fault in faults(bench, tiles, *WEIGHTS[weight_name]):
            print(f"{weight_name:8} {fault}", flush=True)
            num_faults += 1
        print(f"{weight_name:8} checked", flush=True)

    timings: list[Timing] = []
    for num_rows in all_num_rows:
        for weight_name in weights:
            case = time_case(bench, tiles, weight_name, num_rows)
            timings += case
            for each in case:
                mark = "*" if each.is_shipped else " "
                print(
                    f"{weight_name:8} {num_rows:5} {mark}{each.tile:28} {each.us:9.1f} us "
                    f"{each.tbps:6.2f} TB/s {each.tflops:6.0f} TFLOP/s {' '.join(each.kernels)}",
                    flush=True,
                )
            if arguments.out is not None:  # after each case: a run may be cut short
                write_result(arguments.out, head | {"cases": [asdict(each) for each in timings]})
    print("rows, four products of all layers, median over weights of times over torch's")
    for num_rows in all_num_rows:
        print(summary(timings, num_rows))
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
