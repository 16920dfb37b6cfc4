"""Cascade attention against the reference and flat decode, in the interpreter or on a GPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from attn_kernels.cascade import items as cascade_items
from attn_kernels.cascade import launch as cascade_launch
from attn_kernels.cascade import plan as cascade_plan
from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.cascade.prefix_tree import prefix_tree
from attn_kernels.decode import launch as decode_launch
from attn_kernels.decode.launch import DecodeAttention, DecodeTile
from attn_kernels.decode.plan import FIELDS, DecodeItems, SplitRule
from attn_kernels.errors import CapacityError, ShapeError
from attn_kernels.tiles import PlanBuffer
from tests.attn_kernels.paged_case import PagedCase, assert_close, shared_case
from tests.attn_kernels.shared_tables import SharedTables, forests, grow
from tests.attn_kernels.small_tiles import CASCADE, DECODE, cascade, decode, make_cascade, run
from tests.support.rarely import rarely
from tests.support.triton_interpreter import interpreted


def make_attention(
    case: PagedCase, *, model: Mapping[str, float] | None = None, **options: Any
) -> CascadeAttention:
    attention = make_cascade(case, **options)
    attention.model = replace(attention.model, **model or {})
    return attention


def plan(attention: CascadeAttention, case: PagedCase) -> None:
    attention.plan(case.kv_lens, *case.table_arrays)


def three_levels(page_size: int = 8) -> SharedTables:
    """Two roots, three levels, a single request, prefixes of whole and of broken segments."""
    return grow(
        9,
        parents=[0, 0, 1, 1, 4],
        node_pages=[6, 3, 2, 6, 4],
        leaves=[2, 2, 3, 3, 3, 1, 4, 4, 0],
        suffix_tokens=[1, 20, 5, 40, 3, 9, 2, 33, 1],
        page_size=page_size,
    )


def small_case(tables: SharedTables, device: str) -> PagedCase:
    """Keys of one head in the interpreter, which takes as long for each: all are alike."""
    heads = {} if device == "cuda" else {"num_qo_heads": 2, "num_kv_heads": 1}
    return shared_case(tables, device=device, **heads)


def test_a_forest_of_three_levels_gives_the_reference_and_never_reads_unused_rows(device: str):
    case = shared_case(three_levels(), device=device)
    attention = make_attention(case)
    plan(attention, case)
    lse = torch.empty(len(case.kv_lens), case.num_qo_heads, device=device)

    out = run(attention, case, lse=lse)

    assert attention.num_shared_items > 3
    assert_close(out, case, lse=lse)


@given(forests(max_nodes=4, max_requests=5, page_size=8))
@settings(
    max_examples=8,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_forest_gives_the_bits_of_flat_decode(device: str, tables: SharedTables):
    case = small_case(tables, device)
    attention = make_attention(case)
    plan(attention, case)

    out = run(attention, case)

    assert_close(out, case)
    if device == "cpu":  # on a GPU, see test_gpu_cascade.py
        assert torch.equal(out, decode(case))


def test_with_a_sliding_window_those_share_that_lie_within_it(device: str):
    tables = three_levels()
    case = small_case(tables, device)
    lens = np.array(case.kv_lens)
    window = int(np.sort(lens)[-3])
    attention = make_attention(case, sliding_window=window)

    plan(attention, case)
    out = run(attention, case)

    assert attention._shared is not None
    members = np.unique(attention._shared.members)
    assert len(members) >= 4
    assert lens[members].max() == window
    assert (attention._shared.num_shared_slots[lens > window] == 0).all()
    assert_close(out, case, sliding_window=window)
    if device == "cpu":
        assert torch.equal(out, decode(case, sliding_window=window))

    lens[lens.argmax()] -= 9  # makes room
    lens[lens == window] += 1
    with pytest.raises(ShapeError, match=rf"{window + 1} .* shares .* at most sliding_window"):
        attention.plan_next_step(lens)
    assert torch.equal(run(attention, case), out)


def test_any_cut_of_the_tree_gives_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch):
    tables = three_levels()
    case = small_case(tables, device)
    nodes = prefix_tree(
        tables.starts, tables.indices, np.array(tables.kv_lens), page_size=8, unit_len=16
    )
    absorbs = {"slot_us": 1e9, "repeated_bytes_per_us": 1e-4, "num_decode_programs": 4}
    absorbing = make_attention(case, model=absorbs)
    plan(absorbing, case)
    few_slots = int(absorbing._shared.num_shared_slots.max())

    outs = [run(absorbing, case)]
    for count in range(1, len(nodes) + 1):  # parents come first: each is a tree
        monkeypatch.setattr(cascade_launch, "prefix_tree", lambda *_, cut=nodes[:count], **__: cut)
        attention = make_attention(case)
        plan(attention, case)
        outs.append(run(attention, case))

    assert few_slots < int(attention._shared.num_shared_slots.max()), "something was absorbed"
    assert_close(outs[0], case)
    assert all(torch.equal(out, outs[0]) for out in outs) or device == "cuda"


def test_a_batch_that_is_too_large_leaves_the_last_plan_in_force(device: str):
    case = small_case(three_levels(), device)
    attention = make_attention(case)
    plan(attention, case)
    expected = run(attention, case)
    num_items = attention.num_shared_items

    num_requests = len(case.kv_lens) + 1  # that share nothing
    with pytest.raises(CapacityError):
        attention.plan([1] * num_requests, np.arange(num_requests), np.arange(num_requests))

    assert attention.num_shared_items == num_items
    assert torch.equal(run(attention, case), expected)


@pytest.mark.parametrize("item_splits", [*rarely(1), 2, *rarely(4), 8])
def test_items_of_any_length_give_the_same_bits_and_inexact_ones_fewer_slots(
    device: str, item_splits: int, monkeypatch: pytest.MonkeyPatch
):
    def cut_runs(runs: object, *, max_slots: int, **options: object) -> object:
        return cascade_items.cut(runs, item_splits=item_splits, **options)

    tables = grow(3, [0], [20], [0] * 3, [1, 9, 30], page_size=8)
    case = small_case(tables, device)
    rule = SplitRule(split_len=16, splits_per_segment=4)
    expected = cascade(case, rule=rule)
    monkeypatch.setattr(cascade_plan, "cut_runs", cut_runs)
    exact, inexact = (make_attention(case, rule=rule, is_exact=value) for value in (True, False))
    plan(exact, case)
    plan(inexact, case)

    assert torch.equal(run(exact, case), expected) or device == "cuda"
    assert_close(run(inexact, case), case)
    slots = [attention._shared.num_shared_slots.sum() for attention in (exact, inexact)]
    assert slots[0] > slots[1] if item_splits == 2 else slots[0] >= slots[1]


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads"), [(1, 1), (10, 2), *rarely((8, 1), (14, 2)), (16, 1)]
)
def test_group_sizes(device: str, num_qo_heads: int, num_kv_heads: int):
    tables = grow(5, [0], [6], [0] * 5, [1, 2, 3, 30, 8], page_size=8)
    case = shared_case(tables, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, device=device)

    assert_close(cascade(case), case)


@pytest.mark.parametrize("page_size", [1, *rarely(4), 16, *rarely(32, 64), 128])
def test_page_sizes_smaller_and_larger_than_a_split(device: str, page_size: int):
    pages = -(-100 // page_size)
    tables = grow(3, [0], [pages], [0] * 3, [1, page_size, 5], page_size=page_size)
    case = shared_case(tables, device=device)

    assert_close(cascade(case), case)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size"),
    [
        (torch.float16, 32, 8),
        (torch.bfloat16, 64, 64),
        (torch.bfloat16, 96, 32),
        (torch.float16, 256, 1),
        *rarely(
            (torch.bfloat16, 32, 8),
            (torch.float16, 96, 8),
            (torch.float16, 128, 128),
            (torch.bfloat16, 256, 16),
        ),
    ],
)
def test_half_precision(device: str, dtype: torch.dtype, head_dim: int, page_size: int):
    tables = grow(3, [0], [-(-40 // page_size)], [0] * 3, [1, 9, 3], page_size=page_size)
    case = shared_case(tables, head_dim=head_dim, dtype=dtype, device=device)

    out = cascade(case)

    assert_close(out, case)
    if device == "cpu":
        assert torch.equal(out, decode(case))


def test_edges_of_requests_beside_a_shared_prefix(device: str):
    # An empty suffix, one that fills its page, one token in all, and a lone request that ends with
    # its page; five requests: an odd batch.
    shared = [5, 2, 7, 3]  # 32 tokens: two splits
    own = [[], [6], [1], [4], [0, 8]]
    tables = SharedTables.of(
        [shared, shared + own[1], shared + own[2], own[3], own[4]], [32, 40, 33, 1, 16], 8
    )
    case = shared_case(tables, device=device)

    out = cascade(case)

    assert_close(out, case)
    if device == "cpu":
        assert torch.equal(out, decode(case))


def test_rows_and_single_requests_and_padding(device: str):
    tables = grow(4, [0, 1], [5, 1], [0, 1, 0, 0], [3, 4, 1, 20], page_size=8)
    case = shared_case(tables, device=device)
    rows = [6, 1, 4, 2, 0]
    q = torch.full((8, 4, 16), float("nan"), device=device)
    q[rows[:4]] = case.q
    q[0] = 1.0
    out = torch.full_like(q, -1.0)
    attention = CascadeAttention(case.pages, **case.options | {"max_requests": 5}, **CASCADE)
    attention.model = attention.model.sharing_all()

    starts, indices = case.kv_page_indptr.cpu().numpy(), case.kv_page_indices.cpu().numpy()
    attention.plan([*case.kv_lens, 0], starts, indices, rows=rows)
    attention.run(q, case.layer, case.kv_page_indices, out=out)

    assert attention.num_shared_items > 0
    assert_close(out[rows[:4]], case)
    assert (out[0] == 0).all()
    assert (out[[3, 5, 7]] == -1.0).all()


def test_a_plan_is_one_copy_to_the_device_and_a_second_one_of_what_is_shared(
    monkeypatch: pytest.MonkeyPatch, device: str
):
    case = shared_case(three_levels(), device=device)
    shared, flat_only = make_attention(case), make_attention(case, model={"margin": 0.0})
    copies = []
    send = PlanBuffer.send
    monkeypatch.setattr(PlanBuffer, "send", lambda *args: (copies.append(args), send(*args)))

    for attention, num_copies in ((shared, 2), (flat_only, 1)):
        plan(attention, case)
        assert len(copies) == num_copies
        attention.plan_next_step(case.kv_lens)
        assert len(copies) == num_copies + 1
        copies.clear()


def test_a_flat_plan_after_a_shared_one_shares_nothing(device: str):
    case = small_case(three_levels(), device)
    attention = make_attention(case)
    plan(attention, case)
    shared = run(attention, case)

    attention.model = replace(attention.model, margin=0.0)
    plan(attention, case)

    assert attention.num_shared_items == 0
    if device == "cpu":
        assert torch.equal(run(attention, case), shared)
    assert_close(run(attention, case), case)


def test_a_batch_that_grows_is_planned_on_without_looking_at_its_pages(device: str):
    tables = grow(3, [0], [5], [0] * 3, [1, 9, 3], page_size=8)
    grown = SharedTables.of(
        [[*table, *range(40 + 10 * i, 50 + 10 * i)] for i, table in enumerate(tables.tables)],
        [kv_len + steps for kv_len, steps in zip(tables.kv_lens, [1, 40, 17], strict=True)],
        8,
    )
    case = small_case(grown, device)
    attention = make_attention(case)
    attention.plan(tables.kv_lens, *case.table_arrays)
    shared = attention.num_shared_items

    attention.plan_next_step(case.kv_lens)

    assert attention.num_shared_items == shared > 0
    assert_close(run(attention, case), case)


def test_flat_plans_take_a_kernel_of_their_own_in_the_same_memory(
    monkeypatch: pytest.MonkeyPatch, device: str
):
    def shipped(_pages: Tensor, *, beside_shared: bool = False) -> DecodeTile:
        return replace(DECODE["tile"], programs_per_sm=2 if beside_shared else 1)

    monkeypatch.setattr("attn_kernels.cascade.launch.shipped_decode_tile", shipped)
    monkeypatch.setattr("attn_kernels.decode.launch.decode_tile", shipped)
    tables = grow(4, [0, 0], [6, 2], [1, 1, 0, 0], [1, 20, 3, 9], page_size=8)
    case = small_case(tables, device)
    attention = CascadeAttention(case.pages, **case.options, **CASCADE | {"decode_tile": None})
    assert attention.flat is not attention.decode
    assert attention.flat.partial_acc is attention.decode.partial_acc
    models = {
        True: attention.model.sharing_all(),
        False: replace(attention.model, margin=0.0),
    }

    for shares in (True, False, False, True, True):  # each after each
        attention.model = models[shares]
        plan(attention, case)
        assert (attention.num_shared_items > 0) == shares
        attention.decode.partial_acc.fill_(float("nan"))
        out = run(attention, case)
        assert_close(out, case)
        assert attention.decode.partial_acc.isfinite().any(), "nothing was folded"

        with pytest.raises(CapacityError):
            attention.plan([10**7] * len(case.kv_lens), *case.table_arrays)
        assert torch.equal(run(attention, case), out)
        attention.plan_next_step(case.kv_lens)
        assert torch.equal(run(attention, case), out)


@pytest.mark.parametrize(
    ("num_early", "prefix_pages", "num_free_programs", "num_busy"),
    [(9, 8, 0, 9), (8, 8, 0, 14), (9, 8, 1, 14), (9, 10, 0, 14)],
    ids=["beside all", "too many requests", "programs to spare", "unequal items"],
)
def test_few_requests_take_only_programs_that_start_beside_a_shared_part_that_fills_the_device(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    num_early: int,
    prefix_pages: int,
    num_free_programs: int,
    num_busy: int,
):
    tables = grow(9, [0], [prefix_pages], [0] * 9, [1, 20, 5, 40, 3, 9, 2, 33, 1], page_size=8)
    case = small_case(tables, device)
    planned = []
    plan_batch = DecodeAttention.plan_batch

    def spy(self: DecodeAttention, *args: object, **options: object) -> DecodeItems:
        planned.append(plan_batch(self, *args, **options))
        return planned[-1]

    num_lanes, num_kv_heads = 20, case.pages.shape[3]
    monkeypatch.setattr(
        "attn_kernels.decode.launch.programs_for", lambda *_: num_lanes * num_kv_heads
    )
    monkeypatch.setattr(DecodeAttention, "plan_batch", spy)
    attention = make_attention(case)
    assert attention.num_early_lanes == num_lanes
    attention.num_early_lanes = num_early
    plan(attention, case)
    attention.num_programs = (attention.num_shared_items + num_free_programs) * num_kv_heads
    planned.clear()

    plan(attention, case)

    (items,) = planned
    num_items = items.table[:num_lanes, FIELDS.index("lane_items")]
    assert attention.num_shared_items > 0
    assert len(case.kv_lens) == 9
    assert (num_items > 0).sum() == num_busy
    assert_close(run(attention, case), case)


@pytest.mark.parametrize(
    ("dtype", "page_size", "max_requests", "expected"),
    [
        (torch.bfloat16, 64, 16, 16),
        (torch.bfloat16, 64, 256, 33),  # nothing fits beside wide tiles
        (torch.bfloat16, 16, 16, 33),  # Triton's decode kernel
        (torch.float8_e4m3fn, 64, 16, 33),
    ],
)
def test_lanes_that_start_early_on_an_h200(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    page_size: int,
    max_requests: int,
    expected: int,
):
    for launchers in (cascade_launch, decode_launch):
        monkeypatch.setattr(launchers, "on_hopper", lambda _: True)
        monkeypatch.setattr(launchers, "programs_for", lambda _, per_sm: 132 * per_sm)
    pages = torch.zeros((2, 1, 2, 8, page_size, 128), dtype=dtype)
    scale = torch.ones(1, 8) if dtype == torch.float8_e4m3fn else None

    with interpreted():
        attention = CascadeAttention(
            pages,
            num_qo_heads=32,
            scale=1.0,
            max_requests=max_requests,
            max_kv_tokens=4096,
            k_scale=scale,
            v_scale=scale,
        )

    assert attention.num_early_lanes == expected
    assert attention.decode.num_lanes == 33


def test_a_wrong_output_is_refused_before_any_launch(device: str):
    case = shared_case(three_levels(), device=device)
    attention = make_attention(case)
    plan(attention, case)
    attention.decode.partial_acc.fill_(7.0)

    with pytest.raises(ShapeError, match="out has shape"):
        run(attention, case, out=case.q[:1])

    assert attention.num_shared_items > 0
    assert (attention.decode.partial_acc == 7.0).all()


@pytest.mark.parametrize("page_size", [1, 2])
def test_worked_example_of_the_block_sparse_primer_split_into_prefix_and_suffix(
    device: str, page_size: int
):
    # softmax(1, 1, 2) over values [1, 1], [2, 0], [0, 1]; two requests share the first two tokens.
    # A GPU's matrix unit takes 16 keys or more: there tokens of no weight fill up the prefix.
    shared_len = 2 if device == "cpu" else 16
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], device=device)
    values = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 1.0]], device=device)
    num_shared_pages = shared_len // page_size
    prefix = [num_shared_pages + 1 - page for page in range(num_shared_pages)]
    tables = [[*prefix, num_shared_pages + 2], [*prefix, 1]]
    pages = torch.full((num_shared_pages + 4, 1, 2, 1, page_size, 16), float("nan"), device=device)
    for table in tables:
        for token in range(shared_len + 1):
            slot = pages[table[token // page_size], 0, :, 0, token % page_size]
            slot.zero_()
            if token < 2 or token == shared_len:
                row = min(token, 2)
                slot[0, :2], slot[1, :2] = keys[row], values[row]
            else:
                slot[:, :2] = -200.0
    q = torch.zeros(2, 1, 16, device=device)
    q[..., :2] = 1.0
    attention = CascadeAttention(
        pages,
        num_qo_heads=1,
        scale=1.0,
        max_requests=2,
        max_kv_tokens=2 * (shared_len + 1),
        rule=SplitRule(split_len=shared_len, splits_per_segment=1),
        decode_tile=replace(DECODE["tile"], block_n=shared_len),
        tile=CASCADE["tile"],
    )
    attention.model = attention.model.sharing_all()
    flat_table = [page for table in tables for page in table]
    starts = np.array([0, len(tables[0])])

    attention.plan([shared_len + 1] * 2, starts, np.array(flat_table))
    indices = torch.tensor(flat_table, dtype=torch.int32, device=device)
    out = attention.run(q, 0, indices)

    assert attention.num_shared_items == 1
    expected = torch.softmax(torch.tensor([1.0, 1.0, 2.0], device=device), 0) @ values
    torch.testing.assert_close(out[:, 0, :2], expected.expand(2, 2))
    torch.testing.assert_close(expected.cpu(), torch.tensor([0.63, 0.79]), atol=0.01, rtol=0)
