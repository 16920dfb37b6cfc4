"""Trees found in page tables against the definition: who has the same tokens up to each place."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_kernels.cascade.prefix_tree import PrefixNode, prefix_tree
from tests.attn_kernels.shared_tables import SharedTables, check_tree, forests


def tree_of(tables: SharedTables, *, unit_len: int = 4) -> list[PrefixNode]:
    return prefix_tree(
        tables.starts,
        tables.indices,
        np.array(tables.kv_lens),
        page_size=tables.page_size,
        unit_len=unit_len,
    )


def described(nodes: Sequence[PrefixNode]) -> set[tuple[int, int, tuple[int, ...]]]:
    return {(node.begin, node.end, tuple(sorted(node.members.tolist()))) for node in nodes}


def defined(tables: SharedTables, unit_len: int) -> set[tuple[int, int, tuple[int, ...]]]:
    """Nodes by definition: units with the same group of requests are one node."""
    groups: dict[tuple[int, ...], list[int]] = {}
    pages_per_unit = unit_len // tables.page_size
    for unit in range(max(tables.kv_lens, default=0) // unit_len + 1):
        prefixes: dict[tuple[int, ...], list[int]] = {}
        for request, (table, kv_len) in enumerate(zip(tables.tables, tables.kv_lens, strict=True)):
            if (unit + 1) * unit_len < kv_len:  # at least one token stays private
                prefix = tuple(table[: (unit + 1) * pages_per_unit])
                prefixes.setdefault(prefix, []).append(request)
        for members in prefixes.values():
            if len(members) > 1:
                groups.setdefault(tuple(members), []).append(unit)
    return {
        (units[0] * unit_len, (units[-1] + 1) * unit_len, members)
        for members, units in groups.items()
    }


@given(forests())
@settings(max_examples=300, derandomize=True)
def test_a_tree_holds_every_shared_unit_once_and_nothing_else(tables: SharedTables):
    for unit_len in (tables.page_size, 2 * tables.page_size):
        nodes = tree_of(tables, unit_len=unit_len)

        check_tree(nodes)
        assert described(nodes) == defined(tables, unit_len)


@given(forests(), st.randoms(use_true_random=False))
@settings(max_examples=100, derandomize=True)
def test_the_order_of_requests_does_not_matter(tables: SharedTables, random):
    order = list(range(len(tables.kv_lens)))
    random.shuffle(order)

    nodes = tree_of(tables.reordered(order))

    restored = {(b, e, tuple(sorted(order[i] for i in m))) for b, e, m in described(nodes)}
    assert restored == described(tree_of(tables))


def test_requests_that_share_nothing_have_no_tree():
    assert tree_of(SharedTables.of([[1, 2], [3, 4], [5]], [8, 7, 4])) == []


@pytest.mark.parametrize("kv_lens", [[], [0, 0], [1, 1]])
def test_batches_without_whole_units_have_no_tree(kv_lens: list[int]):
    assert tree_of(SharedTables.of([[1]] * len(kv_lens), kv_lens)) == []


def test_a_request_that_ends_with_the_prefix_keeps_its_last_unit():
    tables = SharedTables.of([[1, 2], [1, 2, 3], [1, 2, 4]], [8, 9, 12])

    assert described(tree_of(tables)) == {(0, 4, (0, 1, 2)), (4, 8, (1, 2))}


def test_three_levels_a_second_root_and_a_single_request():
    tables = SharedTables.of(
        [[1, 2, 3, 10], [1, 2, 3, 11], [1, 2, 4, 12], [1, 2, 4, 13], [1, 5], [6, 7], [6, 8], [9]],
        [13, 13, 14, 16, 8, 8, 7, 4],
    )

    assert described(tree_of(tables)) == {
        (0, 4, (0, 1, 2, 3, 4)),
        (4, 8, (0, 1, 2, 3)),
        (8, 12, (0, 1)),
        (8, 12, (2, 3)),
        (0, 4, (5, 6)),
    }
