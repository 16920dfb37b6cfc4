"""Every kernel as launched, compiled for Hopper: it fits, hardly spills, uses the right unit."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from attn_kernels.append.launch import rotate_and_append
from attn_kernels.decode.launch import DecodeAttention
from attn_kernels.elementwise.launch import rms_norm
from attn_kernels.pages.launch import copy_pages, gather_pages, scatter_pages
from attn_kernels.pages.launch_digest import digest_pages
from attn_kernels.prefill.launch import PrefillAttention
from tests.attn_kernels.sm90 import Compiled, compile_launch, launches_of
from tests.attn_kernels.sm90_limits import DECODE_SHAPES, check, check_decode, empty
from tests.attn_kernels.sm90_shapes import (
    ALWAYS,
    BF16,
    FP8,
    FP16,
    HEAD_DIMS,
    KERNELS,
    SHAPES,
    Shape,
    compiled_with,
)

INT32 = torch.int32
PREFILL_SHAPES = KERNELS["prefill"].covering(SHAPES)

PREFILL_SPILLS = {"32of32-d256-p1-float8_e4m3fn-q-bfloat16-window-cap-inexact": 112}


def only_launch(action: Callable[[], object]) -> Compiled:
    (launch,) = launches_of(action)
    return compile_launch(launch)


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


# Those that overlap are compiled beside a shared part (test_compile_cascade), in each run the one
# that is served.
@compiled_with([each for each in DECODE_SHAPES if not each.overlaps], always=ALWAYS[1:])
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


@compiled_with(PREFILL_SHAPES)
def test_prefill(shape: Shape):
    compiled = compile_prefill(shape)

    check(compiled, max_spill_bytes=PREFILL_SPILLS.get(str(shape), 0))
    if shape.dtype != torch.float32:
        assert "wgmma.mma_async" in compiled.ptx
        assert "mma.sync" not in compiled.ptx


def append(
    head_dim: int = 128,
    q_dtype: torch.dtype = BF16,
    dtype: torch.dtype | None = None,
    *,
    num_qo_heads: int = 32,
    num_kv_heads: int = 8,
    num_angles: int | None = None,
) -> torch.Tensor:
    """Rotate and append; `dtype` is of the pages, None the queries'."""
    ids = empty(4, dtype=torch.int64)
    angles = empty(9, head_dim // 2 if num_angles is None else num_angles, dtype=torch.float32)
    scale = empty(2, num_kv_heads, dtype=torch.float32)
    return rotate_and_append(
        empty(4, num_qo_heads, head_dim, dtype=q_dtype),
        empty(4, num_kv_heads, head_dim, dtype=q_dtype),
        empty(4, num_kv_heads, head_dim, dtype=q_dtype),
        empty(4, 2, 2, num_kv_heads, 64, head_dim, dtype=dtype or q_dtype),
        0,
        cos=angles,
        sin=angles,
        positions=ids,
        append_page=ids,
        append_offset=ids,
        **({"k_scale": scale, "v_scale": scale} if dtype == FP8 else {}),
    )


def norm(dtype: torch.dtype) -> object:
    weight = empty(4096, dtype=dtype)
    return rms_norm(empty(4, 4096, dtype=dtype), weight, 1e-5, residual=empty(4, 4096, dtype=dtype))


def small_launches() -> dict[str, Callable[[], object]]:
    ids = empty(4, dtype=torch.int64)
    pages = empty(4, 32, 2, 8, 64, 128)
    words = empty(4, 1 << 16, dtype=INT32)
    dtypes = {"bfloat16": BF16, "float16": FP16, "float32": torch.float32}
    of_dtype = {
        f"rms_norm_{dtype_name}": partial(norm, dtype) for dtype_name, dtype in dtypes.items()
    }
    of_head_dim = {
        f"rotate_and_append_d{head_dim}_{dtype_name}": partial(append, head_dim, dtype)
        for head_dim in HEAD_DIMS
        for dtype_name, dtype in dtypes.items()
    }
    to_fp8 = {
        f"rotate_and_append_d{head_dim}_{q_dtype}_to_fp8": partial(
            append, head_dim, dtypes[q_dtype], FP8
        )
        for head_dim in HEAD_DIMS
        for q_dtype in ("bfloat16", "float16")
    }
    return {
        **of_dtype,
        **of_head_dim,
        **to_fp8,
        "rotate_and_append_partial": lambda: append(num_angles=16),
        "rotate_and_append_partial_to_fp8": lambda: append(dtype=FP8, num_angles=16),
        "rotate_and_append_group_1": lambda: append(num_qo_heads=8),
        "rotate_and_append_group_7": lambda: append(num_qo_heads=28, num_kv_heads=4),
        "rotate_and_append_group_16": lambda: append(num_qo_heads=16, num_kv_heads=1),
        "rms_norm_wide": lambda: rms_norm(empty(4, 8192), empty(8192), 1e-5),
        "gather_pages": lambda: gather_pages(pages, ids, empty(4, 1 << 22)),
        "scatter_pages": lambda: scatter_pages(empty(4, 1 << 22), ids, pages),
        "copy_pages": lambda: copy_pages(pages, ids, ids),
        "digest_pages": lambda: digest_pages(words, ids, empty(2, 1 << 16, dtype=torch.int64)),
    }


# Each width of numbers with one head size in each run; the rest in thorough
RARELY = re.compile(r"_d(64|96|256)_|_float16")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if RARELY.search(name) else ())
        for name in small_launches()
    ],
)
def test_other_kernels(name: str):
    compiled = only_launch(small_launches()[name])

    check(compiled)
    if name in {"gather_pages", "scatter_pages", "copy_pages"}:
        assert "ld.global.v4.b32" in compiled.ptx, "copies in 16-byte vectors"
        assert "st.global.v4.b32" in compiled.ptx
