"""The shared part of cascade attention and decode beside it, compiled for Hopper."""

import numpy as np
import pytest
import torch

from attn_kernels.cascade import CascadeAttention, HopperSharedTile, SharedTile, shared_tile
from tests.attn_kernels.sm90 import Compiled, Launch, compile_launch, launches_of
from tests.attn_kernels.test_compile_sm90 import (
    BF16,
    FEW_SPILLS,
    FP8,
    FP8_CASCADE_SPILLS,
    FP16,
    IDS,
    MAX_SHARED_BYTES,
    PLAIN,
    SHAPES,
    Options,
    check,
    check_decode,
    empty,
    id_of,
    q_dtype,
    scales_of,
)

KV_LEN = 600  # of two requests with the same pages


def both_launches(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    max_requests: int,
    is_exact: bool = True,
    options: Options = PLAIN,
) -> tuple[CascadeAttention, Launch, Launch]:
    made: list[CascadeAttention] = []
    num_pages = -(-KV_LEN // page_size)
    pages = empty(num_pages, 2, 2, num_kv_heads, page_size, head_dim, dtype=dtype)
    max_rows = max_requests * num_qo_heads // num_kv_heads

    def launch() -> None:
        attention = CascadeAttention(
            pages,
            num_qo_heads=num_qo_heads,
            scale=0.1,
            max_requests=max_requests,
            max_kv_tokens=2 * KV_LEN,
            tile=shared_tile(pages, max_rows, is_hopper=True),
            is_exact=is_exact,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            **scales_of(pages),
        )
        attention.overlaps = True  # as on a GPU
        attention.model = attention.model.sharing_all()
        table = np.tile(np.arange(num_pages), 2)
        attention.plan([KV_LEN] * 2, np.array([0, num_pages]), table)
        made.append(attention)
        q = empty(2, num_qo_heads, head_dim, dtype=options.q_dtype or q_dtype(dtype))
        lse = empty(2, num_qo_heads, dtype=torch.float32) if options.has_lse else None
        attention.run(q, 0, empty(len(table), dtype=torch.int32), lse=lse)

    shared, decode = launches_of(launch)
    return made[0], shared, decode


def check_shared_part(
    compiled: Compiled,
    tile: SharedTile | HopperSharedTile,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    is_hopper, is_fp8 = isinstance(tile, HopperSharedTile), dtype == torch.float8_e4m3fn
    max_spill_bytes = FP8_CASCADE_SPILLS.get(head_dim, FEW_SPILLS) if is_fp8 else FEW_SPILLS
    check(compiled, max_spill_bytes=0 if is_hopper else max_spill_bytes)
    assert tile.programs_per_sm * (compiled.shared_bytes + 1024) <= MAX_SHARED_BYTES + 1024
    assert "griddepcontrol.launch_dependents" in compiled.ptx
    if dtype != torch.float32:
        assert "wgmma.mma_async" in compiled.ptx
        assert "mma.sync" not in compiled.ptx
        if is_hopper:
            assert not is_fp8
            assert "setmaxnreg" in compiled.ptx
            assert "cp.async.bulk.tensor" in compiled.ptx
        else:
            assert "cp.async.cg.shared.global" in compiled.ptx


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "inexact"])
@pytest.mark.parametrize("max_requests", [8, 256])
@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "dtype"), SHAPES, ids=IDS
)
def test_shared_part(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    max_requests: int,
    is_exact: bool,
):
    attention, shared, decode = both_launches(
        num_qo_heads, num_kv_heads, head_dim, page_size, dtype, max_requests, is_exact
    )

    check_shared_part(compile_launch(shared), attention.tile, head_dim, dtype)
    assert decode.options["launch_pdl"]


# For few requests, of whose rows Triton's kernel takes the shared part
SHARED_OPTION_SHAPES = [
    (32, 8, 128, 1, BF16, Options(soft_cap=30.0)),
    (5, 1, 64, 1, FP16, Options(sliding_window=1000, has_lse=True)),
    (40, 8, 96, 16, BF16, Options(soft_cap=30.0, has_lse=True)),
    (16, 8, 256, 1, FP16, Options(soft_cap=30.0)),
    (16, 8, 256, 32, BF16, Options(sliding_window=1000, has_lse=True)),
    (32, 8, 128, 1, FP8, Options(q_dtype=FP16, soft_cap=30.0)),
    (10, 2, 64, 128, FP8, Options(q_dtype=FP16, sliding_window=1000)),
    (16, 8, 256, 64, FP8, Options(q_dtype=FP16, soft_cap=30.0, has_lse=True)),
]


@pytest.mark.parametrize("shape", SHARED_OPTION_SHAPES, ids=id_of)
def test_both_launches_with_options(shape: tuple[int, int, int, int, torch.dtype, Options]):
    *heads_and_pages, dtype, options = shape
    _, _, head_dim, page_size = heads_and_pages

    attention, shared, decode = both_launches(
        *heads_and_pages, dtype, max_requests=8, options=options
    )

    check_shared_part(compile_launch(shared), attention.tile, head_dim, dtype)
    beside = compile_launch(decode)
    check_decode(beside, head_dim, page_size, dtype)
    assert beside.ptx.count("griddepcontrol.wait") == 2


# Groups of 9 to 16; bytes of spills of decode beside the shared part
WIDE_GROUP_SHAPES = [
    ((14, 1, 256, 128, BF16, Options(sliding_window=1000)), 1016),
    ((24, 2, 96, 1, BF16, Options(sliding_window=1000)), 136),
    ((12, 1, 128, 128, FP8, Options(soft_cap=30.0)), 136),
]


@pytest.mark.parametrize(
    ("shape", "spill_bytes"), WIDE_GROUP_SHAPES, ids=[id_of(each) for each, _ in WIDE_GROUP_SHAPES]
)
def test_both_launches_of_wide_groups(
    shape: tuple[int, int, int, int, torch.dtype, Options], spill_bytes: int
):
    *heads_and_pages, dtype, options = shape
    _, _, head_dim, page_size = heads_and_pages

    attention, shared, decode = both_launches(
        *heads_and_pages, dtype, max_requests=8, options=options
    )

    check_shared_part(compile_launch(shared), attention.tile, head_dim, dtype)
    beside = compile_launch(decode)
    check_decode(beside, head_dim, page_size, dtype, max_spill_bytes=spill_bytes)


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "inexact"])
@pytest.mark.parametrize(
    "shape",
    [
        (32, 8, 128, 32, BF16, Options(soft_cap=30.0)),
        (28, 4, 64, 128, FP16, Options(soft_cap=30.0)),
    ],
    ids=id_of,
)
def test_the_hopper_kernel_with_a_soft_cap(
    shape: tuple[int, int, int, int, torch.dtype, Options], is_exact: bool
):
    *heads_and_pages, dtype, options = shape

    attention, shared, _ = both_launches(
        *heads_and_pages, dtype, max_requests=256, is_exact=is_exact, options=options
    )

    assert isinstance(attention.tile, HopperSharedTile)
    check_shared_part(compile_launch(shared), attention.tile, heads_and_pages[2], dtype)


def test_decode_waits_for_the_shared_part_before_it_folds_and_before_it_ends():
    _, _, decode = both_launches(32, 8, 128, 64, BF16, 8)

    compiled = compile_launch(decode)

    check_decode(compiled, 128, 64, BF16)
    assert compiled.ptx.count("griddepcontrol.wait") == 2
