"""Pure planning of paged decode attention: lengths -> work items, in numpy on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = Sequence[int] | npt.NDArray[np.int64]

FIELDS = (
    "row",  # of q and out
    "first_entry",  # index of the request's first page in the page table
    "begin",  # tokens [begin, end)
    "end",
    "first_token",  # first one inside the sliding window
    "slot",  # where the item stores its partial result
    "first_slot",  # of the request
    "num_slots",  # of the request; 0: the item is the whole request and stores no partial result
    "num_items",  # of the request: the last one to arrive folds all slots
    "ends_segment",  # 1: the item's last split is the last one of a segment or of the request
)
ITEM_FIELDS = len(FIELDS)

# A model of the device; a token is that of one key-value head, 512 bytes at head_dim 128. Fitted by
# hand to sweeps on one H200; it only has to choose a side. TODO(3): fit per device and shape.
DEVICE_TOKENS_PER_US = 8_000.0
PROGRAM_TOKENS_PER_US = 64.0  # of one program, however idle the rest: its arithmetic is a chain
ITEM_US = 1.0  # filling a pipeline
STORE_US = 5.0  # storing a partial result so that other programs see it
SLOT_US = 0.2  # folding one partial result
BUSY_ROUNDS = 2  # segments for every program: splits would only cost more


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """Where keys are cut: at absolute positions, never depending on the batch."""

    split_len: int = 256  # tokens; a multiple of the kernel's key tile
    splits_per_segment: int = 8

    @property
    def segment_len(self) -> int:
        return self.split_len * self.splits_per_segment


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeItems:
    """Work items, longest first, and where each request's partial results lie.

    A request with more than one partial result owns slots in a row, in key order: first those that
    another kernel fills, then one for each item. A slot holds the fold of a segment's first splits
    (one to all of them) or one of its later splits, and says whether a segment ends with it.
    """

    fields: npt.NDArray[np.int32]  # [num_items, ITEM_FIELDS]
    first_slots: npt.NDArray[np.int64]  # [num_requests]; means nothing for a request without slots
    num_slots: int  # of all requests

    @property
    def num_items(self) -> int:
        return len(self.fields)


def plan_decode(
    kv_lens: Integers,
    *,
    rows: Integers,
    table_starts: Integers,
    rule: SplitRule,
    sliding_window: int | None,
    num_programs: int,
    num_kv_heads: int,
    max_items: int,
    first_private: Integers | None = None,
    num_shared_slots: Integers | None = None,
) -> DecodeItems:
    """Cut requests into items of one split or one segment each, whichever finishes earlier.

    Args:
        kv_lens: Tokens of each request; 0 gives a row of zeros.
        rows: Row of each request's query and output.
        table_starts: Index of each request's first page in the page table.
        rule: Where to cut.
        sliding_window: Number of last tokens that a query sees; None is all.
        num_programs: Programs of the launch.
        num_kv_heads: Key-value heads; each makes every item once.
        max_items: Splits are not considered beyond it.
        first_private: First token that the items of each request cover, a multiple of the split
            length and below its kv_len; None is 0.
        num_shared_slots: Slots of each request that another kernel fills before this launch, for
            the tokens before first_private; None is 0.
    """
    lens = np.asarray(kv_lens, dtype=np.int64)
    first_tokens = np.zeros_like(lens)
    if sliding_window is not None:
        first_tokens = np.maximum(lens - sliding_window, 0)
    begins = first_tokens
    if first_private is not None:
        begins = np.maximum(begins, np.asarray(first_private, dtype=np.int64))
    shared = np.zeros_like(lens)
    if num_shared_slots is not None:
        shared = np.asarray(num_shared_slots, dtype=np.int64)
    entries = np.asarray(table_starts, dtype=np.int64)
    out_rows = np.asarray(rows, dtype=np.int64)

    # Tokens [begin, fine_end) are cut into splits, the rest into segments. A segment whose first
    # splits are in shared slots can only be continued split by split.
    borders = begins // rule.segment_len * rule.segment_len
    if first_private is not None:
        borders = -(-begins // rule.segment_len) * rule.segment_len

    def cut(fine_ends: npt.NDArray[np.int64]) -> DecodeItems:
        first_splits = begins // rule.split_len
        num_fine = -(-np.minimum(fine_ends, lens) // rule.split_len) - first_splits
        num_fine = np.maximum(num_fine, 0)
        num_coarse = np.maximum(-(-(lens - fine_ends) // rule.segment_len), 0)
        counts = np.maximum(num_fine + num_coarse, 1)
        slot_counts = counts + shared
        slot_counts[slot_counts == 1] = 0
        first_slots = np.cumsum(slot_counts) - slot_counts

        owner = np.repeat(np.arange(len(lens)), counts)
        ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        coarse_ordinal = ordinal - num_fine[owner]
        is_fine = coarse_ordinal < 0
        begin = np.where(
            is_fine,
            (first_splits[owner] + ordinal) * rule.split_len,
            fine_ends[owner] + coarse_ordinal * rule.segment_len,
        )
        unit_lens = np.where(is_fine, rule.split_len, rule.segment_len)
        end = np.minimum(begin + unit_lens, lens[owner])

        order = np.argsort(begin - end, kind="stable")
        owner, ordinal, end = owner[order], ordinal[order], end[order]
        fields = np.empty((len(owner), ITEM_FIELDS), dtype=np.int32)
        columns = (
            out_rows[owner],
            entries[owner],
            begin[order],
            end,
            first_tokens[owner],
            (first_slots + shared)[owner] + ordinal,
            first_slots[owner],
            slot_counts[owner],
            counts[owner],
            (end % rule.segment_len == 0) | (end == lens[owner]),
        )
        for field, column in enumerate(columns):
            fields[:, field] = column
        return DecodeItems(fields=fields, first_slots=first_slots, num_slots=int(slot_counts.sum()))

    coarse = cut(borders)
    num_splits = int((-(-lens // rule.split_len)).sum()) + len(lens)
    if num_splits > max_items or coarse.num_items * num_kv_heads > BUSY_ROUNDS * num_programs:
        return coarse
    fine = cut(np.maximum(lens, borders))
    return min(coarse, fine, key=lambda items: _estimated_us(items, num_programs, num_kv_heads))


def _estimated_us(items: DecodeItems, num_programs: int, num_kv_heads: int) -> float:
    """Estimate a launch: program 0 is the busiest, it takes every num_programs-th unit."""
    num_units = items.num_items * num_kv_heads
    mine = np.arange(0, num_units, num_programs) // num_kv_heads
    lengths = items.fields[:, 3] - items.fields[:, 2]
    all_tokens = float(lengths.sum()) * num_kv_heads
    # Programs share the bandwidth; the busiest one ends last.
    busiest = float(lengths[mine].sum())
    active = min(num_units, num_programs)
    rate = min(PROGRAM_TOKENS_PER_US, DEVICE_TOKENS_PER_US / active)
    reading = max(all_tokens / DEVICE_TOKENS_PER_US, busiest / rate)
    num_slots = items.fields[:, 7]
    num_stored = int((num_slots[mine] > 0).sum())
    fold = SLOT_US * int(num_slots.max(initial=1)) if num_stored else 0.0
    return reading + ITEM_US * len(mine) + STORE_US * num_stored + fold
