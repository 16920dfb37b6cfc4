"""Times sharing a prefix beside flat decode where neither is much faster, and writes rows as JSON.

    python -m benchmarks.cascade_border --out benchmarks/results/cascade-border-h200.json

Forests are of two kinds: "prefix/8,2048,1024", 8 requests that share 2,048 tokens and have 1,024
of their own, from a grid, and "random/1500", of several levels, drawn with that seed. Those are
timed of whose two estimates (attn_kernels.cascade_model) neither is 1.5 times the other: shared,
whichever is estimated faster, and flat, by the method of benchmarks.kernels. A row says which of
the two the planner takes. tests/benchmarks/test_cascade_border.py holds the planner to the
committed rows. The estimates were fitted to the grid and to random forests of other seeds.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from attn_kernels.cascade import CascadeAttention
from attn_kernels.cascade_model import CascadeModel
from attn_kernels.cascade_plan import CascadePlan, plan_cascade
from attn_kernels.decode import DEFAULT_RULE
from attn_kernels.prefix_tree import prefix_tree
from benchmarks.attention_cases import SCALE, kv_scale, queries
from benchmarks.bench import NUM_QO_HEADS, Bench
from benchmarks.cascade_cases import Forest, random_forest

BATCHES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHARED = (256, 512, 1024, 2048, 4096, 8192, 16_384)
OWN = (64, 256, 512, 1024, 2048, 4096, 8192, 16_384)
MAX_DISTINCT, MAX_TOKENS = 500_000, 4_000_000
SEEDS = range(1500, 2000)
PAGE_SIZE = 64
NEAR = (1 / 1.5, 1.5)  # estimates of cascade over flat
DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One forest, both ways; times of one layer, medians."""

    dtype: str  # of the pool
    forest: str  # see the module's text
    num_requests: int
    cascade_us: float
    flat_us: float
    is_shared: bool  # what the planner takes


def forest_of(name: str) -> Forest:
    """Return the forest of a row."""
    kind, _, sizes = name.partition("/")
    if kind == "random":
        return random_forest(int(sizes), PAGE_SIZE)
    batch, shared, own = (int(size) for size in sizes.split(","))
    return Forest(nodes=[(-1, shared)], requests=[(0, own)] * batch)


def plan_forest(forest: Forest, model: CascadeModel) -> CascadePlan:
    """Plan a forest as `CascadeAttention` does, from page tables, with slots enough for all."""
    kv_lens = np.array(forest.kv_lens())
    num_pages = forest.num_distinct_tokens() // PAGE_SIZE + len(kv_lens)
    starts, indices = forest.page_tables(range(num_pages), PAGE_SIZE)
    unit_len = math.lcm(DEFAULT_RULE.split_len, PAGE_SIZE)
    nodes = prefix_tree(starts, indices, kv_lens, page_size=PAGE_SIZE, unit_len=unit_len)
    return plan_cascade(
        nodes,
        kv_lens,
        table_starts=starts,
        rule=DEFAULT_RULE,
        model=model,
        max_slots=MAX_TOKENS,
        is_exact=True,
    )


def names() -> Iterator[str]:
    """Yield the forests that are not too large."""
    grid = [f"prefix/{','.join(map(str, sizes))}" for sizes in product(BATCHES, SHARED, OWN)]
    for name in (*grid, *(f"random/{seed}" for seed in SEEDS)):
        forest = forest_of(name)
        if forest.num_distinct_tokens() <= MAX_DISTINCT and sum(forest.kv_lens()) <= MAX_TOKENS:
            yield name


def time_one(bench: Bench, dtype: str, name: str) -> Row | None:
    """Time a forest both ways, if it is near the border and something can be shared."""
    forest = forest_of(name)
    kv_lens = forest.kv_lens()
    num_tokens = forest.num_distinct_tokens() + PAGE_SIZE * len(kv_lens)
    pages = bench.pool(num_tokens, PAGE_SIZE, dtype=DTYPES[dtype])
    scale = kv_scale(pages)
    attention = CascadeAttention(
        pages,
        num_qo_heads=NUM_QO_HEADS,
        scale=SCALE,
        max_requests=len(kv_lens),
        max_kv_tokens=sum(kv_lens),
        k_scale=scale,
        v_scale=scale,
    )
    is_shared = plan_forest(forest, attention.model).num_items > 0
    page_ids = torch.randperm(pages.shape[0], generator=torch.Generator().manual_seed(0))
    starts, indices = forest.page_tables(page_ids[: num_tokens // PAGE_SIZE].tolist(), PAGE_SIZE)
    attention.model = replace(attention.model, margin=math.inf)
    estimate = attention.plan(kv_lens, starts, indices)
    low, high = NEAR
    if attention.num_shared_items == 0 or not low < estimate.cascade_us / estimate.flat_us < high:
        return None
    on_device = torch.from_numpy(indices).to(bench.device)
    q = queries(len(kv_lens), bench.device)
    out = torch.empty_like(q)
    layer = pages.shape[1] // 2
    cascade = bench.time("cascade", lambda: attention.run(q, layer, on_device, out=out))
    attention.flat.plan(kv_lens, table_starts=starts)
    flat = bench.time("flat", lambda: attention.flat.run(q, layer, on_device, out=out))
    return Row(
        dtype=dtype,
        forest=name,
        num_requests=len(kv_lens),
        cascade_us=round(cascade.us, 3),
        flat_us=round(flat.us, 3),
        is_shared=is_shared,
    )


def main() -> None:
    """Run all forests for both kinds of pools, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--pool-gib", type=int, default=40, help="size of the pool of bfloat16")
    parser.add_argument("--repetitions", type=int, default=15, help="timed runs of a forest")
    arguments = parser.parse_args()

    bench = Bench(pool_bytes=arguments.pool_gib << 30, repetitions=arguments.repetitions)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for dtype in DTYPES:
        for name in track(list(names()), description=dtype):
            row = time_one(bench, dtype, name)
            if row is not None:
                rows.append(row)
    lines = ",\n".join(f" {json.dumps(asdict(row))}" for row in rows)
    arguments.out.write_text(f"[\n{lines}\n]\n")
    shared = [row.cascade_us / row.flat_us for row in rows if row.is_shared]
    print(f"{len(rows)} forests, {len(shared)} shared, the worst at {max(shared):.3f} of flat")


if __name__ == "__main__":
    main()
