from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_kernels.decode.launch import DecodeAttention
from attn_kernels.decode.plan import SplitRule
from attn_kernels.errors import CapacityError, ShapeError
from tests.attn_kernels.paged_case import (
    HALF_PRECISION,
    PagedCase,
    assert_close,
    make_case,
    primer_pages,
)
from tests.attn_kernels.small_tiles import DECODE, decode, make_decode, run

EDGES = [1, 7, 8, 9, 16, 17, 33, 97]  # one token, page and split boundaries, several segments


def test_edge_lengths_give_the_reference_and_never_read_unused_rows(device: str):
    case = make_case([1] * len(EDGES), EDGES, device=device)
    lse = torch.empty(len(EDGES), case.num_qo_heads, device=device)

    out = decode(case, lse=lse)

    assert_close(out, case, lse=lse)


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads"), [(1, 1), (10, 2), (8, 1), (14, 2), (16, 1)]
)
def test_group_sizes(device: str, num_qo_heads: int, num_kv_heads: int):
    case = make_case(
        [1, 1], [5, 40], num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, device=device
    )

    assert_close(decode(case), case)


@pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64, 128])
def test_page_sizes_smaller_and_larger_than_a_tile(device: str, page_size: int):
    case = make_case(
        [1, 1, 1], [page_size, 2 * page_size + 1, 70], page_size=page_size, device=device
    )

    assert_close(decode(case), case)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_head_dims(device: str, head_dim: int):
    case = make_case([1], [19], head_dim=head_dim, device=device)

    assert_close(decode(case), case)


@pytest.mark.parametrize(("dtype", "head_dim", "page_size"), HALF_PRECISION)
def test_half_precision(device: str, dtype: torch.dtype, head_dim: int, page_size: int):
    shape = {"head_dim": head_dim, "page_size": page_size, "dtype": dtype}
    case = make_case([1, 1, 1], [3, 16, 70], device=device, **shape)
    lse = torch.empty(case.q.shape[:2], device=device)

    assert_close(decode(case, lse=lse), case, lse=lse)


@pytest.mark.parametrize("window", [1, 8, 20])
def test_sliding_window_hides_older_tokens(device: str, window: int):
    case = make_case([1] * 5, [1, 8, 20, 21, 97], device=device)

    assert_close(decode(case, sliding_window=window), case, window)


def test_a_request_has_the_same_bits_in_any_batch_and_in_any_pages(device: str):
    case = make_case([1] * len(EDGES), EDGES, num_qo_heads=6, device=device)

    together = decode(case)

    assert torch.equal(decode(case.moved()), together)
    for request in range(len(EDGES)):
        assert torch.equal(decode(case.only(request))[0], together[request])


@pytest.mark.parametrize("window", [None, 50])
def test_cuts_between_any_splits_give_the_same_bits(device: str, window: int | None):
    case = make_case([1, 1], [97, 70], device=device)
    num_items, outs = [], []
    for num_programs in (2, 10, 64):
        attention = make_decode(case, sliding_window=window, num_programs=num_programs)
        num_items.append(attention.plan(case.kv_lens).num_items)
        outs.append(run(attention, case))

    assert num_items[0] == 2 < num_items[1] < num_items[2]
    assert all(torch.equal(out, outs[0]) for out in outs)


def slots_of_pieces(
    case: PagedCase, request: int, num_programs: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the partial results (acc, stats) of a request cut for so many programs."""
    alone = case.only(request)
    attention = make_decode(alone, num_programs=num_programs)
    items = attention.plan(alone.kv_lens)
    first = int(items.first_slots[0])
    run(attention, alone)
    slots = range(first, first + items.num_slots)
    return [(attention.partial_acc[slot], attention.partial_stats[slot]) for slot in slots]


def test_slots_that_another_kernel_filled_give_the_bits_of_flat_decode(device: str):
    case = make_case([1, 1], [97, 33], num_qo_heads=6, device=device)
    # Tokens [0, 48) of the first request as a segment and a split, [0, 32) of the second as one
    # segment; what is left of them begins within a segment, and is a single item.
    splits, segments = slots_of_pieces(case, 0, 64), slots_of_pieces(case, 0, 2)
    shared = [segments[0], splits[2], slots_of_pieces(case, 1, 2)[0]]
    attention = make_decode(case, num_programs=2, max_shared_slots=3)

    items = attention.plan(case.kv_lens, first_private=[48, 32], num_shared_slots=[2, 1])
    first, second = items.first_slots.tolist()
    for slot, (acc, stats) in zip((first, first + 1, second), shared, strict=True):
        attention.partial_acc[slot] = acc
        attention.partial_stats[slot] = stats
    out = run(attention, case)

    assert (len(splits), len(segments)) == (7, 4)
    assert torch.equal(out, decode(case))


def test_a_soft_cap_bounds_scores(device: str):
    case = make_case([1, 1], [97, 5], device=device)
    attention = make_decode(case, soft_cap=0.5)
    attention.plan(case.kv_lens)

    out = run(attention, case)

    assert_close(out, case, soft_cap=0.5)
    assert not torch.allclose(out, case.expected()[0], atol=1e-3)


def test_one_plan_serves_many_runs(device: str):
    case = make_case([1, 1], [97, 40], device=device)
    attention = make_decode(case, num_programs=64)
    attention.plan(case.kv_lens)

    for seed in range(3):  # each run leaves its partial results behind
        q = make_case([1, 1], [1, 1], device=device, seed=seed).q
        assert torch.equal(run(attention, replace(case, q=q)), decode(replace(case, q=q)))


def test_rows_and_requests_select_a_part_of_a_mixed_batch(device: str):
    case = make_case([1, 1, 1], [20, 33, 5], device=device)
    attention = make_decode(case)
    q = torch.full((7, 4, 16), float("nan"), device=device)
    q[[5, 2]] = case.q[[0, 2]]
    out = torch.full_like(q, -1.0)

    starts = case.kv_page_indptr.tolist()
    attention.plan([20, 5], rows=[5, 2], table_starts=[starts[0], starts[2]])
    attention.run(q, case.layer, case.kv_page_indices, out=out)

    assert_close(out[[5, 2]], case, rows=[0, 2])
    assert (out[[0, 1, 3, 4, 6]] == -1.0).all()


def test_a_padding_request_of_no_tokens_gives_zeros(device: str):
    case = make_case([1, 1], [20, 0], device=device)
    lse = torch.empty(2, 4, device=device)

    out = decode(case, lse=lse)

    assert_close(out, case, lse=lse)
    assert (out[1] == 0).all()
    assert (lse[1] == float("-inf")).all()


@pytest.mark.parametrize("page_size", [1, 2])
def test_worked_example_of_the_block_sparse_primer(device: str, page_size: int):
    # softmax(1, 1, 2) over values [1, 1], [2, 0], [0, 1]
    pages, table, values = primer_pages(page_size, device)
    q = torch.zeros(1, 1, 16, device=device)
    q[..., :2] = 1.0
    attention = DecodeAttention(
        pages, num_qo_heads=1, scale=1.0, max_requests=1, max_kv_tokens=3, tile=DECODE["tile"]
    )

    attention.plan([3])
    indices = torch.tensor(table, dtype=torch.int32, device=device)
    out = attention.run(q, 0, indices)

    expected = torch.softmax(torch.tensor([1.0, 1.0, 2.0], device=device), 0) @ values
    torch.testing.assert_close(out[0, 0, :2], expected)
    torch.testing.assert_close(expected.cpu(), torch.tensor([0.63, 0.79]), atol=0.01, rtol=0)


def test_plans_beyond_the_buffers_are_refused(device: str):
    case = make_case([1], [20], device=device)
    attention = DecodeAttention(
        case.pages, num_qo_heads=4, scale=1.0, max_requests=2, max_kv_tokens=64, tile=DECODE["tile"]
    )

    with pytest.raises(CapacityError, match="3 requests, at most 2"):
        attention.plan([1, 1, 1])
    with pytest.raises(CapacityError, match="65 tokens, at most 64"):
        attention.plan([65])
    for first_private in (8, 32):
        with pytest.raises(ShapeError, match=f"first_private is {first_private}, must be"):
            make_decode(case).plan([20], first_private=[first_private], num_shared_slots=[1])
    with pytest.raises(ShapeError, match="split_len 24 must be a multiple of the 16 keys"):
        make_decode(case, rule=SplitRule(split_len=24))
