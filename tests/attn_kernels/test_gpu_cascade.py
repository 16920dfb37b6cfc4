"""Cascade attention on a GPU in a served model's shapes: accuracy, bits, graphs, large offsets."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_kernels.cascade.launch import (
    HOPPER_HEAD_DIMS,
    HOPPER_PAGE_SIZES,
    CascadeAttention,
    HopperSharedTile,
    SharedTile,
)
from attn_kernels.checks import HALF_DTYPES
from attn_kernels.decode.launch import DecodeAttention
from tests.attn_kernels.paged_case import PagedCase, assert_close, quantized, shared_case
from tests.attn_kernels.shared_tables import SharedTables, grow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = {
    "llama-3-8b": {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "qwen2-7b": {"num_qo_heads": 28, "num_kv_heads": 4, "head_dim": 128},
    "phi-3": {"num_qo_heads": 32, "num_kv_heads": 32, "head_dim": 96},
    "gemma": {"num_qo_heads": 16, "num_kv_heads": 8, "head_dim": 256},
    "llama-3-1b": {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 64},
    "group-16": {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 128},
    "llama-3-70b": {"num_qo_heads": 64, "num_kv_heads": 8, "head_dim": 128},
    "qwen3-14b": {"num_qo_heads": 40, "num_kv_heads": 8, "head_dim": 128},
}
TILES = [
    SharedTile(block_m=64, num_warps=4, num_stages=3, programs_per_sm=1),
    SharedTile(block_m=128, num_warps=8, num_stages=3, programs_per_sm=1),
]
WIDE_TILES = [replace(tile, num_warps=8, num_stages=2) for tile in TILES]  # for head_dim 256
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

# The usual shapes in pages of three sizes, and every other shape, page size and dtype in pairs:
# where pages are in half precision or fp8, served models take cascade attention for any of these.
BIT_CASES = [
    # shape, page size, dtype of pages, of queries
    *(
        (name, page_size, BF16, BF16)
        for name in ("llama-3-8b", "qwen2-7b", "llama-3-1b", "group-16")
        for page_size in (16, 64, 128)
    ),
    ("llama-3-8b", 32, FP16, FP16),
    ("llama-3-1b", 1, BF16, BF16),
    ("phi-3", 64, BF16, BF16),
    ("phi-3", 16, FP16, FP16),
    ("gemma", 32, BF16, BF16),
    ("gemma", 64, FP16, FP16),
    ("qwen3-14b", 64, BF16, BF16),
    ("llama-3-70b", 64, BF16, BF16),
    ("llama-3-8b", 64, FP8, BF16),
    ("llama-3-1b", 128, FP8, FP16),
    ("phi-3", 16, FP8, BF16),
    ("gemma", 64, FP8, BF16),
    ("qwen2-7b", 32, FP8, FP16),
]
BIT_IDS = [
    f"{name}-p{page_size}-{str(dtype)[6:]}-q-{str(q_dtype)[6:]}"
    for name, page_size, dtype, q_dtype in BIT_CASES
]


def tiles_for(case: PagedCase) -> list[SharedTile | HopperSharedTile]:
    """Return tiles of all kinds that take a pool and fit its device."""
    page_size, head_dim = case.pages.shape[-2:]
    is_taken = head_dim in HOPPER_HEAD_DIMS and page_size in HOPPER_PAGE_SIZES
    if is_taken and case.pages.dtype in HALF_DTYPES:
        return [*TILES, HopperSharedTile()]
    return list(WIDE_TILES if head_dim > 128 else TILES)


def forest(page_size: int, num_leaves: int = 40) -> SharedTables:
    """Two roots and three levels; prefixes of whole and broken segments, and of none."""
    tokens = [2304, 4096, 512, 0, 256]
    return grow(
        num_leaves,
        parents=[0, 0, 1, 3, 3],
        node_pages=[-(-count // page_size) for count in tokens],
        leaves=[(0, 1, 2, 2, 2, 4, 4, 3)[i % 8] for i in range(num_leaves)],
        suffix_tokens=[(1, 300, 64, 2500, 17)[i % 5] for i in range(num_leaves)],
        page_size=page_size,
    )


def cuda_case(tables: SharedTables, name: str = "llama-3-8b", **options: object) -> PagedCase:
    shape = {**SHAPES[name], "dtype": torch.bfloat16, "device": "cuda", **options}
    return shared_case(tables, **shape)


def bit_case(
    name: str,
    page_size: int,
    dtype: torch.dtype,
    q_dtype: torch.dtype,
    tables: SharedTables | None = None,
    **options: object,
) -> PagedCase:
    if tables is None:
        tables = forest(page_size, 8 if page_size == 1 else 40)  # pages are filled one by one
    case = cuda_case(tables, name, dtype=q_dtype, **options)
    return quantized(case, q_dtype) if dtype == FP8 else case


def cascade(case: PagedCase, **options: object) -> CascadeAttention:
    attention = CascadeAttention(
        case.pages,
        **case.options,
        **options,
    )
    attention.model = attention.model.sharing_all()
    plan(attention, case)
    assert attention.num_shared_items > 0
    return attention


def plan(attention: CascadeAttention, case: PagedCase) -> None:
    attention.plan(case.kv_lens, *case.table_arrays)


def states(attention: CascadeAttention | DecodeAttention, case: PagedCase) -> tuple[Tensor, Tensor]:
    """Run with float32 outputs: a difference must not hide in bfloat16."""
    lse = torch.empty(case.q.shape[:2], device=case.q.device)
    out = torch.empty(case.q.shape, device=case.q.device)
    attention.run(case.q, case.layer, case.kv_page_indices, out=out, lse=lse)
    return out, lse


def flat_states(case: PagedCase) -> tuple[Tensor, Tensor]:
    attention = DecodeAttention(
        case.pages,
        **case.options,
    )
    attention.plan(case.kv_lens)
    return states(attention, case)


def all_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_the_shipped_tiles_are_as_accurate_as_eager_attention(name: str, page_size: int):
    for num_leaves in (8, 40):
        case = cuda_case(forest(page_size, num_leaves), name)

        attention = cascade(case)

        assert_close(attention.run(case.q, case.layer, case.kv_page_indices), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype):
    case = cuda_case(forest(64), dtype=dtype)

    assert_close(cascade(case).run(case.q, case.layer, case.kv_page_indices), case)


@pytest.mark.parametrize(("name", "page_size", "dtype", "q_dtype"), BIT_CASES, ids=BIT_IDS)
def test_tiles_and_runs_give_the_bits_of_flat_decode(
    name: str, page_size: int, dtype: torch.dtype, q_dtype: torch.dtype
):
    case = bit_case(name, page_size, dtype, q_dtype)
    expected = flat_states(case)

    assert_close(expected[0], case)
    for tile in (None, *tiles_for(case)):
        attention = cascade(case, tile=tile)
        for overlaps in (True, False):
            attention.overlaps = overlaps
            for _ in range(20):
                assert all_equal(states(attention, case), expected)
        assert all_equal(states(cascade(case, tile=tile, num_programs=1), case), expected)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-1b", "gemma"])
def test_inexact_tiles_are_as_accurate_as_eager_attention(name: str):
    for num_leaves in (8, 40):
        case = cuda_case(forest(64, num_leaves), name)

        attention = cascade(case, is_exact=False)

        assert_close(attention.run(case.q, case.layer, case.kv_page_indices), case)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("options", [{"soft_cap": 2.0}, {"sliding_window": 3000}], ids=str)
def test_a_soft_cap_and_a_window_give_the_bits_of_flat_decode(
    dtype: torch.dtype, page_size: int, options: dict[str, float]
):
    case = bit_case("llama-3-8b", page_size, dtype, BF16)
    flat = DecodeAttention(case.pages, **case.options, **options)
    flat.plan(case.kv_lens)
    expected = states(flat, case)

    assert_close(expected[0], case, **options)
    for tile in tiles_for(case):
        attention = cascade(case, tile=tile, **options)
        assert all_equal(states(attention, case), expected)


def test_graphs_replay_for_later_plans_of_their_kind():
    case = cuda_case(forest(64))
    attention = cascade(case)
    out = torch.empty_like(case.q)
    expected = attention.run(case.q, case.layer, case.kv_page_indices)
    shared, flat = attention.model, replace(attention.model, margin=0.0)
    graphs = {True: torch.cuda.CUDAGraph(), False: torch.cuda.CUDAGraph()}
    for model in (shared, flat):
        attention.model = model
        plan(attention, case)
        attention.run(case.q, case.layer, case.kv_page_indices)  # compiles
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[attention.num_shared_items > 0]):
            attention.run(case.q, case.layer, case.kv_page_indices, out=out)

    for model in (shared, flat, flat, shared, shared):
        attention.model = model
        plan(attention, case)
        out.fill_(float("nan"))
        graphs[attention.num_shared_items > 0].replay()
        assert (attention.num_shared_items > 0) == (model is shared)
        assert torch.equal(out, expected)


def test_pages_beyond_two_to_the_31_elements():
    tables = forest(64)
    case = cuda_case(tables)
    num_pages = 2**31 // case.pages[0].numel() + case.pages.shape[0] + 1
    pages = torch.empty((num_pages, *case.pages.shape[1:]), dtype=torch.bfloat16, device="cuda")
    shift = num_pages - case.pages.shape[0]
    pages[shift:] = case.pages
    far = replace(case, pages=pages, kv_page_indices=case.kv_page_indices + shift)

    for tile in tiles_for(case):
        assert all_equal(
            states(cascade(far, tile=tile), far), states(cascade(case, tile=tile), case)
        )
