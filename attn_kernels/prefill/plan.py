"""Cuts prefill chunks into tiles of rows and distributes these to programs; pure, on the host."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attn_kernels.checks import Integers, as_column
from attn_kernels.errors import CapacityError, ShapeError

ITEM_FIELDS = 5  # request, first row, qo_len, kv_len, tile
UNIT_FIELDS = 6  # those of its item, key-value head

# What the heads that run at one time may read: about what the L2 cache of a Hopper GPU (50 to
# 60 MB in two halves) keeps, so that a key comes from memory once for all tiles that attend to it.
L2_BYTES = 32 << 20
# What a unit costs beside its key tiles, in key tiles. An H200 takes 1.5 us for a tile of 128 rows
# and 128 keys, and about 2.5 us more for each unit.
UNIT_COST = 1.5
# A unit above this part of a program's share starts early, whatever its head.
LONG_PART = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillBatch:
    """The chunks of a batch, checked, as columns of int64 with a value for each chunk."""

    requests: NDArray[np.int64]  # row in the page table
    first_rows: NDArray[np.int64]  # row of the first new token in q
    qo_lens: NDArray[np.int64]  # new tokens, 0 <= qo_len <= kv_len
    kv_lens: NDArray[np.int64]  # all tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCapacity:
    """The largest batch that fixed buffers hold."""

    max_tokens: int  # new ones
    max_requests: int

    def check(self, batch: PrefillBatch) -> None:
        """Raise CapacityError if a batch is larger."""
        num_tokens, num_requests = int(batch.qo_lens.sum()), len(batch.qo_lens)
        if num_tokens > self.max_tokens:
            raise CapacityError(f"{num_tokens} new tokens, at most {self.max_tokens} are planned")
        if num_requests > self.max_requests:
            raise CapacityError(f"{num_requests} requests, at most {self.max_requests} are planned")

    def max_items(self, *, group: int, block_m: int) -> int:
        """Return the most query tiles of a batch, of which each request's last may be partial."""
        return self.max_tokens * group // block_m + self.max_requests


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillNeeds:
    """Minimum sizes of a run's tensors for a batch."""

    num_rows: int  # of q
    num_borders: int  # of kv_page_indptr
    num_entries: int  # of kv_page_indices, if requests have entries of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTable:
    """The work of each program of a persistent kernel, in order."""

    unit_indptr: NDArray[np.int32]  # [num_programs + 1], first unit of each program
    units: NDArray[np.int32]  # [num_units, UNIT_FIELDS]

    def with_programs(self, num_programs: int) -> "UnitTable":
        """Return the same work, which must not be empty, followed by idle programs."""
        num_units = len(self.units)
        num_idle = num_programs - (len(self.unit_indptr) - 1)
        ends = np.arange(num_units + 1, num_units + num_idle + 1)
        idle = np.tile([*idle_item(self.units), 0], (num_idle, 1))
        return UnitTable(
            unit_indptr=np.concatenate([self.unit_indptr, ends]).astype(np.int32),
            units=np.concatenate([self.units, idle]).astype(np.int32),
        )


def check_batch(
    qo_lens: Integers,
    kv_lens: Integers,
    *,
    first_rows: Integers | None,
    requests: Integers | None,
) -> PrefillBatch:
    """Check the chunks of a plan; arguments are those of `PrefillAttention.plan`."""
    new = as_column("qo_lens", qo_lens)
    num_chunks = len(new)
    lens = as_column("kv_lens", kv_lens, num_chunks)
    wrong = np.flatnonzero((new < 0) | (new > lens))
    if len(wrong):
        chunk = wrong[0]
        raise ShapeError(f"{new[chunk]} new tokens of {lens[chunk]}, must be 0 to all of them")
    if first_rows is None:
        rows = np.cumsum(new) - new
    else:
        rows = _indices("first_rows", first_rows, new)
        _check_apart(rows[new > 0], new[new > 0])
    return PrefillBatch(
        requests=_indices("requests", np.arange(num_chunks) if requests is None else requests, new),
        first_rows=rows,
        qo_lens=new,
        kv_lens=lens,
    )


def _indices(name: str, values: Integers, qo_lens: NDArray[np.int64]) -> NDArray[np.int64]:
    indices = as_column(name, values, len(qo_lens))
    if np.minimum.reduce(indices, initial=0) < 0:
        raise ShapeError(f"{name} has {indices.min()}, must be 0 or more")
    return indices


def _check_apart(first_rows: NDArray[np.int64], qo_lens: NDArray[np.int64]) -> None:
    if len(first_rows) < 2:
        return
    order = np.argsort(first_rows)
    begins, ends = first_rows[order], (first_rows + qo_lens)[order]
    overlaps = np.flatnonzero(begins[1:] < ends[:-1])
    if len(overlaps):
        raise ShapeError(
            f"row {begins[1:][overlaps[0]]} is of two requests, must be of one; see first_rows"
        )


def needs_of(batch: PrefillBatch, page_size: int) -> PrefillNeeds:
    """Return a checked batch's requirements; chunks without new tokens read nothing."""
    is_read = batch.qo_lens > 0
    if not is_read.any():
        return PrefillNeeds(num_rows=0, num_borders=0, num_entries=0)
    num_pages: dict[int, int] = {}  # request |-> pages that its chunks read
    pages = -(-batch.kv_lens[is_read] // page_size)
    for request, count in zip(batch.requests[is_read].tolist(), pages.tolist(), strict=True):
        num_pages[request] = max(num_pages.get(request, 0), count)
    return PrefillNeeds(
        num_rows=int((batch.first_rows + batch.qo_lens)[is_read].max()),
        num_borders=max(num_pages) + 2,
        num_entries=sum(num_pages.values()),
    )


def idle_item(items: NDArray[np.int32]) -> tuple[int, int, int, int, int]:
    """Return the item of a program that has nothing to do.

    It reads the first key of a request that another item names, and no row attends to that key.
    """
    return int(items[0, 0]), 0, 0, 1, 0


def plan_items(batch: PrefillBatch, *, group: int, block_m: int) -> NDArray[np.int32]:
    """Return the query tiles of a batch, [num_items, ITEM_FIELDS], those with most keys first.

    Args:
        batch: The chunks.
        group: Query heads of a key-value head; a tile's rows are tokens times these.
        block_m: Rows of a tile.
    """
    num_tiles = -(-batch.qo_lens * group // block_m)
    owner = np.repeat(np.arange(len(num_tiles)), num_tiles)
    tile = np.arange(len(owner)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    last_token = np.minimum((tile + 1) * block_m // group, batch.qo_lens[owner])
    keys = batch.kv_lens[owner] - batch.qo_lens[owner] + last_token
    order = np.argsort(-keys, kind="stable")  # longest first: short ones fill the end
    columns = (
        batch.requests[owner],
        batch.first_rows[owner],
        batch.qo_lens[owner],
        batch.kv_lens[owner],
        tile,
    )
    return np.stack(columns, axis=1)[order].astype(np.int32)


def plan_units(
    batch: PrefillBatch,
    *,
    group: int,
    num_kv_heads: int,
    block_m: int,
    block_n: int,
    sliding_window: int | None,
    token_bytes: int,
    max_programs: int,
) -> UnitTable:
    """Deal the query tiles of all key-value heads to programs, so that all end at one time.

    A unit is a query tile of one key-value head. Units go one by one to the program that has least
    so far: first those that are long beside a program's share, then section by section of heads
    whose keys and values fit the L2 cache together, the longest of a section first.

    Args:
        batch: The chunks.
        group: Query heads of a key-value head.
        num_kv_heads: Key-value heads.
        block_m: Rows of a tile.
        block_n: Keys of a tile.
        sliding_window: Number of last tokens that a query sees; None is all.
        token_bytes: Bytes of a token's key and value of one head.
        max_programs: Programs that run at one time.
    """
    items = plan_items(batch, group=group, block_m=block_m)
    num_items = len(items)
    heads = np.tile(np.arange(num_kv_heads), num_items)
    item_of_unit = np.repeat(np.arange(num_items), num_kv_heads)
    if len(heads) <= max_programs:
        # One for each. A short prompt waits for its plan, and dealing takes most of that time.
        return UnitTable(
            unit_indptr=np.arange(len(heads) + 1, dtype=np.int32),
            units=_units(items, item_of_unit, heads),
        )
    _, _, qo_lens, kv_lens, tiles = items.T.astype(np.int64)
    first_positions = kv_lens - qo_lens + tiles * block_m // group
    last_tokens = np.minimum((tiles * block_m + block_m - 1) // group, qo_lens - 1)
    ends = (kv_lens - qo_lens + last_tokens) // block_n + 1
    begins = np.zeros_like(ends)
    if sliding_window is not None:
        begins = np.maximum(first_positions - sliding_window + 1, 0) // block_n
    costs = ends - begins + UNIT_COST

    head_bytes = int(batch.kv_lens.sum()) * token_bytes
    heads_of_section = min(max(L2_BYTES // max(head_bytes, 1), 1), num_kv_heads)
    share = costs.sum() * num_kv_heads / max_programs
    is_long = costs[item_of_unit] > LONG_PART * share
    section = np.where(is_long, -1, heads // heads_of_section)
    order = np.argsort(section, kind="stable")  # items are sorted already
    heads, item_of_unit = heads[order], item_of_unit[order]

    loads = [(0.0, program) for program in range(max_programs)]
    owners = []
    for cost in costs[item_of_unit].tolist():
        load, program = loads[0]
        heapq.heapreplace(loads, (load + cost, program))
        owners.append(program)
    owner = np.asarray(owners, dtype=np.int64)
    by_program = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=max_programs)
    return UnitTable(
        unit_indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        units=_units(items, item_of_unit[by_program], heads[by_program]),
    )


def _units(
    items: NDArray[np.int32], item_of_unit: NDArray[np.int64], heads: NDArray[np.int64]
) -> NDArray[np.int32]:
    units = np.empty((len(heads), UNIT_FIELDS), dtype=np.int32)
    units[:, :ITEM_FIELDS] = items[item_of_unit]
    units[:, ITEM_FIELDS] = heads
    return units
