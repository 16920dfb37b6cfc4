"""Pure planning of paged decode attention: lengths -> work items, in numpy on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIELDS = (
    "row",  # of q and out
    "request",  # row of the page table
    "begin",  # tokens [begin, end)
    "end",
    "first_token",  # first one inside the sliding window
    "slot",  # where the item stores its partial result, unless it is the whole request
    "first_slot",  # of the request
    "num_slots",  # of the request; 1: no partial results
    "slots_per_segment",
    "segment_phase",  # slots that the request's first segment lacks before its first slot
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
    """Work items, longest first."""

    fields: npt.NDArray[np.int32]  # [num_items, ITEM_FIELDS]
    num_slots: int  # partial results to store

    @property
    def num_items(self) -> int:
        return len(self.fields)


def plan_decode(
    kv_lens: Sequence[int],
    *,
    rows: Sequence[int],
    requests: Sequence[int],
    rule: SplitRule,
    sliding_window: int | None,
    num_programs: int,
    num_kv_heads: int,
    max_items: int,
) -> DecodeItems:
    """Cut requests into items of one split or one segment each, whichever finishes earlier.

    Args:
        kv_lens: Tokens of each request; 0 gives a row of zeros.
        rows: Row of each request's query and output.
        requests: Row of each request in the page table.
        rule: Where to cut.
        sliding_window: Number of last tokens that a query sees; None is all.
        num_programs: Programs of the launch.
        num_kv_heads: Key-value heads; each makes every item once.
        max_items: Splits are not considered beyond it.
    """
    lens = np.asarray(kv_lens, dtype=np.int64)
    first_tokens = np.zeros_like(lens)
    if sliding_window is not None:
        first_tokens = np.maximum(lens - sliding_window, 0)
    table_rows = np.asarray(requests, dtype=np.int64)
    out_rows = np.asarray(rows, dtype=np.int64)

    def cut(unit_len: int, units_per_segment: int) -> DecodeItems:
        first_units = first_tokens // unit_len
        counts = np.maximum(-(-lens // unit_len) - first_units, 1)
        slot_counts = np.where(counts > 1, counts, 0)
        first_slots = np.cumsum(slot_counts) - slot_counts
        owner = np.repeat(np.arange(len(lens)), counts)
        ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = (first_units[owner] + ordinal) * unit_len
        end = np.minimum(begin + unit_len, lens[owner])
        order = np.argsort(begin - end, kind="stable")
        owner, ordinal = owner[order], ordinal[order]
        fields = np.empty((len(owner), ITEM_FIELDS), dtype=np.int32)
        columns: tuple[npt.NDArray[np.int64] | int, ...] = (
            out_rows[owner],
            table_rows[owner],
            begin[order],
            end[order],
            first_tokens[owner],
            first_slots[owner] + ordinal,
            first_slots[owner],
            counts[owner],
            units_per_segment,
            first_units[owner] % units_per_segment,
        )
        for field, column in enumerate(columns):
            fields[:, field] = column
        return DecodeItems(fields=fields, num_slots=int(slot_counts.sum()))

    coarse = cut(rule.segment_len, 1)
    num_splits = int((-(-lens // rule.split_len)).sum()) + len(lens)
    if num_splits > max_items or coarse.num_items * num_kv_heads > BUSY_ROUNDS * num_programs:
        return coarse
    fine = cut(rule.split_len, rule.splits_per_segment)
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
    num_stored = int((num_slots[mine] > 1).sum())
    fold = SLOT_US * int(num_slots.max(initial=1)) if num_stored else 0.0
    return reading + ITEM_US * len(mine) + STORE_US * num_stored + fold
