"""Kernel body of the norm between matrix products, with the residual before it."""

import triton
import triton.language as tl

from attn_kernels.chain import wait_for_launch_before


@triton.jit
def rms_norm_kernel(
    out_ptr,  # [num_rows, size], contiguous
    x_ptr,  # [num_rows, size]
    residual_ptr,  # [num_rows, size], contiguous, replaced by x + residual; only if HAS_RESIDUAL
    weight_ptr,  # [size]
    x_stride,  # elements from row to row
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,  # size, padded to a power of two
    IS_CHAINED: tl.constexpr,
):
    # Grid: (num_rows,). One program per row, whatever the batch: the sum has one order.
    if IS_CHAINED:
        wait_for_launch_before()
    my_row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < size
    x = tl.load(x_ptr + my_row * x_stride + dims, mask=is_dim, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + my_row * size + dims, mask=is_dim, other=0.0)
        # Rounded before the norm, as a model that adds and normalizes in two steps sees it.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + my_row * size + dims, x, mask=is_dim)
    x = x.to(tl.float32)
    mean_square = tl.sum(x * x, 0) / size
    normed = (x * tl.rsqrt(mean_square + eps)).to(out_ptr.dtype.element_ty)
    weight = tl.load(weight_ptr + dims, mask=is_dim, other=0.0)
    out = normed.to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + my_row * size + dims, out, mask=is_dim)
