"""Cascade attention's own planner, where sharing costs nothing: whatever can be read once is."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attn_kernels.cascade.model import CascadeModel
from attn_kernels.cascade.plan import CascadePlan, plan_cascade
from attn_kernels.cascade.prefix_tree import prefix_tree
from attn_kernels.decode.plan import SplitRule

FREE = replace(
    CascadeModel(
        num_kv_heads=1,
        members_per_tile=16,
        token_bytes=16,
        num_programs=4,
        num_decode_programs=4,
        num_flat_lanes=4,
        tile_token_us=0.0,
    ).sharing_all(),
    item_us=0.0,
    slot_us=0.0,
)


def plan_free(
    kv_lens: Sequence[int], tables: Sequence[Sequence[int]], *, page_size: int, unit_len: int
) -> CascadePlan:
    """Plan rows with these lengths and pages; prefixes end at multiples of `unit_len` tokens."""
    lens = np.array(kv_lens, dtype=np.int64)
    starts = np.cumsum([0, *map(len, tables)])[:-1]
    pages = np.array([page for table in tables for page in table], dtype=np.int32)
    nodes = prefix_tree(starts, pages, lens, page_size=page_size, unit_len=unit_len)
    return plan_cascade(
        nodes,
        lens,
        table_starts=starts,
        rule=SplitRule(split_len=unit_len, splits_per_segment=4),
        model=FREE,
        max_slots=1_000_000,
        is_exact=True,
    )
