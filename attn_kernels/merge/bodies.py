"""Kernel body that folds normalized attention states over disjoint keys."""

import triton
import triton.language as tl

from attn_kernels.attention_state import LN2

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_rows"])
def merge_states_kernel(
    out_ptr,  # [num_rows, head_dim]; a row is a token and a head
    lse_ptr,  # [num_rows], float32, natural log
    outs_ptr,  # [num_rows, head_dim] for each state
    lses_ptr,  # [num_rows] for each state, float32, natural log
    num_rows,
    outs_stride,  # elements from one state to the next
    lses_stride,
    NUM_STATES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Grid: (cdiv(num_rows, BLOCK_M),)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    in_out = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = rows[:, None] * HEAD_DIM + dims[None, :]

    # Fold in the order given, with weights relative to the largest lse so far.
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)  # base 2
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    outs_offsets, lses_offsets = offsets, rows  # in 64 bits, as strides times states need
    for _ in tl.static_range(NUM_STATES):
        out = tl.load(outs_ptr + outs_offsets, mask=in_out, other=0.0)
        lse = tl.load(lses_ptr + lses_offsets, mask=is_row, other=float("-inf"))
        lse_log2 = lse * LOG2_E
        new_m = tl.maximum(m, lse_log2)
        m_finite = tl.where(new_m == float("-inf"), 0.0, new_m)
        alpha = tl.exp2(m - m_finite)
        weight = tl.exp2(lse_log2 - m_finite)
        # A state over no keys has an undefined output, possibly NaN: select, do not multiply.
        out = tl.where((weight > 0.0)[:, None], out.to(tl.float32), 0.0)
        acc = tl.fma(acc, alpha[:, None], out * weight[:, None])
        total = tl.fma(total, alpha, weight)
        m = new_m
        outs_offsets += outs_stride
        lses_offsets += lses_stride
    is_empty = total == 0.0
    total_finite = tl.where(is_empty, 1.0, total)
    tl.store(out_ptr + offsets, acc / total_finite[:, None], mask=in_out)
    lse = tl.where(is_empty, float("-inf"), (m + tl.log2(total_finite)) * LN2)
    tl.store(lse_ptr + rows, lse, mask=is_row)
