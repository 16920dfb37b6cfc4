"""Times sharing a prefix and flat decode where neither is much faster, and writes rows as JSON.

    python -m benchmarks.cascade_border --out benchmarks/results/cascade-border-h200.json
    python -m benchmarks.cascade_border --shape 32,32,128,64 --every 3 --seeds 3000:3200 --out ...
    python -m benchmarks.cascade_border --shape 32,8,128,64,4096,30 --dtype float16 --out ...

There are two kinds of forests: "prefix/8,2048,1024", 8 requests that share 2,048 tokens and have
1,024 of their own, from a grid, and "random/1500", of several levels, drawn with that seed. If
neither of a forest's two estimates (attn_kernels.cascade.model) is 1.5 times the other, it is timed
both shared and flat, by the method of benchmarks.kernels. A row says which of the two the planner
chooses. tests/benchmarks/test_cascade_border.py checks the planner against the committed rows. The
estimates were fitted to the grid and to random forests of other seeds, with the first shape;
buffers are for as many rows as the engine's (llm_engine.decode_triton).
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import track

from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.cascade.model import CascadeModel
from attn_kernels.cascade.plan import CascadePlan, plan_cascade
from attn_kernels.cascade.prefix_tree import prefix_tree, within_window
from attn_kernels.decode.launch import DEFAULT_RULE
from benchmarks.attention_cases import kv_scale, queries
from benchmarks.bench import Bench
from benchmarks.cascade_cases import Forest, random_forest
from llm_engine.decode_triton import MAX_DECODE_ROWS, few_rows

BATCHES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHARED = (256, 512, 1024, 2048, 4096, 8192, 16_384)
OWN = (64, 256, 512, 1024, 2048, 4096, 8192, 16_384)
MAX_DISTINCT, MAX_TOKENS = 500_000, 4_000_000
NEAR = (1 / 1.5, 1.5)  # estimates of cascade over flat
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


class Shape(NamedTuple):
    """Heads, pages of the pool, and parameters of attention over it."""

    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64  # tokens
    sliding_window: int = 0  # tokens; 0: none
    soft_cap: float = 0.0  # 0: none

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    def __str__(self) -> str:
        last = 6 if self.soft_cap else 5 if self.sliding_window else 4
        return ",".join(f"{part:g}" for part in self[:last])


FITTED, FITTED_DTYPES = Shape(), ("bfloat16", "float8_e4m3fn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One forest, both ways; times of one layer, medians."""

    dtype: str  # of the pool
    shape: str  # as --shape takes it
    forest: str  # see the module's text
    num_requests: int
    cascade_us: float
    flat_us: float
    is_shared: bool  # the planner's choice


def forest_of(name: str, page_size: int) -> Forest:
    """Return the forest of a row."""
    kind, _, sizes = name.partition("/")
    if kind == "random":
        return random_forest(int(sizes), page_size)
    batch, shared, own = (int(size) for size in sizes.split(","))
    return Forest(nodes=[(-1, shared)], requests=[(0, own)] * batch)


def plan_forest(forest: Forest, shape: Shape, model: CascadeModel) -> CascadePlan:
    """Plan a forest as `CascadeAttention` does, from page tables, with enough slots for all."""
    kv_lens = np.array(forest.kv_lens())
    page_size = shape.page_size
    num_pages = forest.num_distinct_tokens() // page_size + len(kv_lens)
    starts, indices = forest.page_tables(range(num_pages), page_size)
    unit_len = math.lcm(DEFAULT_RULE.split_len, page_size)
    visible, shareable = within_window(kv_lens, shape.sliding_window or None)
    nodes = prefix_tree(starts, indices, shareable, page_size=page_size, unit_len=unit_len)
    return plan_cascade(
        nodes,
        visible,
        table_starts=starts,
        rule=DEFAULT_RULE,
        model=model,
        max_slots=MAX_TOKENS,
        is_exact=True,
    )


def names(page_size: int, every: int, seeds: range) -> Iterator[str]:
    """Yield forests that are not too large: a part of the grid, and random ones."""
    grid = [f"prefix/{','.join(map(str, sizes))}" for sizes in product(BATCHES, SHARED, OWN)]
    for name in (*grid[::every], *(f"random/{seed}" for seed in seeds)):
        forest = forest_of(name, page_size)
        if forest.num_distinct_tokens() <= MAX_DISTINCT and sum(forest.kv_lens()) <= MAX_TOKENS:
            yield name


def buffer_rows(num_requests: int, group: int) -> int:
    """Return the size of the engine's buffers for this number of requests."""
    few = few_rows(group)
    return few if num_requests <= few else MAX_DECODE_ROWS


def time_one(bench: Bench, dtype: str, shape: Shape, name: str) -> Row | None:
    """Time a forest both ways, if it is near the border and has something to share."""
    page_size = shape.page_size
    forest = forest_of(name, page_size)
    kv_lens = forest.kv_lens()
    num_tokens = forest.num_distinct_tokens() + page_size * len(kv_lens)
    pages = bench.pool(
        num_tokens,
        page_size,
        dtype=DTYPES[dtype],
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    scale = kv_scale(pages)
    attention = CascadeAttention(
        pages,
        num_qo_heads=shape.num_qo_heads,
        scale=shape.head_dim**-0.5,
        max_requests=buffer_rows(len(kv_lens), shape.group),
        max_kv_tokens=sum(kv_lens),
        sliding_window=shape.sliding_window or None,
        soft_cap=shape.soft_cap or None,
        k_scale=scale,
        v_scale=scale,
    )
    is_shared = plan_forest(forest, shape, attention.model).num_items > 0
    page_ids = torch.randperm(pages.shape[0], generator=torch.Generator().manual_seed(0))
    starts, indices = forest.page_tables(page_ids[: num_tokens // page_size].tolist(), page_size)
    attention.model = replace(attention.model, margin=math.inf)
    estimate = attention.plan(kv_lens, starts, indices)
    low, high = NEAR
    if attention.num_shared_items == 0 or not low < estimate.cascade_us / estimate.flat_us < high:
        return None
    on_device = torch.from_numpy(indices).to(bench.device)
    q = queries(
        len(kv_lens),
        bench.device,
        num_qo_heads=shape.num_qo_heads,
        head_dim=shape.head_dim,
        dtype=torch.float16 if dtype == "float16" else torch.bfloat16,
    )
    out = torch.empty_like(q)
    layer = pages.shape[1] // 2
    cascade = bench.time("cascade", lambda: attention.run(q, layer, on_device, out=out))
    attention.flat.plan(kv_lens, table_starts=starts)
    flat = bench.time("flat", lambda: attention.flat.run(q, layer, on_device, out=out))
    return Row(
        dtype=dtype,
        shape=str(shape),
        forest=name,
        num_requests=len(kv_lens),
        cascade_us=round(cascade.us, 3),
        flat_us=round(flat.us, 3),
        is_shared=is_shared,
    )


def shape_of(text: str) -> Shape:
    """Read a shape from the command line."""
    parts = text.split(",")
    return Shape(*map(int, parts[:5]), *map(float, parts[5:]))


def seeds_of(text: str) -> range:
    """Read a range of seeds from the command line."""
    return range(*map(int, text.split(":")))


def main() -> None:
    """Run all forests for all shapes and pools, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--pool-gib", type=int, default=40, help="size of the bfloat16 pool, GiB")
    parser.add_argument("--repetitions", type=int, default=15, help="timed runs of a forest")
    parser.add_argument(
        "--shape",
        type=shape_of,
        action="append",
        dest="shapes",
        metavar="QO,KV,DIM,PAGE[,WINDOW[,CAP]]",
        help="query heads, key-value heads, head_dim, page size, sliding window and soft cap, "
        f"0 for none; repeatable; default: {FITTED}",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        action="append",
        dest="dtypes",
        help=f"dtype of pages; repeatable; default: {' and '.join(FITTED_DTYPES)}",
    )
    parser.add_argument(
        "--every", type=int, default=1, help="take one of every so many forests of the grid"
    )
    parser.add_argument("--seeds", type=seeds_of, default=range(1500, 2000), metavar="FIRST:END")
    arguments = parser.parse_args()

    bench = Bench(pool_bytes=arguments.pool_gib << 30, repetitions=arguments.repetitions)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for shape, dtype in product(arguments.shapes or [FITTED], arguments.dtypes or FITTED_DTYPES):
        chosen = list(names(shape.page_size, arguments.every, arguments.seeds))
        for name in track(chosen, description=f"{dtype} {shape}"):
            row = time_one(bench, dtype, shape, name)
            if row is not None:
                rows.append(row)
    lines = ",\n".join(f" {json.dumps(asdict(row))}" for row in rows)
    arguments.out.write_text(f"[\n{lines}\n]\n")
    shared = [row.cascade_us / row.flat_us for row in rows if row.is_shared]
    print(f"{len(rows)} forests, {len(shared)} shared, the worst at {max(shared):.3f} of flat")


if __name__ == "__main__":
    main()
