"""Attention states inside kernels: unnormalized acc, base-2 maximum m, and sum total of weights.

A state over no keys is (0, -inf, 0). All kernels fold states with `merge`, so that a fold gives the
same bits wherever it is computed; the explicit fma leaves the compiler no choice of contraction.
"""

import triton
import triton.language as tl


@triton.jit
def merge(acc_a, m_a, total_a, acc_b, m_b, total_b):
    # acc [M, D]; m and total [M]
    m = tl.maximum(m_a, m_b)
    m_finite = tl.where(m == float("-inf"), 0.0, m)  # -inf - -inf would be NaN
    weight_a = tl.exp2(m_a - m_finite)
    weight_b = tl.exp2(m_b - m_finite)
    acc = tl.fma(acc_a, weight_a[:, None], acc_b * weight_b[:, None])
    return acc, m, tl.fma(total_a, weight_a, total_b * weight_b)


@triton.jit
def attend_tile(q, k, v, visible, acc, m, total, scale_log2, MASKED: tl.constexpr):
    # q [M, D]; k [D, N]; v [N, D]; visible [M, N]; acc [M, D]; m and total [M]
    # The scale is applied in float32 after the product, and the same way with and without a
    # mask: a row must not notice in which kind of tile its keys were.
    scores = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    m_finite = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(tl.fma(scores, scale_log2, -m_finite[:, None]))  # [M, N]
    alpha = tl.exp2(m - m_finite)
    total = tl.fma(total, alpha, tl.sum(p, 1))
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_m, total


@triton.jit
def normalize(acc, m, total):
    # Returns the output [M, D] and lse_log2 [M]; a state over no keys gives 0 and -inf.
    is_empty = total == 0.0
    out = acc / tl.where(is_empty, 1.0, total)[:, None]
    lse_log2 = tl.where(is_empty, float("-inf"), m + tl.log2(tl.where(is_empty, 1.0, total)))
    return out, lse_log2


@triton.jit
def page_of_tile(
    page_indices_ptr,
    my_first_page,
    start,
    end,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Page ids of tokens [start, start + BLOCK_N), int64 because page offsets pass 2**31: a scalar
    # where the tile lies in one page, else [BLOCK_N]. Ids at and after `end` are not read.
    if PAGE_SIZE % BLOCK_N == 0:
        entry = page_indices_ptr + my_first_page + start // PAGE_SIZE
        page = tl.load(entry, mask=start < end, other=0)
    else:
        tokens = start + tl.arange(0, BLOCK_N)
        entry = page_indices_ptr + my_first_page + tokens // PAGE_SIZE
        page = tl.load(entry, mask=tokens < end, other=0)
    return page.to(tl.int64)
