"""Kernel body of cascade attention's shared part for Hopper: the same bits as bodies.py.

A persistent program per multiprocessor, in three partitions as in prefill/bodies_hopper.py: a warp
that copies keys and values page by page into rings in shared memory, and two warpgroups of 64 query
rows each, whose products with the next keys run while they compute weights of the current ones.

Source: FlashAttention-3 (Shah et al., 2024): warp specialization, ping-pong scheduling.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_kernels.attention_state import capped, merge_weights, pair_rows, sum_rows
from attn_kernels.warpgroups import GROUP_ROWS, NEG_INF, narrow, pass_turn, wait_for_turn


@gluon.jit
def copy_shared_keys(
    pages_desc,
    k_bufs,
    v_bufs,
    k_full,
    k_empty,
    v_full,
    v_empty,
    page_indices_ptr,
    plan_ptr,
    layer,
    num_layers,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ITEM_FIELDS: gl.constexpr,
):
    BOX_ROWS: gl.constexpr = PAGE_SIZE if PAGE_SIZE < BLOCK_N else BLOCK_N
    PARTS: gl.constexpr = BLOCK_N // BOX_ROWS
    HALVES: gl.constexpr = HEAD_DIM // 64
    # A tile [BLOCK_N, HEAD_DIM] lies in shared memory as column blocks of 64, so a page's part of
    # a column block is one box of the copy engine.
    shape: gl.constexpr = [STAGES * HALVES * PARTS, BOX_ROWS, 64]
    k_boxes = k_bufs._reinterpret(k_bufs.dtype, shape, pages_desc.layout)
    v_boxes = v_bufs._reinterpret(v_bufs.dtype, shape, pages_desc.layout)
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2

    num_units = gl.load(plan_ptr) * NUM_KV_HEADS
    count = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        my_item_ptr = plan_ptr + 1 + (unit // NUM_KV_HEADS) * ITEM_FIELDS
        my_kv_head = unit % NUM_KV_HEADS
        begin = gl.load(my_item_ptr + 2)
        end = gl.load(my_item_ptr + 3)
        my_page_ptr = page_indices_ptr + gl.load(my_item_ptr + 4)
        for start in range(begin, end, BLOCK_N):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), TILE_BYTES)
            for part in gl.static_range(PARTS):
                token = start + part * BOX_ROWS
                page = gl.load(my_page_ptr + token // PAGE_SIZE)
                row = (page * num_layers + layer) * 2 * NUM_KV_HEADS + my_kv_head
                for half in gl.static_range(HALVES):
                    tma.async_copy_global_to_shared(
                        pages_desc,
                        [row * PAGE_SIZE + token % PAGE_SIZE, half * 64],
                        k_full.index(stage),
                        k_boxes.index((stage * HALVES + half) * PARTS + part),
                    )
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), TILE_BYTES)
            for part in gl.static_range(PARTS):
                token = start + part * BOX_ROWS
                page = gl.load(my_page_ptr + token // PAGE_SIZE)
                row = ((page * num_layers + layer) * 2 + 1) * NUM_KV_HEADS + my_kv_head
                for half in gl.static_range(HALVES):
                    tma.async_copy_global_to_shared(
                        pages_desc,
                        [row * PAGE_SIZE + token % PAGE_SIZE, half * 64],
                        v_full.index(stage),
                        v_boxes.index((stage * HALVES + half) * PARTS + part),
                    )
            count += 1


@gluon.jit
def load_rows(
    q_ptr,
    q_smem,
    plan_ptr,
    unit,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ITEM_FIELDS: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    # Starts to copy a unit's query rows; those that it lacks keep what the buffer held.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    my_item_ptr = plan_ptr + 1 + (unit // NUM_KV_HEADS) * ITEM_FIELDS
    my_rows_ptr = plan_ptr + gl.load(my_item_ptr)
    my_num_rows = gl.load(my_item_ptr + 1)
    rows = WARPGROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    is_row = rows < my_num_rows
    heads = gl.load(my_rows_ptr + rows * 2, mask=is_row, other=0) + unit % NUM_KV_HEADS * GROUP
    dims = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout)), 0)
    pointers = q_ptr + gl.expand_dims(heads.to(gl.int64) * HEAD_DIM, 1) + dims
    in_q = gl.expand_dims(is_row, 1) & (dims < HEAD_DIM)
    async_copy.async_copy_global_to_shared(q_smem, pointers, in_q)
    async_copy.commit_group()


@gluon.jit
def weigh(s, m, scale_log2, soft_cap_log2, HAS_SOFT_CAP: gl.constexpr):
    # s [64, BLOCK_N]; m [64]. Returns weights, the factor of what was, and the new maximum.
    if HAS_SOFT_CAP:
        s = capped(s, scale_log2, soft_cap_log2)
        scale_log2 = 1.0
    new_m = gl.maximum(m, gl.max(s, 1) * scale_log2)
    m_finite = gl.where(new_m == NEG_INF, 0.0, new_m)  # -inf - -inf would be NaN
    p = gl.exp2(gl.fma(s, scale_log2, -gl.expand_dims(m_finite, 1)))
    return p, gl.exp2(m - m_finite), new_m


@gluon.jit
def sum_of(total, s_rows: gl.constexpr):
    return gl.convert_layout(sum_rows(total), s_rows)


@gluon.jit
def merge_rows(acc_a, m_a, total_a, acc_b, m_b, total_b, o_rows: gl.constexpr):
    # As `merge` in attention_state.py; acc has a layout of its own.
    m, weight_a, weight_b = merge_weights(m_a, m_b)
    row_a = gl.expand_dims(gl.convert_layout(weight_a, o_rows), 1)
    row_b = gl.expand_dims(gl.convert_layout(weight_b, o_rows), 1)
    acc = gl.fma(acc_a, row_a, acc_b * row_b)
    return acc, m, gl.fma(total_a, weight_a, total_b * weight_b)


@gluon.jit
def store_rows(
    partial_acc_ptr,
    partial_stats_ptr,
    plan_ptr,
    my_item_ptr,
    first_head,  # of the slot, among all heads of all slots, for a request whose slots begin at 0
    acc,
    m,
    total,
    ends_segment,
    HEAD_DIM: gl.constexpr,
    WARPGROUP: gl.constexpr,
    s_rows: gl.constexpr,
    o_layout: gl.constexpr,
):
    # acc [64, HEAD_DIM]; m and total [64]
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    my_rows_ptr = plan_ptr + gl.load(my_item_ptr)
    rows = WARPGROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, s_rows)
    is_row = rows < gl.load(my_item_ptr + 1)
    slot_heads = gl.load(my_rows_ptr + rows * 2 + 1, mask=is_row, other=0) + first_head
    partial_rows = slot_heads.to(gl.int64)
    dims = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout)), 0)
    offsets = gl.expand_dims(gl.convert_layout(partial_rows * HEAD_DIM, o_rows), 1)
    in_acc = gl.expand_dims(gl.convert_layout(is_row, o_rows), 1) & (dims < HEAD_DIM)
    gl.store(partial_acc_ptr + offsets + dims, acc, mask=in_acc)
    stats_ptrs = partial_stats_ptr + partial_rows * 3
    gl.store(stats_ptrs, m, mask=is_row)
    gl.store(stats_ptrs + 1, total, mask=is_row)
    flags = gl.zeros([GROUP_ROWS], gl.float32, s_rows) + ends_segment.to(gl.float32)
    gl.store(stats_ptrs + 2, flags, mask=is_row)


@gluon.jit
def attend_shared(
    q_ptr,
    k_bufs,
    v_bufs,
    q_bufs,
    k_full,
    k_empty,
    v_full,
    v_empty,
    plan_ptr,
    partial_acc_ptr,
    partial_stats_ptr,
    scale_log2,
    soft_cap_log2,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    SEGMENT_LEN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ITEM_FIELDS: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    IS_EXACT: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = k_bufs.dtype

    num_units = gl.load(plan_ptr) * NUM_KV_HEADS
    my_first_unit = gl.program_id(0)
    zeros = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, s_layout)
    no_m = gl.full([GROUP_ROWS], NEG_INF, gl.float32, s_rows)
    no_total = gl.zeros([GROUP_ROWS], gl.float32, s_rows)
    if WARPGROUP == 1:
        pass_turn(WARPGROUP)
    load_rows(
        q_ptr, q_bufs.index(0), plan_ptr, my_first_unit,
        NUM_KV_HEADS, GROUP, HEAD_DIM, ITEM_FIELDS, WARPGROUP,
    )  # fmt: skip

    count = 0  # tiles
    buffer = 0
    for unit in range(my_first_unit, num_units, gl.num_programs(0)):
        my_item_ptr = plan_ptr + 1 + (unit // NUM_KV_HEADS) * ITEM_FIELDS
        begin = gl.load(my_item_ptr + 2)
        end = gl.load(my_item_ptr + 3)
        my_ordinal = gl.load(my_item_ptr + 5)  # of the first slot among those of a request
        # Its segment's beginning belongs to another item: splits are stored one by one.
        begins_within = begin % SEGMENT_LEN != 0
        q = q_bufs.index(buffer)
        stage = count % STAGES
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        wait_for_turn(WARPGROUP)
        s = warpgroup_mma(
            q, k_bufs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        pass_turn(WARPGROUP)
        next_unit = unit + gl.num_programs(0)
        if next_unit < num_units:
            # The next unit's queries come while this one's keys are read.
            load_rows(
                q_ptr, q_bufs.index(1 - buffer), plan_ptr, next_unit,
                NUM_KV_HEADS, GROUP, HEAD_DIM, ITEM_FIELDS, WARPGROUP,
            )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, _alpha, m = weigh(s, no_m, scale_log2, soft_cap_log2, HAS_SOFT_CAP)
        total = pair_rows(p)
        p = gl.convert_layout(narrow(p, dtype), p_layout)
        acc = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, o_layout)
        segment_acc = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, o_layout)
        segment_m = no_m
        segment_total = no_total
        count += 1
        for start in range(begin + BLOCK_N, end, BLOCK_N):
            # The weights of the tile before times its values, while this tile's are computed
            stage = count % STAGES
            value_stage = (count - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
            wait_for_turn(WARPGROUP)
            s = warpgroup_mma(
                q, k_bufs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(value_stage), ((count - 1) // STAGES) & 1)
            # A state's first products are added to nothing.
            has_begun = start - BLOCK_N != begin
            if IS_EXACT:
                has_begun = (start - BLOCK_N) % SPLIT_LEN != 0
            acc = warpgroup_mma(p, v_bufs.index(value_stage), acc, use_acc=has_begun, is_async=True)
            pass_turn(WARPGROUP)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            # A split begins with a state over no keys: its first weight of what was is 0.
            m_before = m
            if IS_EXACT:
                m_before = gl.where(start % SPLIT_LEN == 0, no_m, m)
            next_p, alpha, next_m = weigh(s, m_before, scale_log2, soft_cap_log2, HAS_SOFT_CAP)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(value_stage), count=1)
            if IS_EXACT:
                if start % SPLIT_LEN == 0:
                    segment_acc, segment_m, segment_total = merge_rows(
                        segment_acc, segment_m, segment_total, acc, m, sum_of(total, s_rows), o_rows
                    )
                    ends_segment = start % SEGMENT_LEN == 0
                    is_alone = begins_within & (start // SEGMENT_LEN == begin // SEGMENT_LEN)
                    if ends_segment | is_alone:
                        store_rows(
                            partial_acc_ptr, partial_stats_ptr, plan_ptr, my_item_ptr,
                            my_ordinal * (NUM_KV_HEADS * GROUP) + unit % NUM_KV_HEADS * GROUP,
                            segment_acc, segment_m, segment_total, ends_segment,
                            HEAD_DIM, WARPGROUP, s_rows, o_layout,
                        )  # fmt: skip
                        my_ordinal += 1
                        segment_acc = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, o_layout)
                        segment_m = no_m
                        segment_total = no_total
                else:
                    acc = acc * gl.expand_dims(gl.convert_layout(alpha, o_rows), 1)
            else:
                acc = acc * gl.expand_dims(gl.convert_layout(alpha, o_rows), 1)
            # The sums of pairs have a layout of their own.
            pair_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))
            total = gl.fma(total, gl.expand_dims(pair_alpha, 1), pair_rows(next_p))
            m = next_m
            p = gl.convert_layout(narrow(next_p, dtype), p_layout)
            count += 1
        value_stage = (count - 1) % STAGES
        mbarrier.wait(v_full.index(value_stage), ((count - 1) // STAGES) & 1)
        wait_for_turn(WARPGROUP)
        has_begun = end - BLOCK_N != begin
        if IS_EXACT:
            has_begun = (end - BLOCK_N) % SPLIT_LEN != 0
        acc = warpgroup_mma(p, v_bufs.index(value_stage), acc, use_acc=has_begun, is_async=True)
        pass_turn(WARPGROUP)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(value_stage), count=1)
        segment_acc, segment_m, segment_total = merge_rows(
            segment_acc, segment_m, segment_total, acc, m, sum_of(total, s_rows), o_rows
        )

        store_rows(
            partial_acc_ptr, partial_stats_ptr, plan_ptr, my_item_ptr,
            my_ordinal * (NUM_KV_HEADS * GROUP) + unit % NUM_KV_HEADS * GROUP,
            segment_acc, segment_m, segment_total, end % SEGMENT_LEN == 0,
            HEAD_DIM, WARPGROUP, s_rows, o_layout,
        )  # fmt: skip
        buffer = 1 - buffer


@gluon.jit
def attend_units(
    q_ptr,
    pages_desc,
    page_indices_ptr,
    plan_ptr,
    partial_acc_ptr,
    partial_stats_ptr,
    layer,
    num_layers,
    scale_log2,
    soft_cap_log2,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SPLIT_LEN: gl.constexpr,
    SEGMENT_LEN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ITEM_FIELDS: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    IS_EXACT: gl.constexpr,
):
    dtype: gl.constexpr = pages_desc.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_shape: gl.constexpr = [2, GROUP_ROWS, HEAD_DIM]
    q_bufs_0 = gl.allocate_shared_memory(dtype, q_shape, tile_layout)
    q_bufs_1 = gl.allocate_shared_memory(dtype, q_shape, tile_layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                attend_shared,
                (
                    q_ptr, k_bufs, v_bufs, q_bufs_0, k_full, k_empty, v_full, v_empty,
                    plan_ptr, partial_acc_ptr, partial_stats_ptr, scale_log2, soft_cap_log2,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, SPLIT_LEN, SEGMENT_LEN, BLOCK_N, STAGES,
                    ITEM_FIELDS, HAS_SOFT_CAP, IS_EXACT, 0,
                ),
            ),
            (
                attend_shared,
                (
                    q_ptr, k_bufs, v_bufs, q_bufs_1, k_full, k_empty, v_full, v_empty,
                    plan_ptr, partial_acc_ptr, partial_stats_ptr, scale_log2, soft_cap_log2,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, SPLIT_LEN, SEGMENT_LEN, BLOCK_N, STAGES,
                    ITEM_FIELDS, HAS_SOFT_CAP, IS_EXACT, 1,
                ),
            ),
            (
                copy_shared_keys,
                (
                    pages_desc, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty,
                    page_indices_ptr, plan_ptr, layer, num_layers, NUM_KV_HEADS, HEAD_DIM,
                    PAGE_SIZE, BLOCK_N, STAGES, ITEM_FIELDS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# Not specialized: a layer must not cost a compilation.
@gluon.jit(do_not_specialize=["layer", "num_layers"])
def shared_prefix_hopper_kernel(
    q_ptr,  # [num_rows, num_qo_heads, head_dim]
    pages_desc,  # [num_pages * num_layers * 2 * num_kv_heads * page_size, head_dim]
    page_indices_ptr,  # [num_table_entries], int32
    plan_ptr,  # int32: number of items, items [., ITEM_FIELDS], rows [., 2] (q, first slot)
    partial_acc_ptr,  # [max_slots, num_qo_heads, head_dim], float32
    partial_stats_ptr,  # [max_slots, num_qo_heads, 3], float32
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
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ITEM_FIELDS: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    IS_EXACT: gl.constexpr,  # the bits are those of flat decode; else it is faster
    IS_CHAINED: gl.constexpr,
    OVERLAPS: gl.constexpr,  # the decode kernel is launched beside this one
):
    # Grid: (num_programs,), at most one for each multiprocessor
    if IS_CHAINED:
        gdc_wait()
    if OVERLAPS:
        gdc_launch_dependents()
    # A program without a unit must not set up: it would read one.
    if gl.program_id(0) < gl.load(plan_ptr) * NUM_KV_HEADS:
        attend_units(
            q_ptr, pages_desc, page_indices_ptr, plan_ptr, partial_acc_ptr, partial_stats_ptr,
            layer, num_layers, scale_log2, soft_cap_log2, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
            SPLIT_LEN, SEGMENT_LEN, BLOCK_N, STAGES, ITEM_FIELDS, HAS_SOFT_CAP, IS_EXACT,
        )  # fmt: skip
