"""Times the linear layers of whole passes without a rest between them, beside torch's.

    python -m benchmarks.linear_sustained --out benchmarks/results/linear-sustained-X.json

`benchmarks.linear` times single launches, between which the GPU rests. In a pass of a model they
follow one another, and a GPU at its power limit lowers its clock. Here the products of 32 layers of
Llama-3-8B's weights are recorded in one CUDA graph, which is replayed for a second at a time, in
turns with the same products by torch. `ms` is a pass; `mhz` and `watts` are what nvidia-smi says of
the GPU at the end of that second. All are medians over the turns.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attn_kernels.linear.launch import linear
from benchmarks.linear import NUM_LAYERS, TORCH, WEIGHTS, Bench
from benchmarks.measured_host import add_commit, conditions, nvidia_smi
from benchmarks.result_file import write_result

NUM_ROWS = (512, 2048)
SECONDS = 1.0  # of each turn
QUERY_S = 0.5  # longer than nvidia-smi takes
OURS = "ours"
Product = Callable[[Tensor, Tensor], Tensor]


def recorded(product: Product, operands: list[tuple[Tensor, Tensor]]) -> torch.cuda.CUDAGraph:
    """Record the products of all layers."""
    for x, weight in operands:
        product(x, weight)  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_LAYERS):
            for x, weight in operands:
                product(x, weight)
    return graph


def replayed(graph: torch.cuda.CUDAGraph, seconds: float) -> dict[str, float]:
    """Replay a recording for a while; return the time of one, and how the GPU runs at the end."""
    stream = torch.cuda.current_stream()
    started = time.perf_counter()
    count = 0
    while time.perf_counter() - started < seconds:
        for _ in range(4):
            graph.replay()
        count += 4
        stream.synchronize()
    pass_s = (time.perf_counter() - started) / count
    for _ in range(round(QUERY_S / pass_s)):
        graph.replay()
    mhz, watts = nvidia_smi("clocks.sm", "power.draw")[0].split(", ")
    stream.synchronize()
    return {"ms": 1e3 * pass_s, "mhz": float(mhz), "watts": float(watts)}


def measured(bench: Bench, num_rows: int, turns: int) -> dict[str, Any]:
    """Time all products of one number of rows, ours and torch's in turns."""
    shapes = (shape for name, shape in WEIGHTS.items() if name != "lm_head")
    operands = [bench.operands(num_rows, *shape) for shape in shapes]
    products: dict[str, Product] = {OURS: linear, TORCH: functional.linear}
    graphs = {name: recorded(product, operands) for name, product in products.items()}
    found = [
        (name, replayed(graph, SECONDS)) for _ in range(turns) for name, graph in graphs.items()
    ]
    return {
        "case": f"{num_rows} rows",
        **{
            f"{name}_{key}": round(
                statistics.median(each[key] for of, each in found if of == name), 3
            )
            for name in products
            for key in ("ms", "mhz", "watts")
        },
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    add_commit(parser)
    options = parser.parse_args()
    bench = Bench(repetitions=1)
    cases = []
    for num_rows in NUM_ROWS:
        cases.append(measured(bench, num_rows, options.turns))
        sys.stdout.write(json.dumps(cases[-1]) + "\n")
        sys.stdout.flush()
    write_result(options.out, conditions("linear_sustained", options.commit) | {"cases": cases})


if __name__ == "__main__":
    main()
