"""Pure planning of paged decode attention: lengths -> work items, in numpy on the host.

Programs form lanes, one program for each key-value head, and all requests' keys, laid end to end,
are dealt to the lanes in equal runs. A request that a lane's border cuts becomes several items,
which cost partial results and their fold. So there are fewer cuts where that keeps lanes about
equal: few requests become equal pieces, one for each lane; short ones stay whole; and what is
longer than a lane's share is cut into whole segments first, with the others laid between them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attn_kernels.checks import Integers, as_column, check_at_least_one
from attn_kernels.errors import CapacityError, PageTableError, ShapeError

Array = npt.NDArray[np.int64]

accumulate = np.add.accumulate  # as np.cumsum, which takes twice as long for so few

FIELDS = (
    "row",  # of q and out
    "first_entry",  # index of the request's first page in the page table
    "first_token",  # first one inside the sliding window
    "first_slot",  # of the request
    "num_slots",  # of the request; 0: the item is the whole request and stores no partial result
    "num_items",  # of the request: the last one to arrive folds all slots
    "begin",  # tokens [begin, end), both at borders of splits but for a request's last end
    "end",
    "slot",  # first one where the item stores partial results
    "is_tail",  # 1: the request ends with the item
    "others",  # of a lane's first item: where the lane's other items begin in the table
    "lane_items",  # of a lane's first item: items of the lane
)
ITEM_FIELDS = len(FIELDS)
SPLIT_BITS = 32  # of a request's number and a split's in one integer, to be sorted together

# Fitted by hand to sweeps on one H200.
ITEM_TOKENS = 64  # what an item costs before and after its keys, in tokens
PIECE_EXCESS = 1.15  # times the average load that is accepted for one item in each lane
WHOLE_EXCESS = 1.04  # times the average load that is accepted for requests without cuts ...
WHOLE_TOKENS = 6144  # ... and the average load up to which it pays, in tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule:
    """Where keys are cut: at absolute positions, never depending on the batch."""

    split_len: int = 256  # tokens; a multiple of the kernel's key tile
    splits_per_segment: int = 8

    def __post_init__(self) -> None:
        check_at_least_one("split_len", self.split_len)
        check_at_least_one("splits_per_segment", self.splits_per_segment)

    @property
    def segment_len(self) -> int:
        return self.split_len * self.splits_per_segment


class DecodeBatch(NamedTuple):
    """The requests of a batch, checked, as columns with a value for each request."""

    kv_lens: Array  # 0 or more
    rows: Array  # of q and out, 0 or more, each once
    table_starts: Array  # 0 or more, but any where kv_len is 0
    num_rows: int  # least rows of q
    num_entries: int  # least entries of the page table


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeItems:
    """Work items of all lanes, and where each request's partial results lie.

    A request of several items, one that shares a prefix and, unless the kernel keeps it whole, one
    of several segments owns slots in a row, in key order: first those that another kernel fills,
    then those of its items. A slot holds the fold of a segment's first splits (one to all of them)
    or one of its later splits, and says whether a segment ends with it.
    """

    table: npt.NDArray[np.int32]  # [num_lanes + num_items, ITEM_FIELDS]: first items, then all
    first_slots: Array  # [num_requests]; means nothing for a request without slots
    num_slots: int  # of all requests
    num_lanes: int

    @property
    def num_items(self) -> int:
        return len(self.table) - self.num_lanes

    @property
    def fields(self) -> npt.NDArray[np.int32]:
        """All items, [num_items, ITEM_FIELDS], in order of lanes, requests and keys."""
        return self.table[self.num_lanes :]


def max_slots(
    max_requests: int, max_kv_tokens: int, num_lanes: int, rule: SplitRule, *, begins_within: bool
) -> int:
    """Return a bound of the slots that items fill; `begins_within` a segment they may begin."""
    # A segment for each full one and each end; a piece that begins within a segment fills a slot
    # for each of its splits.
    pieces = num_lanes + (max_requests if begins_within else 0)
    num_slots = max_kv_tokens // rule.segment_len + 2 * max_requests
    return num_slots + pieces * (rule.splits_per_segment + 1)


def check_batch(
    kv_lens: Integers,
    *,
    rows: Integers | None,
    table_starts: Integers | None,
    page_size: int,
    max_requests: int,
    max_kv_tokens: int,
) -> DecodeBatch:
    """Check the requests of a plan; arguments are those of `DecodeAttention.plan`."""
    lens = as_column("kv_lens", kv_lens)
    num_requests = len(lens)
    if num_requests > max_requests:
        raise CapacityError(f"{num_requests} requests, at most {max_requests} are planned")
    # This precedes each step of decode: few calls of numpy, and what is wrong is looked for later.
    signs = lens
    if table_starts is None:
        num_pages = (lens + (page_size - 1)) // page_size
        ends = accumulate(num_pages)
        starts = ends - num_pages
    else:
        starts = as_column("table_starts", table_starts, num_requests)
        signs = lens | starts
    if rows is None:
        row_of = np.arange(num_requests)
    else:
        row_of = as_column("rows", rows, num_requests)
        signs = signs | row_of
    if np.count_nonzero(signs < 0):
        _check_signs(lens, row_of, starts)
    num_tokens = int(np.add.reduce(lens))
    if num_tokens > max_kv_tokens:
        raise CapacityError(f"{num_tokens} tokens, at most {max_kv_tokens} are planned")
    num_rows = num_requests if rows is None else _num_rows(row_of)
    if table_starts is None:
        num_entries = int(ends[-1]) if num_requests else 0
    else:
        num_entries = _num_entries(starts, lens, page_size)
    return DecodeBatch(lens, row_of, starts, num_rows, num_entries)


def _check_signs(kv_lens: Array, rows: Array, table_starts: Array) -> None:
    if kv_lens.min() < 0:
        raise ShapeError(f"kv_lens has {kv_lens.min()}, must be 0 or more")
    if rows.min() < 0:
        raise ShapeError(f"rows has {rows.min()}, must be 0 or more")
    starts = table_starts[kv_lens > 0]
    if len(starts) and starts.min() < 0:
        raise PageTableError(f"table_starts has {starts.min()}, must be 0 or more")


def _num_rows(rows: Array) -> int:
    """Return the least rows of q that a plan is for, if no two requests write the same one."""
    if np.count_nonzero(rows[1:] > rows[:-1]) < len(rows) - 1:  # as a rule they ascend
        rows = np.sort(rows)
        is_repeated = rows[1:] == rows[:-1]
        if np.count_nonzero(is_repeated):
            row = rows[1:][is_repeated][0]
            raise ShapeError(f"rows has {row} more than once, must be different for each request")
    return int(rows[-1]) + 1 if len(rows) else 0


def _num_entries(table_starts: Array, kv_lens: Array, page_size: int) -> int:
    """Return the least entries of the page table."""
    if np.count_nonzero(kv_lens) < len(kv_lens):
        table_starts, kv_lens = table_starts[kv_lens > 0], kv_lens[kv_lens > 0]
    if len(kv_lens) == 0:
        return 0
    ends = table_starts * page_size  # in tokens
    ends += kv_lens
    return -(-int(np.maximum.reduce(ends)) // page_size)


def plan_decode(
    kv_lens: Integers,
    *,
    rows: Integers,
    table_starts: Integers,
    rule: SplitRule,
    sliding_window: int | None,
    num_lanes: int,
    keeps_whole: bool,
    num_busy_lanes: int | None = None,
    first_private: Integers | None = None,
    num_shared_slots: Integers | None = None,
) -> DecodeItems:
    """Cut requests into items and distribute them to lanes.

    Args:
        kv_lens: Tokens of each request; 0 gives a row of zeros.
        rows: Row of each request's query and output.
        table_starts: Index of each request's first page in the page table.
        rule: Where to cut.
        sliding_window: Number of last tokens that a query sees; None is all.
        num_lanes: Lanes; those that get no item are the last ones.
        keeps_whole: Whether the kernel folds a request of several segments that is one item and
            shares nothing in registers, so that it needs no slots.
        num_busy_lanes: Lanes to deal to, the first ones; None is all.
        first_private: First token that the items of each request cover, a multiple of the split
            length and below its kv_len; None is 0.
        num_shared_slots: Slots of each request that another kernel fills before this launch, for
            the tokens before first_private; None is 0.
    """
    lens = np.asarray(kv_lens, dtype=np.int64)
    split_len, per_segment = rule.split_len, rule.splits_per_segment
    first_tokens: int | Array = 0
    first_splits: Array | None = None  # all begin at their first token, as most batches do
    if sliding_window is not None:
        first_tokens = np.maximum(lens - sliding_window, 0)
        first_splits = first_tokens // split_len
    if first_private is not None:
        private = np.asarray(first_private, dtype=np.int64) // split_len
        first_splits = private if first_splits is None else np.maximum(first_splits, private)
    end_splits = (lens + (split_len - 1)) // split_len

    num_splits = end_splits if first_splits is None else end_splits - first_splits
    phases = None if first_splits is None else first_splits % per_segment
    owner, cut, lane, ascends = _deal(num_splits, phases, num_busy_lanes or num_lanes, rule)
    is_cut = len(owner) > len(lens)  # large batches often are not, and a step waits for this
    num_items: int | Array = 1
    tails: slice | Array = slice(None)  # each request's last item
    begin = cut if first_splits is None else first_splits[owner] + cut
    end = end_splits
    if is_cut:
        num_items = np.bincount(owner, minlength=len(lens))
        tails = accumulate(num_items) - 1
        end = np.empty_like(begin)
        end[:-1] = begin[1:]
        end[tails] = end_splits

    # An item's slots: splits up to the border of a segment if it begins within one, then segments.
    border = np.minimum((begin + (per_segment - 1)) // per_segment * per_segment, end)
    item_slots = np.maximum(border - begin - (border - end) // per_segment, 1)
    slot_ends = accumulate(item_slots)
    request_ends = slot_ends[tails]
    num_slots = request_ends.copy()
    num_slots[1:] -= request_ends[:-1]
    has_slots = np.not_equal(num_items if keeps_whole else num_slots, 1)
    if num_shared_slots is not None:
        shared = np.asarray(num_shared_slots, dtype=np.int64)
        num_slots += shared
        has_slots = has_slots | (shared > 0)
    num_slots *= has_slots
    last_slots = accumulate(num_slots)
    first_slots = last_slots - num_slots

    table = np.zeros((num_lanes + len(owner), ITEM_FIELDS), dtype=np.int32)
    fields = table[num_lanes:]  # in order of lanes
    items = fields if ascends else np.zeros_like(fields)  # in order of requests
    requests = np.zeros((len(lens), ITEM_FIELDS), dtype=np.int32) if is_cut else items
    columns = (rows, table_starts, first_tokens, first_slots, num_slots, num_items)
    for field, column in enumerate(columns):
        requests[:, field] = column
    if is_cut:
        requests.take(owner, axis=0, out=items, mode="clip")  # "raise" would copy
    items[:, 6] = begin * split_len
    items[:, 7] = end * split_len
    items[tails, 7] = lens
    # Items' slots lie at the end of the request's.
    items[:, 8] = slot_ends - item_slots + (last_slots - request_ends)[owner]
    items[tails, 9] = 1
    if not ascends:
        items.take(lane.argsort(kind="stable"), axis=0, out=fields, mode="clip")
    lane_items = np.bincount(lane)
    first_items = accumulate(lane_items) - lane_items
    used = table[: len(lane_items)]
    used[:] = fields.take(first_items, axis=0)
    used[:, 10] = num_lanes + first_items + 1
    used[:, 11] = lane_items
    total_slots = int(last_slots[-1]) if len(lens) else 0
    return DecodeItems(
        table=table, first_slots=first_slots, num_slots=total_slots, num_lanes=num_lanes
    )


def lane_excess(kv_lens: Array, *, num_lanes: int, rule: SplitRule) -> float:
    """Return the load of the busiest lane over the average, of one request or more."""
    num_splits = -(-kv_lens // rule.split_len)
    owner, cut, lane, _ = _deal(num_splits, None, num_lanes, rule)
    item_ends = np.append(cut[1:], 0)
    tails = np.searchsorted(owner, np.arange(len(kv_lens)), side="right") - 1
    item_ends[tails] = num_splits
    tokens = _tokens(item_ends - cut, rule.split_len)
    loads = np.bincount(lane, weights=tokens, minlength=num_lanes)
    return float(loads.max() / loads.mean())


def _deal(
    num_splits: Array, phases: Array | None, num_lanes: int, rule: SplitRule
) -> tuple[Array, Array, Array, bool]:
    """Distribute requests to lanes, as equally as cuts between splits allow.

    Args:
        num_splits: Splits of each request.
        phases: Splits that each request's first segment lacks at its beginning; None is 0.
        num_lanes: Lanes.
        rule: Where keys are cut.

    Returns:
        For each item, in order of requests and keys: its request, the split of the request where it
        begins, its lane. Lanes that get no item are the last ones: programs that work together are
        then on different multiprocessors. And whether lanes ascend.
    """
    num_requests = len(num_splits)
    if num_requests == 0:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none, True
    if num_requests <= num_lanes:
        piece = _piece_for(num_splits, num_lanes)
        if piece <= PIECE_EXCESS * num_splits.sum() / num_lanes + 1:
            counts = np.maximum(-(-num_splits // piece), 1)
            owner = np.repeat(np.arange(num_requests), counts)
            lane = np.arange(len(owner))
            return owner, (lane - (accumulate(counts) - counts)[owner]) * piece, lane, True

    num_tokens = _tokens(num_splits, rule.split_len)
    share = int(np.add.reduce(num_tokens)) / num_lanes
    longest = int(np.maximum.reduce(num_tokens))
    if share <= WHOLE_TOKENS and longest <= WHOLE_EXCESS * share:
        per_lane = -(-num_requests // num_lanes)
        lane_tokens = np.add.reduceat(num_tokens, np.arange(0, num_requests, per_lane))
        if lane_tokens.max() <= WHOLE_EXCESS * share:
            whole = np.arange(num_requests)
            return whole, np.zeros_like(whole), whole // per_lane, True
    room = np.empty(num_lanes)
    room.fill(share)
    piece = max(int(share - ITEM_TOKENS), 0) // rule.segment_len * rule.splits_per_segment
    if piece > 0 and longest - ITEM_TOKENS > share:
        is_long = num_tokens > share + ITEM_TOKENS
        owners = is_long.nonzero()[0]  # few
        num_pieces = num_splits[owners]
        if phases is not None:
            num_pieces += phases[owners]
        num_pieces //= piece  # 1 or more
        if np.add.reduce(num_pieces) <= num_lanes:
            owner, cut, lane = _deal_with_pieces(
                num_splits, phases, num_tokens, owners, num_pieces, piece, room, rule.split_len
            )
            return owner, cut, lane, False
    border_owner, border_cut = _lane_borders(num_tokens, room, rule.split_len)
    owner, cut, lane = _items(num_splits, border_owner, border_cut, num_borders=num_lanes - 1)
    return owner, cut, _without_gaps(lane), True


def _deal_with_pieces(
    num_splits: Array,
    phases: Array | None,
    num_tokens: Array,
    owners: Array,
    num_pieces: Array,
    piece: int,
    room: npt.NDArray[np.float64],
    split_len: int,
) -> tuple[Array, Array, Array]:
    """Give lanes a piece of a long request each, and deal all else between them.

    Args:
        num_splits: Splits of each request.
        phases: Splits that each request's first segment, and so its first piece, lacks, or None.
        num_tokens: What each request costs; overwritten for the long ones by what is left of them.
        owners: The long requests, in order.
        num_pieces: Pieces of each of them, from its beginning; 1 or more.
        piece: Splits of a piece, whole segments.
        room: Tokens that each lane may take; what pieces take of it is subtracted.
        split_len: Tokens of a split.
    """
    piece_ends = accumulate(num_pieces)
    total = int(piece_ends[-1])
    owner = owners.repeat(num_pieces)
    ordinals = np.arange(total)
    ends = (ordinals + 1 - (piece_ends - num_pieces).repeat(num_pieces)) * piece
    if phases is not None:
        ends -= phases[owner]
    room[:total] -= np.minimum(ends, piece) * split_len + ITEM_TOKENS
    np.maximum(room, 1.0, out=room)  # where pieces fill all lanes, the rest goes to all alike
    begins = np.zeros(len(num_splits), dtype=np.int64)  # of the rest
    begins[owners] = ends[piece_ends - 1]
    num_left = num_splits[owners] - begins[owners]
    num_tokens[owners] = _tokens(num_left, split_len) * (num_left > 0)
    border_owner, border_cut = _lane_borders(num_tokens, room, split_len)
    border_cut += begins[border_owner]
    cut_owner = np.concatenate((border_owner, owner))
    cuts = np.concatenate((border_cut, ends))
    owner, cut, lane = _items(num_splits, cut_owner, cuts, num_borders=len(border_owner))
    lane[cut < begins[owner]] = ordinals
    return owner, cut, lane


def _lane_borders(
    num_tokens: Array, room: npt.NDArray[np.float64], split_len: int
) -> tuple[Array, Array]:
    """Lay requests end to end; return in which one, and at which of its splits, lanes 1, ... begin.

    Args:
        num_tokens: What each request costs.
        room: What each lane gets is in proportion to it.
        split_len: Tokens of a split.
    """
    ends = accumulate(num_tokens)
    room_ends = accumulate(room)
    borders = (room_ends[:-1] * (ends[-1] / room_ends[-1])).astype(np.int64)
    owner = np.minimum(ends.searchsorted(borders, side="right"), len(ends) - 1)
    into = borders - (ends - num_tokens)[owner] + (split_len // 2 - ITEM_TOKENS)
    return owner, np.maximum(into, 0) // split_len


def _items(
    num_splits: Array, cut_owner: Array, cuts: Array, num_borders: int
) -> tuple[Array, Array, Array]:
    """Return all items' requests, first splits and lanes where requests are cut.

    Args:
        num_splits: Splits of each request.
        cut_owner: The request of each cut.
        cuts: Its split; at the request's end or beyond, nothing is cut.
        num_borders: The first cuts are where lanes 1, ... begin.
    """
    cut_keys = (cut_owner << SPLIT_BITS) + cuts
    at_end = (cuts >= num_splits[cut_owner]).nonzero()[0]
    cut_keys[at_end] = (cut_owner[at_end] + 1) << SPLIT_BITS
    keys = np.concatenate((np.arange(len(num_splits) + 1) << SPLIT_BITS, cut_keys))
    keys.sort()
    keys = keys[:-1][keys[1:] > keys[:-1]]  # each once, without the end of the last request
    border_items = keys.searchsorted(cut_keys[:num_borders])  # the last ones may be beyond all
    lane = accumulate(np.bincount(border_items, minlength=len(keys)))[: len(keys)]
    return keys >> SPLIT_BITS, keys & ((1 << SPLIT_BITS) - 1), lane


def _tokens(num_splits: Array, split_len: int) -> Array:
    """Return the costs of requests, in tokens."""
    return num_splits * split_len + ITEM_TOKENS


def _without_gaps(lane: Array) -> Array:
    """Number lanes, which ascend, so that lanes without items come last."""
    is_new = np.zeros(len(lane), dtype=np.int64)
    np.greater(lane[1:], lane[:-1], out=is_new[1:], casting="unsafe")
    return accumulate(is_new)


def _piece_for(num_splits: Array, num_lanes: int) -> int:
    """Return the least number of splits so that pieces of it do not outnumber the lanes."""
    piece = max(-(-int(num_splits.sum()) // num_lanes), 1)
    while np.maximum(-(-num_splits // piece), 1).sum() > num_lanes:
        piece += 1 + piece // 8
    return piece
