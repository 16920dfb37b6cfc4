"""The shared part of cascade attention and decode beside it, compiled for Hopper."""

import numpy as np
import torch

from attn_kernels.cascade.launch import (
    HOPPER_HEAD_DIMS,
    CascadeAttention,
    HopperSharedTile,
    SharedTile,
    shared_tile,
)
from attn_kernels.checks import HALF_DTYPES
from tests.attn_kernels.sm90 import Compiled, Launch, compile_launch, launches_of
from tests.attn_kernels.sm90_limits import (
    DECODE_SHAPES,
    FEW_SPILLS,
    FP8_CASCADE_SPILLS,
    MAX_SHARED_BYTES,
    check,
    check_decode,
    empty,
)
from tests.attn_kernels.sm90_shapes import (
    BF16,
    CAP,
    FP8,
    FP16,
    KERNELS,
    PLAIN_SHAPES,
    SHAPES,
    Shape,
    compiled_with,
)

FEW_ROWS_SHAPES = KERNELS["shared part"].covering(SHAPES)  # by Triton's kernel
# By the kernel for Hopper
MANY_ROWS_SHAPES = KERNELS["shared part on Hopper"].covering(
    [
        *(
            shape
            for shape in PLAIN_SHAPES
            if shape.dtype in HALF_DTYPES and shape.head_dim in HOPPER_HEAD_DIMS
        ),
        Shape(16, 1, 64, 16, BF16, None, CAP, is_exact=False),
        Shape(28, 4, 64, 16, BF16),
        Shape(4, 4, 64, 16, FP16, None, CAP),
        Shape(10, 2, 64, 32, FP16, is_exact=False),
        Shape(28, 4, 64, 64, FP16, None, CAP, is_exact=False),
        Shape(32, 8, 64, 128, FP16, None, CAP, is_exact=False),
        Shape(8, 8, 64, 128, FP16),
        Shape(24, 2, 64, 128, FP16),
        Shape(4, 4, 128, 32, FP16, None, CAP, is_exact=False),
        Shape(15, 1, 128, 32, FP16, is_exact=False),
    ]
)
KV_LEN = 600  # of two requests with the same pages


def both_launches(shape: Shape, max_requests: int) -> tuple[CascadeAttention, Launch, Launch]:
    made: list[CascadeAttention] = []
    num_pages = -(-KV_LEN // shape.page_size)
    pages = empty(num_pages, *shape.pages().shape[1:], dtype=shape.dtype)

    def launch() -> None:
        attention = CascadeAttention(
            pages,
            num_qo_heads=shape.num_qo_heads,
            scale=0.1,
            max_requests=max_requests,
            max_kv_tokens=2 * KV_LEN,
            tile=shared_tile(pages, max_requests * shape.group, is_hopper=True),
            is_exact=shape.is_exact,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            **shape.scales(),
        )
        attention.overlaps = True  # as on a GPU
        attention.model = attention.model.sharing_all()
        table = np.tile(np.arange(num_pages), 2)
        attention.plan([KV_LEN] * 2, np.array([0, num_pages]), table)
        made.append(attention)
        q = empty(2, shape.num_qo_heads, shape.head_dim, dtype=shape.q_dtype)
        lse = empty(2, shape.num_qo_heads, dtype=torch.float32) if shape.has_lse else None
        attention.run(q, 0, empty(len(table), dtype=torch.int32), lse=lse)

    shared, decode = launches_of(launch)
    return made[0], shared, decode


def check_shared_part(
    compiled: Compiled, tile: SharedTile | HopperSharedTile, shape: Shape
) -> None:
    is_fp8 = shape.dtype == FP8
    max_spill_bytes = FP8_CASCADE_SPILLS.get(shape.head_dim, FEW_SPILLS) if is_fp8 else FEW_SPILLS
    check(compiled, max_spill_bytes=0 if isinstance(tile, HopperSharedTile) else max_spill_bytes)
    assert tile.programs_per_sm * (compiled.shared_bytes + 1024) <= MAX_SHARED_BYTES + 1024
    assert "griddepcontrol.launch_dependents" in compiled.ptx
    if shape.dtype != torch.float32:
        assert "wgmma.mma_async" in compiled.ptx
        assert "mma.sync" not in compiled.ptx
        if isinstance(tile, HopperSharedTile):
            assert not is_fp8
            assert "setmaxnreg" in compiled.ptx
            assert "cp.async.bulk.tensor" in compiled.ptx
        else:
            assert "cp.async.cg.shared.global" in compiled.ptx


@compiled_with(FEW_ROWS_SHAPES)
def test_shared_part_of_few_rows(shape: Shape):
    attention, shared, decode = both_launches(shape, max_requests=8)

    check_shared_part(compile_launch(shared), attention.tile, shape)
    assert decode.options["launch_pdl"]


# What test_compile_sm90 leaves to this one, and what is served
@compiled_with([SHAPES[0], *(each for each in DECODE_SHAPES if each.overlaps)])
def test_decode_waits_for_the_shared_part_before_it_folds_and_before_it_ends(shape: Shape):
    _, _, decode = both_launches(shape, max_requests=8)

    compiled = compile_launch(decode)

    check_decode(compiled, shape)
    assert compiled.ptx.count("griddepcontrol.wait") == 2


@compiled_with(MANY_ROWS_SHAPES)
def test_shared_part_of_many_rows(shape: Shape):
    attention, shared, decode = both_launches(shape, max_requests=256)

    assert isinstance(attention.tile, HopperSharedTile)
    check_shared_part(compile_launch(shared), attention.tile, shape)
    assert decode.options["launch_pdl"]
