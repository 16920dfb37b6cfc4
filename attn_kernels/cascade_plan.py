"""Pure planning of cascade attention: which prefixes to read once for all, and in which pieces.

1. share     chooses for each node of the prefix tree: it is read once for all of its members, or
             absorbed, that is read by each child and each request with what they read anyway
2. cut       makes the work items of the shared part; the rest is for the decode kernel
3. estimate  compares the whole with flat decode, where every request reads all of its keys

Source: the choice between sharing and absorbing is FastTree's (MLSys 2025), here decided for the
whole tree at once, so that the order of children does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attn_kernels.decode_plan import SplitRule
from attn_kernels.prefix_tree import IntArray, PrefixNode

FIELDS = (
    "first_member",  # members [first_member, first_member + num_members) of the plan
    "num_members",
    "begin",  # tokens [begin, end): a split, or the beginning of a segment
    "end",
    "first_entry",  # index of a member's first page in the page table
    "ordinal",  # of the slot among the slots of a request
    "ends_segment",  # 1: the item's last split is the last one of a segment
)
ITEM_FIELDS = len(FIELDS)

MAX_ABSORBED = 8  # nodes in a row that a descendant may read in their stead


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeModel:
    """What the work costs on a device, to choose a side; times of one layer in us.

    The defaults are fitted to one H200 with head_dim 128.
    """

    num_kv_heads: int
    members_per_tile: int  # requests whose query heads fill a tile
    tile_token_us: float  # arithmetic of a tile for a token of one key-value head
    token_bytes: int  # K and V of a token, all heads
    slot_bytes: int  # partial results of a request
    num_programs: int  # of the shared part's launch

    hbm_bytes_per_us: float = 4.2e6
    repeated_bytes_per_us: float = 6.0e6  # of keys that another request reads at about this time
    item_us: float = 2.0  # filling a pipeline, storing the results
    slot_us: float = 0.15  # folding one more slot
    flat_us: float = 8.0  # a launch whose requests have one token each
    extra_us: float = 3.0  # what a second launch adds
    margin: float = 0.95  # cascade must be estimated faster than flat by this factor

    def read_us(self, num_tokens: int) -> float:
        """Return the time to read tokens from memory."""
        return num_tokens * self.token_bytes / self.hbm_bytes_per_us

    def reread_us(self, num_tokens: int) -> float:
        """Return the time that the decode kernel takes for tokens that others read as well."""
        return num_tokens * self.token_bytes / self.repeated_bytes_per_us

    def run_us(self, num_members: int, num_tokens: int) -> float:
        """Return the device time that a shared run takes, the fold of its slots included."""
        tiles = -(-num_members // self.members_per_tile)
        units = tiles * self.num_kv_heads
        compute = units * num_tokens * self.tile_token_us / self.num_programs
        fold = 2 * num_members * self.slot_bytes / self.hbm_bytes_per_us + self.slot_us
        return (
            max(compute, self.read_us(num_tokens)) + units * self.item_us / self.num_programs + fold
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRun:
    """Tokens that are read once for all members."""

    begin: int  # tokens [begin, end); begins where the run of the same members before it ends
    end: int
    members: IntArray  # indices of requests
    parent: int | None  # index of the run that ends at `begin`


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeEstimate:
    """The model's times of one layer, to be compared with each other and with measurements."""

    flat_us: float
    cascade_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadePlan:
    """The shared part of a batch, and what is left to the decode kernel."""

    fields: npt.NDArray[np.int32]  # [num_items, ITEM_FIELDS], longest first
    members: IntArray  # indices of requests, run after run; items name ranges of it
    first_private: IntArray  # [num_requests], first token left to the decode kernel
    num_shared_slots: IntArray  # [num_requests]
    estimate: CascadeEstimate

    @property
    def num_items(self) -> int:
        return len(self.fields)


def plan_cascade(
    nodes: Sequence[PrefixNode],
    kv_lens: IntArray,
    *,
    table_starts: IntArray,
    rule: SplitRule,
    model: CascadeModel,
    max_slots: int,
) -> CascadePlan:
    """Choose what to share and cut it into work items; flat if that is estimated faster.

    Args:
        nodes: The prefix tree with borders at multiples of the split length, parents first.
        kv_lens: Tokens of each request.
        table_starts: Index of each request's first page in the page table.
        rule: Where to cut.
        model: What work costs.
        max_slots: Most shared slots, summed over requests; beyond them the plan is flat.
    """
    flat_us = _flat_us(nodes, kv_lens, model)
    runs = share(nodes, model)
    if not runs:
        return _flat(len(kv_lens), CascadeEstimate(flat_us=flat_us, cascade_us=flat_us))
    cut = _best_cut(runs, table_starts, rule, model, max_slots)
    cascade_us = _cascade_us(nodes, runs, kv_lens, cut, model)
    estimate = CascadeEstimate(flat_us=flat_us, cascade_us=cascade_us)
    if cascade_us > model.margin * flat_us or cut.num_slots > max_slots:
        return _flat(len(kv_lens), estimate)
    first_private = np.zeros(len(kv_lens), dtype=np.int64)
    num_shared_slots = np.zeros(len(kv_lens), dtype=np.int64)
    for run, num_slots in zip(runs, cut.slots_up_to, strict=True):
        first_private[run.members] = run.end  # a descendant's overwrites its ancestors'
        num_shared_slots[run.members] = num_slots
    return CascadePlan(
        fields=cut.fields,
        members=np.concatenate([run.members for run in runs]),
        first_private=first_private,
        num_shared_slots=num_shared_slots,
        estimate=estimate,
    )


def share(nodes: Sequence[PrefixNode], model: CascadeModel) -> list[SharedRun]:
    """Choose the nodes to share so that the sum of the device's times is least.

    An absorbed node's keys are read by its children, who may in turn leave them to theirs. The
    choice is exact for up to MAX_ABSORBED nodes absorbed in a row.

    Returns:
        Runs, parents before children.
    """
    children: list[list[int]] = [[] for _ in nodes]
    num_alone = [len(node.members) for node in nodes]  # members that no child has
    for index, node in enumerate(nodes):
        if node.parent is not None:
            children[node.parent].append(index)
            num_alone[node.parent] -= len(node.members)

    # costs[node][n]: of the subtree, if the node must also see to n nodes above it.
    costs: list[list[float]] = [[] for _ in nodes]
    absorbs: list[list[bool]] = [[] for _ in nodes]
    for index in reversed(range(len(nodes))):
        node = nodes[index]
        below = sum(costs[child][0] for child in children[index])
        for pending, begin in enumerate(_begins(nodes, index)):
            shared = model.run_us(len(node.members), node.end - begin) + below
            absorbed = float("inf")
            if pending < MAX_ABSORBED:
                absorbed = num_alone[index] * model.reread_us(node.end - begin) + sum(
                    costs[child][pending + 1] for child in children[index]
                )
            costs[index].append(min(shared, absorbed))
            absorbs[index].append(absorbed <= shared)

    runs: list[SharedRun] = []
    run_above: list[int | None] = []  # the last run at or above each node
    pending_at: list[int] = []  # absorbed nodes in a row, up to each node
    for index, node in enumerate(nodes):
        above = None if node.parent is None else run_above[node.parent]
        pending = 0 if node.parent is None else pending_at[node.parent]
        if absorbs[index][pending]:
            run_above.append(above)
            pending_at.append(pending + 1)
            continue
        begin = 0 if above is None else runs[above].end
        runs.append(SharedRun(begin=begin, end=node.end, members=node.members, parent=above))
        run_above.append(len(runs) - 1)
        pending_at.append(0)
    return runs


def _begins(nodes: Sequence[PrefixNode], index: int) -> list[int]:
    """Return where a node's run begins with 0, 1, ... nodes above it absorbed."""
    begins = [nodes[index].begin]
    parent = nodes[index].parent
    while parent is not None and len(begins) <= MAX_ABSORBED:
        begins.append(nodes[parent].begin)
        parent = nodes[parent].parent
    return begins


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    fields: npt.NDArray[np.int32]
    num_slots: int  # of all requests
    slots_up_to: list[int]  # for each run: slots of a member, those of its ancestors included
    work_us: float  # all programs' time, divided by their number
    ends_us: float  # the busiest program's time


def _best_cut(
    runs: Sequence[SharedRun],
    table_starts: IntArray,
    rule: SplitRule,
    model: CascadeModel,
    max_slots: int,
) -> _Cut:
    """Cut runs into segments, splits, or whole rounds of segments and splits for the rest."""
    lengths = np.array([run.end - run.begin for run in runs], dtype=np.int64) // rule.split_len
    owner = np.repeat(np.arange(len(runs)), lengths)
    first_splits = np.array([run.begin for run in runs], dtype=np.int64) // rule.split_len
    split = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    split += first_splits[owner]
    # A piece begins a segment, or is a split of a segment that begins in another run: only then
    # is a piece's state part of the fold in key order.
    segment_begin = split // rule.splits_per_segment * rule.splits_per_segment
    is_begin = (split == segment_begin) | (segment_begin < first_splits[owner])

    tiles = np.array([-(-len(run.members) // model.members_per_tile) for run in runs])
    begins = np.flatnonzero(is_begin)
    units = np.cumsum(tiles[owner[begins]]) * model.num_kv_heads
    whole_rounds = int(units[-1]) // model.num_programs * model.num_programs if len(units) else 0
    num_whole = int(np.searchsorted(units, whole_rounds, side="right"))
    is_rest = np.zeros(len(owner), dtype=bool)
    if num_whole < len(begins):
        is_rest[begins[num_whole] :] = True

    coarse = _cut(runs, owner, split, is_begin, table_starts, rule, model)
    finer = (
        _cut(runs, owner, split, starts, table_starts, rule, model)
        for starts in (is_begin | is_rest, np.ones_like(is_begin))
    )
    cuts = [coarse, *(cut for cut in finer if cut.num_slots <= max_slots)]
    return min(cuts, key=lambda cut: cut.ends_us + _fold_us(cut, model))


def _cut(
    runs: Sequence[SharedRun],
    owner: IntArray,  # [num_splits] run of each split
    split: IntArray,  # [num_splits] its place in the request
    is_begin: npt.NDArray[np.bool_],  # [num_splits] whether a piece begins with it
    table_starts: IntArray,
    rule: SplitRule,
    model: CascadeModel,
) -> _Cut:
    starts = np.flatnonzero(is_begin)
    run_of = owner[starts]
    begin = split[starts] * rule.split_len
    lengths = np.diff(starts, append=len(owner)) * rule.split_len
    end = begin + lengths
    num_pieces = np.bincount(run_of, minlength=len(runs))
    slots_up_to: list[int] = []
    for run, count in zip(runs, num_pieces.tolist(), strict=True):
        above = 0 if run.parent is None else slots_up_to[run.parent]
        slots_up_to.append(above + count)
    first_piece = np.cumsum(num_pieces) - num_pieces
    ordinal = np.arange(len(starts)) - first_piece[run_of]
    ordinal += np.array(slots_up_to, dtype=np.int64)[run_of] - num_pieces[run_of]

    # Tiles of one piece are neighbours: they read the same keys at about the same time.
    sizes = np.array([len(run.members) for run in runs], dtype=np.int64)
    first_members = np.cumsum(sizes) - sizes
    tiles = -(-sizes // model.members_per_tile)
    order = np.argsort(-lengths, kind="stable")
    piece = np.repeat(order, tiles[run_of[order]])
    item_run = run_of[piece]
    first_item = np.concatenate(([0], np.flatnonzero(np.diff(piece)) + 1))
    num_items = np.diff(first_item, append=len(piece))
    tile = np.arange(len(piece)) - np.repeat(first_item, num_items) if len(piece) else piece
    fields = np.empty((len(piece), ITEM_FIELDS), dtype=np.int32)
    entries = table_starts[[run.members[0] for run in runs]] if runs else table_starts[:0]
    for column, values in enumerate(
        (
            first_members[item_run] + tile * model.members_per_tile,
            np.minimum(sizes[item_run] - tile * model.members_per_tile, model.members_per_tile),
            begin[piece],
            end[piece],
            entries[item_run],
            ordinal[piece],
            end[piece] % rule.segment_len == 0,
        )
    ):
        fields[:, column] = values

    head_bytes = model.token_bytes // model.num_kv_heads
    token_us = max(
        model.tile_token_us, head_bytes * model.num_programs / model.repeated_bytes_per_us
    )
    unit_us = lengths[piece] * token_us + model.item_us
    mine = np.arange(0, len(piece) * model.num_kv_heads, model.num_programs) // model.num_kv_heads
    return _Cut(
        fields=fields,
        num_slots=int(fields[:, 1].sum()),
        slots_up_to=slots_up_to,
        work_us=float(unit_us.sum()) * model.num_kv_heads / model.num_programs,
        ends_us=float(unit_us[mine].sum()),  # program 0 has the longest of each round
    )


def _fold_us(cut: _Cut, model: CascadeModel) -> float:
    """Estimate what storing and folding a cut's slots adds."""
    moved = 2 * cut.num_slots * model.slot_bytes / model.hbm_bytes_per_us
    return moved + model.slot_us * max(cut.slots_up_to, default=0)


def _flat_us(nodes: Sequence[PrefixNode], kv_lens: IntArray, model: CascadeModel) -> float:
    num_repeated = _num_repeated(nodes)
    num_distinct = int(kv_lens.sum()) - num_repeated
    return model.flat_us + model.read_us(num_distinct) + model.reread_us(num_repeated)


def _cascade_us(
    nodes: Sequence[PrefixNode],
    runs: Sequence[SharedRun],
    kv_lens: IntArray,
    cut: _Cut,
    model: CascadeModel,
) -> float:
    num_repeated = _num_repeated(nodes)
    num_shared = sum(run.end - run.begin for run in runs)
    num_private = int(kv_lens.sum()) - num_repeated - num_shared
    private = model.read_us(num_private) + model.reread_us(num_repeated - _num_repeated(runs))
    # The decode kernel starts where the shared part leaves multiprocessors free.
    both = max(cut.ends_us, max(cut.work_us, model.read_us(num_shared)) + private)
    return model.flat_us + model.extra_us + both + _fold_us(cut, model)


def _num_repeated(parts: Sequence[PrefixNode] | Sequence[SharedRun]) -> int:
    """Count the tokens that flat decode reads again, after a first request has read them."""
    return sum((len(part.members) - 1) * (part.end - part.begin) for part in parts)


def _flat(num_requests: int, estimate: CascadeEstimate) -> CascadePlan:
    nothing = np.zeros(num_requests, dtype=np.int64)
    return CascadePlan(
        fields=np.empty((0, ITEM_FIELDS), dtype=np.int32),
        members=nothing[:0],
        first_private=nothing,
        num_shared_slots=nothing,
        estimate=estimate,
    )
