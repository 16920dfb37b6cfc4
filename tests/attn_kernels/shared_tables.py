"""Page tables of requests whose prefixes form a forest, as a prefix cache hands them out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from attn_kernels.cascade.prefix_tree import PrefixNode


@dataclass(frozen=True, kw_only=True)
class SharedTables:
    tables: list[list[int]]
    kv_lens: list[int]
    page_size: int
    starts: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]

    @staticmethod
    def of(
        tables: Sequence[Sequence[int]], kv_lens: Sequence[int], page_size: int = 4
    ) -> "SharedTables":
        counts = [len(table) for table in tables]
        return SharedTables(
            tables=[list(table) for table in tables],
            kv_lens=list(kv_lens),
            page_size=page_size,
            starts=np.cumsum([0, *counts])[: len(counts)],
            indices=np.array([page for table in tables for page in table], dtype=np.int32),
        )

    def reordered(self, order: Sequence[int]) -> "SharedTables":
        return SharedTables.of(
            [self.tables[i] for i in order], [self.kv_lens[i] for i in order], self.page_size
        )


def grow(
    num_requests: int,
    parents: Sequence[int],
    node_pages: Sequence[int],
    leaves: Sequence[int],
    suffix_tokens: Sequence[int],
    page_size: int = 4,
) -> SharedTables:
    """Make requests below nodes of a forest.

    Args:
        num_requests: How many.
        parents: For each node, an earlier node, or itself for a root.
        node_pages: For each node, its pages.
        leaves: For each request, the node it is below.
        suffix_tokens: For each request, its own tokens; 0 ends it with the node's last page.
        page_size: Tokens of a page.
    """
    next_page = 1
    paths: list[list[int]] = []
    for node, (parent, count) in enumerate(zip(parents, node_pages, strict=True)):
        above = [] if parent >= node else paths[parent]
        paths.append([*above, *range(next_page, next_page + count)])
        next_page += count
    tables, kv_lens = [], []
    for request in range(num_requests):
        path, suffix = paths[leaves[request]], suffix_tokens[request]
        count = -(-suffix // page_size)
        tables.append([*path, *range(next_page, next_page + count)])
        kv_lens.append(len(path) * page_size + suffix)
        next_page += count
    return SharedTables.of(tables, kv_lens, page_size)


@st.composite
def forests(
    draw: st.DrawFn, max_nodes: int = 6, max_requests: int = 9, page_size: int = 4
) -> SharedTables:
    num_nodes = draw(st.integers(1, max_nodes))
    num_requests = draw(st.integers(1, max_requests))
    parents = [draw(st.integers(0, node)) for node in range(num_nodes)]
    return grow(
        num_requests,
        parents,
        [draw(st.integers(1, 5)) for _ in range(num_nodes)],
        [draw(st.integers(0, num_nodes - 1)) for _ in range(num_requests)],
        [draw(st.sampled_from([0, 1, 3, 4, 5, 17])) for _ in range(num_requests)],
        page_size,
    )


def check_tree(nodes: Sequence[PrefixNode]) -> None:
    """Assert the invariants of a tree: nodes are whole, nested, and parents come first."""
    for index, node in enumerate(nodes):
        assert node.begin < node.end
        assert len(node.members) > 1
        if node.parent is None:
            assert node.begin == 0
            continue
        parent = nodes[node.parent]
        assert node.parent < index
        assert parent.end == node.begin
        assert len(node.members) < len(parent.members)
        assert np.isin(node.members, parent.members).all()
