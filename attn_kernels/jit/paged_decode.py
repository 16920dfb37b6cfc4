"""Kernel body of paged decode attention: one query token per request, split over the keys.

A request's keys are cut into splits at absolute multiples of SPLIT_LEN, and splits form segments of
a fixed number of splits. Its result is the fold over segments of the fold over each segment's
splits, both in key order. A work item is one split or one segment (folded in registers), so the
planner may choose the item size by the load of the device, and the bits do not change.

Partial results lie in slots. A slot holds a state (acc, m, total) and a flag, 1 if a segment ends
with it. A request's slots follow each other in key order; the first ones may have been filled by an
earlier launch (a prefix that requests share).
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from attn_kernels.jit.attention_state import attend_tile, merge, normalize, page_of_tile

FOLD_STAGES = tl.constexpr(4)  # partial results in flight
LN2 = tl.constexpr(0.6931471805599453)


# Not specialized: a layer must not cost a compilation.
@triton.jit(do_not_specialize=["layer"])
def paged_decode_kernel(
    out_ptr,  # [num_rows, num_qo_heads, head_dim]
    lse_ptr,  # [num_rows, num_qo_heads], float32, natural log; read only if HAS_LSE
    q_ptr,  # [num_rows, num_qo_heads, head_dim]
    pages_ptr,  # [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    page_indices_ptr,  # [num_table_entries], int32
    plan_ptr,  # [1 + max_items * ITEM_FIELDS], int32: number of items, then the items
    partial_acc_ptr,  # [max_slots, num_qo_heads, head_dim], float32
    partial_stats_ptr,  # [max_slots, num_qo_heads, 3], float32: m, total, whether a segment ends
    arrivals_ptr,  # [max_slots, num_kv_heads], int32, zero between launches
    layer,
    page_stride,  # elements
    layer_stride,
    scale_log2,  # softmax scale * log2(e)
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,  # GROUP, padded for the matrix unit
    BLOCK_N: tl.constexpr,  # divides SPLIT_LEN
    BLOCK_D: tl.constexpr,  # HEAD_DIM, padded to a power of two
    ITEM_FIELDS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    OVERLAPS: tl.constexpr,  # the launch that fills shared slots may still run
):
    # Grid: (num_programs,); each program takes every num_programs-th unit (item, key-value head).
    num_units = tl.load(plan_ptr) * NUM_KV_HEADS
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_head = rows < GROUP
    is_dim = dims < HEAD_DIM
    in_q = is_head[:, None] & is_dim[None, :]
    heads_dims = rows[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK_M, BLOCK_D]

    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0)):
        my_kv_head = unit % NUM_KV_HEADS
        my_item_ptr = plan_ptr + 1 + (unit // NUM_KV_HEADS) * ITEM_FIELDS
        my_row = tl.load(my_item_ptr)
        my_first_page = tl.load(my_item_ptr + 1)  # index in the page table
        my_begin = tl.load(my_item_ptr + 2)
        my_end = tl.load(my_item_ptr + 3)
        my_first_token = tl.load(my_item_ptr + 4)  # first one inside the sliding window
        my_slot = tl.load(my_item_ptr + 5)
        my_first_slot = tl.load(my_item_ptr + 6)
        my_num_slots = tl.load(my_item_ptr + 7)  # 0: the item is the whole request
        my_num_items = tl.load(my_item_ptr + 8)
        my_ends_segment = tl.load(my_item_ptr + 9)

        my_first_head = my_row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + my_kv_head * GROUP
        q = tl.load(q_ptr + my_first_head * HEAD_DIM + heads_dims, mask=in_q, other=0.0)
        my_k_ptr = pages_ptr + layer * layer_stride + my_kv_head * (PAGE_SIZE * HEAD_DIM)
        my_v_ptr = my_k_ptr + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM

        # State of the split in progress, and of the segment before it.
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        segment_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        segment_m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        segment_total = tl.zeros([BLOCK_M], dtype=tl.float32)

        first_tile = tl.maximum(my_begin, my_first_token) // BLOCK_N * BLOCK_N
        page = page_of_tile(page_indices_ptr, my_first_page, first_tile, my_end, PAGE_SIZE, BLOCK_N)
        for start in tl.range(first_tile, my_end, BLOCK_N):
            if start % SPLIT_LEN == 0:
                segment_acc, segment_m, segment_total = merge(
                    segment_acc, segment_m, segment_total, acc, m, total
                )
                acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
                m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                total = tl.zeros([BLOCK_M], dtype=tl.float32)
            tokens = start + tl.arange(0, BLOCK_N)
            in_item = tokens < my_end
            offsets = page * page_stride + (tokens % PAGE_SIZE) * HEAD_DIM
            # One tile ahead: keys must not wait for the page id within an iteration.
            page = page_of_tile(
                page_indices_ptr, my_first_page, start + BLOCK_N, my_end, PAGE_SIZE, BLOCK_N
            )
            # Rows past the end may hold anything, also NaN: they are never read.
            k = tl.load(
                my_k_ptr + offsets[None, :] + dims[:, None],
                mask=in_item[None, :] & is_dim[:, None],
                other=0.0,
            )  # [BLOCK_D, BLOCK_N]
            v = tl.load(
                my_v_ptr + offsets[:, None] + dims[None, :],
                mask=in_item[:, None] & is_dim[None, :],
                other=0.0,
            )  # [BLOCK_N, BLOCK_D]
            visible = (in_item & (tokens >= my_first_token))[None, :]
            acc, m, total = attend_tile(q, k, v, visible, acc, m, total, scale_log2, MASKED=True)
        acc, m, total = merge(segment_acc, segment_m, segment_total, acc, m, total)

        my_heads = my_kv_head * GROUP + rows
        if my_num_slots == 0:
            out, lse_log2 = normalize(acc, m, total)
            tl.store(out_ptr + my_first_head * HEAD_DIM + heads_dims, out, mask=in_q)
            if HAS_LSE:
                tl.store(lse_ptr + my_first_head + rows, lse_log2 * LN2, mask=is_head)
        else:
            partial_row = my_slot.to(tl.int64) * (NUM_KV_HEADS * GROUP) + my_heads
            tl.store(
                partial_acc_ptr + partial_row[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_q
            )
            stats = partial_stats_ptr + partial_row * 3
            ends_segment = tl.zeros([BLOCK_M], dtype=tl.float32) + my_ends_segment
            tl.store(stats, m, mask=is_head)
            tl.store(stats + 1, total, mask=is_head)
            tl.store(stats + 2, ends_segment, mask=is_head)
            # The last of a request's items to arrive folds them all, in key order. The barrier
            # puts all threads' stores before the release by one of them.
            tl.debug_barrier()
            arrivals = arrivals_ptr + my_first_slot * NUM_KV_HEADS + my_kv_head
            if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == my_num_items - 1:
                tl.store(arrivals, 0)
                if OVERLAPS:
                    cuda.gdc_wait()
                acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
                m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                total = tl.zeros([BLOCK_M], dtype=tl.float32)
                segment_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
                segment_m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                segment_total = tl.zeros([BLOCK_M], dtype=tl.float32)
                for index in tl.range(0, my_num_slots, num_stages=FOLD_STAGES):
                    row = (my_first_slot + index).to(tl.int64) * (NUM_KV_HEADS * GROUP) + my_heads
                    # .cg: another multiprocessor wrote them, this one's L1 must not answer.
                    partial_acc = tl.load(
                        partial_acc_ptr + row[:, None] * HEAD_DIM + dims[None, :],
                        mask=in_q,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    stats = partial_stats_ptr + row * 3
                    partial_m = tl.load(
                        stats, mask=is_head, other=float("-inf"), cache_modifier=".cg"
                    )
                    partial_total = tl.load(
                        stats + 1, mask=is_head, other=0.0, cache_modifier=".cg"
                    )
                    segment_acc, segment_m, segment_total = merge(
                        segment_acc, segment_m, segment_total, partial_acc, partial_m, partial_total
                    )
                    my_slot_ptr = partial_stats_ptr + (my_first_slot + index).to(tl.int64) * (
                        NUM_KV_HEADS * GROUP * 3
                    )
                    if tl.load(my_slot_ptr + my_kv_head * GROUP * 3 + 2, cache_modifier=".cg") != 0:
                        acc, m, total = merge(acc, m, total, segment_acc, segment_m, segment_total)
                        segment_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
                        segment_m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                        segment_total = tl.zeros([BLOCK_M], dtype=tl.float32)
                out, lse_log2 = normalize(acc, m, total)
                tl.store(out_ptr + my_first_head * HEAD_DIM + heads_dims, out, mask=in_q)
                if HAS_LSE:
                    tl.store(lse_ptr + my_first_head + rows, lse_log2 * LN2, mask=is_head)
    if OVERLAPS:
        cuda.gdc_wait()  # whatever follows this launch may rely on that one
