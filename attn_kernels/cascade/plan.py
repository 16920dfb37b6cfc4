"""Pure planning of cascade attention: which prefixes to read once, and in which pieces.

1. share     chooses for each node of the prefix tree whether it is read once for all members, or
             absorbed: each child and each request reads it together with its own keys
2. cut       makes the work items of the shared part; the rest is for the decode kernel
3. estimate  compares the result with flat decode, in which every request reads all of its keys

Source: the choice between sharing and absorbing is FastTree's (MLSys 2025), here decided for the
whole tree at once, so that the order of children does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attn_kernels.cascade.items import ITEM_FIELDS, SharedItems, SharedRun, cut_runs
from attn_kernels.cascade.model import CascadeModel
from attn_kernels.cascade.prefix_tree import IntArray, PrefixNode
from attn_kernels.decode.plan import SplitRule, lane_excess

MAX_ABSORBED = 8  # consecutive absorbed nodes that a descendant may read


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeEstimate:
    """The model's times of one layer, to be compared with each other and with measurements."""

    flat_us: float
    cascade_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadePlan:
    """The shared part of a batch, and the rest for the decode kernel."""

    fields: npt.NDArray[np.int32]  # [num_items, ITEM_FIELDS], longest first
    members: IntArray  # indices of requests, run after run; items name ranges of it
    first_private: IntArray  # [num_requests], first token left to the decode kernel
    num_shared_slots: IntArray  # [num_requests]
    estimate: CascadeEstimate
    num_spared: int = 0  # tokens that requests need not read, as one of them reads them for all
    num_groups: int = 0  # of requests that share from their first token on
    num_grouped: int = 0  # requests in these groups

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
    is_exact: bool,
) -> CascadePlan:
    """Choose what to share and cut it into work items; flat if estimated to be faster.

    Args:
        nodes: The prefix tree with borders at multiples of the split length, parents first.
        kv_lens: Tokens of each request.
        table_starts: Index of each request's first page in the page table.
        rule: Where to cut.
        model: Costs of the work.
        max_slots: Most shared slots, summed over requests; beyond them the plan is flat.
        is_exact: Whether results must be bit-identical to flat decode.
    """
    runs = share(nodes, model)
    flat_us = _flat_us(nodes, kv_lens, model, rule)
    if not runs:
        return _flat(len(kv_lens), CascadeEstimate(flat_us=flat_us, cascade_us=flat_us))
    items = cut_runs(
        runs,
        table_starts=table_starts,
        rule=rule,
        model=model,
        max_slots=max_slots,
        is_exact=is_exact,
    )
    cascade_us = _cascade_us(nodes, runs, kv_lens, items, model)
    estimate = CascadeEstimate(flat_us=flat_us, cascade_us=cascade_us)
    if cascade_us > model.margin * flat_us or items.num_slots > max_slots:
        return _flat(len(kv_lens), estimate)
    first_private = np.zeros(len(kv_lens), dtype=np.int64)
    num_shared_slots = np.zeros(len(kv_lens), dtype=np.int64)
    for run, num_slots in zip(runs, items.slots_up_to, strict=True):
        first_private[run.members] = run.end  # a descendant's overwrites its ancestors'
        num_shared_slots[run.members] = num_slots
    groups = [len(run.members) for run in runs if run.parent is None]
    return CascadePlan(
        fields=items.fields,
        members=np.concatenate([run.members for run in runs]),
        first_private=first_private,
        num_shared_slots=num_shared_slots,
        estimate=estimate,
        num_spared=_num_repeated(runs),
        num_groups=len(groups),
        num_grouped=sum(groups),
    )


def share(nodes: Sequence[PrefixNode], model: CascadeModel) -> list[SharedRun]:
    """Choose the nodes to share so that the sum of the device's times is least.

    Its children read an absorbed node's keys, or may leave them to their own children. The choice
    is exact for up to MAX_ABSORBED consecutive absorbed nodes.

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


def _flat_us(
    nodes: Sequence[PrefixNode], kv_lens: IntArray, model: CascadeModel, rule: SplitRule
) -> float:
    num_repeated = _num_repeated(nodes)
    # Without a tree nothing is compared, and lanes need not be dealt twice.
    excess = lane_excess(kv_lens, num_lanes=model.num_flat_lanes, rule=rule) if nodes else 1.0
    num_distinct = int(kv_lens.sum()) - num_repeated
    return model.flat_us(num_distinct, num_repeated, len(kv_lens), excess)


def _cascade_us(
    nodes: Sequence[PrefixNode],
    runs: Sequence[SharedRun],
    kv_lens: IntArray,
    items: SharedItems,
    model: CascadeModel,
) -> float:
    num_repeated = _num_repeated(nodes)
    num_shared = sum(run.end - run.begin for run in runs)
    return model.cascade_us(
        num_shared,
        int(kv_lens.sum()) - num_repeated - num_shared,
        num_repeated - _num_repeated(runs),
        len(kv_lens),
        items.num_slots,
        max(items.slots_up_to),
        items.ends_us,
    )


def _num_repeated(parts: Sequence[PrefixNode] | Sequence[SharedRun]) -> int:
    """Count the tokens that members would read again after the first one."""
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
