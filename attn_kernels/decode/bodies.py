"""Kernel body of paged decode attention: one query token per request, split over the keys.

A request's keys are cut into splits at absolute multiples of SPLIT_LEN, and splits form segments of
SEGMENT_LEN. Its result is the fold over segments of the fold over each segment's splits, both in
key order, so the bits do not depend on how the planner distributes the work: a work item is any run
of splits of one request, and a program processes a lane of items for one key-value head.

Partial results lie in slots. A slot holds a state (acc, m, total) and a flag, 1 if a segment ends
with it. The state is the fold of a segment's first splits, one to all of them, or a single later
split. A request's slots follow each other in key order; the first ones may have been filled by an
earlier launch (a prefix that requests share).

Queries are the columns of all matrix products: a tile of keys has the 64 rows that wgmma takes, and
bits are those of wide tiles of queries (see attention_state.py).
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from attn_kernels.attention_state import (
    LN2,
    attend_columns,
    merge,
    normalize,
    page_of_tile,
    sum_columns,
)

FOLD_SLOTS = tl.constexpr(4)  # folded while as many are loaded
LOWEST = tl.constexpr(-3.0e38)  # below all scores, and unlike -inf free of NaN in differences


@triton.jit
def load_item(item_ptr):
    # What an item needs from its beginning: row, first page, begin, end, first token in the window.
    return (
        tl.load(item_ptr),
        tl.load(item_ptr + 1),
        tl.load(item_ptr + 6),
        tl.load(item_ptr + 7),
        tl.load(item_ptr + 2),
    )


@triton.jit
def store_slot(
    partial_acc_ptr,
    partial_stats_ptr,
    slot,
    heads,
    dims,
    in_acc,
    is_head,
    acc,
    m,
    total,
    ends_segment,
    NUM_QO_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    # acc [D, M]; m and total [M]
    rows = slot.to(tl.int64) * NUM_QO_HEADS + heads
    tl.store(partial_acc_ptr + rows[None, :] * HEAD_DIM + dims[:, None], acc, mask=in_acc)
    stats_ptrs = partial_stats_ptr + rows * 3
    tl.store(stats_ptrs, m, mask=is_head)
    tl.store(stats_ptrs + 1, total, mask=is_head)
    flags = tl.zeros_like(m) + ends_segment.to(tl.float32)
    tl.store(stats_ptrs + 2, flags, mask=is_head)


@triton.jit
def load_slot(
    partial_acc_ptr,
    partial_stats_ptr,
    slot,
    is_slot,
    first_head,
    members,
    dims,
    NUM_QO_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    # .cg: another multiprocessor wrote them, this one's L1 must not answer.
    first_row = slot.to(tl.int64) * NUM_QO_HEADS + first_head
    in_group = (members < GROUP) & is_slot
    acc = tl.load(
        partial_acc_ptr + first_row * HEAD_DIM + members[:, None] * HEAD_DIM + dims[None, :],
        mask=in_group[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    stats_ptrs = partial_stats_ptr + first_row * 3 + members * 3
    m = tl.load(stats_ptrs, mask=in_group, other=LOWEST, cache_modifier=".cg")
    total = tl.load(stats_ptrs + 1, mask=in_group, other=0.0, cache_modifier=".cg")
    ends_segment = tl.load(
        partial_stats_ptr + first_row * 3 + 2, mask=is_slot, other=0.0, cache_modifier=".cg"
    )
    return acc, m, total, ends_segment


@triton.jit
def merge_finite(acc_a, m_a, total_a, acc_b, m_b, total_b):
    # As `merge`, for maxima of which one at least is finite.
    m = tl.maximum(m_a, m_b)
    weight_a = tl.exp2(m_a - m)
    weight_b = tl.exp2(m_b - m)
    acc = tl.fma(acc_a, weight_a[:, None], acc_b * weight_b[:, None])
    return acc, m, tl.fma(total_a, weight_a, total_b * weight_b)


@triton.jit
def load_slots(
    partial_acc_ptr,
    partial_stats_ptr,
    first_slot,
    first,
    num_slots,
    first_head,
    members,
    dims,
    NUM_QO_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    # Slots `first` and following of a request's.
    slots = ()
    for index in tl.static_range(FOLD_SLOTS):
        slot = load_slot(
            partial_acc_ptr,
            partial_stats_ptr,
            first_slot + first + index,
            first + index < num_slots,
            first_head,
            members,
            dims,
            NUM_QO_HEADS,
            GROUP,
            HEAD_DIM,
        )
        slots = slots + (slot,)  # noqa: RUF005 -- Triton has no unpacking
    return slots


@triton.jit
def fold_slots(
    partial_acc_ptr,
    partial_stats_ptr,
    first_slot,
    num_slots,
    first_head,
    NUM_QO_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Returns acc [BLOCK_GROUP, BLOCK_D], m and total [BLOCK_GROUP] of the request.
    #
    # Each slot is merged into its segment, and a segment that ends into the result. No branches:
    # where a segment goes on, it is merged with weight 0, and the first slot of the next segment
    # gives an ended one weight 0. So all but two chains of fma runs ahead. Little is unrolled: code
    # comes from memory the first time.
    members = tl.arange(0, BLOCK_GROUP)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_D], dtype=tl.float32)
    m = tl.full([BLOCK_GROUP], LOWEST, dtype=tl.float32)
    total = tl.zeros([BLOCK_GROUP], dtype=tl.float32)
    segment_acc, segment_m, segment_total = acc, m, total
    slots = load_slots(
        partial_acc_ptr,
        partial_stats_ptr,
        first_slot,
        0,
        num_slots,
        first_head,
        members,
        dims,
        NUM_QO_HEADS,
        GROUP,
        HEAD_DIM,
    )
    for first in tl.range(0, num_slots, FOLD_SLOTS, num_stages=1):
        next_slots = load_slots(
            partial_acc_ptr,
            partial_stats_ptr,
            first_slot,
            first + FOLD_SLOTS,
            num_slots,
            first_head,
            members,
            dims,
            NUM_QO_HEADS,
            GROUP,
            HEAD_DIM,
        )
        for index in tl.static_range(FOLD_SLOTS):
            slot_acc, slot_m, slot_total, ends_segment = slots[index]
            segment_acc, segment_m, segment_total = merge_finite(
                segment_acc, segment_m, segment_total, slot_acc, slot_m, slot_total
            )
            ended_m = tl.where(ends_segment != 0, segment_m, LOWEST)
            acc, m, total = merge_finite(acc, m, total, segment_acc, ended_m, segment_total)
            segment_m = tl.where(ends_segment != 0, LOWEST, segment_m)
        slots = next_slots
    return acc, m, total


# Not specialized: a layer must not cost a compilation.
@triton.jit(do_not_specialize=["layer"])
def paged_decode_kernel(
    out_ptr,  # [num_rows, num_qo_heads, head_dim]
    lse_ptr,  # [num_rows, num_qo_heads], float32, natural log; written only if HAS_LSE
    q_ptr,  # [num_rows, num_qo_heads, head_dim]
    pages_ptr,  # [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    page_indices_ptr,  # [num_table_entries], int32
    items_ptr,  # [num_lanes + max_items, ITEM_FIELDS], int32: each lane's first item, the others
    partial_acc_ptr,  # [max_slots, num_qo_heads, head_dim], float32
    partial_stats_ptr,  # [max_slots, num_qo_heads, 3], float32: m, total, whether a segment ends
    arrivals_ptr,  # [max_slots, num_kv_heads], int32, zero between launches
    k_scale_ptr,  # [num_layers, num_kv_heads], float32; None unless pages are fp8
    v_scale_ptr,  # the same
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
    BLOCK_M: tl.constexpr,  # GROUP, padded for the matrix unit
    BLOCK_GROUP: tl.constexpr,  # GROUP, padded to a power of two
    BLOCK_N: tl.constexpr,  # divides SPLIT_LEN
    BLOCK_D: tl.constexpr,  # HEAD_DIM, padded to a power of two
    ITEM_FIELDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # and not OVERLAPS
    OVERLAPS: tl.constexpr,  # the launch that fills shared slots may still run
):
    # Grid: (num_lanes * NUM_KV_HEADS,); heads of a lane are neighbours.
    if IS_CHAINED:
        cuda.gdc_wait()
    NUM_QO_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    my_kv_head = tl.program_id(0) % NUM_KV_HEADS
    my_first_head = my_kv_head * GROUP
    my_item_ptr = items_ptr + (tl.program_id(0) // NUM_KV_HEADS) * ITEM_FIELDS
    my_row, my_first_page, my_begin, my_end, my_first_token = load_item(my_item_ptr)
    my_others_ptr = items_ptr + tl.load(my_item_ptr + 10) * ITEM_FIELDS
    my_num_items = tl.load(my_item_ptr + 11)  # of the lane

    # The scale of keys becomes one of scores, and that of values one of the output: states, and so
    # their folds, know nothing of either.
    if k_scale_ptr is not None:
        scale_log2 *= tl.load(k_scale_ptr + layer * NUM_KV_HEADS + my_kv_head)
        my_v_scale = tl.load(v_scale_ptr + layer * NUM_KV_HEADS + my_kv_head)

    columns = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    is_head = columns < GROUP
    is_dim = dims < HEAD_DIM
    in_acc = is_dim[:, None] & is_head[None, :]
    heads_dims = columns[None, :] * HEAD_DIM + dims[:, None]  # [BLOCK_D, BLOCK_M]
    my_k_ptr = pages_ptr + layer * layer_stride + my_kv_head * (PAGE_SIZE * HEAD_DIM)
    my_v_ptr = my_k_ptr + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM

    my_start = tl.maximum(my_begin, my_first_token) // BLOCK_N * BLOCK_N
    my_page = page_of_tile(page_indices_ptr, my_first_page, my_start, my_end, PAGE_SIZE, BLOCK_N)
    my_out_row = my_row.to(tl.int64) * NUM_QO_HEADS + my_first_head
    q = tl.load(q_ptr + my_out_row * HEAD_DIM + heads_dims, mask=in_acc, other=0.0)

    for index in tl.range(0, my_num_items):
        my_first_slot = tl.load(my_item_ptr + 3)
        my_num_slots = tl.load(my_item_ptr + 4)  # 0: the item is the whole request
        my_arrivals = tl.load(my_item_ptr + 5)  # items of the request
        my_slot = tl.load(my_item_ptr + 8)
        my_is_tail = tl.load(my_item_ptr + 9)  # the request ends with the item
        # The next item's fields arrive while this one is computed.
        my_item_ptr = my_others_ptr + index * ITEM_FIELDS
        next_row, next_first_page, next_begin, next_end, next_first_token = load_item(my_item_ptr)
        # Its segment's beginning belongs to another item: splits are stored one by one.
        begins_within = my_begin % SEGMENT_LEN != 0

        # State of the split in progress, and of the segment before it.
        acc = tl.zeros([BLOCK_D, BLOCK_M], dtype=tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_N // 2, BLOCK_M], dtype=tl.float32)
        segment_acc = tl.zeros([BLOCK_D, BLOCK_M], dtype=tl.float32)
        segment_m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        segment_total = tl.zeros([BLOCK_M], dtype=tl.float32)
        for start in tl.range(my_start, my_end, BLOCK_N):
            if (start % SPLIT_LEN == 0) & (start > my_begin):
                segment_acc, segment_m, segment_total = merge(
                    segment_acc, segment_m, segment_total, acc, m, sum_columns(total), DIM_AXIS=0
                )
                acc = tl.zeros([BLOCK_D, BLOCK_M], dtype=tl.float32)
                m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                total = tl.zeros([BLOCK_N // 2, BLOCK_M], dtype=tl.float32)
                ends_segment = start % SEGMENT_LEN == 0
                is_alone = begins_within & (start // SEGMENT_LEN == my_begin // SEGMENT_LEN)
                if ends_segment | is_alone:
                    store_slot(
                        partial_acc_ptr,
                        partial_stats_ptr,
                        my_slot,
                        my_first_head + columns,
                        dims,
                        in_acc,
                        is_head,
                        segment_acc,
                        segment_m,
                        segment_total,
                        ends_segment,
                        NUM_QO_HEADS,
                        HEAD_DIM,
                    )
                    my_slot += 1
                    segment_acc = tl.zeros([BLOCK_D, BLOCK_M], dtype=tl.float32)
                    segment_m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                    segment_total = tl.zeros([BLOCK_M], dtype=tl.float32)
            # One address and constant offsets: per-row arithmetic would take longer than the rest.
            tile = my_page * page_stride
            if PAGE_SIZE % BLOCK_N == 0:
                tile += (start % PAGE_SIZE) * HEAD_DIM
                offsets = keys[:, None] * HEAD_DIM + dims[None, :]
                k_ptrs = (my_k_ptr + tile) + offsets
                v_ptrs = (my_v_ptr + tile) + offsets
            else:
                slots = (start + keys) % PAGE_SIZE
                if BLOCK_N % PAGE_SIZE == 0:
                    slots = keys % PAGE_SIZE
                offsets = slots[:, None] * HEAD_DIM + dims[None, :]
                k_ptrs = my_k_ptr + tile[:, None] + offsets
                v_ptrs = my_v_ptr + tile[:, None] + offsets
            # One tile ahead: keys must not wait for the page id within an iteration.
            my_page = page_of_tile(
                page_indices_ptr, my_first_page, start + BLOCK_N, my_end, PAGE_SIZE, BLOCK_N
            )
            # Rows past the end may hold anything, also NaN. Their scores are masked, so that keys
            # may be read; a weight of zero would not make up for a value.
            in_item = keys < my_end - start
            if HEAD_DIM < BLOCK_D:
                k = tl.load(k_ptrs, mask=is_dim[None, :], other=0.0)  # [BLOCK_N, BLOCK_D]
                v = tl.load(v_ptrs, mask=in_item[:, None] & is_dim[None, :], other=0.0)
            else:
                k = tl.load(k_ptrs)
                v = tl.load(v_ptrs, mask=in_item[:, None], other=0.0)
            visible = in_item
            if HAS_WINDOW:
                visible = visible & (keys >= my_first_token - start)
            acc, m, total = attend_columns(
                q,
                k.to(q.dtype),
                v.to(q.dtype),
                visible,
                acc,
                m,
                total,
                scale_log2,
                soft_cap_log2,
                HAS_SOFT_CAP,
            )
        acc, m, sums = merge(
            segment_acc, segment_m, segment_total, acc, m, sum_columns(total), DIM_AXIS=0
        )

        # The next item's first page id and queries arrive while this one is stored.
        ends_segment = (my_end % SEGMENT_LEN == 0) | (my_is_tail != 0)
        my_row, my_first_page, my_begin, my_end = next_row, next_first_page, next_begin, next_end
        my_first_token = next_first_token
        my_start = tl.maximum(my_begin, my_first_token) // BLOCK_N * BLOCK_N
        has_next = index + 1 < my_num_items
        my_page = page_of_tile(
            page_indices_ptr,
            my_first_page,
            my_start,
            tl.where(has_next, my_end, 0),
            PAGE_SIZE,
            BLOCK_N,
        )
        out_row = my_out_row
        my_out_row = my_row.to(tl.int64) * NUM_QO_HEADS + my_first_head
        q = tl.load(q_ptr + my_out_row * HEAD_DIM + heads_dims, mask=in_acc & has_next, other=0.0)

        if my_num_slots == 0:
            out, lse_log2 = normalize(tl.trans(acc), m, sums)
            if v_scale_ptr is not None:
                out *= my_v_scale
            tl.store(
                out_ptr + out_row * HEAD_DIM + tl.trans(heads_dims), out, mask=tl.trans(in_acc)
            )
            if HAS_LSE:
                tl.store(lse_ptr + out_row + columns, lse_log2 * LN2, mask=is_head)
        else:
            store_slot(
                partial_acc_ptr,
                partial_stats_ptr,
                my_slot,
                my_first_head + columns,
                dims,
                in_acc,
                is_head,
                acc,
                m,
                sums,
                ends_segment,
                NUM_QO_HEADS,
                HEAD_DIM,
            )
            # The last of a request's items to arrive folds all slots, in key order. The barrier
            # puts all threads' stores before the release by one of them.
            tl.debug_barrier()
            is_last = my_arrivals == 1  # the other slots are shared ones
            if my_arrivals > 1:
                counter = arrivals_ptr + my_first_slot * NUM_KV_HEADS + my_kv_head
                is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == my_arrivals - 1
                if is_last:
                    tl.store(counter, 0)
            if is_last:
                if OVERLAPS:
                    cuda.gdc_wait()
                group_acc, group_m, group_total = fold_slots(
                    partial_acc_ptr,
                    partial_stats_ptr,
                    my_first_slot,
                    my_num_slots,
                    my_first_head,
                    NUM_QO_HEADS,
                    GROUP,
                    HEAD_DIM,
                    BLOCK_GROUP,
                    BLOCK_D,
                )
                out, lse_log2 = normalize(group_acc, group_m, group_total)
                if v_scale_ptr is not None:
                    out *= my_v_scale
                members = tl.arange(0, BLOCK_GROUP)
                in_group = members < GROUP
                tl.store(
                    out_ptr + out_row * HEAD_DIM + members[:, None] * HEAD_DIM + dims[None, :],
                    out,
                    mask=in_group[:, None] & is_dim[None, :],
                )
                if HAS_LSE:
                    tl.store(lse_ptr + out_row + members, lse_log2 * LN2, mask=in_group)
    if OVERLAPS:
        cuda.gdc_wait()  # whatever follows this launch may rely on that one
