"""The decode kernel for Hopper: compiled on any host; on a GPU its bits are the Triton twin's."""

import pytest
import torch
from torch import Tensor

from attn_kernels.decode.launch import DecodeAttention, DecodeTile, HopperDecodeTile, decode_tile
from attn_kernels.decode.plan import SplitRule
from tests.attn_kernels.paged_case import PagedCase, assert_close, make_case, quantized
from tests.attn_kernels.sm90 import compile_launch, launches_of
from tests.attn_kernels.sm90_shapes import (
    ALWAYS,
    BF16,
    CAP,
    FP8,
    FP16,
    WINDOW,
    Shape,
    compiled_with,
)

MAX_SHARED_BYTES = 227 * 1024
RESERVED_BYTES = 1024  # of a program, for the system
TWIN = DecodeTile(block_n=64, num_warps=4, num_stages=3, programs_per_sm=2)

SHAPES = [
    Shape(32, 8, 128, 64, BF16),
    Shape(28, 4, 128, 128, BF16),
    Shape(16, 1, 128, 64, FP16),
    Shape(4, 4, 128, 64, BF16),
    Shape(32, 8, 64, 64, BF16),
    Shape(10, 2, 64, 128, FP16),
    Shape(64, 8, 128, 64, BF16),
    Shape(32, 8, 128, 64, FP8),
    Shape(10, 2, 64, 128, FP8),
]
ALL_OPTIONS = Shape(32, 8, 128, 64, FP16, WINDOW, CAP, has_lse=True, overlaps=True)
# With the rest of the pairs of head size, page size, dtypes, kind of group, options and tile
COMPILED_SHAPES = [
    *SHAPES,
    Shape(16, 1, 64, 128, FP8, WINDOW, CAP, has_lse=True, over_fp8=FP16, overlaps=True),
    ALL_OPTIONS,
    Shape(28, 4, 128, 64, FP8, has_lse=True, over_fp8=FP16, overlaps=True),
    Shape(8, 8, 128, 128, FP8, WINDOW, CAP, overlaps=True),
    Shape(28, 4, 128, 128, BF16, WINDOW, CAP, has_lse=True),
    Shape(24, 2, 128, 128, BF16, overlaps=True),
    Shape(4, 4, 64, 64, FP8, None, CAP, has_lse=True, over_fp8=FP16),
    Shape(16, 8, 64, 128, FP8, WINDOW, over_fp8=FP16),
    Shape(48, 4, 128, 128, FP8, WINDOW, CAP, has_lse=True),
    Shape(32, 32, 128, 64, FP16, WINDOW, CAP, overlaps=True),
    Shape(6, 1, 128, 64, BF16, None, CAP, has_lse=True, overlaps=True),
]
# One token, borders of tiles, splits and segments and their neighbours, none, and many at once.
KV_LENS = [1, 64, 63, 0, 65, 256, 257, 255, 2048, 2049, 5000, 700, 1, 3000, 12_345, 130]

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="no Hopper GPU",
)


def is_twin_of(case: PagedCase, num_programs: int | None = None, **options: object) -> None:
    """Run both kernels with outputs in float32 and compare all bits."""
    twins = states(case, TWIN, num_programs, **options)
    for tile in {decode_tile(case.pages), decode_tile(case.pages, beside_shared=True)}:
        assert isinstance(tile, HopperDecodeTile)
        results = states(case, tile, num_programs, **options)
        assert all(map(torch.equal, results, twins))


def states(
    case: PagedCase,
    tile: DecodeTile | HopperDecodeTile,
    num_programs: int | None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    attention = DecodeAttention(
        case.pages,
        **case.options,
        tile=tile,
        num_programs=num_programs,
        **options,
    )
    attention.plan(case.kv_lens)
    lse = torch.empty(case.q.shape[:2], device="cuda")
    out = torch.empty(case.q.shape, device="cuda")
    attention.run(case.q, case.layer, case.kv_page_indices, out=out, lse=lse)
    return out, lse


def cuda_case(kv_lens: list[int], shape: Shape) -> PagedCase:
    case = make_case(
        [1] * len(kv_lens),
        kv_lens,
        num_qo_heads=shape.num_qo_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        dtype=shape.q_dtype,
        device="cuda",
    )
    return quantized(case, shape.q_dtype) if shape.dtype == FP8 else case


@compiled_with(COMPILED_SHAPES, [*ALWAYS, ALL_OPTIONS])
def test_programs_fit_a_multiprocessor_and_nothing_spills(shape: Shape):
    pages = shape.pages()
    tile = decode_tile(pages, is_hopper=True, beside_shared=shape.overlaps)

    def launch() -> None:
        attention = DecodeAttention(
            pages,
            num_qo_heads=shape.num_qo_heads,
            scale=0.1,
            max_requests=1,
            max_kv_tokens=64,
            tile=tile,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            **shape.scales(),
        )
        q = torch.empty(1, shape.num_qo_heads, shape.head_dim, dtype=shape.q_dtype)
        lse = torch.empty(1, shape.num_qo_heads) if shape.has_lse else None
        table = torch.empty(1, dtype=torch.int32)
        attention.launch(q, 0, table, torch.empty_like(q), lse, overlaps=shape.overlaps)

    (launched,) = launches_of(launch)
    compiled = compile_launch(launched)

    assert launched.kernel.__name__ == "paged_decode_hopper_kernel"
    assert compiled.spill_bytes == 0
    assert tile.programs_per_sm * (compiled.shared_bytes + RESERVED_BYTES) <= (
        MAX_SHARED_BYTES + RESERVED_BYTES
    )
    assert "wgmma.mma_async" in compiled.ptx
    assert compiled.ptx.count("griddepcontrol.wait") == (2 if shape.overlaps else 1)
    assert "mma.sync" not in compiled.ptx
    assert "cp.async.bulk.tensor.4d" in compiled.ptx


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_the_twins_and_results_the_references(shape: Shape):
    case = cuda_case(KV_LENS, shape)

    is_twin_of(case)
    is_twin_of(case, num_programs=shape.num_kv_heads * 3)  # few lanes of many items

    out, lse = states(case, decode_tile(case.pages), None)
    assert_close(out, case, lse=lse)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 100}, {"sliding_window": 1000}, {"soft_cap": 20.0}],
    ids=["window-100", "window-1000", "soft-cap"],
)
def test_masks_give_the_twins_bits(options: dict[str, float]):
    case = cuda_case(KV_LENS, SHAPES[0])

    is_twin_of(case, **options)
    is_twin_of(case, num_programs=16, **options)


@pytest.mark.gpu
@on_hopper
def test_items_that_begin_within_a_segment_give_the_twins_bits():
    case = cuda_case([9000, 40, 20_000], SHAPES[0])

    is_twin_of(case)
    is_twin_of(case, rule=SplitRule(split_len=128, splits_per_segment=4))
