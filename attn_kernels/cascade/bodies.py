"""Kernel body of cascade attention's shared part: one read of a prefix serves many requests.

A row of the tile is one query head of one request; all rows see all keys, so no score is masked.
Keys are folded as in the decode kernel: splits of SPLIT_LEN tokens at absolute multiples, in key
order. Each row stores a slot among the partial results of its request, which the decode kernel then
folds with those of the request's own keys.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from attn_kernels.attention_state import (
    attend_rows,
    merge,
    page_of_tile,
    sum_rows,
)
from attn_kernels.prefill.bodies import load_kv_tile


# Not specialized: a layer must not cost a compilation.
@triton.jit(do_not_specialize=["layer"])
def shared_prefix_kernel(
    q_ptr,  # [num_rows, num_qo_heads, head_dim]
    pages_ptr,  # [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    page_indices_ptr,  # [num_table_entries], int32
    plan_ptr,  # int32: number of items, items [., ITEM_FIELDS], rows [., 2] (q, first slot)
    partial_acc_ptr,  # [max_slots, num_qo_heads, head_dim], float32
    partial_stats_ptr,  # [max_slots, num_qo_heads, 3], float32
    k_scale_ptr,  # [num_layers, num_kv_heads], float32; None unless pages are fp8
    layer,
    page_stride,  # elements
    layer_stride,
    scale_log2,  # softmax scale * log2(e); for a soft cap see `capped`
    soft_cap_log2,  # soft cap * log2(e); read only if HAS_SOFT_CAP
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    SEGMENT_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows (request, query head) of a tile
    BLOCK_N: tl.constexpr,  # divides SPLIT_LEN; that of the decode kernel, or bits differ
    BLOCK_D: tl.constexpr,  # HEAD_DIM, padded to a power of two
    ITEM_FIELDS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_EXACT: tl.constexpr,  # the bits are those of flat decode
    IS_CHAINED: tl.constexpr,
    OVERLAPS: tl.constexpr,  # the decode kernel is launched beside this one
):
    # Grid: (num_programs,); each program takes every num_programs-th unit (item, key-value head).
    if IS_CHAINED:
        cuda.gdc_wait()
    if OVERLAPS:
        # The decode kernel may start on multiprocessors that have nothing to do here.
        cuda.gdc_launch_dependents()
    num_units = tl.load(plan_ptr) * NUM_KV_HEADS
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0)):
        my_kv_head = unit % NUM_KV_HEADS
        my_item_ptr = plan_ptr + 1 + (unit // NUM_KV_HEADS) * ITEM_FIELDS
        my_rows_ptr = plan_ptr + tl.load(my_item_ptr)
        my_num_rows = tl.load(my_item_ptr + 1)
        my_begin = tl.load(my_item_ptr + 2)
        my_end = tl.load(my_item_ptr + 3)
        my_first_entry = tl.load(my_item_ptr + 4)  # of the page table that is read
        my_ordinal = tl.load(my_item_ptr + 5)  # of the first slot among those of a request

        is_row = rows < my_num_rows
        in_q = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        # The plan knows heads of key-value head 0: no division by GROUP here.
        q_heads = tl.load(my_rows_ptr + rows * 2, mask=is_row, other=0) + my_kv_head * GROUP
        q = tl.load(
            q_ptr + q_heads.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :], mask=in_q, other=0.0
        )
        my_k_ptr = pages_ptr + layer * layer_stride + my_kv_head * (PAGE_SIZE * HEAD_DIM)
        my_v_ptr = my_k_ptr + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
        my_scale_log2 = scale_log2
        if k_scale_ptr is not None:  # that of values waits for the decode kernel's output
            my_scale_log2 *= tl.load(k_scale_ptr + layer * NUM_KV_HEADS + my_kv_head)

        # A slot for each segment; if its beginning belongs to another item, a slot for each split
        # (which could not be folded in key order yet). One slot if bits do not matter.
        begin = my_begin
        while begin < my_end:
            end = my_end
            if IS_EXACT:
                end = tl.minimum(begin // SEGMENT_LEN * SEGMENT_LEN + SEGMENT_LEN, my_end)
                end = tl.where(begin % SEGMENT_LEN == 0, end, begin + SPLIT_LEN)
            # State of the split in progress, and of those before it.
            acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            total = tl.zeros([BLOCK_M, BLOCK_N // 2], dtype=tl.float32)
            segment_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            segment_m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            segment_total = tl.zeros([BLOCK_M], dtype=tl.float32)
            page = page_of_tile(page_indices_ptr, my_first_entry, begin, end, PAGE_SIZE, BLOCK_N)
            for start in tl.range(begin, end, BLOCK_N):
                if IS_EXACT & (start % SPLIT_LEN == 0):
                    segment_acc, segment_m, segment_total = merge(
                        segment_acc, segment_m, segment_total, acc, m, sum_rows(total), DIM_AXIS=1
                    )
                    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
                    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                    total = tl.zeros([BLOCK_M, BLOCK_N // 2], dtype=tl.float32)
                k, v, _ = load_kv_tile(
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
                # One tile ahead: keys must not wait for the page id within an iteration.
                page = page_of_tile(
                    page_indices_ptr, my_first_entry, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N
                )
                acc, m, total = attend_rows(
                    q,
                    k,
                    v,
                    acc,
                    m,
                    total,
                    my_scale_log2,
                    soft_cap_log2,
                    HAS_SOFT_CAP,
                )
            segment_acc, segment_m, segment_total = merge(
                segment_acc, segment_m, segment_total, acc, m, sum_rows(total), DIM_AXIS=1
            )

            slot_heads = tl.load(my_rows_ptr + rows * 2 + 1, mask=is_row, other=0)
            slot_heads += my_ordinal * (NUM_KV_HEADS * GROUP) + my_kv_head * GROUP
            partial_rows = slot_heads.to(tl.int64)
            tl.store(
                partial_acc_ptr + partial_rows[:, None] * HEAD_DIM + dims[None, :],
                segment_acc,
                mask=in_q,
            )
            stats_ptrs = partial_stats_ptr + partial_rows * 3
            tl.store(stats_ptrs, segment_m, mask=is_row)
            tl.store(stats_ptrs + 1, segment_total, mask=is_row)
            tl.store(stats_ptrs + 2, (end % SEGMENT_LEN == 0).to(tl.float32), mask=is_row)
            my_ordinal += 1
            begin = end
