"""Attention states inside kernels: unnormalized acc, base-2 maximum m, and sum total of weights.

A state over no keys is (0, -inf, 0). All kernels fold states by the same arithmetic (`merge`;
`merge_finite` for finite maxima), so that a fold gives the same bits wherever it is computed; the
explicit fma leaves the compiler no choice of contraction.

There are two ways to fold a tile of keys into a state:

- `attend_tile` sums weights in the compiler's order; its bits belong to one shape of tile.
- `attend_columns` (few queries: they are the columns, keys the rows) and `attend_rows` (many
  queries) give equal bits for a query in any tile of either kind with the same keys, if the matrix
  products are wgmma: at least 64 rows, 16 columns, half precision. Such a product is one chain in
  ascending order of the inner dimension, whatever the tile (decision 0006). Weights are summed in
  a fixed order, too, which needs no exchange in either kind of tile: a total is kept as N / 2 sums,
  of the pairs of keys 8 apart that one thread holds in either; they are summed when a split ends
  (`sum_rows`, `sum_columns`).
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
MAX_HALVINGS = tl.constexpr(8)  # of the sums of a tile, which has 512 keys at most


@triton.jit
def merge_weights(m_a, m_b):
    # The maximum of two states, and the factor of each state
    m = tl.maximum(m_a, m_b)
    m_finite = tl.where(m == float("-inf"), 0.0, m)  # -inf - -inf would be NaN
    return m, tl.exp2(m_a - m_finite), tl.exp2(m_b - m_finite)


@triton.jit
def merge(acc_a, m_a, total_a, acc_b, m_b, total_b, DIM_AXIS: tl.constexpr):
    # m and total [M]; acc [M, D] with DIM_AXIS 1 (queries are rows), [D, M] with 0 (columns)
    m, weight_a, weight_b = merge_weights(m_a, m_b)
    scaled_b = acc_b * tl.expand_dims(weight_b, DIM_AXIS)
    acc = tl.fma(acc_a, tl.expand_dims(weight_a, DIM_AXIS), scaled_b)
    return acc, m, tl.fma(total_a, weight_a, total_b * weight_b)


@triton.jit
def pair_rows(p):
    # Weights [M, N] to the sums [M, N / 2] of keys 8 apart; a sum of two has one order.
    NUM_ROWS: tl.constexpr = p.shape[0]
    NUM_KEYS: tl.constexpr = p.shape[1]
    APART: tl.constexpr = 8 if NUM_KEYS >= 16 else NUM_KEYS // 2
    pairs = tl.reshape(p, [NUM_ROWS, NUM_KEYS // (2 * APART), 2, APART])
    return tl.reshape(tl.sum(pairs, 2), [NUM_ROWS, NUM_KEYS // 2])


@triton.jit
def pair_columns(p):
    # Weights [N, M] to sums [N / 2, M], as `pair_rows`
    NUM_KEYS: tl.constexpr = p.shape[0]
    NUM_COLUMNS: tl.constexpr = p.shape[1]
    APART: tl.constexpr = 8 if NUM_KEYS >= 16 else NUM_KEYS // 2
    pairs = tl.reshape(p, [NUM_KEYS // (2 * APART), 2, APART, NUM_COLUMNS])
    return tl.reshape(tl.sum(pairs, 1), [NUM_KEYS // 2, NUM_COLUMNS])


@triton.jit
def add_rows(total):
    # [M, N] to [M, N / 2]: each sum and its neighbour
    return tl.sum(tl.reshape(total, [total.shape[0], total.shape[1] // 2, 2]), 2)


@triton.jit
def add_columns(total):
    # [N, M] to [N / 2, M], as `add_rows`
    return tl.sum(tl.reshape(total, [total.shape[0] // 2, 2, total.shape[1]]), 1)


@triton.jit
def sum_rows(total):
    # [M, N / 2] to [M]
    for _ in tl.static_range(MAX_HALVINGS):
        if total.shape[1] > 1:
            total = add_rows(total)
    return tl.reshape(total, [total.shape[0]])


@triton.jit
def sum_columns(total):
    # [N / 2, M] to [M]
    for _ in tl.static_range(MAX_HALVINGS):
        if total.shape[0] > 1:
            total = add_columns(total)
    return tl.reshape(total, [total.shape[1]])


@triton.jit
def capped(scores, scale_log2, soft_cap_log2):
    # soft_cap * tanh(scores * scale / soft_cap), in base 2; `scale_log2` is 2 * scale / soft_cap
    # and `soft_cap_log2` the cap, both times log2(e).
    # The last operation is an fma: the compiler might contract a product with what follows.
    inverse = 1.0 / (tl.exp2(scores * scale_log2) + 1.0)
    return tl.fma(inverse, -2.0 * soft_cap_log2, soft_cap_log2)


@triton.jit
def attend_tile(
    q,
    k,
    v,
    visible,
    acc,
    m,
    total,
    scale_log2,
    MASKED: tl.constexpr,
    soft_cap_log2,
    HAS_SOFT_CAP: tl.constexpr,
):
    # q [M, D]; k [D, N]; v [N, D]; visible [M, N]; acc [M, D]; m and total [M]
    # The scale is applied in float32 after the product, in the same way with and without a mask: a
    # row's result must not depend on the kind of tile that held its keys.
    scores = tl.dot(q, k, input_precision="ieee")
    if HAS_SOFT_CAP:
        scores = capped(scores, scale_log2, soft_cap_log2)
        scale_log2 = 1.0
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
def attend_rows(
    q,
    k,
    v,
    acc,
    m,
    total,
    scale_log2,
    soft_cap_log2,
    HAS_SOFT_CAP: tl.constexpr,
):
    # q [M, D]; k [D, N]; v [N, D]; acc [M, D]; m [M]; total [M, N / 2]
    # All keys are visible: only whole splits are shared.
    scores = tl.dot(q, k, input_precision="ieee")
    if HAS_SOFT_CAP:
        scores = capped(scores, scale_log2, soft_cap_log2)
        scale_log2 = 1.0
    new_m = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    m_finite = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(tl.fma(scores, scale_log2, -m_finite[:, None]))  # [M, N]
    alpha = tl.exp2(m - m_finite)
    total = tl.fma(total, alpha[:, None], pair_rows(p))
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, new_m, total


@triton.jit
def attend_columns(
    q,
    k,
    v,
    visible,
    acc,
    m,
    total,
    scale_log2,
    soft_cap_log2,
    HAS_SOFT_CAP: tl.constexpr,
):
    # q [D, M]; k and v [N, D]; visible [N]; acc [D, M]; m [M]; total [N / 2, M]
    scores = tl.dot(k, q, input_precision="ieee")  # [N, M]
    if HAS_SOFT_CAP:
        scores = capped(scores, scale_log2, soft_cap_log2)
        scale_log2 = 1.0
    scores = tl.where(visible[:, None], scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 0) * scale_log2)
    m_finite = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(tl.fma(scores, scale_log2, -m_finite[None, :]))
    alpha = tl.exp2(m - m_finite)
    total = tl.fma(total, alpha[None, :], pair_columns(p))
    acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * alpha[None, :], input_precision="ieee")
    return acc, new_m, total


@triton.jit
def normalize(acc, m, total):
    # acc [M, D]; m and total [M]
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
