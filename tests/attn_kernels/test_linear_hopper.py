"""The linear layer for Hopper: emulated and compiled on any host, run on a GPU for its bits."""

import re
from functools import cache

import pytest
import torch

from attn_kernels.errors import DtypeError, ShapeError, StrideError
from attn_kernels.linear import bodies_hopper, launch_hopper
from attn_kernels.linear.launch import gated_linear, linear, shipped_tile, shipped_tiles
from attn_kernels.linear.launch_triton import LinearTile
from attn_kernels.linear.plan import HOPPER_TILES, HopperLinearTile, hopper_tile
from tests.attn_kernels.linear_case import MAX_SHARED_BYTES, check, check_gated, operands, randn
from tests.attn_kernels.sm90 import compile_launch, launches_of, ptxas_notes
from tests.support.gluon_emulator import DeadlockError, HazardError, edited, emulated

BF16 = torch.bfloat16
NAN = float("nan")
FEW, MANY = HOPPER_TILES[-1], HOPPER_TILES[0]
IN_EACH_RUN = (MANY, FEW, next(tile for tile in HOPPER_TILES if tile.tail_m))
# With two stages, each is used again soon.
PLAIN = HopperLinearTile(block_m=128, block_n=256, block_k=64, num_stages=2)
TAILED = HopperLinearTile(
    block_m=128, tail_m=32, block_n=128, block_k=64, num_stages=2, is_swapped=True
)


def emulate(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: HopperLinearTile,
    *,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    seed: int = 0,
) -> torch.Tensor:
    """Return what the kernel writes; what it does not write is NaN."""
    out = torch.full((len(x), len(weight) // (2 if is_gated else 1)), NAN, dtype=x.dtype)
    with emulated(seed):
        launch_hopper.launch(out, x, weight, bias, tile, is_gated=is_gated)
    return out


# Fewer rows than a tile, one more than one, tiles of which a warpgroup has no rows; outputs and
# inner elements that fill no tile; more tiles than the four programs.
@pytest.mark.parametrize("tile", HOPPER_TILES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in"), [(3, 80, 8), (129, 336, 136), (543, 272, 400)], ids=str
)
def test_every_tile_multiplies_any_shape(
    tile: HopperLinearTile, num_rows: int, num_out: int, num_in: int
) -> None:
    x = randn("cpu", BF16, num_rows, num_in)
    weight = randn("cpu", BF16, num_out, num_in, seed=1)
    bias = randn("cpu", BF16, num_out, seed=2) if num_rows == 129 else None

    product = emulate(x, weight, tile, bias=bias)

    check(product, x, weight, bias)
    check_gated(emulate(x, weight, tile, bias=bias, is_gated=True), product)


def test_float16_is_multiplied_as_well() -> None:
    x, weight = randn("cpu", torch.float16, 20, 72), randn("cpu", torch.float16, 88, 72, seed=1)

    for tile in (FEW, MANY):
        check(emulate(x, weight, tile), x, weight)


def test_a_row_has_the_same_bits_in_any_batch_and_tile() -> None:
    x, weight = randn("cpu", BF16, 543, 136), randn("cpu", BF16, 136, 136, seed=1)

    together = emulate(x, weight, MANY)

    for tile in HOPPER_TILES:
        assert torch.equal(emulate(x, weight, tile), together)
        for first, last in ((0, 1), (542, 543), (3, 40), (250, 506)):
            assert torch.equal(emulate(x[first:last], weight, tile), together[first:last])


@pytest.mark.parametrize("tile", [HOPPER_TILES[1], FEW], ids=str)
def test_no_order_of_events_changes_the_result(tile: HopperLinearTile) -> None:
    x, weight = randn("cpu", BF16, 40, 328), randn("cpu", BF16, 712, 328, seed=1)

    expected = emulate(x, weight, tile)

    for seed in range(1, 6):
        assert torch.equal(emulate(x, weight, tile, seed=seed), expected)


# Each of them is needed, and the emulation sees it if one is not there.
@pytest.mark.parametrize(
    ("tile", "name", "old", "new"),
    [
        *(
            (PLAIN, *each)
            for each in (
                ("copy_operands", "mbarrier.wait(empty.index(stage), phase)", "pass"),
                ("copy_operands", "phase = 1", "phase = 0"),
                ("copy_operands", "(BLOCK_M + TAIL + BLOCK_N)", "(2 * BLOCK_M + BLOCK_N)"),
                ("multiply", "mbarrier.wait(full.index(stage), phase)", "pass"),
                ("multiply", "phase = gl.where(wraps, phase ^ 1, phase)", "pass"),
                (
                    "multiply",
                    "warpgroup_mma_wait(1, deps=[acc])",
                    "warpgroup_mma_wait(2, deps=[acc])",
                ),
                ("multiply", ", pred=start > 0)", ")"),
                (
                    "multiply",
                    "mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)\n",
                    "pass\n",
                ),
                ("multiply", "fence_async_shared()\n                tma", "tma"),
                (
                    "multiply",
                    "store_wait(OUT_BOXES - 1)\n                out_box",
                    "store_wait(9)\n                out_box",
                ),
                ("multiply", "\n    tma.store_wait(0)", ""),
            )
        ),
        *(
            (TAILED, *each)
            for each in (
                ("copy_operands", "(BLOCK_M + TAIL + BLOCK_N)", "(BLOCK_M + BLOCK_N)"),
                (
                    "multiply",
                    "warpgroup_mma_wait(1, deps=[acc, tail]",
                    "warpgroup_mma_wait(3, deps=[acc, tail]",
                ),
                ("multiply", "2 if TAIL else 1", "9"),
                ("store_swapped", "fence_async_shared()", "pass"),
            )
        ),
    ],
    ids=str,
)
def test_the_emulation_sees_what_a_kernel_forgets(
    monkeypatch: pytest.MonkeyPatch, tile: HopperLinearTile, name: str, old: str, new: str
) -> None:
    x, weight, expected = emulated_in_any_order(tile)

    def is_right(seed: int) -> bool:
        try:
            return torch.equal(emulate(x, weight, tile, seed=seed), expected)
        except (DeadlockError, HazardError):
            return False

    monkeypatch.setattr(bodies_hopper, name, edited(getattr(bodies_hopper, name), old, new))
    assert not all(map(is_right, range(3)))


@cache
def emulated_in_any_order(tile: HopperLinearTile) -> tuple[torch.Tensor, ...]:
    """Return operands, and what the right kernel makes of them in each order that is tried."""
    x, weight = randn("cpu", BF16, 200, 136), randn("cpu", BF16, 1616, 136, seed=1)
    first, *others = (emulate(x, weight, tile, seed=seed) for seed in range(3))
    assert all(torch.equal(other, first) for other in others)
    return x, weight, first


# Each tile, gated and not, with one of both dtypes, and with or without a bias; in each run one of
# them for the largest tile, the smallest, and one with a tail
@pytest.mark.parametrize(
    ("tile", "is_gated", "dtype", "has_bias"),
    [
        pytest.param(
            *(tile, is_gated, (BF16, torch.float16)[(index + is_gated) % 2]),
            (index + is_gated) % 4 < 2,
            marks=()
            if tile in IN_EACH_RUN and is_gated == (tile.tail_m > 0)
            else pytest.mark.thorough,
        )
        for index, tile in enumerate(HOPPER_TILES)
        for is_gated in (False, True)
    ],
    ids=str,
)
def test_every_tile_compiles_to_one_instruction_a_block_and_the_copy_engine(
    tile: HopperLinearTile,
    is_gated: bool,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    x, weight = (torch.empty(rows, 4096, dtype=dtype) for rows in (5, 4096))
    bias = torch.empty(4096, dtype=dtype) if has_bias else None

    product = gated_linear if is_gated else linear
    (launch,) = launches_of(lambda: product(x, weight, bias, tile=tile))
    compiled = compile_launch(launch)

    assert compiled.shared_bytes <= MAX_SHARED_BYTES
    assert compiled.spill_bytes == 0
    columns = {tile.block_m if tile.is_swapped else tile.block_n, tile.tail_m} - {0}
    shapes = set(re.findall(r"wgmma.mma_async.sync.aligned.(\w+)", compiled.ptx))
    assert shapes == {f"m64n{each}k16" for each in columns}
    assert "mma.sync" not in compiled.ptx
    assert "serialized" not in ptxas_notes(compiled.ptx)
    assert "cp.async.bulk.tensor.2d.shared" in compiled.ptx
    assert "cp.async.bulk.tensor.2d.global" in compiled.ptx


def test_what_the_copy_engine_does_not_take_is_named(launches: list[object]) -> None:
    x, weight = torch.empty(9, 16, dtype=BF16), torch.empty(24, 16, dtype=BF16)

    with pytest.raises(DtypeError, match=r"x is torch\.float32"):
        linear(x.float(), weight.float(), tile=FEW)
    with pytest.raises(ShapeError, match="num_out is 20, must be a multiple of 8"):
        linear(x, weight[:20], tile=FEW)
    with pytest.raises(ShapeError, match="num_in is 12, must be a multiple of 8"):
        linear(x[:, :12].contiguous(), weight[:, :12].contiguous(), tile=FEW)
    with pytest.raises(StrideError, match="x begins at address"):
        linear(torch.empty(9 * 16 + 1, dtype=BF16)[1:].view(9, 16), weight, tile=FEW)
    assert not launches


@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "block_m", "block_n"),
    [
        (96, 4096, 4096, 64, 64),
        (128, 4096, 14_336, 64, 64),
        (256, 4096, 4096, 128, 64),
        (512, 4096, 14_336, 128, 128),
        (512, 6144, 4096, 128, 192),
        (2048, 4096, 4096, 128, 256),
        (8192, 28_672, 4096, 128, 256),
    ],
)
def test_the_tile_is_the_one_that_is_estimated_fastest(
    num_rows: int, num_out: int, num_in: int, block_m: int, block_n: int
) -> None:
    tile = hopper_tile(num_rows, num_out, num_in, 132)

    assert (tile.block_m, tile.block_n) == (block_m, block_n)


def test_the_choice_is_the_hopper_kernel_where_it_can_be_and_is_worth_its_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_hopper(num_rows: int, num_in: int, dtype: torch.dtype, *, is_recorded: bool) -> bool:
        x, weight = torch.empty(num_rows, num_in, dtype=dtype), torch.empty(128, num_in)
        tile = shipped_tile(x, weight, is_recorded=is_recorded)
        assert tile in shipped_tiles(x, weight)
        return isinstance(tile, HopperLinearTile)

    assert not is_hopper(2048, 64, BF16, is_recorded=True)
    monkeypatch.setattr("attn_kernels.linear.launch.on_hopper", lambda _: True)
    assert is_hopper(2048, 64, BF16, is_recorded=False)
    assert is_hopper(65, 64, BF16, is_recorded=True)
    assert not is_hopper(64, 64, BF16, is_recorded=True)
    assert not is_hopper(768, 64, BF16, is_recorded=False)
    assert not is_hopper(2048, 60, BF16, is_recorded=True)
    assert not is_hopper(2048, 64, torch.float32, is_recorded=True)
    misaligned = torch.empty(2048 * 64 + 1, dtype=BF16)[1:].view(2048, 64)
    tile = shipped_tile(misaligned, torch.empty(128, 64, dtype=BF16), is_recorded=True)
    assert isinstance(tile, LinearTile)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling"])
def test_all_tiles_give_the_bits_of_the_triton_kernel_on_a_gpu(
    dtype: torch.dtype, kind: str
) -> None:
    x, weight = operands(kind, dtype)
    bias = weight[0].contiguous()

    for each in (None, bias):
        expected = linear(x, weight, each)
        gated = gated_linear(x, weight, each)
        for tile in HOPPER_TILES:
            assert torch.equal(linear(x, weight, each, tile=tile), expected), tile
            assert torch.equal(gated_linear(x, weight, each, tile=tile), gated), tile
            for first, last in ((0, 1), (542, 543), (3, 40), (250, 506)):
                rows = linear(x[first:last], weight, each, tile=tile)
                assert torch.equal(rows, expected[first:last]), tile


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_shape_is_written_past_its_end_on_a_gpu() -> None:
    for num_rows, num_out, num_in in ((3, 72, 8), (129, 328, 136), (543, 264, 400)):
        x, weight = randn("cuda", BF16, num_rows, num_in), randn("cuda", BF16, num_out, num_in)
        for tile in HOPPER_TILES:
            around = torch.full((num_rows + 2, num_out), NAN, dtype=BF16, device="cuda")
            launch_hopper.launch(around[1:-1], x, weight, None, tile)

            assert around[[0, -1]].isnan().all()
            check(around[1:-1], x, weight)
