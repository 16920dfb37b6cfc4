"""Kernel body of paged decode attention for Hopper: the same bits as bodies.py.

Work items, lanes, splits, segments and slots are those of bodies.py, and so is every
operation on numbers (of NaN in fp8 see `widen`). A request that is one item is folded in registers,
of however many segments, and stores no slots. Keys and values come otherwise: the tensor copy
engine brings the tiles of all of a lane's items into one ring in shared memory, as many ahead as
the ring holds, also over the border between items. The weights of a tile are computed while the
products of those before with their values still run. Tiles of fp8 become half precision on their
way from the ring to the matrix unit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from attn_kernels.attention_state import (
    LN2,
    add_columns,
    capped,
    merge,
    pair_columns,
    sum_columns,
)
from attn_kernels.decode.bodies import LOWEST, load_item, merge_finite
from attn_kernels.warpgroups import NEG_INF, barrier, clear_tail, narrow, widen

BLOCK_N = gl.constexpr(64)  # keys of a tile: the rows of products
BLOCK_M = gl.constexpr(16)  # query heads: their columns
# A tile's scores and the output: queries are columns.
COLUMNS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
QUERY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SLOT_ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
# [4, BLOCK_M], a value of each warp for each column: a thread has all four for its columns.
ALL_WARPS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [0, 1], [0, 8]],
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[4, 16],
    )
)


@gluon.jit
def first_tile(begin, first_token):
    return gl.maximum(begin, first_token) // BLOCK_N * BLOCK_N


@gluon.jit
def load_page(page_indices_ptr, first_entry, start, is_token, PAGE_SIZE: gl.constexpr):
    # An item without tokens has a tile, too, of which nothing is visible: any page will do.
    return gl.load(page_indices_ptr + first_entry + start // PAGE_SIZE, mask=is_token, other=0)


@gluon.jit
def copy_tile(
    pages_desc,
    boxes,
    full,
    stage,
    cursor,
    my_num_items,
    my_kv_head,
    layer,
    num_layers,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    # Keys and values at the cursor, if there are any
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * pages_desc.dtype.primitive_bitwidth // 8
    index, _entry, start, _end, page, _next_entry, _next_begin, _next_end, _next_first = cursor
    if index < my_num_items:
        row = ((page * num_layers + layer) * 2 * NUM_KV_HEADS + my_kv_head) * PAGE_SIZE
        mbarrier.expect(full.index(stage), 2 * TILE_BYTES)
        tma.async_copy_global_to_shared(
            pages_desc,
            [0, 0, row + start % PAGE_SIZE, 0],
            full.index(stage),
            boxes.index(stage),
        )


@gluon.jit
def next_tile(
    page_indices_ptr,
    my_others_ptr,
    my_num_items,
    cursor,
    ITEM_FIELDS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    # The cursor: the item that is copied, its first page, the tile's start, its end, the tile's
    # page id; and fields of the item after it, loaded while this one is copied. A load writes them
    # where they stay: nothing waits for it before that item begins.
    index, first_entry, start, end, _page, next_entry, next_begin, next_end, next_first = cursor
    start += BLOCK_N
    is_new = start >= end
    index += is_new.to(gl.int32)
    first_entry = gl.where(is_new, next_entry, first_entry)
    start = gl.where(is_new, first_tile(next_begin, next_first), start)
    end = gl.where(is_new, next_end, end)
    next_ptr = my_others_ptr + index * ITEM_FIELDS
    next_entry = gl.load(next_ptr + 1, mask=is_new, other=next_entry)
    next_begin = gl.load(next_ptr + 6, mask=is_new, other=next_begin)
    next_end = gl.load(next_ptr + 7, mask=is_new, other=next_end)
    next_first = gl.load(next_ptr + 2, mask=is_new, other=next_first)
    is_token = (index < my_num_items) & (start < end)
    page = load_page(page_indices_ptr, first_entry, start, is_token, PAGE_SIZE)
    return index, first_entry, start, end, page, next_entry, next_begin, next_end, next_first


@gluon.jit
def load_queries(
    q_ptr, first_head, is_item, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr
):  # fmt: skip
    members = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, QUERY_ROWS)), 1)
    dims = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, QUERY_ROWS)), 0)
    offsets = (first_head + members) * HEAD_DIM + dims
    in_group = (members < GROUP) & (dims < HEAD_DIM) & is_item
    return gl.load(q_ptr + offsets, mask=in_group, other=0.0)


@gluon.jit
def max_of(s):
    # [BLOCK_N, BLOCK_M] to [BLOCK_M]: within each warp, then, exchanged once, over warps
    of_warps = gl.max(gl.reshape(s, [4, BLOCK_N // 4, BLOCK_M]), 1)
    of_all = gl.max(gl.convert_layout(of_warps, ALL_WARPS), 0)
    return gl.convert_layout(of_all, gl.SliceLayout(0, COLUMNS))


@gluon.jit
def weigh(s, m, visible, scale_log2, soft_cap_log2, HAS_SOFT_CAP: gl.constexpr):
    # s [BLOCK_N, BLOCK_M]; m [BLOCK_M]. Returns weights, the factor of what was, the new maximum.
    if HAS_SOFT_CAP:
        s = capped(s, scale_log2, soft_cap_log2)
        scale_log2 = 1.0
    s = gl.where(gl.expand_dims(visible, 1), s, NEG_INF)
    new_m = gl.maximum(m, max_of(s) * scale_log2)
    m_finite = gl.where(new_m == NEG_INF, 0.0, new_m)  # -inf - -inf would be NaN
    p = gl.exp2(gl.fma(s, scale_log2, -gl.expand_dims(m_finite, 0)))
    return p, gl.exp2(m - m_finite), new_m


@gluon.jit
def sum_of(total):
    # As `sum_columns`, in the same order: within each warp, then, exchanged once, over warps
    for _ in gl.static_range(3):
        total = add_columns(total)
    sums = sum_columns(gl.convert_layout(total, ALL_WARPS))
    return gl.convert_layout(sums, gl.SliceLayout(0, COLUMNS))


@gluon.jit
def operand_of(tile_smem, half_smem, HEAD_DIM: gl.constexpr):
    # What the matrix unit takes of a tile: the tile itself, or its copy in half precision.
    operand = tile_smem
    if tile_smem.dtype != half_smem.dtype:
        per_row: gl.constexpr = HEAD_DIM // 16
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 // per_row, per_row], [4, 1], [1, 0])
        half_smem.store(widen(tile_smem.load(layout), half_smem.dtype))
        fence_async_shared()
        operand = half_smem
    return operand


@gluon.jit
def store_slot(
    partial_acc_ptr,
    partial_stats_ptr,
    slot,
    first_head,
    acc,
    m,
    total,
    ends_segment,
    NUM_QO_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, COLUMNS))
    dims = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(1, COLUMNS)), 1)
    first_row = slot.to(gl.int64) * NUM_QO_HEADS + first_head
    is_head = columns < GROUP
    heads = gl.expand_dims(columns, 0)
    in_acc = (heads < GROUP) & (dims < HEAD_DIM)
    gl.store(partial_acc_ptr + first_row * HEAD_DIM + (heads * HEAD_DIM + dims), acc, mask=in_acc)
    stats_ptrs = partial_stats_ptr + first_row * 3 + columns * 3
    gl.store(stats_ptrs, m, mask=is_head)
    gl.store(stats_ptrs + 1, total, mask=is_head)
    flags = gl.zeros_like(m) + ends_segment.to(gl.float32)
    gl.store(stats_ptrs + 2, flags, mask=is_head)


# `load_slots` and `fold_slots` are twins of those in bodies.py: Triton infers layouts, Gluon wants
# them written out, so neither can call the other's. What names no layout is shared.
@gluon.jit
def load_slots(
    partial_acc_ptr,
    partial_stats_ptr,
    first_slot,
    first,
    num_slots,
    first_head,
    NUM_QO_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_GROUP: gl.constexpr,
    FOLD_SLOTS: gl.constexpr,
):
    # Slots `first` and following of a request's. .cg: another multiprocessor wrote them, this one's
    # L1 must not answer.
    members = gl.arange(0, BLOCK_GROUP, gl.SliceLayout(1, SLOT_ROWS))
    rows = gl.expand_dims(members, 1)
    dims = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, SLOT_ROWS)), 0)
    slots = ()
    for index in gl.static_range(FOLD_SLOTS):
        slot = first_slot + first + index
        is_slot = first + index < num_slots
        first_row = slot.to(gl.int64) * NUM_QO_HEADS + first_head
        acc = gl.load(
            partial_acc_ptr + first_row * HEAD_DIM + (rows * HEAD_DIM + dims),
            mask=(rows < GROUP) & (dims < HEAD_DIM) & is_slot,
            other=0.0,
            cache_modifier=".cg",
        )
        stats_ptrs = partial_stats_ptr + first_row * 3 + members * 3
        in_group = (members < GROUP) & is_slot
        m = gl.load(stats_ptrs, mask=in_group, other=LOWEST, cache_modifier=".cg")
        total = gl.load(stats_ptrs + 1, mask=in_group, other=0.0, cache_modifier=".cg")
        ends_segment = gl.load(
            partial_stats_ptr + first_row * 3 + 2, mask=is_slot, other=0.0, cache_modifier=".cg"
        )
        slots = slots + ((acc, m, total, ends_segment),)  # noqa: RUF005
    return slots


@gluon.jit
def fold_slots(
    partial_acc_ptr,
    partial_stats_ptr,
    first_slot,
    num_slots,
    first_head,
    NUM_QO_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_GROUP: gl.constexpr,
):
    # As in bodies.py. Returns acc [BLOCK_GROUP, HEAD_DIM], m and total [BLOCK_GROUP].
    # As many are folded as are loaded meanwhile, and as fit the registers.
    FOLD_SLOTS: gl.constexpr = 4 if BLOCK_GROUP <= 8 else 2
    acc = gl.zeros([BLOCK_GROUP, HEAD_DIM], gl.float32, SLOT_ROWS)
    m = gl.full([BLOCK_GROUP], LOWEST, gl.float32, gl.SliceLayout(1, SLOT_ROWS))
    total = gl.zeros([BLOCK_GROUP], gl.float32, gl.SliceLayout(1, SLOT_ROWS))
    segment_acc, segment_m, segment_total = acc, m, total
    slots = load_slots(
        partial_acc_ptr, partial_stats_ptr, first_slot, 0, num_slots, first_head,
        NUM_QO_HEADS, GROUP, HEAD_DIM, BLOCK_GROUP, FOLD_SLOTS,
    )  # fmt: skip
    for first in range(0, num_slots, FOLD_SLOTS):
        next_slots = load_slots(
            partial_acc_ptr, partial_stats_ptr, first_slot, first + FOLD_SLOTS, num_slots,
            first_head, NUM_QO_HEADS, GROUP, HEAD_DIM, BLOCK_GROUP, FOLD_SLOTS,
        )  # fmt: skip
        for index in gl.static_range(FOLD_SLOTS):
            slot_acc, slot_m, slot_total, ends_segment = slots[index]
            segment_acc, segment_m, segment_total = merge_finite(
                segment_acc, segment_m, segment_total, slot_acc, slot_m, slot_total
            )
            ended_m = gl.where(ends_segment != 0, segment_m, LOWEST)
            acc, m, total = merge_finite(acc, m, total, segment_acc, ended_m, segment_total)
            segment_m = gl.where(ends_segment != 0, LOWEST, segment_m)
        slots = next_slots
    return acc, m, total


@gluon.jit
def log_sum_exp(m, total):
    # Natural; -inf for a state over no keys.
    is_empty = total == 0.0
    lse_log2 = m + gl.log2(gl.where(is_empty, 1.0, total))
    return gl.where(is_empty, NEG_INF, lse_log2) * LN2


# Not specialized: a layer must not cost a compilation.
@gluon.jit(do_not_specialize=["layer", "num_layers"])
def paged_decode_hopper_kernel(
    out_ptr,  # [num_rows, num_qo_heads, head_dim]
    lse_ptr,  # [num_rows, num_qo_heads], float32, natural log; written only if HAS_LSE
    q_ptr,  # [num_rows, num_qo_heads, head_dim]
    pages_desc,  # the pool; a box is a tile's keys and values: [2, column blocks, BLOCK_N, columns]
    page_indices_ptr,  # [num_table_entries], int32
    items_ptr,  # [num_lanes + max_items, ITEM_FIELDS], int32: each lane's first item, the others
    partial_acc_ptr,  # [max_slots, num_qo_heads, head_dim], float32
    partial_stats_ptr,  # [max_slots, num_qo_heads, 3], float32: m, total, whether a segment ends
    arrivals_ptr,  # [max_slots, num_kv_heads], int32, zero between launches
    k_scale_ptr,  # [num_layers, num_kv_heads], float32; None unless pages are fp8
    v_scale_ptr,  # the same
    layer,
    num_layers,
    scale_log2,  # softmax scale * log2(e); for a soft cap see `capped`
    soft_cap_log2,  # soft cap * log2(e); read only if HAS_SOFT_CAP
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    SEGMENT_LEN: gl.constexpr,
    BLOCK_GROUP: gl.constexpr,  # GROUP, padded to a power of two
    STAGES: gl.constexpr,
    ITEM_FIELDS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    HAS_LSE: gl.constexpr,
    IS_CHAINED: gl.constexpr,  # and not OVERLAPS
    OVERLAPS: gl.constexpr,  # the launch that fills shared slots may still run
):
    # Grid: (num_lanes * NUM_KV_HEADS,); heads of a lane are neighbours.
    if IS_CHAINED:
        gdc_wait()
    NUM_QO_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    COLUMN_BLOCK: gl.constexpr = pages_desc.block_shape[3]
    HALVES: gl.constexpr = HEAD_DIM // COLUMN_BLOCK
    dtype: gl.constexpr = pages_desc.dtype
    half_dtype: gl.constexpr = q_ptr.dtype.element_ty
    IS_FP8: gl.constexpr = k_scale_ptr is not None
    my_kv_head = gl.program_id(0) % NUM_KV_HEADS
    my_first_head = my_kv_head * GROUP
    my_item_ptr = items_ptr + (gl.program_id(0) // NUM_KV_HEADS) * ITEM_FIELDS
    my_row, my_first_entry, my_begin, my_end, my_first_token = load_item(my_item_ptr)
    my_others_ptr = items_ptr + gl.load(my_item_ptr + 10) * ITEM_FIELDS
    my_num_items = gl.load(my_item_ptr + 11)  # of the lane
    my_v_scale = 1.0
    if IS_FP8:
        # As in bodies.py: states, and so their folds, know nothing of either scale.
        scale_log2 *= gl.load(k_scale_ptr + layer * NUM_KV_HEADS + my_kv_head)
        my_v_scale = gl.load(v_scale_ptr + layer * NUM_KV_HEADS + my_kv_head)

    element_bits: gl.constexpr = dtype.primitive_bitwidth
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(
        COLUMN_BLOCK * element_bits // 8, element_bits, 2
    )
    half_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    weights_layout: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    bufs = gl.allocate_shared_memory(dtype, [STAGES * 2, BLOCK_N, HEAD_DIM], tile_layout)
    q_smem = gl.allocate_shared_memory(half_dtype, [BLOCK_M, HEAD_DIM], half_layout)
    p_smem = gl.allocate_shared_memory(half_dtype, [BLOCK_N, BLOCK_M], weights_layout)
    k_half, v_half = bufs.index(0), bufs.index(1)
    if IS_FP8:
        k_half = gl.allocate_shared_memory(half_dtype, [BLOCK_N, HEAD_DIM], half_layout)
        v_half = gl.allocate_shared_memory(half_dtype, [BLOCK_N, HEAD_DIM], half_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # A tile [BLOCK_N, HEAD_DIM] lies in shared memory as column blocks of at most 128 bytes, its
    # keys before its values.
    boxes = bufs._reinterpret(dtype, [STAGES, 2, HALVES, BLOCK_N, COLUMN_BLOCK], pages_desc.layout)
    parts = bufs._reinterpret(
        dtype, [STAGES * 2 * HALVES * (BLOCK_N // 16), 16, COLUMN_BLOCK], tile_layout
    )
    for ahead in gl.static_range(STAGES):
        mbarrier.init(full.index(ahead), count=1)
    fence_async_shared()

    # The ring is filled: the first tiles of the lane, of one item or several.
    my_start = first_tile(my_begin, my_first_token)
    has_item = my_num_items > 0
    page = load_page(page_indices_ptr, my_first_entry, my_start, my_start < my_end, PAGE_SIZE)
    first_head = my_row.to(gl.int64) * NUM_QO_HEADS + my_first_head
    next_q = load_queries(q_ptr, first_head, has_item, GROUP, HEAD_DIM)
    next_row, next_entry, next_begin, next_end, next_first_token = load_item(my_others_ptr)
    cursor = (
        my_num_items * 0, my_first_entry, my_start, my_end, page,
        next_entry, next_begin, next_end, next_first_token,
    )  # fmt: skip
    for ahead in range(STAGES):
        copy_tile(
            pages_desc, boxes, full, ahead, cursor, my_num_items, my_kv_head, layer, num_layers,
            NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE,
        )  # fmt: skip
        cursor = next_tile(
            page_indices_ptr, my_others_ptr, my_num_items, cursor, ITEM_FIELDS, PAGE_SIZE
        )

    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COLUMNS))
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, COLUMNS))
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, COLUMNS)
    no_m = gl.full([BLOCK_M], NEG_INF, gl.float32, gl.SliceLayout(0, COLUMNS))
    no_acc = gl.zeros([HEAD_DIM, BLOCK_M], gl.float32, COLUMNS)
    no_total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(0, COLUMNS))
    count = 0  # tiles
    for index in range(my_num_items):
        my_first_slot = gl.load(my_item_ptr + 3)
        my_num_slots = gl.load(my_item_ptr + 4)
        is_whole = my_num_slots == 0  # the item is the whole request, nobody else folds its parts
        my_arrivals = gl.load(my_item_ptr + 5)  # items of the request
        my_slot = gl.load(my_item_ptr + 8)
        my_is_tail = gl.load(my_item_ptr + 9)  # the request ends with the item
        # The next item's fields arrive while this one is computed.
        my_item_ptr = my_others_ptr + index * ITEM_FIELDS
        next_row, _entry, next_begin, next_end, next_first_token = load_item(my_item_ptr)
        # Its segment's beginning belongs to another item: splits are stored one by one.
        begins_within = my_begin % SEGMENT_LEN != 0
        my_start = first_tile(my_begin, my_first_token)

        q_smem.store(next_q)
        fence_async_shared()
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        q = q_smem.permute((1, 0))
        keys_tile = operand_of(bufs.index(stage * 2), k_half, HEAD_DIM)
        s = warpgroup_mma(keys_tile, q, zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        visible = keys < my_end - my_start
        if HAS_WINDOW:
            visible = visible & (keys >= my_first_token - my_start)
        p, _alpha, m = weigh(s, no_m, visible, scale_log2, soft_cap_log2, HAS_SOFT_CAP)
        p_smem.store(narrow(p, half_dtype))
        fence_async_shared()
        acc = no_acc
        total = pair_columns(p)
        segment_acc = no_acc
        segment_m = no_m
        segment_total = no_total
        whole_acc = no_acc
        whole_m = no_m
        whole_total = no_total
        count += 1
        for start in range(my_start + BLOCK_N, my_end, BLOCK_N):
            # The weights of the tile before times its values, while this tile's are computed
            stage = count % STAGES
            value_stage = (count - 1) % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            keys_tile = operand_of(bufs.index(stage * 2), k_half, HEAD_DIM)
            s = warpgroup_mma(keys_tile, q, zeros, use_acc=False, is_async=True)
            values = operand_of(bufs.index(value_stage * 2 + 1), v_half, HEAD_DIM)
            acc = warpgroup_mma(values.permute((1, 0)), p_smem, acc, is_async=True)
            next_cursor = next_tile(
                page_indices_ptr, my_others_ptr, my_num_items, cursor, ITEM_FIELDS, PAGE_SIZE
            )
            s = warpgroup_mma_wait(1, deps=[s])
            # A split begins with a state over no keys: its first weight of what was is 0.
            begins_split = start % SPLIT_LEN == 0
            visible = keys < my_end - start
            if HAS_WINDOW:
                visible = visible & (keys >= my_first_token - start)
            next_p, alpha, next_m = weigh(
                s, gl.where(begins_split, no_m, m), visible,
                scale_log2, soft_cap_log2, HAS_SOFT_CAP,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()  # all warps are done with the stage and the weights
            p_smem.store(narrow(next_p, half_dtype))
            fence_async_shared()
            copy_tile(
                pages_desc, boxes, full, value_stage, cursor, my_num_items, my_kv_head,
                layer, num_layers, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE,
            )  # fmt: skip
            cursor = next_cursor
            if begins_split:
                segment_acc, segment_m, segment_total = merge(
                    segment_acc, segment_m, segment_total, acc, m, sum_of(total), DIM_AXIS=0
                )
                ends_segment = start % SEGMENT_LEN == 0
                is_alone = begins_within & (start // SEGMENT_LEN == my_begin // SEGMENT_LEN)
                is_alone = is_alone & (is_whole == 0)
                if ends_segment | is_alone:
                    if is_whole:
                        whole_acc, whole_m, whole_total = merge(
                            whole_acc, whole_m, whole_total,
                            segment_acc, segment_m, segment_total, DIM_AXIS=0,
                        )  # fmt: skip
                    else:
                        store_slot(
                            partial_acc_ptr, partial_stats_ptr, my_slot, my_first_head,
                            segment_acc, segment_m, segment_total, ends_segment,
                            NUM_QO_HEADS, GROUP, HEAD_DIM,
                        )  # fmt: skip
                        my_slot += 1
                    segment_acc = no_acc
                    segment_m = no_m
                    segment_total = no_total
                acc = no_acc  # not only times 0: it may have overflowed
            acc = acc * gl.expand_dims(alpha, 0)
            # The sums of pairs have a layout of their own.
            pair_alpha = gl.convert_layout(alpha, gl.SliceLayout(0, total.type.layout))
            total = gl.fma(total, gl.expand_dims(pair_alpha, 0), pair_columns(next_p))
            m = next_m
            count += 1
        value_stage = (count - 1) % STAGES
        tail = my_end % BLOCK_N
        if (tail != 0) | (my_end == 0):
            clear_tail(parts, value_stage * 2 + 1, tail, BLOCK_N, HALVES)
        values = operand_of(bufs.index(value_stage * 2 + 1), v_half, HEAD_DIM)
        acc = warpgroup_mma(values.permute((1, 0)), p_smem, acc, is_async=True)
        # The next item's queries arrive meanwhile.
        has_next = index + 1 < my_num_items
        row_head = first_head
        first_head = next_row.to(gl.int64) * NUM_QO_HEADS + my_first_head
        next_q = load_queries(q_ptr, first_head, has_next, GROUP, HEAD_DIM)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()  # all warps are done with the stage and the weights
        copy_tile(
            pages_desc, boxes, full, value_stage, cursor, my_num_items, my_kv_head,
            layer, num_layers, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE,
        )  # fmt: skip
        cursor = next_tile(
            page_indices_ptr, my_others_ptr, my_num_items, cursor, ITEM_FIELDS, PAGE_SIZE
        )
        acc, m, sums = merge(
            segment_acc, segment_m, segment_total, acc, m, sum_of(total), DIM_AXIS=0
        )
        ends_segment = (my_end % SEGMENT_LEN == 0) | (my_is_tail != 0)
        my_begin, my_end, my_first_token = next_begin, next_end, next_first_token

        if is_whole:
            acc, m, sums = merge(whole_acc, whole_m, whole_total, acc, m, sums, DIM_AXIS=0)
            out = acc / gl.expand_dims(gl.where(sums == 0.0, 1.0, sums), 0)
            if IS_FP8:
                out *= my_v_scale
            heads = gl.expand_dims(columns, 0)
            dims = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(1, COLUMNS)), 1)
            in_acc = (heads < GROUP) & (dims < HEAD_DIM)
            offsets = heads * HEAD_DIM + dims
            out = out.to(out_ptr.dtype.element_ty)
            gl.store(out_ptr + row_head * HEAD_DIM + offsets, out, mask=in_acc)
            if HAS_LSE:
                lse = log_sum_exp(m, sums)
                gl.store(lse_ptr + row_head + columns, lse, mask=columns < GROUP)
        else:
            store_slot(
                partial_acc_ptr, partial_stats_ptr, my_slot, my_first_head,
                acc, m, sums, ends_segment, NUM_QO_HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip
            # The last of a request's items to arrive folds all slots, in key order. The barrier
            # puts all threads' stores before the release by one of them.
            barrier()
            is_last = my_arrivals == 1  # the other slots are shared ones
            if my_arrivals > 1:
                counter = arrivals_ptr + my_first_slot * NUM_KV_HEADS + my_kv_head
                is_last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == my_arrivals - 1
                if is_last:
                    gl.store(counter, 0)
            if is_last:
                if OVERLAPS:
                    gdc_wait()
                group_acc, group_m, group_total = fold_slots(
                    partial_acc_ptr, partial_stats_ptr, my_first_slot, my_num_slots,
                    my_first_head, NUM_QO_HEADS, GROUP, HEAD_DIM, BLOCK_GROUP,
                )  # fmt: skip
                is_empty = group_total == 0.0
                out = group_acc / gl.expand_dims(gl.where(is_empty, 1.0, group_total), 1)
                if IS_FP8:
                    out *= my_v_scale
                members = gl.arange(0, BLOCK_GROUP, gl.SliceLayout(1, SLOT_ROWS))
                rows = gl.expand_dims(members, 1)
                dims = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, SLOT_ROWS)), 0)
                in_group = (rows < GROUP) & (dims < HEAD_DIM)
                offsets = rows * HEAD_DIM + dims
                out = out.to(out_ptr.dtype.element_ty)
                gl.store(out_ptr + row_head * HEAD_DIM + offsets, out, mask=in_group)
                if HAS_LSE:
                    lse = log_sum_exp(group_m, group_total)
                    gl.store(lse_ptr + row_head + members, lse, mask=members < GROUP)
    if OVERLAPS:
        gdc_wait()  # whatever follows this launch may rely on that one
