"""Every kernel as launched, compiled for Hopper: it fits, hardly spills, uses the right unit."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from attn_kernels.append import rotate_and_append
from attn_kernels.decode import DecodeAttention, decode_tile
from attn_kernels.digest import digest_pages
from attn_kernels.elementwise import rms_norm, silu_mul
from attn_kernels.merge import merge_states
from attn_kernels.pages import copy_pages, gather_pages, scatter_pages
from attn_kernels.prefill import PrefillAttention
from tests.attn_kernels.sm90 import Compiled, compile_launch, launches_of
from tests.attn_kernels.sm90_shapes import BF16, FP8, FP16, SHAPES, Shape

MAX_SHARED_BYTES = 227 * 1024
INT32 = torch.int32

# Tiles converted from fp8 lie in registers, beside the states of a split and of its segment; with
# head_dim 256, a shape that works but is not tuned, many of them are spilled. Otherwise it is a few
# bytes a thread, in some shapes, under one of the versions of Triton or the other.
FEW_SPILLS = 56
FP8_DECODE_SPILLS = {256: 528}  # head_dim |-> bytes
FP8_CASCADE_SPILLS = {256: 272}
# What else spills more, in bytes: tiles of groups above eight have twice the columns, and heads of
# 256 twice those of 128.
DECODE_SPILLS = {
    "28of2-d96-p128-float16-window-cap-lse-overlaps": 80,
    "6of1-d256-p16-float16-lse-overlaps": 232,
    "11of1-d256-p16-bfloat16-inexact-overlaps": 616,
    "16of1-d256-p32-float8_e4m3fn-q-float16-lse-overlaps": 544,
}
PREFILL_SPILLS = {"32of32-d256-p1-float8_e4m3fn-q-bfloat16-window-cap-inexact": 112}


def check(compiled: Compiled, *, max_spill_bytes: int = 0) -> None:
    assert compiled.shared_bytes <= MAX_SHARED_BYTES
    spill_bytes = compiled.spill_bytes
    assert spill_bytes <= max_spill_bytes, f"{spill_bytes} bytes of local memory"


def only_launch(action: Callable[[], object]) -> Compiled:
    (launch,) = launches_of(action)
    return compile_launch(launch)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def compile_decode(shape: Shape) -> Compiled:
    def launch() -> None:
        attention = DecodeAttention(
            shape.pages(),
            num_qo_heads=shape.num_qo_heads,
            scale=0.1,
            max_requests=1,
            max_kv_tokens=64,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            **shape.scales(),
        )
        attention.plan([5])
        q = empty(1, shape.num_qo_heads, shape.head_dim, dtype=shape.q_dtype)
        lse = empty(1, shape.num_qo_heads, dtype=torch.float32) if shape.has_lse else None
        attention.run(q, 0, empty(5, dtype=INT32), lse=lse)

    return only_launch(launch)


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


# Those that overlap are compiled beside a shared part (test_compile_cascade).
@pytest.mark.parametrize("shape", [each for each in SHAPES if not each.overlaps], ids=str)
def test_decode(shape: Shape):
    check_decode(compile_decode(shape), shape)


def compile_prefill(shape: Shape) -> Compiled:
    def launch() -> None:
        attention = PrefillAttention(
            shape.pages(),
            num_qo_heads=shape.num_qo_heads,
            scale=0.1,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            **shape.scales(),
        )
        attention.plan([5], [5])
        q = empty(5, shape.num_qo_heads, shape.head_dim, dtype=shape.q_dtype)
        lse = empty(5, shape.num_qo_heads, dtype=torch.float32) if shape.has_lse else None
        attention.run(q, 0, empty(2, dtype=INT32), empty(5, dtype=INT32), lse=lse)

    return only_launch(launch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill(shape: Shape):
    compiled = compile_prefill(shape)

    check(compiled, max_spill_bytes=PREFILL_SPILLS.get(str(shape), 0))
    if shape.dtype != torch.float32:
        assert "wgmma.mma_async" in compiled.ptx
        assert "mma.sync" not in compiled.ptx


def small_launches() -> dict[str, Callable[[], object]]:
    ids = empty(4, dtype=torch.int64)
    pages = empty(4, 32, 2, 8, 64, 128)
    words = empty(4, 1 << 16, dtype=INT32)

    def append(
        num_angles: int, pages: torch.Tensor = pages, dtype: torch.dtype = BF16
    ) -> torch.Tensor:
        head_dim = pages.shape[5]
        scale = empty(32, 8, dtype=torch.float32)
        scales = {"k_scale": scale, "v_scale": scale} if pages.dtype == FP8 else {}
        return rotate_and_append(
            empty(4, 32, head_dim, dtype=dtype),
            empty(4, 8, head_dim, dtype=dtype),
            empty(4, 8, head_dim, dtype=dtype),
            pages,
            0,
            cos=empty(9, num_angles, dtype=torch.float32),
            sin=empty(9, num_angles, dtype=torch.float32),
            positions=ids,
            append_page=ids,
            append_offset=ids,
            **scales,
        )

    def merge(head_dim: int, dtype: torch.dtype = BF16) -> object:
        lses = empty(3, 4, 32, dtype=torch.float32)
        return merge_states(empty(3, 4, 32, head_dim, dtype=dtype), lses)

    of_head_dim = {
        f"{name}_d{head_dim}": partial(launch, head_dim)
        for head_dim in (64, 96, 256)
        for name, launch in (
            ("merge", merge),
            ("rotate_and_append", lambda size: append(size // 2, empty(4, 2, 2, 8, 64, size))),
        )
    }
    return {
        **of_head_dim,
        "merge": lambda: merge(128),
        "merge_float16": lambda: merge(128, FP16),
        "merge_float32": lambda: merge(128, torch.float32),
        "rotate_and_append_float16": lambda: append(64, pages.to(FP16), FP16),
        "rotate_and_append_float32": lambda: append(64, pages.float(), torch.float32),
        "rotate_and_append": lambda: append(64),
        "rotate_and_append_partial": lambda: append(16),
        "rotate_and_append_fp8": lambda: append(64, pages.to(FP8)),
        "rotate_and_append_partial_fp8": lambda: append(16, pages.to(FP8)),
        "rotate_and_append_float16_to_fp8": lambda: append(64, pages.to(FP8), FP16),
        "rms_norm": lambda: rms_norm(empty(4, 4096), empty(4096), 1e-5, residual=empty(4, 4096)),
        "rms_norm_wide": lambda: rms_norm(empty(4, 8192), empty(8192), 1e-5),
        "silu_mul": lambda: silu_mul(empty(4, 14336), empty(4, 14336)),
        "gather_pages": lambda: gather_pages(pages, ids, empty(4, 1 << 22)),
        "scatter_pages": lambda: scatter_pages(empty(4, 1 << 22), ids, pages),
        "copy_pages": lambda: copy_pages(pages, ids, ids),
        "digest_pages": lambda: digest_pages(words, ids, empty(2, 1 << 16, dtype=torch.int64)),
    }


@pytest.mark.parametrize("name", small_launches())
def test_other_kernels(name: str):
    compiled = only_launch(small_launches()[name])

    check(compiled)
    if name in {"gather_pages", "scatter_pages", "copy_pages"}:
        assert "ld.global.v4.b32" in compiled.ptx, "copies in 16-byte vectors"
        assert "st.global.v4.b32" in compiled.ptx


def _loop_of(ptx: str) -> str:
    """The innermost loop that multiplies matrices: from the last label before its mma."""
    before = ptx.rindex("\n$L__BB", 0, ptx.index("wgmma.mma_async"))
    return ptx[before : ptx.index("bra", ptx.index("wgmma.mma_async"))]
