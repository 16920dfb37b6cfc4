"""What kernels compiled for sm_90 may spill and share, and what the decode kernel must be."""

import torch

from attn_kernels.decode.launch import decode_tile
from tests.attn_kernels.sm90 import Compiled
from tests.attn_kernels.sm90_shapes import FP8, KERNELS, SHAPES, Shape

MAX_SHARED_BYTES = 227 * 1024
DECODE_SHAPES = KERNELS["decode"].covering(SHAPES)

# Tiles converted from fp8 lie in registers, beside the states of a split and of its segment; with
# head_dim 256, a shape that works but is not tuned, many of them are spilled. Otherwise it is a few
# bytes a thread, in some shapes, under one of the versions of Triton or the other.
FEW_SPILLS = 56
FP8_DECODE_SPILLS = {256: 528}  # head_dim |-> bytes
FP8_CASCADE_SPILLS = {256: 272}
# What else spills more, in bytes: tiles of groups above eight have twice the columns, and heads of
# 256 twice those of 128.
DECODE_SPILLS = {
    "9of1-d128-p16-bfloat16": 64,
    "10of1-d128-p16-bfloat16-inexact": 96,
    "13of1-d128-p32-float16-window-cap-lse": 112,
    "28of2-d96-p128-float16-window-cap-lse-overlaps": 80,
    "6of1-d256-p16-float16-lse-overlaps": 232,
    "11of1-d256-p16-bfloat16-inexact-overlaps": 616,
    "16of1-d256-p32-float8_e4m3fn-q-float16-lse-overlaps": 544,
}


def check(compiled: Compiled, *, max_spill_bytes: int = 0) -> None:
    assert compiled.shared_bytes <= MAX_SHARED_BYTES
    spill_bytes = compiled.spill_bytes
    assert spill_bytes <= max_spill_bytes, f"{spill_bytes} bytes of local memory"


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def check_decode(compiled: Compiled, shape: Shape) -> None:
    """What any launch of the Triton kernel must be, also one beside a shared part."""
    is_fp8 = shape.dtype == FP8
    max_spill_bytes = FP8_DECODE_SPILLS.get(shape.head_dim, FEW_SPILLS) if is_fp8 else FEW_SPILLS
    check(compiled, max_spill_bytes=DECODE_SPILLS.get(str(shape), max_spill_bytes))
    programs = decode_tile(shape.pages(), is_hopper=False).programs_per_sm
    assert programs * (compiled.shared_bytes + 1024) <= MAX_SHARED_BYTES + 1024
    if shape.dtype != torch.float32:
        assert "wgmma.mma_async" in compiled.ptx
        assert "mma.sync" not in compiled.ptx
        # fp8 comes in 8 bytes a thread (Triton lays it out for products in half precision).
        copy = "cp.async.ca.shared.global" if is_fp8 else "cp.async.cg.shared.global"
        assert copy in compiled.ptx
        assert "cp.async.wait_group \t0;" not in _loop_of(compiled.ptx), "the pipeline drains"


def _loop_of(ptx: str) -> str:
    """The innermost loop that multiplies matrices: from the last label before its mma."""
    before = ptx.rindex("\n$L__BB", 0, ptx.index("wgmma.mma_async"))
    return ptx[before : ptx.index("bra", ptx.index("wgmma.mma_async"))]
