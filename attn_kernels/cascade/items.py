"""Cuts shared runs of tokens into work items: numpy on the host.

An item is a tile of query rows and a range of a run's splits, for each key-value head. It fills a
slot for each segment that it begins, and one for each split of a segment that another item begins:
if the result must be bit-identical to flat decode, only a segment's first splits may be folded
before the others exist. Otherwise each item fills one slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from attn_kernels.cascade.model import CascadeModel
from attn_kernels.cascade.prefix_tree import IntArray
from attn_kernels.decode.plan import SplitRule

FIELDS = (
    "first_member",  # members [first_member, first_member + num_members) of the plan
    "num_members",
    "begin",  # tokens [begin, end), both at borders of splits
    "end",
    "first_entry",  # index of a member's first page in the page table
    "ordinal",  # of the item's first slot among the slots of a request
)
ITEM_FIELDS = len(FIELDS)

MAX_SEGMENTS = 4  # of an item


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRun:
    """Tokens read once for all members."""

    begin: int  # tokens [begin, end), both at borders of splits; 0 without a parent
    end: int
    members: IntArray  # indices of requests
    parent: int | None  # index of the run that ends at `begin`, with these members and others


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedItems:
    """The work items of all runs."""

    fields: npt.NDArray[np.int32]  # [num_items, ITEM_FIELDS], longest first
    num_slots: int  # of all requests
    slots_up_to: list[int]  # for each run: slots of a member, those of its ancestors included
    ends_us: float  # estimated: the busiest program's time


def cut_runs(
    runs: Sequence[SharedRun],
    *,
    table_starts: IntArray,
    rule: SplitRule,
    model: CascadeModel,
    max_slots: int,
    is_exact: bool,
) -> SharedItems:
    """Cut runs at multiples of the length that is estimated to finish first.

    Args:
        runs: One or more, parents before children.
        table_starts: Index of each request's first page in the page table.
        rule: Where splits and segments end.
        model: Costs of the work.
        max_slots: Most slots of all requests; the coarsest cut is returned even if it has more.
        is_exact: Whether the result must be bit-identical to flat decode.
    """
    shapes = tuple((run.begin, run.end, len(run.members), run.parent) for run in runs)
    item_splits = _item_splits_for(shapes, rule, model, max_slots, is_exact)
    return cut(
        runs,
        item_splits=item_splits,
        table_starts=table_starts,
        rule=rule,
        model=model,
        is_exact=is_exact,
    )


@lru_cache(maxsize=64)  # the steps of a batch have the same runs until a request joins or leaves
def _item_splits_for(
    shapes: tuple[tuple[int, int, int, int | None], ...],  # begin, end, members, parent
    rule: SplitRule,
    model: CascadeModel,
    max_slots: int,
    is_exact: bool,
) -> int:
    """Return the length of items, in splits, that is estimated to finish first."""
    runs = [
        SharedRun(begin=begin, end=end, members=np.zeros(size, dtype=np.int64), parent=parent)
        for begin, end, size, parent in shapes
    ]
    num_requests = max(size for _, _, size, _ in shapes)

    def total_us(items: SharedItems) -> float:
        return items.ends_us + model.own_parts_us(num_requests, max(items.slots_up_to))

    cut_by = partial(
        cut,
        runs,
        table_starts=np.zeros(1, dtype=np.int64),
        rule=rule,
        model=model,
        is_exact=is_exact,
    )
    best_splits = item_splits = MAX_SEGMENTS * rule.splits_per_segment
    best = cut_by(item_splits=item_splits)
    while item_splits > 1:
        item_splits //= 2
        items = cut_by(item_splits=item_splits)
        if items.num_slots > max_slots or items.ends_us > 2 * best.ends_us:
            break
        if total_us(items) < total_us(best):
            best, best_splits = items, item_splits
    return best_splits


def cut(
    runs: Sequence[SharedRun],
    *,
    item_splits: int,
    table_starts: IntArray,
    rule: SplitRule,
    model: CascadeModel,
    is_exact: bool,
) -> SharedItems:
    """Cut runs at multiples of `item_splits` splits; other arguments are those of `cut_runs`."""
    first = np.array([run.begin for run in runs], dtype=np.int64) // rule.split_len
    last = np.array([run.end for run in runs], dtype=np.int64) // rule.split_len
    num_pieces = -(-last // item_splits) - first // item_splits
    run_of = np.repeat(np.arange(len(runs)), num_pieces)
    ordinal = np.arange(len(run_of)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    border = (first[run_of] // item_splits + ordinal) * item_splits
    begin = np.maximum(border, first[run_of])
    end = np.minimum(border + item_splits, last[run_of])

    per_segment = rule.splits_per_segment
    piece_slots = np.ones_like(begin)
    if is_exact:
        whole = np.minimum(-(-begin // per_segment) * per_segment, end)  # segments from here on
        piece_slots = whole - begin + -(-(end - whole) // per_segment)
    run_slots = np.bincount(run_of, weights=piece_slots, minlength=len(runs)).astype(np.int64)
    slots_up_to: list[int] = []
    for run, count in zip(runs, run_slots.tolist(), strict=True):
        slots_up_to.append((0 if run.parent is None else slots_up_to[run.parent]) + count)
    run_first_slots = np.array(slots_up_to) - run_slots
    first_slot = np.cumsum(piece_slots) - piece_slots
    first_slot += (run_first_slots - np.cumsum(run_slots) + run_slots)[run_of]

    # Tiles of one piece are neighbours: they read the same keys at about the same time.
    sizes = np.array([len(run.members) for run in runs], dtype=np.int64)
    tiles = -(-sizes // model.members_per_tile)
    order = np.argsort(begin - end, kind="stable")
    counts = tiles[run_of[order]]
    piece = np.repeat(order, counts)
    tile = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    run_index = run_of[piece]
    tile_begin = tile * model.members_per_tile
    first_members = np.cumsum(sizes) - sizes
    entries = table_starts[[run.members[0] for run in runs]]
    fields = np.empty((len(piece), ITEM_FIELDS), dtype=np.int32)
    for column, values in enumerate(
        (
            first_members[run_index] + tile_begin,
            np.minimum(sizes[run_index] - tile_begin, model.members_per_tile),
            begin[piece] * rule.split_len,
            end[piece] * rule.split_len,
            entries[run_index],
            first_slot[piece],
        )
    ):
        fields[:, column] = values

    item_us = model.shared_item_us((end - begin) * rule.split_len, piece_slots)[piece]
    mine = np.arange(0, len(piece) * model.num_kv_heads, model.num_programs) // model.num_kv_heads
    return SharedItems(
        fields=fields,
        num_slots=int((sizes * run_slots).sum()),
        slots_up_to=slots_up_to,
        ends_us=float(item_us[mine].sum()),  # program 0 has the longest of each round
    )
