"""What is shared, how it is cut, and that every key of every request is read once, in key order."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attn_kernels.cascade.model import CascadeModel
from attn_kernels.cascade.plan import MAX_ABSORBED, CascadePlan, plan_cascade, share
from attn_kernels.cascade.prefix_tree import prefix_tree
from attn_kernels.decode.plan import SplitRule
from tests.attn_kernels.shared_tables import SharedTables, forests, grow
from tests.support.free_sharing import plan_free

RULE = SplitRule(split_len=4, splits_per_segment=4)
MODEL = CascadeModel(
    num_kv_heads=2,
    members_per_tile=2,
    token_bytes=4096,
    num_programs=6,
    num_decode_programs=12,
    num_flat_lanes=3,
    tile_token_us=0.01,
    launch_us=0.0,
    shared_launch_us=0.0,
    excess_weight=0.0,  # lanes are dealt in the order of requests
)
EAGER = replace(MODEL, margin=1e9)  # shares although it is slower
LLAMA_3_8B = CascadeModel(
    num_kv_heads=8,
    members_per_tile=32,
    token_bytes=4096,
    num_programs=132,
    num_decode_programs=264,
    num_flat_lanes=16,
    tile_token_us=0.0143,
)


def plan(
    tables: SharedTables,
    model: CascadeModel = EAGER,
    rule: SplitRule = RULE,
    max_slots: int = 10_000,
    is_exact: bool = True,
) -> CascadePlan:
    kv_lens = np.array(tables.kv_lens)
    nodes = prefix_tree(
        tables.starts,
        tables.indices,
        kv_lens,
        page_size=tables.page_size,
        unit_len=rule.split_len,
    )
    return plan_cascade(
        nodes,
        kv_lens,
        table_starts=tables.starts,
        rule=rule,
        model=model,
        max_slots=max_slots,
        is_exact=is_exact,
    )


def slots_of(
    cascade: CascadePlan, request: int, rule: SplitRule, is_exact: bool
) -> list[tuple[int, int, int]]:
    """Begin, end, first entry of what a request's shared slots hold, by ordinal."""
    slots: dict[int, tuple[int, int, int]] = {}
    for first, count, begin, end, entry, ordinal in cascade.fields.tolist():
        if request not in cascade.members[first : first + count]:
            continue
        while begin < end:  # as the kernels cut
            segment_end = (begin // rule.segment_len + 1) * rule.segment_len
            is_within = begin % rule.segment_len != 0
            slot_end = begin + rule.split_len if is_within else min(segment_end, end)
            if not is_exact:
                slot_end = end
            assert ordinal not in slots
            slots[ordinal] = (begin, slot_end, entry)
            ordinal += 1
            begin = slot_end
    assert sorted(slots) == list(range(len(slots)))
    return [slots[ordinal] for ordinal in range(len(slots))]


def check_coverage(
    cascade: CascadePlan, tables: SharedTables, is_exact: bool, rule: SplitRule = RULE
) -> None:
    for request, kv_len in enumerate(tables.kv_lens):
        reached = 0
        slots = slots_of(cascade, request, rule, is_exact)
        for begin, end, entry in slots:
            assert begin == reached
            assert begin % rule.split_len == 0
            assert end % rule.split_len == 0
            mine = tables.starts[request]
            pages = slice(begin // tables.page_size, end // tables.page_size)
            assert np.array_equal(tables.indices[entry:][pages], tables.indices[mine:][pages]), (
                "another prefix is read"
            )
            reached = end
        assert cascade.first_private[request] == reached
        assert cascade.num_shared_slots[request] == len(slots)
        assert reached < max(kv_len, 1)


@given(
    forests(), st.sampled_from([1, 2, 6, 1000]), st.sampled_from([0.0, 0.01, 1.0]), st.booleans()
)
@settings(max_examples=300, derandomize=True)
def test_every_key_of_every_request_is_covered_once_in_order(
    tables: SharedTables, num_programs: int, slot_us: float, is_exact: bool
):
    model = replace(EAGER, num_programs=num_programs, slot_us=slot_us)

    check_coverage(plan(tables, model, is_exact=is_exact), tables, is_exact)


@given(forests(), st.randoms(use_true_random=False))
@settings(max_examples=100, derandomize=True)
def test_what_is_shared_does_not_depend_on_the_order_of_requests(tables: SharedTables, random):
    order = list(range(len(tables.kv_lens)))
    random.shuffle(order)

    cascade, reordered = plan(tables), plan(tables.reordered(order))

    assert reordered.first_private.tolist() == cascade.first_private[order].tolist()
    assert reordered.num_shared_slots.tolist() == cascade.num_shared_slots[order].tolist()
    assert reordered.estimate.flat_us == pytest.approx(cascade.estimate.flat_us)
    assert reordered.estimate.cascade_us == pytest.approx(cascade.estimate.cascade_us)


@given(forests(max_nodes=5))
@settings(max_examples=100, derandomize=True)
def test_the_choice_is_the_best_of_all(tables: SharedTables):
    nodes = prefix_tree(
        tables.starts, tables.indices, np.array(tables.kv_lens), page_size=4, unit_len=4
    )

    assume(len(nodes) <= MAX_ABSORBED)

    def cost(shared: Sequence[bool]) -> float:
        total = 0.0
        ends = [0] * len(tables.kv_lens)  # where each request's own part begins
        reached = [0] * len(nodes)  # where the run of each node begins
        for index, node in enumerate(nodes):
            begin = 0 if node.parent is None else reached[node.parent]
            reached[index] = node.end if shared[index] else begin
            if shared[index]:
                total += MODEL.run_us(len(node.members), node.end - begin)
                for member in node.members:
                    ends[member] = node.end
        last = [0] * len(tables.kv_lens)  # end of the deepest node
        for node in nodes:
            for member in node.members:
                last[member] = node.end
        return total + sum(MODEL.reread_us(b - a) for a, b in zip(ends, last, strict=True))

    choices = [[bool(bits >> i & 1) for i in range(len(nodes))] for bits in range(1 << len(nodes))]
    runs = share(nodes, MODEL)
    chosen = [any(np.array_equal(node.members, run.members) for run in runs) for node in nodes]
    assert cost(chosen) == pytest.approx(min(map(cost, choices)))


def shared_batch(batch: int, shared: int, unique: int) -> SharedTables:
    return grow(batch, [0], [shared // 64], [0] * batch, [unique] * batch, page_size=64)


FULL_RULE = SplitRule()


@pytest.mark.parametrize(
    ("batch", "shared", "unique", "is_shared"),
    [
        (256, 32_768, 256, True),
        (64, 8192, 256, True),
        (16, 8192, 256, True),
        (2, 256, 4096, False),
        (8, 256, 1024, False),
        (256, 0, 512, False),
    ],
)
def test_sharing_is_chosen_where_it_pays(batch: int, shared: int, unique: int, is_shared: bool):
    cascade = plan(shared_batch(batch, shared, unique), LLAMA_3_8B, FULL_RULE)

    assert (cascade.num_items > 0) == is_shared
    estimate = cascade.estimate
    assert (estimate.cascade_us < estimate.flat_us) == is_shared
    assert (cascade.first_private == (shared if is_shared else 0)).all()


@pytest.mark.parametrize(("batch", "is_shared"), [(256, True), (64, True), (16, False)])
def test_a_second_launch_that_costs_more_than_sharing_saves_is_not_made(
    batch: int, is_shared: bool
):
    model = replace(LLAMA_3_8B, shared_launch_us=90.0)

    cascade = plan(shared_batch(batch, 8192, 256), model, FULL_RULE)

    assert (cascade.num_items > 0) == is_shared


def test_a_short_prefix_of_few_is_absorbed_by_longer_ones_below_it():
    # 256 tokens of 64 requests, in two groups of 8,192 tokens: two tiles in any case.
    tables = grow(64, [0, 0, 0], [4, 128, 128], [1] * 32 + [2] * 32, [100] * 64, page_size=64)
    cascade = plan(tables, LLAMA_3_8B, FULL_RULE)

    assert (cascade.fields[:, 2] == 0).sum() == 2, "each group reads it for itself"
    assert (cascade.first_private == 256 + 8192).all()


def test_few_tokens_are_cut_finely_and_many_into_whole_segments():
    few = plan(shared_batch(16, 8192, 256), replace(LLAMA_3_8B, num_programs=264), FULL_RULE)
    many = plan(shared_batch(256, 32_768, 256), LLAMA_3_8B, FULL_RULE)

    assert (few.fields[:, 3] - few.fields[:, 2] <= 512).all()
    assert ((many.fields[:, 3] - many.fields[:, 2]) % FULL_RULE.segment_len == 0).all()


def test_a_plan_that_needs_more_slots_than_there_are_is_flat():
    tables = shared_batch(64, 8192, 256)

    num_slots = 64 * (8192 // FULL_RULE.segment_len)

    assert plan(tables, LLAMA_3_8B, FULL_RULE, max_slots=num_slots).num_items > 0
    assert plan(tables, LLAMA_3_8B, FULL_RULE, max_slots=num_slots - 1).num_items == 0


def tokens_read(cascade: CascadePlan, tables: SharedTables) -> int:
    """Count what the work items load, each piece of a run once, and what requests load alone."""
    # Tiles of one piece of a run find its pages at the same entry; two runs never do.
    pieces = {tuple(item) for item in cascade.fields[:, [2, 3, 4]].tolist()}
    shared = sum(end - begin for begin, end, _ in pieces)
    own = sum(
        kv_len - first
        for kv_len, first in zip(tables.kv_lens, cascade.first_private.tolist(), strict=True)
    )
    return shared + own


@given(forests(max_requests=12), st.sampled_from([0.0, 0.5, 5.0]), st.sampled_from([1e3, 8e6]))
@settings(max_examples=300, derandomize=True)
def test_what_is_spared_is_what_items_do_not_load(
    tables: SharedTables, item_us: float, repeated_bytes_per_us: float
):
    model = replace(EAGER, item_us=item_us, repeated_bytes_per_us=repeated_bytes_per_us)

    cascade = plan(tables, model)

    assert sum(tables.kv_lens) - cascade.num_spared == tokens_read(cascade, tables)
    sharing = np.flatnonzero(cascade.first_private)
    assert cascade.num_grouped == len(sharing)
    first_pages = {int(tables.indices[tables.starts[request]]) for request in sharing}
    assert cascade.num_groups >= len(first_pages), "a group begins with one page"
    assert (cascade.num_groups > 0) == (cascade.num_items > 0)


@given(forests(max_requests=12))
@settings(max_examples=300, derandomize=True)
def test_where_sharing_is_free_each_prefix_is_read_once(tables: SharedTables):
    cascade = plan_free(tables.kv_lens, tables.tables, page_size=4, unit_len=RULE.split_len)

    # A unit of tokens is known by all pages up to it; each request keeps its last token.
    units: Counter[tuple[int, ...]] = Counter()
    num_own = 0
    for table, kv_len in zip(tables.tables, tables.kv_lens, strict=True):
        num_units = max(kv_len - 1, 0) // 4
        units.update(tuple(table[: unit + 1]) for unit in range(num_units))
        num_own += kv_len - 4 * num_units
    assert sum(tables.kv_lens) - cascade.num_spared == 4 * len(units) + num_own
    begun = [count for unit, count in units.items() if len(unit) == 1 and count > 1]
    assert (cascade.num_groups, cascade.num_grouped) == (len(begun), sum(begun))


def test_a_flat_plan_spares_nothing():
    cascade = plan(grow(2, [0], [1], [0, 0], [4, 4]), replace(MODEL, margin=0.0))

    assert (cascade.num_items, cascade.num_spared) == (0, 0)
    assert (cascade.num_groups, cascade.num_grouped) == (0, 0)
