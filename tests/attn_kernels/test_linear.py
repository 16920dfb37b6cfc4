"""The linear layer against its reference, its bits in any batch, and its compilation for Hopper."""

import pytest
import torch

from attn_kernels.errors import DtypeError, ShapeError, StrideError
from attn_kernels.linear.launch import gated_linear, linear
from attn_kernels.linear.launch_triton import LinearTile, linear_tile, linear_tiles
from tests.attn_kernels.linear_case import MAX_SHARED_BYTES, check, check_gated, operands, randn
from tests.attn_kernels.sm90 import compile_launch, launches_of, ptxas_notes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALF_TILES = linear_tiles(torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_in", "num_out"),
    [(1, 48, 80), (3, 64, 211), (33, 100, 31), (70, 136, 144)],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_any_shape(
    device: str, dtype: torch.dtype, num_rows: int, num_in: int, num_out: int, has_bias: bool
) -> None:
    x, weight = (
        randn(device, dtype, num_rows, num_in),
        randn(device, dtype, num_out, num_in, seed=1),
    )
    bias = randn(device, dtype, num_out, seed=2) if has_bias else None

    out = linear(x, weight, bias)

    assert out.dtype == dtype
    check(out, x, weight, bias)


@pytest.mark.parametrize("tile", HALF_TILES, ids=str)
def test_every_tile(device: str, tile: LinearTile) -> None:
    dtype = torch.bfloat16
    x, weight = randn(device, dtype, 70, 72), randn(device, dtype, 304, 72, seed=1)

    product = linear(x, weight, tile=tile)

    check(product, x, weight)
    check_gated(gated_linear(x, weight, tile=tile), product)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 33])
def test_gates_follow_their_biases(device: str, dtype: torch.dtype, num_rows: int) -> None:
    x, weight = randn(device, dtype, num_rows, 48), randn(device, dtype, 112, 48, seed=1)
    bias = randn(device, dtype, 112, seed=2)

    out = gated_linear(x, weight, bias)

    assert out.dtype == dtype
    check_gated(out, linear(x, weight, bias))


def test_extreme_gates_are_finite(device: str) -> None:
    gates, ups = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4, 0, 0, 0]), torch.ones(8)
    weight = torch.cat((gates, ups))[:, None].to(device)

    out = gated_linear(torch.ones(1, 1, device=device), weight)

    expected = torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4, 0, 0, 0]])
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-30)


def test_no_rows_give_no_rows(device: str) -> None:
    assert linear(torch.ones(0, 16, device=device), torch.ones(4, 16, device=device)).shape == (
        0,
        4,
    )


def test_what_does_not_fit_is_named(device: str) -> None:
    x, weight = torch.ones(2, 16, device=device), torch.ones(4, 16, device=device)

    with pytest.raises(ShapeError, match="weight has shape"):
        linear(x, weight[:, :8])
    with pytest.raises(ShapeError, match="weight has 4 rows, must be a multiple of 16"):
        gated_linear(x, weight)
    with pytest.raises(ShapeError, match="bias has shape"):
        linear(x, weight, torch.ones(5, device=device))
    with pytest.raises(DtypeError, match="weight is"):
        linear(x, weight.half())
    with pytest.raises(StrideError, match="x has strides"):
        linear(torch.ones(16, 2, device=device).T, weight)


# Each tile with both dtypes and all kinds of arguments, and these with both dtypes; in each run one
# of them for the smallest tile, the largest, and one that is not swapped.
@pytest.mark.parametrize(
    ("tile", "is_gated", "num_in", "has_bias", "dtype"),
    [
        pytest.param(
            *(tile, is_gated, num_in, has_bias),
            (torch.bfloat16, torch.float16)[(index + kind) % 2],
            marks=() if index in (0, 2, 4) and kind == index else pytest.mark.thorough,
        )
        for index, tile in enumerate(HALF_TILES)
        for kind, (is_gated, num_in, has_bias) in enumerate(
            [
                (False, 4096, True),
                (False, 80, True),
                (False, 4096, False),
                (True, 4096, False),
                (True, 80, True),
            ]
        )
    ],
    ids=str,
)
def test_every_tile_compiles_to_the_one_instruction(
    tile: LinearTile,
    is_gated: bool,
    num_in: int,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    x, weight = (torch.empty(rows, num_in, dtype=dtype) for rows in (5, 4096))
    bias = torch.empty(4096, dtype=dtype) if has_bias else None

    product = gated_linear if is_gated else linear
    (launch,) = launches_of(lambda: product(x, weight, bias, tile=tile))
    compiled = compile_launch(launch)

    assert compiled.shared_bytes <= MAX_SHARED_BYTES
    assert compiled.spill_bytes == 0
    assert "wgmma.mma_async" in compiled.ptx
    assert "mma.sync" not in compiled.ptx
    assert "cp.async.cg.shared.global" in compiled.ptx
    if is_gated and tile.is_swapped and not has_bias:
        assert "serialized" not in ptxas_notes(compiled.ptx)


def test_float32_compiles_without_spills() -> None:
    x, weight = torch.empty(5, 64), torch.empty(96, 64)

    (launch,) = launches_of(lambda: linear(x, weight))
    compiled = compile_launch(launch)

    assert compiled.spill_bytes == 0
    assert "mma" not in compiled.ptx, "tensor cores would round to fewer bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(device: str, dtype: torch.dtype) -> None:
    x, weight = randn(device, dtype, 70, 96), randn(device, dtype, 300, 96, seed=1)

    together = linear(x, weight)

    assert torch.equal(linear(x.flip(0), weight).flip(0), together)
    for first, last in ((0, 1), (69, 70), (3, 40), (31, 66)):
        assert torch.equal(linear(x[first:last], weight), together[first:last])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling"])
def test_all_tiles_give_the_same_bits_on_a_gpu(dtype: torch.dtype, kind: str) -> None:
    x, weight = operands(kind, dtype)

    outs = [linear(x, weight, tile=tile) for tile in HALF_TILES]

    for out in outs[1:]:
        assert torch.equal(out, outs[0])
    for num_rows in (1, 2, 16, 63, 65, 128, 257, 542):
        assert torch.equal(linear(x[:num_rows], weight), outs[0][:num_rows])
    gated = [gated_linear(x, weight, tile=tile) for tile in HALF_TILES]
    assert all(torch.equal(out, gated[0]) for out in gated[1:])
    check_gated(gated[0], outs[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_vocabulary_and_many_rows_pass_2_to_the_31_elements() -> None:
    x = randn("cuda", torch.bfloat16, 17_000, 64)
    weight = randn("cuda", torch.bfloat16, 128_256, 64, seed=1)

    out = linear(x, weight)

    assert out.numel() > 2**31
    assert torch.equal(out[-100:], linear(x[-100:], weight))
    check(out[-100:], x[-100:], weight)


@pytest.mark.parametrize(
    ("num_rows", "num_out", "block_m", "block_n"),
    [
        (1, 4096, 16, 64),
        (16, 128_256, 16, 64),
        (17, 4096, 64, 32),
        (17, 28_672, 64, 128),
        (32, 6144, 64, 64),
        (64, 6144, 64, 64),
        (64, 28_672, 64, 128),
        (256, 6144, 128, 128),
        (2048, 4096, 128, 256),
        (8192, 96, 64, 128),
        (20, 96, 64, 32),
    ],
)
def test_the_tile_is_the_largest_that_occupies_the_device(
    num_rows: int, num_out: int, block_m: int, block_n: int
) -> None:
    tile = linear_tile(num_rows, num_out, torch.bfloat16)

    assert (tile.block_m, tile.block_n) == (block_m, block_n)
    assert tile in HALF_TILES
    assert linear_tile(num_rows, num_out, torch.float32) in linear_tiles(torch.float32)
