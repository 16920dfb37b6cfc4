"""Kernel body of a linear layer whose rows have the same bits in any batch.

Each element is one chain of products in ascending order of the inner dimension, 16 at a time in
the same tensor core instruction for every tile. Nothing else enters it: neither the number of rows
nor the tile that a row lies in. Rows and inner elements that only fill a tile are exact zeros, and
a product has the same bits whichever operand comes first.

If it is gated, weight rows are 8 of gates and 8 of what they gate in turns, so that a gate and its
counterpart lie in one thread's registers, and only their product leaves the kernel.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from attn_kernels.chain import wait_for_launch_before
from attn_kernels.linear import plan

GATE_GROUP = tl.constexpr(plan.GATE_GROUP)


@triton.jit
def gated(x, dtype: tl.constexpr):
    # [M, N] -> [M, N / 2]: silu(gates) * the others, with each step rounded to dtype
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    # It changes nothing. Without an operation here, and with weights as the first operand, ptxas
    # lets each product wait for the one before (C7514).
    x = tl.where(x == x, x, float("nan"))
    pairs = tl.reshape(x, [M, N // (2 * GATE_GROUP), 2, GATE_GROUP])
    gate, up = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    return tl.reshape(silu.to(tl.float32) * up.to(dtype).to(tl.float32), [M, N // 2])


# Not specialized: a row count must not cost a compilation.
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out_ptr,  # [num_rows, num_out], or [num_rows, num_out / 2] if IS_GATED
    x_ptr,  # [num_rows, num_in]
    weight_ptr,  # [num_out, num_in]
    bias_ptr,  # [num_out]; read only if HAS_BIAS
    num_rows,
    num_out,
    num_in,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_TAIL: tl.constexpr,  # BLOCK_K does not divide num_in
    BLOCK_M: tl.constexpr,  # rows
    BLOCK_N: tl.constexpr,  # outputs
    BLOCK_K: tl.constexpr,
    IS_SWAPPED: tl.constexpr,  # weights are the first operand: 64 outputs an instruction
    BAND: tl.constexpr,  # row tiles that share weights while those are in the L2 cache
    IS_CHAINED: tl.constexpr,
):
    # Grid: (cdiv(num_rows, BLOCK_M) * cdiv(num_out, BLOCK_N),), in bands of BAND row tiles; within
    # a band, row tiles change fastest.
    if IS_CHAINED:
        if IS_GATED:
            # The product that follows has few programs. Scheduled while this one still ran, they
            # made a step of one row 4 % slower: presumably they crowd where there is room first.
            cuda.gdc_wait()
        else:
            wait_for_launch_before()
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    programs_per_band = BAND * tl.cdiv(num_out, BLOCK_N)
    my_first_tile = tl.program_id(0) // programs_per_band * BAND
    my_band = tl.minimum(num_row_tiles - my_first_tile, BAND)
    my_place = tl.program_id(0) % programs_per_band

    rows = (my_first_tile + my_place % my_band) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = my_place // my_band * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    is_row = rows < num_rows
    is_output = outputs < num_out
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * num_in + inner[None, :]
    # Outputs beyond the last one read the first: cheaper than a mask, and never stored.
    weight_rows = tl.where(is_output, outputs, 0).to(tl.int64)
    weight_ptrs = weight_ptr + weight_rows[:, None] * num_in + inner[None, :]

    if IS_SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, num_in, BLOCK_K):
        if HAS_TAIL:
            is_inner = (start + inner < num_in)[None, :]
            x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_inner, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_inner, other=0.0)
        else:
            x = tl.load(x_ptrs + start, mask=is_row[:, None], other=0.0)  # [BLOCK_M, BLOCK_K]
            weight = tl.load(weight_ptrs + start)  # [BLOCK_N, BLOCK_K]
        if IS_SWAPPED:
            acc = tl.dot(weight, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    if IS_SWAPPED:
        acc = acc.T
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out_stride = num_out
    if IS_GATED:
        acc = gated(acc, out_ptr.dtype.element_ty)
        outputs = my_place // my_band * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_stride = num_out // 2
        is_output = outputs < out_stride
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :],
        acc,
        mask=is_row[:, None] & is_output[None, :],
    )
