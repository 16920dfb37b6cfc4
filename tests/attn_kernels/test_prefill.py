import pytest
import torch

from attn_kernels.errors import ShapeError
from attn_kernels.prefill.launch import PrefillAttention
from attn_kernels.prefill.plan import PrefillCapacity
from tests.attn_kernels.paged_case import (
    HALF_PRECISION,
    assert_close,
    make_case,
    primer_pages,
)
from tests.attn_kernels.small_tiles import PREFILL, make_prefill, prefill


def test_ragged_batch_of_whole_prompts_and_chunks_gives_the_reference(device: str):
    case = make_case([1, 8, 9, 5, 20, 1], [1, 8, 9, 40, 65, 33], device=device)
    lse = torch.empty(case.q.shape[:2], device=device)

    out = prefill(case, lse=lse)

    assert_close(out, case, lse=lse)


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads"), [(1, 1), (10, 2), (8, 1), (6, 2), (16, 1)]
)
def test_group_sizes(device: str, num_qo_heads: int, num_kv_heads: int):
    case = make_case(
        [11, 7], [11, 30], num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, device=device
    )

    assert_close(prefill(case), case)


@pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64, 128])
def test_page_sizes_smaller_and_larger_than_a_tile(device: str, page_size: int):
    case = make_case([9, 5], [page_size + 9, 70], page_size=page_size, device=device)

    assert_close(prefill(case), case)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_head_dims(device: str, head_dim: int):
    case = make_case([6], [19], head_dim=head_dim, device=device)

    assert_close(prefill(case), case)


@pytest.mark.parametrize(("dtype", "head_dim", "page_size"), HALF_PRECISION)
def test_half_precision(device: str, dtype: torch.dtype, head_dim: int, page_size: int):
    shape = {"head_dim": head_dim, "page_size": page_size, "dtype": dtype}
    case = make_case([3, 17], [16, 70], device=device, **shape)
    lse = torch.empty(case.q.shape[:2], device=device)

    assert_close(prefill(case, lse=lse), case, lse=lse)


@pytest.mark.parametrize("window", [1, 8, 17, 40])
def test_sliding_window_hides_older_tokens(device: str, window: int):
    case = make_case([1, 20, 12, 70], [1, 20, 65, 70], device=device)

    assert_close(prefill(case, sliding_window=window), case, window)


@pytest.mark.parametrize("window", [None, 12])
def test_a_soft_cap_bounds_scores(device: str, window: int | None):
    case = make_case([1, 20, 12], [1, 20, 65], device=device)
    lse = torch.empty(case.q.shape[:2], device=device)

    out = prefill(case, sliding_window=window, soft_cap=0.5, lse=lse)

    assert_close(out, case, window, soft_cap=0.5, lse=lse)
    assert not torch.allclose(out, prefill(case, sliding_window=window), atol=1e-3)


@pytest.mark.parametrize("window", [None, 12])
def test_a_token_has_the_same_bits_in_any_chunk_any_batch_and_any_pages(
    device: str, window: int | None
):
    case = make_case([37, 20], [37, 52], num_qo_heads=6, device=device)

    whole = prefill(case, sliding_window=window)

    assert torch.equal(prefill(case.moved(), sliding_window=window), whole)
    for request, rows in ((0, slice(0, 37)), (1, slice(37, 57))):
        assert torch.equal(prefill(case.only(request), sliding_window=window), whole[rows])
    first, second = case.chunk([21, 40], [21, 8]), case.chunk([37, 52], [16, 12])
    first_out, second_out = (
        prefill(first, sliding_window=window),
        prefill(second, sliding_window=window),
    )
    for part, rows in (
        (first_out[:21], slice(0, 21)),
        (second_out[:16], slice(21, 37)),
        (first_out[21:], slice(37, 45)),
        (second_out[16:], slice(45, 57)),
    ):
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_worked_example_of_the_block_sparse_primer(device: str, num_rows: int, page_size: int):
    # softmax(1, 1, 2) over values [1, 1], [2, 0], [0, 1], for the last of three tokens
    pages, table, values = primer_pages(page_size, device)
    q = torch.zeros(num_rows, 1, 16, device=device)
    q[..., :2] = 1.0
    attention = PrefillAttention(pages, num_qo_heads=1, scale=1.0, **PREFILL)

    attention.plan([num_rows], [3])
    indptr = torch.tensor([0, len(table)], dtype=torch.int32, device=device)
    indices = torch.tensor(table, dtype=torch.int32, device=device)
    out = attention.run(q, 0, indptr, indices)

    # The three tokens see scores 1; 1, 1; 1, 1, 2. The primer prints the last row cut short.
    scores = torch.tensor([1.0, 1.0, 2.0], device=device)
    rows = [torch.softmax(scores[:count], 0) @ values[:count] for count in (1, 2, 3)]
    torch.testing.assert_close(out[:, 0, :2], torch.stack(rows[-num_rows:]))
    printed = torch.tensor([[1.0, 1.0], [1.5, 0.5], [0.63, 0.79]])
    torch.testing.assert_close(out[:, 0, :2].cpu(), printed[-num_rows:], atol=0.01, rtol=0)


@pytest.mark.parametrize("qo_lens", [[0, 3, 0, 9, 0], [0, 0, 0, 0, 0]])
def test_chunks_without_new_tokens_leave_the_others_as_they_are(device: str, qo_lens: list[int]):
    case = make_case(qo_lens, [16, 19, 5, 9, 8], device=device)
    attention = make_prefill(case)
    guard = torch.full((2, *case.q.shape[1:]), 7.0, device=device)
    out = torch.cat((torch.full_like(case.q, float("nan")), guard))  # rows of no chunk behind
    q = torch.cat((case.q, guard))

    attention.plan(case.qo_lens, case.kv_lens)
    attention.run(q, case.layer, case.kv_page_indptr, case.kv_page_indices, out=out)

    assert (out[-2:] == 7.0).all()
    if sum(qo_lens):
        assert_close(out[:-2], case)


@pytest.mark.parametrize("window", [None, 12])
def test_plans_in_fixed_buffers_give_the_same_bits(device: str, window: int | None):
    tables = make_case([37, 20], [37, 52], device=device)
    capacity = PrefillCapacity(max_tokens=57, max_requests=3)
    attention = make_prefill(tables, sliding_window=window, capacity=capacity)

    for ends, lens in (
        ([21, 40], [21, 8]),
        ([37, 52], [37, 20]),
        ([37, 52], [16, 0]),
        ([5, 33], [1, 1]),
    ):
        case = tables.chunk(ends, lens)
        guard = torch.full((2, *case.q.shape[1:]), 7.0, device=device)
        out = torch.cat((case.q, guard))  # rows of no chunk behind, as of a padded pass
        attention.plan(case.qo_lens, case.kv_lens)
        entries = (case.kv_page_indptr, case.kv_page_indices)
        attention.run(torch.cat((case.q, guard)), case.layer, *entries, out=out)
        assert torch.equal(out[:-2], prefill(case, sliding_window=window))
        assert (out[-2:] == 7.0).all()


def test_more_new_tokens_than_tokens_are_refused(device: str):
    case = make_case([1], [20], device=device)
    attention = make_prefill(case)

    with pytest.raises(ShapeError, match="21 new tokens of 20"):
        attention.plan([21], [20])


@pytest.mark.parametrize("soft_cap", [0.0, -1.0, float("nan")])
def test_a_soft_cap_that_is_not_positive_is_refused(device: str, soft_cap: float):
    case = make_case([1], [20], device=device)

    with pytest.raises(ShapeError, match=f"soft_cap is {soft_cap}, must be positive"):
        make_prefill(case, soft_cap=soft_cap)
