"""Times sharing a prefix beside flat decode where neither is much faster, and writes rows as JSON.

    python -m benchmarks.cascade_border --out benchmarks/results/cascade-border-h200.json

A batch of requests shares tokens and has tokens of its own. Of a grid of such forests, those are
timed whose two estimates (attn_kernels.cascade_model) differ by less than half: shared, whichever
is estimated faster, and flat, by the method of benchmarks.kernels. A row says which of the two
the planner takes. tests/benchmarks/test_cascade_border.py holds the planner to the committed rows.
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
from attn_kernels.prefix_tree import PrefixNode
from benchmarks.attention_cases import SCALE, kv_scale, queries
from benchmarks.bench import NUM_QO_HEADS, Bench
from benchmarks.cascade_cases import Forest

BATCHES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHARED = (256, 512, 1024, 2048, 4096, 8192, 16_384)
OWN = (64, 256, 512, 1024, 2048, 4096, 8192, 16_384)
MAX_DISTINCT, MAX_TOKENS = 500_000, 4_000_000
PAGE_SIZE = 64
NEAR = (1 / 1.5, 1.5)  # estimates of cascade over flat
DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One forest, both ways; times of one layer, medians."""

    dtype: str  # of the pool
    batch: int
    shared: int  # tokens that all requests share
    own: int  # tokens of each request behind them
    cascade_us: float
    flat_us: float
    is_shared: bool  # what the planner takes


def plan_one(batch: int, shared: int, own: int, model: CascadeModel) -> CascadePlan:
    """Plan a forest of one prefix."""
    node = PrefixNode(begin=0, end=shared, members=np.arange(batch), parent=None)
    return plan_cascade(
        [node],
        np.full(batch, shared + own),
        table_starts=np.zeros(batch, dtype=np.int64),
        rule=DEFAULT_RULE,
        model=model,
        max_slots=MAX_TOKENS,
        is_exact=True,
    )


def grid() -> Iterator[tuple[int, int, int]]:
    """Yield batch, shared and own tokens."""
    for batch, shared, own in product(BATCHES, SHARED, OWN):
        if shared + batch * own <= MAX_DISTINCT and batch * (shared + own) <= MAX_TOKENS:
            yield batch, shared, own


def time_one(bench: Bench, dtype: str, batch: int, shared: int, own: int) -> Row | None:
    """Time a forest both ways, if it is near the border and all its tokens can be shared."""
    forest = Forest(nodes=[(-1, shared)], requests=[(0, own)] * batch)
    kv_lens = forest.kv_lens()
    num_tokens = forest.num_distinct_tokens() + PAGE_SIZE * batch
    pages = bench.pool(num_tokens, PAGE_SIZE, dtype=DTYPES[dtype])
    scale = kv_scale(pages)
    attention = CascadeAttention(
        pages,
        num_qo_heads=NUM_QO_HEADS,
        scale=SCALE,
        max_requests=batch,
        max_kv_tokens=sum(kv_lens),
        k_scale=scale,
        v_scale=scale,
    )
    is_shared = plan_one(batch, shared, own, attention.model).num_items > 0
    attention.model = replace(attention.model, margin=math.inf)
    plan = plan_one(batch, shared, own, attention.model)
    low, high = NEAR
    ratio = plan.estimate.cascade_us / plan.estimate.flat_us
    if plan.num_items == 0 or not low < ratio < high:
        return None
    page_ids = torch.randperm(pages.shape[0], generator=torch.Generator().manual_seed(0))
    starts, indices = forest.page_tables(page_ids[: num_tokens // PAGE_SIZE].tolist(), PAGE_SIZE)
    on_device = torch.from_numpy(indices).to(bench.device)
    q = queries(batch, bench.device)
    out = torch.empty_like(q)
    layer = pages.shape[1] // 2
    attention.plan(kv_lens, starts, indices)
    cascade = bench.time("cascade", lambda: attention.run(q, layer, on_device, out=out))
    attention.flat.plan(kv_lens, table_starts=starts)
    flat = bench.time("flat", lambda: attention.flat.run(q, layer, on_device, out=out))
    return Row(
        dtype=dtype,
        batch=batch,
        shared=shared,
        own=own,
        cascade_us=round(cascade.us, 3),
        flat_us=round(flat.us, 3),
        is_shared=is_shared,
    )


def main() -> None:
    """Run the grid for both kinds of pools, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--pool-gib", type=int, default=40, help="size of the pool of bfloat16")
    parser.add_argument("--repetitions", type=int, default=15, help="timed runs of a forest")
    arguments = parser.parse_args()

    bench = Bench(pool_bytes=arguments.pool_gib << 30, repetitions=arguments.repetitions)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for dtype in DTYPES:
        for sizes in track(list(grid()), description=dtype):
            row = time_one(bench, dtype, *sizes)
            if row is not None:
                rows.append(row)
    lines = ",\n".join(f" {json.dumps(asdict(row))}" for row in rows)
    arguments.out.write_text(f"[\n{lines}\n]\n")
    shared = [row.cascade_us / row.flat_us for row in rows if row.is_shared]
    print(f"{len(rows)} forests, {len(shared)} shared, the worst at {max(shared):.3f} of flat")


if __name__ == "__main__":
    main()
