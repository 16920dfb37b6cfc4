"""Kernel body of paged prefill attention: causal, ragged batch, chunks over existing prefixes.

A query tile packs tokens and the query heads of one key-value head, so that each key is read once
for all of them and the causal edge is fine-grained. Key tiles lie at absolute multiples of BLOCK_N
and a fully hidden tile changes nothing, so a row's bits do not depend on its tile or chunk.
"""

import triton
import triton.language as tl

from attn_kernels.attention_state import LN2, attend_tile, normalize, page_of_tile


@triton.jit
def load_kv_tile(
    k_ptr,  # keys of one layer and head of page 0
    v_ptr,
    page,  # a scalar or [BLOCK_N]
    start,
    end,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,  # of the tiles returned, that of queries
):
    dims = tl.arange(0, BLOCK_D)
    tokens = start + tl.arange(0, BLOCK_N)
    in_request = tokens < end
    offsets = page * page_stride + (tokens % PAGE_SIZE) * HEAD_DIM
    if MASKED:
        # Rows past the end may hold anything, also NaN: they are never read.
        is_dim = dims < HEAD_DIM
        in_k = in_request[None, :] & is_dim[:, None]
        in_v = in_request[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + offsets[None, :] + dims[:, None], mask=in_k, other=0.0)
        v = tl.load(v_ptr + offsets[:, None] + dims[None, :], mask=in_v, other=0.0)
    else:
        k = tl.load(k_ptr + offsets[None, :] + dims[:, None])
        v = tl.load(v_ptr + offsets[:, None] + dims[None, :])
    return k.to(DTYPE), v.to(DTYPE), tokens  # [BLOCK_D, BLOCK_N], [BLOCK_N, BLOCK_D], [BLOCK_N]


# Not specialized: a layer must not cost a compilation.
@triton.jit(do_not_specialize=["layer", "sliding_window"])
def paged_prefill_kernel(
    out_ptr,  # [num_rows, num_qo_heads, head_dim]
    lse_ptr,  # [num_rows, num_qo_heads], float32, natural log; written only if HAS_LSE
    q_ptr,  # [num_rows, num_qo_heads, head_dim]
    pages_ptr,  # [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    page_indptr_ptr,  # [num_requests + 1], int32
    page_indices_ptr,  # [num_table_entries], int32
    items_ptr,  # [num_items, ITEM_FIELDS], int32: request, first row, qo_len, kv_len, tile
    k_scale_ptr,  # [num_layers, num_kv_heads], float32; None unless pages are fp8
    v_scale_ptr,  # the same
    layer,
    page_stride,  # elements
    layer_stride,
    scale_log2,  # softmax scale * log2(e)
    soft_cap_log2,  # cap * log2(e), and scale_log2 as `capped` takes it; only if HAS_SOFT_CAP
    sliding_window,  # tokens that a query sees; read only if HAS_WINDOW
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows (token, query head) of a tile
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM, padded to a power of two
    ITEM_FIELDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    # Grid: (num_items * num_kv_heads,); heads of one item are neighbours.
    my_kv_head = tl.program_id(0) % NUM_KV_HEADS
    my_item_ptr = items_ptr + (tl.program_id(0) // NUM_KV_HEADS) * ITEM_FIELDS
    my_request = tl.load(my_item_ptr)
    my_first_row = tl.load(my_item_ptr + 1)
    my_qo_len = tl.load(my_item_ptr + 2)
    my_kv_len = tl.load(my_item_ptr + 3)
    my_tile = tl.load(my_item_ptr + 4)
    my_first_page = tl.load(page_indptr_ptr + my_request)

    if k_scale_ptr is not None:  # a scale of keys is one of scores
        scale_log2 *= tl.load(k_scale_ptr + layer * NUM_KV_HEADS + my_kv_head)

    rows = my_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    my_tokens = rows // GROUP
    is_row = my_tokens < my_qo_len
    in_q = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (my_first_row + my_tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + (
        my_kv_head * GROUP + rows % GROUP
    )
    q = tl.load(q_ptr + heads[:, None] * HEAD_DIM + dims[None, :], mask=in_q, other=0.0)
    my_k_ptr = pages_ptr + layer * layer_stride + my_kv_head * (PAGE_SIZE * HEAD_DIM)
    my_v_ptr = my_k_ptr + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM

    # Keys, by what the tile's rows see of them:
    #   [begin, full_begin)  cut by the window of some rows
    #   [full_begin, full_end)  seen by all rows
    #   [full_end, end)      the causal edge
    my_start = my_kv_len - my_qo_len
    positions = my_start + my_tokens
    first_position = my_start + my_tile * BLOCK_M // GROUP
    last_position = my_start + tl.minimum((my_tile * BLOCK_M + BLOCK_M - 1) // GROUP, my_qo_len - 1)
    end = last_position + 1
    begin = 0
    full_begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - sliding_window + 1, 0) // BLOCK_N * BLOCK_N
        window_edge = tl.maximum(last_position - sliding_window + 1, 0)
        full_begin = tl.minimum(tl.cdiv(window_edge, BLOCK_N) * BLOCK_N, end)
    full_end = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, full_begin)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_WINDOW:
        page = page_of_tile(page_indices_ptr, my_first_page, begin, end, PAGE_SIZE, BLOCK_N)
        for start in tl.range(begin, full_begin, BLOCK_N):
            k, v, tokens = load_kv_tile(
                my_k_ptr,
                my_v_ptr,
                page,
                start,
                end,
                page_stride,
                PAGE_SIZE=PAGE_SIZE,
                HEAD_DIM=HEAD_DIM,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
                MASKED=True,
                DTYPE=q.dtype,
            )
            page = page_of_tile(
                page_indices_ptr, my_first_page, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N
            )
            distances = positions[:, None] - tokens[None, :]
            visible = (distances >= 0) & (distances < sliding_window)
            acc, m, total = attend_tile(
                q,
                k,
                v,
                visible,
                acc,
                m,
                total,
                scale_log2,
                MASKED=True,
                soft_cap_log2=soft_cap_log2,
                HAS_SOFT_CAP=HAS_SOFT_CAP,
            )
    # Page ids are loaded one tile ahead: keys must not wait for them within an iteration.
    page = page_of_tile(page_indices_ptr, my_first_page, full_begin, end, PAGE_SIZE, BLOCK_N)
    for start in tl.range(full_begin, full_end, BLOCK_N):
        k, v, tokens = load_kv_tile(
            my_k_ptr,
            my_v_ptr,
            page,
            start,
            end,
            page_stride,
            PAGE_SIZE=PAGE_SIZE,
            HEAD_DIM=HEAD_DIM,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
            MASKED=HEAD_DIM < BLOCK_D,
            DTYPE=q.dtype,
        )
        page = page_of_tile(
            page_indices_ptr, my_first_page, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N
        )
        acc, m, total = attend_tile(
            q,
            k,
            v,
            is_row[:, None],
            acc,
            m,
            total,
            scale_log2,
            MASKED=False,
            soft_cap_log2=soft_cap_log2,
            HAS_SOFT_CAP=HAS_SOFT_CAP,
        )
    page = page_of_tile(page_indices_ptr, my_first_page, full_end, end, PAGE_SIZE, BLOCK_N)
    for start in tl.range(full_end, end, BLOCK_N):
        k, v, tokens = load_kv_tile(
            my_k_ptr,
            my_v_ptr,
            page,
            start,
            end,
            page_stride,
            PAGE_SIZE=PAGE_SIZE,
            HEAD_DIM=HEAD_DIM,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
            MASKED=True,
            DTYPE=q.dtype,
        )
        page = page_of_tile(
            page_indices_ptr, my_first_page, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N
        )
        distances = positions[:, None] - tokens[None, :]
        visible = distances >= 0
        if HAS_WINDOW:
            visible = visible & (distances < sliding_window)
        acc, m, total = attend_tile(
            q,
            k,
            v,
            visible,
            acc,
            m,
            total,
            scale_log2,
            MASKED=True,
            soft_cap_log2=soft_cap_log2,
            HAS_SOFT_CAP=HAS_SOFT_CAP,
        )

    out, lse_log2 = normalize(acc, m, total)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + layer * NUM_KV_HEADS + my_kv_head)
    tl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], out, mask=in_q)
    if HAS_LSE:
        tl.store(lse_ptr + heads, lse_log2 * LN2, mask=is_row)
