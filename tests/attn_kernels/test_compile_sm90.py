"""Every kernel as launched, compiled for Hopper: it fits, hardly spills, uses the right unit."""

from collections.abc import Callable
from dataclasses import dataclass
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

MAX_SHARED_BYTES = 227 * 1024
INT32 = torch.int32

# Llama-3-8B's shape first, then each head size, page size, group and dtype that ships.
SHAPES = [
    # num_qo_heads, num_kv_heads, head_dim, page_size, dtype of pages
    (32, 8, 128, 64, torch.bfloat16),
    (32, 8, 128, 16, torch.float16),
    (32, 8, 64, 32, torch.bfloat16),
    (40, 8, 96, 64, torch.bfloat16),
    (28, 4, 128, 128, torch.bfloat16),
    (16, 1, 128, 64, torch.bfloat16),
    (4, 4, 128, 64, torch.bfloat16),
    (16, 8, 256, 64, torch.bfloat16),
    (16, 8, 256, 16, torch.bfloat16),
    (32, 8, 128, 64, torch.float32),
    (32, 8, 128, 64, torch.float8_e4m3fn),
    (32, 8, 128, 16, torch.float8_e4m3fn),
    (32, 8, 64, 32, torch.float8_e4m3fn),
    (40, 8, 96, 64, torch.float8_e4m3fn),
    (16, 8, 256, 64, torch.float8_e4m3fn),
    (16, 8, 256, 16, torch.float8_e4m3fn),
    (64, 8, 128, 64, torch.bfloat16),
]
IDS = [
    f"{qo}of{kv}-d{dim}-p{page}-{str(dtype).removeprefix('torch.')}"
    for qo, kv, dim, page, dtype in SHAPES
]


# Tiles converted from fp8 lie in registers, beside the states of a split and of its segment; with
# head_dim 256, a shape that works but is not tuned, many of them are spilled. Otherwise it is a few
# bytes a thread, in some shapes, under one of the versions of Triton or the other.
FEW_SPILLS = 56
FP8_DECODE_SPILLS = {256: 528}  # head_dim |-> bytes
FP8_CASCADE_SPILLS = {256: 272}
FP8_WINDOWED_PREFILL_SPILLS = {256: 112}  # without a window, and of any other shape: none


def check(compiled: Compiled, *, max_spill_bytes: int = 0) -> None:
    assert compiled.shared_bytes <= MAX_SHARED_BYTES
    spill_bytes = compiled.spill_bytes
    assert spill_bytes <= max_spill_bytes, f"{spill_bytes} bytes of local memory"


def only_launch(action: Callable[[], object]) -> Compiled:
    (launch,) = launches_of(action)
    return compile_launch(launch)


def scales_of(pages: torch.Tensor) -> dict[str, torch.Tensor]:
    if pages.dtype != torch.float8_e4m3fn:
        return {}
    scale = empty(pages.shape[1], pages.shape[3], dtype=torch.float32)
    return {"k_scale": scale, "v_scale": scale}


def q_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What attention is made and run with beside its shape."""

    sliding_window: int | None = None
    soft_cap: float | None = None
    has_lse: bool = False
    q_dtype: torch.dtype | None = None  # None is the pages' own, or bfloat16 over fp8

    def __str__(self) -> str:
        names = [
            str(self.q_dtype).replace("torch.", "q-") if self.q_dtype else "",
            "window" if self.sliding_window else "",
            "cap" if self.soft_cap else "",
            "lse" if self.has_lse else "",
        ]
        return "-".join(filter(None, names))


PLAIN = Options()


def compile_decode(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    options: Options = PLAIN,
) -> Compiled:
    pages = empty(2, 2, 2, num_kv_heads, page_size, head_dim, dtype=dtype)

    def launch() -> None:
        attention = DecodeAttention(
            pages,
            num_qo_heads=num_qo_heads,
            scale=0.1,
            max_requests=1,
            max_kv_tokens=64,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            **scales_of(pages),
        )
        attention.plan([5])
        q = empty(1, num_qo_heads, head_dim, dtype=options.q_dtype or q_dtype(dtype))
        lse = empty(1, num_qo_heads, dtype=torch.float32) if options.has_lse else None
        attention.run(q, 0, empty(5, dtype=INT32), lse=lse)

    return only_launch(launch)


def check_decode(
    compiled: Compiled,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    *,
    max_spill_bytes: int = FEW_SPILLS,
) -> None:
    """What any launch of the Triton kernel must be, also one beside a shared part."""
    is_fp8 = dtype == torch.float8_e4m3fn
    if is_fp8:
        max_spill_bytes = FP8_DECODE_SPILLS.get(head_dim, max_spill_bytes)
    check(compiled, max_spill_bytes=max_spill_bytes)
    tile = decode_tile(empty(1, 1, 2, 1, page_size, head_dim, dtype=dtype), is_hopper=False)
    programs = tile.programs_per_sm
    assert programs * (compiled.shared_bytes + 1024) <= MAX_SHARED_BYTES + 1024
    if dtype != torch.float32:
        assert "wgmma.mma_async" in compiled.ptx
        assert "mma.sync" not in compiled.ptx
        # fp8 comes in 8 bytes a thread (Triton lays it out for products in half precision).
        copy = "cp.async.ca.shared.global" if is_fp8 else "cp.async.cg.shared.global"
        assert copy in compiled.ptx
        assert "cp.async.wait_group \t0;" not in _loop_of(compiled.ptx), "the pipeline drains"


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "dtype"), SHAPES, ids=IDS
)
def test_decode(
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
):
    compiled = compile_decode(num_qo_heads, num_kv_heads, head_dim, page_size, dtype)

    check_decode(compiled, head_dim, page_size, dtype)


# Each option, pages of one token and queries in float16 over fp8, with each head size and kind of
# pages: pairs of these rather than all combinations, for each costs a second or two.
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
OPTION_SHAPES = [
    (32, 8, 128, 1, BF16, Options(sliding_window=4096, soft_cap=30.0, has_lse=True)),
    (5, 1, 64, 16, FP16, Options(sliding_window=4096)),
    (6, 2, 96, 1, BF16, Options(soft_cap=30.0)),
    (16, 8, 256, 1, FP16, Options(has_lse=True)),
    (16, 8, 256, 32, BF16, Options(sliding_window=4096, soft_cap=30.0)),
    (32, 8, 128, 1, FP8, Options(q_dtype=FP16, sliding_window=4096)),
    (10, 2, 64, 128, FP8, Options(soft_cap=30.0, has_lse=True)),
    (40, 8, 96, 16, FP8, Options(q_dtype=FP16, soft_cap=30.0)),
    (16, 8, 256, 64, FP8, Options(q_dtype=FP16, sliding_window=4096, soft_cap=30.0, has_lse=True)),
    (32, 32, 256, 1, FP8, Options(sliding_window=4096, soft_cap=30.0)),
]


def id_of(shape: tuple[int, int, int, int, torch.dtype, Options]) -> str:
    qo, kv, dim, page, dtype, options = shape
    return f"{qo}of{kv}-d{dim}-p{page}-{str(dtype).removeprefix('torch.')}-{options}"


@pytest.mark.parametrize("shape", OPTION_SHAPES, ids=id_of)
def test_decode_with_options(shape: tuple[int, int, int, int, torch.dtype, Options]):
    _, _, head_dim, page_size, dtype, _ = shape

    check_decode(compile_decode(*shape), head_dim, page_size, dtype)


# Groups of 9 to 16, whose tiles have twice the columns, with each head size; bytes of spills
WIDE_GROUP_SHAPES = [
    ((16, 1, 64, 1, BF16, Options(sliding_window=4096, soft_cap=30.0, has_lse=True)), 0),
    ((28, 2, 96, 16, FP16, Options(soft_cap=30.0)), 136),
    ((18, 2, 128, 16, FP16, Options(soft_cap=30.0)), 136),
    ((16, 1, 128, 1, BF16, Options(sliding_window=4096, soft_cap=30.0, has_lse=True)), 136),
    ((11, 1, 256, 16, BF16, Options(sliding_window=4096, soft_cap=30.0, has_lse=True)), 1016),
    ((16, 1, 64, 32, FP8, Options(soft_cap=30.0)), 0),
    ((48, 4, 96, 1, FP8, Options(q_dtype=FP16, soft_cap=30.0)), 136),
    ((15, 1, 128, 16, FP8, Options(q_dtype=FP16, soft_cap=30.0)), 136),
    ((16, 1, 256, 64, FP8, Options(sliding_window=4096, soft_cap=30.0, has_lse=True)), 528),
]


@pytest.mark.parametrize(
    ("shape", "spill_bytes"), WIDE_GROUP_SHAPES, ids=[id_of(each) for each, _ in WIDE_GROUP_SHAPES]
)
def test_decode_of_wide_groups(
    shape: tuple[int, int, int, int, torch.dtype, Options], spill_bytes: int
):
    _, _, head_dim, page_size, dtype, _ = shape

    compiled = compile_decode(*shape)

    check_decode(compiled, head_dim, page_size, dtype, max_spill_bytes=spill_bytes)


def compile_prefill(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    options: Options = PLAIN,
) -> Compiled:
    pages = empty(2, 2, 2, num_kv_heads, page_size, head_dim, dtype=dtype)

    def launch() -> None:
        attention = PrefillAttention(
            pages,
            num_qo_heads=num_qo_heads,
            scale=0.1,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            **scales_of(pages),
        )
        attention.plan([5], [5])
        q = empty(5, num_qo_heads, head_dim, dtype=options.q_dtype or q_dtype(dtype))
        lse = empty(5, num_qo_heads, dtype=torch.float32) if options.has_lse else None
        attention.run(q, 0, empty(2, dtype=INT32), empty(5, dtype=INT32), lse=lse)

    return only_launch(launch)


def check_prefill(compiled: Compiled, dtype: torch.dtype, *, max_spill_bytes: int = 0) -> None:
    check(compiled, max_spill_bytes=max_spill_bytes)
    if dtype != torch.float32:
        assert "wgmma.mma_async" in compiled.ptx
        assert "mma.sync" not in compiled.ptx


WINDOWED = [0, 2, 8, 10]  # shapes to compile with a sliding window too: it adds a loop
PREFILL_SHAPES = [(*shape, None) for shape in SHAPES] + [(*SHAPES[i], 4096) for i in WINDOWED]
PREFILL_IDS = IDS + [f"{IDS[i]}-window" for i in WINDOWED]


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "dtype", "sliding_window"),
    PREFILL_SHAPES,
    ids=PREFILL_IDS,
)
def test_prefill(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
):
    options = Options(sliding_window=sliding_window)

    compiled = compile_prefill(num_qo_heads, num_kv_heads, head_dim, page_size, dtype, options)

    check_prefill(compiled, dtype)


@pytest.mark.parametrize("shape", OPTION_SHAPES, ids=id_of)
def test_prefill_with_options(shape: tuple[int, int, int, int, torch.dtype, Options]):
    _, _, head_dim, _, dtype, options = shape
    max_spill_bytes = 0
    if dtype == FP8 and options.sliding_window is not None:
        max_spill_bytes = FP8_WINDOWED_PREFILL_SPILLS.get(head_dim, 0)

    check_prefill(compile_prefill(*shape), dtype, max_spill_bytes=max_spill_bytes)


# The most registers of prefill; bytes of spills
LARGE_WINDOWED_SHAPES = [
    ((2, 1, 256, 32, BF16, Options(sliding_window=4096, has_lse=True)), 16),
    ((56, 4, 256, 128, FP8, Options(sliding_window=4096)), 128),
]


@pytest.mark.parametrize(
    ("shape", "spill_bytes"),
    LARGE_WINDOWED_SHAPES,
    ids=[id_of(each) for each, _ in LARGE_WINDOWED_SHAPES],
)
def test_prefill_of_large_heads_within_a_window(
    shape: tuple[int, int, int, int, torch.dtype, Options], spill_bytes: int
):
    check_prefill(compile_prefill(*shape), shape[4], max_spill_bytes=spill_bytes)


def small_launches() -> dict[str, Callable[[], object]]:
    ids = empty(4, dtype=torch.int64)
    pages = empty(4, 32, 2, 8, 64, 128)
    words = empty(4, 1 << 16, dtype=INT32)

    def append(
        num_angles: int, pages: torch.Tensor = pages, dtype: torch.dtype = BF16
    ) -> torch.Tensor:
        head_dim = pages.shape[5]
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
            **scales_of(pages),
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
        "rotate_and_append_fp8": lambda: append(64, pages.to(torch.float8_e4m3fn)),
        "rotate_and_append_partial_fp8": lambda: append(16, pages.to(torch.float8_e4m3fn)),
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
