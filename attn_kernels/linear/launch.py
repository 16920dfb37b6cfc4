"""Linear layer whose rows have the same bits in any batch, for prefill and decode alike."""

import torch
from torch import Tensor

from attn_kernels.checks import FLOAT_DTYPES, check_launchable, check_tensor
from attn_kernels.errors import ShapeError
from attn_kernels.linear import launch_hopper, launch_triton
from attn_kernels.linear.launch_triton import LinearTile, linear_tile, linear_tiles
from attn_kernels.linear.plan import GATE_GROUP, HOPPER_TILES, HopperLinearTile, hopper_tile
from attn_kernels.tiles import on_hopper, programs_for

Tile = LinearTile | HopperLinearTile

# Up to as many rows both kernels take as long: the memory's bandwidth is all that counts.
TRITON_ROWS = 64
# The host needs longer to launch the Hopper kernel. In a CUDA graph that does not count; of no more
# rows than these, launched one by one, the device waits for the host in any case.
UNRECORDED_TRITON_ROWS = 768


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Return x @ weight.T + bias; a row's bits depend on that row and the weights only.

    Args:
        x: [num_rows, num_in], contiguous.
        weight: [num_out, num_in], contiguous, dtype of x.
        bias: [num_out], dtype of x, or None.
        tile: Which kernel, and how it is compiled; None takes the shipped choice.

    Returns:
        [num_rows, num_out], newly allocated, rounded once from float32 sums.
    """
    return _product(x, weight, bias, tile, is_gated=False)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Return silu(x @ gate.T + its bias) * (x @ up.T + its bias).

    Args:
        x: As in `linear`.
        weight: [2 * num_out, num_in]: 8 rows of gate, then 8 of up, in turns; num_out is a multiple
            of 8.
        bias: [2 * num_out] in the same order, or None.
        tile: As in `linear`.

    Returns:
        [num_rows, num_out], newly allocated. Both products, the activation and the result are
        rounded to x's dtype, as in a model that computes them one by one.
    """
    return _product(x, weight, bias, tile, is_gated=True)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None, *, is_gated: bool
) -> Tensor:
    check_tensor("x", x, shape=(None, None), dtype=FLOAT_DTYPES, device=None)
    check_launchable("x", x)
    device, dtype = x.device, x.dtype
    num_rows, num_in = x.shape
    check_tensor("weight", weight, shape=(None, num_in), dtype=dtype, device=device)
    num_out = weight.shape[0]
    if bias is not None:
        check_tensor("bias", bias, shape=(num_out,), dtype=dtype, device=device)
    if is_gated and num_out % (2 * GATE_GROUP):
        raise ShapeError(f"weight has {num_out} rows, must be a multiple of {2 * GATE_GROUP}")
    if tile is None:
        tile = shipped_tile(x, weight, is_recorded=_is_recorded(x))
    elif isinstance(tile, HopperLinearTile):
        launch_hopper.check(x, weight)
    num_columns = num_out // 2 if is_gated else num_out
    out = torch.empty((num_rows, num_columns), dtype=dtype, device=device)
    if not out.numel():
        return out
    if isinstance(tile, HopperLinearTile):
        launch_hopper.launch(out, x, weight, bias, tile, is_gated=is_gated)
    else:
        launch_triton.launch(out, x, weight, bias, tile, is_gated=is_gated)
    return out


def shipped_tiles(x: Tensor, weight: Tensor) -> tuple[Tile, ...]:
    """Return all tiles that may be chosen for such inputs and weights."""
    tiles: tuple[Tile, ...] = linear_tiles(x.dtype)
    return (*tiles, *HOPPER_TILES) if _takes_hopper(x, weight) else tiles


def shipped_tile(x: Tensor, weight: Tensor, *, is_recorded: bool) -> Tile:
    """Return the tile that is chosen for a product, which may be recorded in a CUDA graph."""
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    is_worth_it = num_rows > (TRITON_ROWS if is_recorded else UNRECORDED_TRITON_ROWS)
    if is_worth_it and _takes_hopper(x, weight):
        return hopper_tile(num_rows, num_out, num_in, programs_for(x.device, 1))
    return linear_tile(num_rows, num_out, x.dtype)


def _takes_hopper(x: Tensor, weight: Tensor) -> bool:
    return on_hopper(x) and launch_hopper.takes(x, weight)


def _is_recorded(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
