"""Finds the prefixes that requests of a batch share, from their page tables, in numpy on the host.

A page belongs to one prefix: requests with the same page at the same place have the same tokens
before it, because a prefix cache shares a page only along a path of its radix tree. So a page
represents its whole prefix, and comparing one page of each unit of tokens suffices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixNode:
    """A run of tokens that exactly its members have in the same pages."""

    begin: int  # tokens [begin, end)
    end: int
    members: IntArray  # two or more indices of requests
    parent: int | None  # index of the node that ends at `begin`, with these members and others


def within_window(kv_lens: IntArray, sliding_window: int | None) -> tuple[IntArray, IntArray]:
    """Return the tokens that each request reads, and those in which it may share a prefix.

    A request longer than the window sees only the end of its tokens, and shares nothing.
    """
    if sliding_window is None:
        return kv_lens, kv_lens
    return np.minimum(kv_lens, sliding_window), np.where(kv_lens <= sliding_window, kv_lens, 0)


def prefix_tree(
    table_starts: npt.NDArray[np.integer],
    page_indices: npt.NDArray[np.integer],
    kv_lens: npt.NDArray[np.integer],
    *,
    page_size: int,
    unit_len: int,
) -> list[PrefixNode]:
    """Return the tree of a batch (a forest, rather), parents before children.

    Borders are multiples of `unit_len`, and each request keeps its last token, at least, to itself.

    Args:
        table_starts: Index of each request's first page in `page_indices`, [num_requests].
        page_indices: Page ids of all requests.
        kv_lens: Tokens of each request, [num_requests].
        page_size: Tokens of a page.
        unit_len: A multiple of page_size.
    """
    shareable = np.maximum(kv_lens.astype(np.int64) - 1, 0) // unit_len  # units
    candidates = np.flatnonzero(shareable)
    if not len(candidates):
        return []
    pages_per_unit = unit_len // page_size
    first_ends = table_starts[candidates] + (pages_per_unit - 1)  # entry of the last page of unit 0
    _, group, sizes = np.unique(page_indices[first_ends], return_inverse=True, return_counts=True)
    is_shared = sizes[group] > 1
    candidates, first_ends = candidates[is_shared], first_ends[is_shared]
    if not len(candidates):
        return []

    # One row per candidate: the last page of each unit; what is not shareable equals nothing.
    limits = shareable[candidates]
    units = np.arange(limits.max())
    entries = first_ends[:, None] + units * pages_per_unit
    ends = np.where(
        units < limits[:, None],
        page_indices[np.minimum(entries, len(page_indices) - 1)],
        -1 - np.arange(len(candidates))[:, None],
    )
    # Any order that compares rows from the left puts equal prefixes side by side: compare bytes.
    ends = np.ascontiguousarray(ends, dtype=np.int32)
    order = np.argsort(ends.view(np.dtype((np.void, ends.shape[1] * 4))).ravel(), kind="stable")
    ends = ends[order]
    differs = ends[1:] != ends[:-1]
    common = np.where(differs.any(1), differs.argmax(1), ends.shape[1])  # of neighbours, in units
    return _nodes(common.tolist(), candidates[order], unit_len)


def _nodes(common: Sequence[int], requests: IntArray, unit_len: int) -> list[PrefixNode]:
    """Turn the common units of neighbours into nodes: intervals of equal depth, from a stack.

    Source: the interval tree of longest common prefixes (Abouelhoda, Kurtz, Ohlebusch, 2004).
    """
    closed: list[tuple[int, int, int, int]] = []  # depth, parent's depth, first, last + 1
    open_nodes = [(0, 0)]  # depth, first; depths rise
    for last, depth in enumerate([*common, 0], start=1):
        first = last - 1
        while open_nodes[-1][0] > depth:
            closing, first = open_nodes.pop()
            closed.append((closing, max(depth, open_nodes[-1][0]), first, last))
        if open_nodes[-1][0] < depth:
            open_nodes.append((depth, first))
    closed.reverse()  # a parent closes after its children

    nodes: list[PrefixNode] = []
    path: list[int] = []  # from a root to the latest node
    for depth, parent_depth, first, last in closed:
        while path and nodes[path[-1]].end > parent_depth * unit_len:
            path.pop()
        nodes.append(
            PrefixNode(
                begin=parent_depth * unit_len,
                end=depth * unit_len,
                members=requests[first:last],
                parent=path[-1] if parent_depth else None,
            )
        )
        path.append(len(nodes) - 1)
    return nodes
