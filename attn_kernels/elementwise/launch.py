"""The norm between matrix products, with the residual before it."""

import math

import torch
from torch import Tensor

from attn_kernels.chain import chained
from attn_kernels.checks import FLOAT_DTYPES, check_launchable, check_number, check_tensor
from attn_kernels.elementwise.bodies import rms_norm_kernel
from attn_kernels.errors import ShapeError
from attn_kernels.tiles import padded


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """Divide each row by its root mean square and multiply by `weight`.

    Args:
        x: [num_rows, size], rows may have any stride.
        weight: [size], dtype of x.
        eps: Added to the mean square; at least 0 and finite.
        residual: If given, [num_rows, size], contiguous: becomes x + residual, which is normed.

    Returns:
        The normed rows, newly allocated. Sums are float32; the normed row and the sum with the
        residual are rounded to x's dtype where a model in separate steps rounds them.
    """
    check_tensor("x", x, shape=(None, None), dtype=FLOAT_DTYPES, device=None, contiguous_from=1)
    check_launchable("x", x)
    device = x.device
    num_rows, size = x.shape
    check_tensor("weight", weight, shape=(size,), dtype=x.dtype, device=device)
    if residual is not None:
        check_tensor("residual", residual, shape=(num_rows, size), dtype=x.dtype, device=device)
    check_number("eps", eps)
    if not 0 <= eps < math.inf:
        raise ShapeError(f"eps is {eps}, must be at least 0 and finite")
    out = torch.empty((num_rows, size), dtype=x.dtype, device=device)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            out,
            x,
            residual if residual is not None else x,
            weight,
            x.stride(0),
            size,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=padded(size),
            num_warps=min(8, max(1, padded(size) // 512)),
            **chained(x),
        )
    return out
