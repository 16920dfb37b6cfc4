"""Launches the linear layer for Hopper GPUs: tensor copy engine and specialized warps."""

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_kernels.checks import HALF_DTYPES, VECTOR_BYTES, check_aligned, check_tensor
from attn_kernels.errors import ShapeError
from attn_kernels.linear.bodies_hopper import linear_hopper_kernel
from attn_kernels.linear.plan import GROUP_ROWS, NUM_BYTES, STORE_COLUMNS, HopperLinearTile
from attn_kernels.tiles import programs_for

BAND = 16  # row tiles; their inputs and some columns of weights stay in the L2 cache


class _Box(TensorDescriptor):  # type: ignore[misc]  # Triton has no types
    """A descriptor without per-launch checks, which `check` has already made."""

    def __post_init__(self) -> None:
        pass


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether `check` would pass, apart from the device."""
    return (
        x.dtype in HALF_DTYPES
        and all(size and size % 8 == 0 for size in weight.shape)
        and all(each.data_ptr() % VECTOR_BYTES == 0 for each in (x, weight))
    )


def check(x: Tensor, weight: Tensor) -> None:
    """Check this kernel's own requirement: alignment for the copy engine."""
    check_tensor("x", x, shape=(None, None), dtype=HALF_DTYPES, device=None)
    for name, size in zip(("num_out", "num_in"), weight.shape, strict=True):
        if not size or size % 8:
            raise ShapeError(f"{name} is {size}, must be a multiple of 8 for the Hopper kernel")
    check_aligned("x", x)
    check_aligned("weight", weight)


def launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: HopperLinearTile,
    *,
    is_gated: bool = False,
) -> None:
    """Write x @ weight.T + bias to out, gated or not.

    The arguments are checked, and out is not empty.
    """
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    x_rows, weight_rows, out_rows = GROUP_ROWS, tile.block_n, GROUP_ROWS
    num_columns = tile.block_n  # of a warpgroup's results
    if tile.is_swapped:
        x_rows, weight_rows, out_rows = tile.block_m, GROUP_ROWS, tile.block_m
        num_columns = GROUP_ROWS
    if is_gated:
        num_columns //= 2
    out_columns = min(num_columns, STORE_COLUMNS)
    linear_hopper_kernel[(min(tile.num_tiles(num_rows, num_out), programs_for(x.device, 1)),)](
        _descriptor(out, out_rows, out_columns),
        _descriptor(out, tile.tail_m, out_columns) if tile.tail_m else None,
        _descriptor(x, x_rows, tile.block_k),
        _descriptor(x, tile.tail_m, tile.block_k) if tile.tail_m else None,
        _descriptor(weight, weight_rows, tile.block_k),
        bias if bias is not None else weight,
        num_rows,
        num_out,
        num_in,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        IS_SWAPPED=tile.is_swapped,
        BLOCK_M=tile.block_m,
        TAIL=tile.tail_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.num_stages,
        # One is filled while the other one is copied.
        OUT_BOXES=min(num_columns // out_columns, 2),
        WARPGROUPS=tile.num_warpgroups,
        BAND=BAND,
        num_warps=4,
    )


def _descriptor(matrix: Tensor, box_rows: int, box_columns: int) -> _Box:
    # Not the tensor's own strides: of a single row that may be anything.
    num_rows, num_columns = matrix.shape
    box = [box_rows, box_columns]
    layout = NVMMASharedLayout(
        swizzle_byte_width=min(128, box_columns * NUM_BYTES), element_bitwidth=16, rank=2
    )
    return _Box(matrix, [num_rows, num_columns], [num_columns, 1], box, layout)
