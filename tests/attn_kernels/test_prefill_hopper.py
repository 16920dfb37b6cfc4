"""The prefill kernel for Hopper: emulated and compiled on any host, run on a GPU."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from attn_kernels.errors import ShapeError, StrideError
from attn_kernels.prefill import bodies_hopper, launch_hopper
from attn_kernels.prefill.launch import PrefillAttention
from attn_kernels.prefill.launch_hopper import HopperTile
from attn_kernels.prefill.launch_triton import PrefillTile
from attn_kernels.prefill.plan import PrefillCapacity
from tests.attn_kernels.paged_case import PagedCase, assert_close, make_case
from tests.attn_kernels.sm90 import Compiled, compile_launch, launches_of
from tests.attn_kernels.sm90_shapes import BF16, FP16, KERNELS, WINDOW, Shape, compiled_with
from tests.support.gluon_emulator import DeadlockError, HazardError, edited, emulated

MAX_SHARED_BYTES = 227 * 1024
MAX_SPILL_BYTES = 16  # a scalar or two of the start: warps begin with few registers
NUM_WARPS = 12  # two warpgroups that multiply, and one of which a warp copies
MMA_SHAPES = {64: "m64n64k16", 128: "m64n128k16"}

SHAPES = [
    Shape(32, 8, 128, 64, BF16, has_lse=True),
    Shape(32, 8, 128, 64, BF16, WINDOW),
    Shape(28, 4, 128, 16, BF16, has_lse=True),
    Shape(5, 1, 128, 32, FP16, 100),
    Shape(4, 4, 128, 128, BF16, has_lse=True),
    Shape(32, 8, 64, 64, BF16, has_lse=True),
    Shape(8, 1, 64, 16, FP16, 100),
]
# With the rest of the pairs of head size, page size, dtype, kind of group and options
COMPILED_SHAPES = KERNELS["prefill on Hopper"].covering(
    [
        Shape(32, 8, 128, 64, BF16),
        *SHAPES,
        Shape(16, 1, 64, 32, BF16),
        Shape(28, 4, 64, 64, BF16, WINDOW, has_lse=True),
        Shape(10, 2, 64, 128, BF16),
        Shape(8, 8, 128, 16, BF16, has_lse=True),
        Shape(4, 4, 64, 32, FP16, WINDOW, has_lse=True),
        Shape(32, 8, 64, 32, FP16, has_lse=True),
        Shape(32, 32, 64, 64, FP16),
        Shape(24, 2, 64, 64, FP16, WINDOW, has_lse=True),
        Shape(11, 1, 64, 128, FP16, WINDOW, has_lse=True),
        Shape(16, 8, 64, 128, FP16, WINDOW),
        Shape(16, 1, 128, 16, FP16, WINDOW),
    ]
)
# Chunks whose tiles of rows see one, two, three and more tiles of keys, and that end within a tile,
# and one without new tokens.
QO_LENS = [1, 15, 130, 200, 0, 7, 257, 129, 300, 33]
KV_LENS = [1, 300, 130, 1000, 64, 40, 257, 384, 300, 161]

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="no Hopper GPU",
)


def case_of(
    qo_lens: list[int], kv_lens: list[int], shape: Shape, device: str = "cuda"
) -> PagedCase:
    return make_case(
        qo_lens,
        kv_lens,
        num_qo_heads=shape.num_qo_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        dtype=shape.dtype,
        device=device,
    )


def planned(
    case: PagedCase, window: int | None = None, *, tile: HopperTile | None = None
) -> PrefillAttention:
    attention = PrefillAttention(
        case.pages,
        num_qo_heads=case.num_qo_heads,
        scale=case.scale,
        sliding_window=window,
        tile=tile,
    )
    assert isinstance(attention.tile, HopperTile), "the shipped choice on this GPU"
    attention.plan(case.qo_lens, case.kv_lens)
    return attention


def run(
    attention: PrefillAttention, case: PagedCase, *, lse: torch.Tensor | None = None
) -> torch.Tensor:
    tables = (case.kv_page_indptr, case.kv_page_indices)
    return attention.run(case.q, case.layer, *tables, lse=lse)


def prefill(
    case: PagedCase, window: int | None = None, *, tile: HopperTile | None = None
) -> torch.Tensor:
    return run(planned(case, window, tile=tile), case)


def emulate(
    case: PagedCase,
    window: int | None = None,
    *,
    lse: torch.Tensor | None = None,
    tile: HopperTile | None = None,
    seed: int = 0,
) -> torch.Tensor:
    with emulated(seed):
        return run(planned(case, window, tile=tile or HopperTile()), case, lse=lse)


def small(qo_lens: list[int], kv_lens: list[int], shape: Shape) -> PagedCase:
    return case_of(qo_lens, kv_lens, shape, "cpu")


# Rows of one, two and several tiles, which see one and several tiles of keys and end within one
FEW_QO_LENS, FEW_KV_LENS = [1, 40, 0, 70, 7], [300, 40, 9, 270, 128]
FEW = Shape(4, 1, 64, 32, BF16)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 2, 128, 64, BF16, has_lse=True),
        Shape(7, 1, 128, 16, BF16, has_lse=True),
        Shape(5, 1, 64, 32, FP16, 100),
        Shape(2, 2, 64, 128, BF16, 30, has_lse=True),
    ],
    ids=str,
)
def test_the_emulated_kernel_is_as_accurate_as_eager_attention(shape: Shape):
    case = small(FEW_QO_LENS, FEW_KV_LENS, shape)
    lse = torch.empty(case.q.shape[:2]) if shape.has_lse else None

    out = emulate(case, shape.sliding_window, lse=lse)

    assert_close(out, case, shape.sliding_window, lse=lse)


@pytest.mark.parametrize("window", [None, 100])
def test_no_order_of_events_and_no_number_of_programs_changes_a_bit(
    window: int | None, monkeypatch: pytest.MonkeyPatch
):
    case = small(FEW_QO_LENS, FEW_KV_LENS, FEW)
    expected = emulate(case, window)

    for seed, num_programs in enumerate((1, 2, 3, 50), 1):
        monkeypatch.setattr(launch_hopper, "programs_for", lambda *_, n=num_programs: n)
        assert torch.equal(emulate(case, window, seed=seed), expected)
    assert torch.equal(emulate(case, window, tile=HopperTile(k_stages=3, v_stages=3)), expected)


def test_a_token_has_the_same_bits_however_its_prompt_was_cut():
    num_tokens = 290
    whole = small([num_tokens], [num_tokens], FEW)
    expected = emulate(whole)

    for first in (0, 127, 128, 129, 200, num_tokens - 1):
        cut = replace(whole, q=whole.q[first:].contiguous(), qo_lens=[num_tokens - first])
        assert torch.equal(emulate(cut), expected[first:])


# Each of them is needed, and the emulation sees it if one is not there.
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("copy_keys_and_values", "mbarrier.wait(k_empty.index(stage), phase ^ 1)", "pass"),
        ("copy_keys_and_values", "mbarrier.wait(v_empty.index(stage), phase ^ 1)", "pass"),
        ("attend", "mbarrier.wait(k_full.index(0), 0)", "pass"),
        ("attend", "mbarrier.wait(v_full.index(value_stage), value_phase)", "pass"),
        ("attend", "async_copy.wait_group(0)\n            fence", "fence"),
        ("attend", "    async_copy.wait_group(0)\n    fence_async_shared()\n", "    pass\n"),
        (
            "attend",
            "fence_async_shared()\n            mbarrier",
            "mbarrier",
        ),
        (
            "attend",
            "            s = warpgroup_mma_wait(1, deps=[s])\n"
            "            mbarrier.arrive(k_empty.index(stage), count=1)\n"
            "            if",
            "            if",
        ),
        (
            "attend",
            "mbarrier.arrive(v_empty.index(value_stage), count=1)\n            acc = acc *",
            "acc = acc *",
        ),
        ("attend", "clear_tail(v_parts, value_stage, tail, BLOCK_N, HALVES)", "pass"),
        ("attend", "    if WARPGROUP == 1:\n        pass_turn(1)\n", ""),
        ("attend", "q_bufs.index((index + 1) % 2)", "q_bufs.index(index % 2)"),
    ],
)
def test_the_emulation_sees_what_the_kernel_forgets(
    monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str
):
    case = small(FEW_QO_LENS, FEW_KV_LENS, FEW)
    monkeypatch.setattr(launch_hopper, "programs_for", lambda *_: 2)
    expected = emulated_in_any_order()

    def is_right(seed: int) -> bool:
        try:
            return torch.equal(emulate(case, seed=seed), expected)
        except (DeadlockError, HazardError):
            return False

    monkeypatch.setattr(bodies_hopper, name, edited(getattr(bodies_hopper, name), old, new))
    assert not all(map(is_right, range(3)))


@cache
def emulated_in_any_order() -> torch.Tensor:
    """Return what the right kernel computes, with two programs, in each order that is tried."""
    case = small(FEW_QO_LENS, FEW_KV_LENS, FEW)
    first, *others = (emulate(case, seed=seed) for seed in range(3))
    assert all(torch.equal(other, first) for other in others)
    return first


def compiled(shape: Shape) -> Compiled:
    q = torch.empty(5, shape.num_qo_heads, shape.head_dim, dtype=shape.dtype)
    lse = torch.empty(5, shape.num_qo_heads) if shape.has_lse else None

    def launch() -> None:
        attention = PrefillAttention(
            shape.pages(),
            num_qo_heads=shape.num_qo_heads,
            scale=0.1,
            sliding_window=shape.sliding_window,
            tile=HopperTile(),
        )
        attention.plan([5], [5])
        table = torch.zeros(2, dtype=torch.int32)
        attention.run(q, 0, table, table, lse=lse)

    (only,) = launches_of(launch)
    return compile_launch(only)


in_turn = pytest.mark.xdist_group("prefill on Hopper")  # the first shape is compiled once


@in_turn
@compiled_with(COMPILED_SHAPES)
def test_the_kernel_fits_and_uses_the_units_that_make_it_fast(shape: Shape):
    result = compiled(shape)

    assert result.shared_bytes <= MAX_SHARED_BYTES
    assert result.spill_bytes <= MAX_SPILL_BYTES, f"{result.spill_bytes} bytes of local memory"
    assert result.registers * NUM_WARPS * 32 <= 65_536
    assert f"wgmma.mma_async.sync.aligned.{MMA_SHAPES[shape.head_dim]}" in result.ptx
    assert "cp.async.bulk.tensor.2d" in result.ptx
    assert "setmaxnreg.inc.sync.aligned.u32 \t240" in result.ptx
    assert "ex2.approx.ftz.f32" in result.ptx
    assert "mma.sync" not in result.ptx


@in_turn
def test_the_next_keys_are_multiplied_before_the_softmax_of_the_present_ones():
    ptx = compiled(COMPILED_SHAPES[0]).ptx

    turns = re.findall(r"bar\.sync 8.*?bar\.arrive 9.*?\n", ptx, re.DOTALL)
    loop = max(turns, key=lambda turn: turn.count("wgmma.mma_async"))
    assert loop.count("wgmma.commit_group") == 2, "scores and values in one turn"
    assert "ex2" not in loop


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 1, 2, 1, 24, 128), r"page_size 24, only \(16, 32, 64, 128\)"),
        ((4, 1, 2, 1, 16, 96), r"head_dim 96, only \(64, 128\)"),
    ],
)
def test_a_pool_that_the_kernel_does_not_take_is_refused(shape: tuple, message: str, device: str):
    pages = torch.zeros(shape, dtype=torch.bfloat16, device=device)

    with pytest.raises(ShapeError, match=message):
        PrefillAttention(pages, num_qo_heads=1, scale=1.0, tile=HopperTile())


def test_a_soft_cap_is_left_to_the_other_kernel(device: str):
    pages = torch.zeros(4, 1, 2, 1, 16, 64, dtype=torch.bfloat16, device=device)

    other = PrefillAttention(pages, num_qo_heads=1, scale=1.0, soft_cap=30.0)

    assert isinstance(other.tile, PrefillTile)
    with pytest.raises(ShapeError, match="the Hopper kernel takes none"):
        PrefillAttention(pages, num_qo_heads=1, scale=1.0, soft_cap=30.0, tile=HopperTile())


def test_queries_at_an_odd_address_are_refused(device: str):
    pages = torch.zeros(4, 1, 2, 1, 16, 64, dtype=torch.bfloat16, device=device)
    attention = PrefillAttention(pages, num_qo_heads=1, scale=1.0, tile=HopperTile())
    q = torch.zeros(65, dtype=torch.bfloat16, device=device)[1:].view(1, 1, 64)
    table = torch.zeros(2, dtype=torch.int32, device=device)

    with pytest.raises(StrideError, match=r"q begins at address .* must be a multiple of 16"):
        attention.run(q, 0, table, table)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_accurate_as_eager_attention(shape: Shape):
    case = case_of(QO_LENS, KV_LENS, shape)
    lse = torch.empty(case.q.shape[:2], device="cuda")

    out = run(planned(case, shape.sliding_window), case, lse=lse)

    assert_close(out, case, shape.sliding_window, lse=lse)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("window", [None, 100])
def test_the_same_bits_by_any_number_of_programs_and_stages(
    window: int | None, monkeypatch: pytest.MonkeyPatch
):
    case = case_of(QO_LENS, KV_LENS, SHAPES[0])

    together = prefill(case, window)

    assert torch.equal(prefill(case, window, tile=HopperTile(v_stages=3)), together)
    for num_programs in (1, 7):  # many units in a row
        monkeypatch.setattr(launch_hopper, "programs_for", lambda *_, n=num_programs: n)
        assert torch.equal(prefill(case, window), together)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[6]], ids=str)
def test_the_same_bits_beside_idle_programs(shape: Shape):
    attention: PrefillAttention | None = None
    for qo_lens, kv_lens in (([1], [1]), ([1], [1000]), (QO_LENS, KV_LENS), ([7, 0, 40], [90] * 3)):
        case = case_of(qo_lens, kv_lens, shape)
        if attention is None:
            pages = case_of(QO_LENS, KV_LENS, shape).pages
            attention = PrefillAttention(
                pages,
                num_qo_heads=case.num_qo_heads,
                scale=case.scale,
                sliding_window=shape.sliding_window,
                capacity=PrefillCapacity(max_tokens=sum(QO_LENS), max_requests=len(QO_LENS)),
            )
        attention.pages[: len(case.pages)] = case.pages
        attention.plan(case.qo_lens, case.kv_lens)

        assert torch.equal(run(attention, case), prefill(case, shape.sliding_window))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[6]], ids=str)
def test_the_same_bits_in_any_run(shape: Shape):
    case = case_of(QO_LENS, KV_LENS, shape)
    attention = planned(case, shape.sliding_window)
    lse = torch.empty(case.q.shape[:2], device="cuda")
    together = run(attention, case, lse=lse)
    lse_together = lse.clone()

    for _ in range(100):
        lse.fill_(float("nan"))
        assert torch.equal(run(attention, case, lse=lse), together)
        assert torch.equal(lse, lse_together)
