"""The shared part of cascade attention and decode beside it, compiled for Hopper."""

import numpy as np
import pytest
import torch

from attn_kernels.cascade import CascadeAttention, HopperSharedTile, shared_tile
from tests.attn_kernels.sm90 import Launch, compile_launch, launches_of
from tests.attn_kernels.test_compile_sm90 import (
    FEW_SPILLS,
    FP8_CASCADE_SPILLS,
    IDS,
    MAX_SHARED_BYTES,
    SHAPES,
    check,
    empty,
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
) -> tuple[CascadeAttention, Launch, Launch]:
    made: list[CascadeAttention] = []
    pages = empty(2, 2, 2, num_kv_heads, page_size, head_dim, dtype=dtype)
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
            **scales_of(pages),
        )
        attention.overlaps = True  # as on a GPU
        attention.model = attention.model.sharing_all()
        table = np.arange(-(-KV_LEN // page_size))
        attention.plan([KV_LEN] * 2, np.array([0, len(table)]), np.concatenate((table, table)))
        made.append(attention)
        q = empty(1, num_qo_heads, head_dim, dtype=q_dtype(dtype))
        attention.run(q, 0, empty(1, dtype=torch.int32))

    shared, decode = launches_of(launch)
    return made[0], shared, decode


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

    compiled = compile_launch(shared)

    is_fp8 = dtype == torch.float8_e4m3fn
    max_spill_bytes = FP8_CASCADE_SPILLS.get(head_dim, FEW_SPILLS) if is_fp8 else FEW_SPILLS
    if isinstance(attention.tile, HopperSharedTile):
        max_spill_bytes = 0
    check(compiled, max_spill_bytes=max_spill_bytes)
    programs = attention.tile.programs_per_sm
    assert programs * (compiled.shared_bytes + 1024) <= MAX_SHARED_BYTES + 1024
    assert "griddepcontrol.launch_dependents" in compiled.ptx
    assert decode.options["launch_pdl"]
    if dtype != torch.float32:
        assert "wgmma.mma_async" in compiled.ptx
        assert "mma.sync" not in compiled.ptx
        if isinstance(attention.tile, HopperSharedTile):
            assert not is_fp8
            assert "setmaxnreg" in compiled.ptx
            assert "cp.async.bulk.tensor" in compiled.ptx
        else:
            assert "cp.async.cg.shared.global" in compiled.ptx


def test_decode_waits_for_the_shared_part_before_it_folds_and_before_it_ends():
    _, _, decode = both_launches(32, 8, 128, 64, torch.bfloat16, 8)

    assert compile_launch(decode).ptx.count("griddepcontrol.wait") == 2
