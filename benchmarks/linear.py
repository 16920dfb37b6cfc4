"""Times the linear layer on one GPU beside torch's (cuBLAS) and writes a list of cases as JSON.

    python -m benchmarks.linear --out benchmarks/results/linear-h200.json

Method: Llama-3-8B's weight shapes, bfloat16, random data; the launch in a CUDA graph; 256 MB are
written between runs, so that the L2 cache is cold; time from events around the replay; median.
"tbps" counts the weights' bytes, "tflops" all operations. Every tile is timed and its result is
compared bit by bit with the first one's; "shipped" marks the tile that `linear_tile` picks.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

from attn_kernels.linear import LinearTile, linear, linear_tile, linear_tiles

# name |-> (num_out, num_in)
WEIGHTS = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
    "lm_head": (128_256, 4096),
}
NUM_ROWS = (1, 16, 64, 128, 256, 512, 2048, 8192)
FLUSH_BYTES = 256 << 20


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


class Bench:
    """Times launches with a cold cache."""

    def __init__(self, repetitions: int) -> None:
        self._repetitions = repetitions
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def time_us(self, launch: Callable[[], object]) -> float:
        """Return the median of a launch in microseconds."""
        launch()  # compiles outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        events = []
        for _ in range(self._repetitions):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._flush.fill_(1)
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        times: list[float] = [start.elapsed_time(end) * 1000 for start, end in events]
        return statistics.median(times)


def name_of(tile: LinearTile) -> str:
    """Return the tile's numbers."""
    swapped = " swapped" if tile.is_swapped else ""
    sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
    return f"{sizes} w{tile.num_warps} s{tile.num_stages}{swapped}"


def bench_case(bench: Bench, weight_name: str, num_rows: int) -> list[Timing]:
    """Time torch and every tile on one shape."""
    num_out, num_in = WEIGHTS[weight_name]
    x = torch.randn(num_rows, num_in, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(num_out, num_in, dtype=torch.bfloat16, device="cuda")
    shipped = linear_tile(num_rows, num_out, torch.bfloat16)
    expected = linear(x, weight, tile=shipped)

    def timing(tile: str, is_shipped: bool, us: float) -> Timing:
        return Timing(
            weight=weight_name,
            num_rows=num_rows,
            tile=tile,
            is_shipped=is_shipped,
            us=round(us, 2),
            tbps=round(weight.nbytes / us / 1e6, 3),
            tflops=round(2 * num_rows * weight.numel() / us / 1e6, 1),
        )

    timings = [timing("torch", False, bench.time_us(lambda: functional.linear(x, weight)))]
    for tile in linear_tiles(torch.bfloat16):
        # Tiles for few rows and for many: outside of their range they only cost time.
        has_too_few, has_too_many = num_rows <= tile.block_m // 2, num_rows > 4 * tile.block_m
        if (has_too_few and tile.block_m > 64) or (has_too_many and tile.block_m <= 64):
            continue
        assert torch.equal(linear(x, weight, tile=tile), expected), f"{tile} has other bits"

        def launch(tile: LinearTile = tile) -> None:
            linear(x, weight, tile=tile)

        timings.append(timing(name_of(tile), tile == shipped, bench.time_us(launch)))
    return timings


def main() -> None:
    """Time all shapes; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--repetitions", type=int, default=20, help="timed runs of a case")
    arguments = parser.parse_args()

    bench = Bench(arguments.repetitions)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    timings: list[Timing] = []
    for num_rows in NUM_ROWS:
        for weight_name in WEIGHTS:
            if weight_name == "lm_head" and num_rows > 256:
                continue  # only a sequence's last row has logits
            case = bench_case(bench, weight_name, num_rows)
            timings += case
            for each in sorted(case, key=lambda each: each.us):
                mark = "*" if each.is_shipped else " "
                print(
                    f"{weight_name:8} {num_rows:5} {mark}{each.tile:28} {each.us:9.1f} us "
                    f"{each.tbps:6.2f} TB/s {each.tflops:6.0f} TFLOP/s",
                    flush=True,
                )
    if arguments.out is not None:
        rows = ",\n".join(" " + json.dumps(asdict(each)) for each in timings)
        arguments.out.write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    main()
