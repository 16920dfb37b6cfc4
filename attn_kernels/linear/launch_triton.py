"""Launches the linear layer of plain Triton, for any GPU and any shape."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from attn_kernels.chain import chained
from attn_kernels.linear.bodies import linear_kernel

BAND = 8  # row tiles; their inputs and a column of weights stay in the L2 cache
FEW_ROWS = 16
ENOUGH_PROGRAMS = 96  # keep the memory of an H200 and its 132 multiprocessors busy


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearTile:
    """How the kernel is compiled. All tiles of a dtype give the same bits."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int
    num_warps: int
    num_stages: int
    is_swapped: bool = False  # weights are the first operand of the product

    def __post_init__(self) -> None:
        first = self.block_n if self.is_swapped else self.block_m
        assert first >= 64, "below 64 rows another instruction would multiply"


# No tensor cores in full float32: for tests, not for speed.
FLOAT32_TILE = LinearTile(block_m=64, block_n=32, block_k=32, num_warps=4, num_stages=2)

# Up to FEW_ROWS rows: the weights' bandwidth is all that counts. The deep one has one program per
# multiprocessor, for weights that have no more.
FEW = LinearTile(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, is_swapped=True)
FEW_DEEP = LinearTile(
    block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=8, is_swapped=True
)

# More rows, largest first: the larger, the less often is anything read.
MIN_ROWS = 64
MANY = (
    LinearTile(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3, is_swapped=True),
    LinearTile(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4),
    LinearTile(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=4),
    LinearTile(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=6),
    LinearTile(block_m=64, block_n=32, block_k=128, num_warps=4, num_stages=8),
)


def linear_tiles(dtype: torch.dtype) -> tuple[LinearTile, ...]:
    """Return all shipped tiles of a dtype."""
    return (FLOAT32_TILE,) if dtype == torch.float32 else (FEW, FEW_DEEP, *MANY)


def linear_tile(num_rows: int, num_out: int, dtype: torch.dtype) -> LinearTile:
    """Return the shipped choice for a shape: the largest tile that occupies the device."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    if num_rows <= FEW_ROWS:
        return FEW if triton.cdiv(num_out, FEW.block_n) > 132 else FEW_DEEP
    for tile in MANY:
        wastes_rows = tile.block_m > MIN_ROWS and num_rows <= tile.block_m // 2
        if not wastes_rows and _num_programs(num_rows, num_out, tile) >= ENOUGH_PROGRAMS:
            return tile
    return MANY[-1]


def launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: LinearTile,
    *,
    is_gated: bool = False,
) -> None:
    """Write x @ weight.T + bias to out, gated or not.

    The arguments are checked, and out is not empty.
    """
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    linear_kernel[(_num_programs(num_rows, num_out, tile),)](
        out,
        x,
        weight,
        bias if bias is not None else weight,
        num_rows,
        num_out,
        num_in,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        HAS_TAIL=num_in % tile.block_k != 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        IS_SWAPPED=tile.is_swapped,
        BAND=BAND,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **chained(x),
    )


def _num_programs(num_rows: int, num_out: int, tile: LinearTile) -> int:
    return int(triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_out, tile.block_n))
