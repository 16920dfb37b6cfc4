"""Kernel body of paged prefill attention for Hopper: the same semantics as bodies.py.

A persistent program per multiprocessor, in three partitions: one warp copies keys and values page
by page into a ring in shared memory (TMA), and two warpgroups of 64 rows each multiply. The product
with the next keys is issued before the softmax of the present ones, also from one unit of work to
the next, and the two warpgroups take turns, so that the tensor cores work while exponentials are
computed.

Source: FlashAttention-3 (Shah et al., 2024): warp specialization, ping-pong scheduling, and the
two-stage pipeline inside a warpgroup.
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

from attn_kernels.attention_state import LN2
from attn_kernels.warpgroups import (
    GROUP_ROWS,
    NEG_INF,
    clear_tail,
    narrow,
    pass_turn,
    wait_for_turn,
)

ROW_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes a thread


@gluon.jit
def load_unit(units_ptr, index, UNIT_FIELDS: gl.constexpr):
    my_unit_ptr = units_ptr + index * UNIT_FIELDS
    return (
        gl.load(my_unit_ptr),  # request
        gl.load(my_unit_ptr + 1),  # first row
        gl.load(my_unit_ptr + 2),  # qo_len
        gl.load(my_unit_ptr + 3),  # kv_len
        gl.load(my_unit_ptr + 4),  # tile
        gl.load(my_unit_ptr + 5),  # key-value head
    )


@gluon.jit
def key_range(
    my_qo_len,
    my_kv_len,
    my_tile,
    sliding_window,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    # Key tiles of a query tile:
    #   [begin, full_begin)  cut by the window of some rows
    #   [full_begin, full_end)  seen by all rows
    #   [full_end, end)      the causal edge
    my_start = my_kv_len - my_qo_len
    first_position = my_start + my_tile * BLOCK_M // GROUP
    last_position = my_start + gl.minimum((my_tile * BLOCK_M + BLOCK_M - 1) // GROUP, my_qo_len - 1)
    end = last_position // BLOCK_N + 1
    begin = 0
    full_begin = 0
    if HAS_WINDOW:
        begin = gl.maximum(first_position - sliding_window + 1, 0) // BLOCK_N
        window_edge = gl.maximum(last_position - sliding_window + 1, 0)
        full_begin = gl.minimum((window_edge + BLOCK_N - 1) // BLOCK_N, end)
    full_end = gl.maximum((first_position + 1) // BLOCK_N, full_begin)
    return begin, full_begin, full_end, end


@gluon.jit
def copy_keys_and_values(
    pages_desc,
    k_bufs,
    v_bufs,
    k_full,
    k_empty,
    v_full,
    v_empty,
    page_indptr_ptr,
    page_indices_ptr,
    unit_indptr_ptr,
    units_ptr,
    layer,
    num_layers,
    sliding_window,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    UNIT_FIELDS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    PARTS: gl.constexpr = BLOCK_N // PAGE_SIZE
    HALVES: gl.constexpr = HEAD_DIM // 64
    # A tile [BLOCK_N, HEAD_DIM] lies in shared memory as column blocks of 64, so a page's part of
    # a column block is one box of the copy engine.
    k_shape: gl.constexpr = [K_STAGES * HALVES * PARTS, PAGE_SIZE, 64]
    v_shape: gl.constexpr = [V_STAGES * HALVES * PARTS, PAGE_SIZE, 64]
    k_boxes = k_bufs._reinterpret(k_bufs.dtype, k_shape, pages_desc.layout)
    v_boxes = v_bufs._reinterpret(v_bufs.dtype, v_shape, pages_desc.layout)
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2

    my_first_unit = gl.load(unit_indptr_ptr + gl.program_id(0))
    my_last_unit = gl.load(unit_indptr_ptr + gl.program_id(0) + 1)
    count = 0
    for index in range(my_first_unit, my_last_unit):
        my_request, _, my_qo_len, my_kv_len, my_tile, my_kv_head = load_unit(
            units_ptr, index, UNIT_FIELDS
        )
        my_page_ptr = page_indices_ptr + gl.load(page_indptr_ptr + my_request)
        last_page = (my_kv_len - 1) // PAGE_SIZE
        begin, _full_begin, _full_end, end = key_range(
            my_qo_len, my_kv_len, my_tile, sliding_window, GROUP, BLOCK_M, BLOCK_N, HAS_WINDOW
        )
        for tile in range(begin, end):
            stage = count % K_STAGES
            phase = (count // K_STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), TILE_BYTES)
            for part in gl.static_range(PARTS):
                # Parts past the end repeat the last page: the tile must be complete.
                page = gl.load(my_page_ptr + gl.minimum(tile * PARTS + part, last_page))
                row = (page * num_layers + layer) * 2 * NUM_KV_HEADS + my_kv_head
                for half in gl.static_range(HALVES):
                    tma.async_copy_global_to_shared(
                        pages_desc,
                        [row * PAGE_SIZE, half * 64],
                        k_full.index(stage),
                        k_boxes.index((stage * HALVES + half) * PARTS + part),
                    )
            stage = count % V_STAGES
            phase = (count // V_STAGES) & 1
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), TILE_BYTES)
            for part in gl.static_range(PARTS):
                page = gl.load(my_page_ptr + gl.minimum(tile * PARTS + part, last_page))
                row = ((page * num_layers + layer) * 2 + 1) * NUM_KV_HEADS + my_kv_head
                for half in gl.static_range(HALVES):
                    tma.async_copy_global_to_shared(
                        pages_desc,
                        [row * PAGE_SIZE, half * 64],
                        v_full.index(stage),
                        v_boxes.index((stage * HALVES + half) * PARTS + part),
                    )
            count += 1


@gluon.jit
def hide(s, positions, columns, start, sliding_window, HAS_WINDOW: gl.constexpr):
    # s [64, BLOCK_N]; positions of its rows; columns of its keys, which begin at `start`
    # Threads' columns differ in bits 1 and 2. With these on the other side of the comparison, the
    # columns of a thread are constants instead of 32 registers.
    last = gl.expand_dims(positions - start, 1) - gl.expand_dims(columns & 6, 0)
    columns = gl.expand_dims(columns & ~6, 0)
    s = gl.where(columns <= last, s, NEG_INF)
    if HAS_WINDOW:
        s = gl.where(columns > last - sliding_window, s, NEG_INF)
    return s


@gluon.jit
def fold_scores(s, m, total, scale_log2):
    # s [64, BLOCK_N]; m and total [64]
    new_m = gl.maximum(m, gl.max(s, 1) * scale_log2)
    m_finite = gl.where(new_m == NEG_INF, 0.0, new_m)  # -inf - -inf would be NaN
    p = gl.exp2(gl.fma(s, scale_log2, -gl.expand_dims(m_finite, 1)))
    alpha = gl.exp2(m - m_finite)
    total = gl.fma(total, alpha, gl.sum(p, 1))
    return p, alpha, new_m, total


@gluon.jit
def row_offsets(
    my_first_row,
    my_qo_len,
    my_tile,
    my_kv_head,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    # Offsets [64, HEAD_DIM] of a warpgroup's rows in q and out, and which of them there are.
    rows = my_tile * BLOCK_M + WARPGROUP * GROUP_ROWS
    rows = rows + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, ROW_LAYOUT))
    dims = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ROW_LAYOUT)), 0)
    my_tokens = rows // GROUP
    heads = (my_first_row + my_tokens).to(gl.int64) * (NUM_KV_HEADS * GROUP) + (
        my_kv_head * GROUP + rows % GROUP
    )
    is_row = gl.expand_dims(my_tokens < my_qo_len, 1) & (dims < HEAD_DIM)
    return gl.expand_dims(heads * HEAD_DIM, 1) + dims, is_row


@gluon.jit
def attend(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_bufs,
    v_bufs,
    q_bufs,
    k_full,
    k_empty,
    v_full,
    v_empty,
    unit_indptr_ptr,
    units_ptr,
    scale_log2,
    sliding_window,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    UNIT_FIELDS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_LSE: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = k_bufs.dtype
    HALVES: gl.constexpr = HEAD_DIM // 64
    v_parts = v_bufs._reinterpret(
        dtype, [V_STAGES * HALVES * (BLOCK_N // 16), 16, 64], v_bufs.layout
    )

    my_first_unit = gl.load(unit_indptr_ptr + gl.program_id(0))
    my_last_unit = gl.load(unit_indptr_ptr + gl.program_id(0) + 1)
    _, my_first_row, my_qo_len, my_kv_len, my_tile, my_kv_head = load_unit(
        units_ptr, my_first_unit, UNIT_FIELDS
    )
    q = q_bufs.index(my_first_unit % 2)
    offsets, is_row = row_offsets(
        my_first_row, my_qo_len, my_tile, my_kv_head,
        NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, WARPGROUP,
    )  # fmt: skip
    async_copy.async_copy_global_to_shared(q, q_ptr + offsets, is_row)
    async_copy.commit_group()
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    my_rows = WARPGROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, s_rows)
    zeros = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, s_layout)
    no_m = gl.full([GROUP_ROWS], NEG_INF, gl.float32, s_rows)
    no_total = gl.zeros([GROUP_ROWS], gl.float32, s_rows)
    if WARPGROUP == 1:
        pass_turn(1)

    # Scores of the first tile of the first unit
    begin, full_begin, full_end, end = key_range(
        my_qo_len, my_kv_len, my_tile, sliding_window, GROUP, BLOCK_M, BLOCK_N, HAS_WINDOW
    )
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.wait(k_full.index(0), 0)
    wait_for_turn(WARPGROUP)
    keys = k_bufs.index(0).permute((1, 0))
    s = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    pass_turn(WARPGROUP)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0), count=1)
    positions = my_kv_len - my_qo_len + (my_tile * BLOCK_M + my_rows) // GROUP
    s = hide(s, positions, columns, begin * BLOCK_N, sliding_window, HAS_WINDOW)
    p, _alpha, m, total = fold_scores(s, no_m, no_total, scale_log2)
    p = gl.convert_layout(narrow(p, dtype), p_layout)
    count = 1

    for index in range(my_first_unit, my_last_unit):
        # The next unit's queries come while this one's keys are read.
        is_last = index + 1 == my_last_unit
        _, next_first_row, next_qo_len, next_kv_len, next_tile, next_kv_head = load_unit(
            units_ptr, gl.where(is_last, index, index + 1), UNIT_FIELDS
        )
        next_q = q_bufs.index((index + 1) % 2)
        offsets, is_row = row_offsets(
            next_first_row, next_qo_len, next_tile, next_kv_head,
            NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, WARPGROUP,
        )  # fmt: skip
        async_copy.async_copy_global_to_shared(next_q, q_ptr + offsets, is_row)
        async_copy.commit_group()

        q = q_bufs.index(index % 2)
        acc = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, o_layout)
        positions = my_kv_len - my_qo_len + (my_tile * BLOCK_M + my_rows) // GROUP
        begin, full_begin, full_end, end = key_range(
            my_qo_len, my_kv_len, my_tile, sliding_window, GROUP, BLOCK_M, BLOCK_N, HAS_WINDOW
        )
        # One loop, with a branch: of a loop for each kind of tile, ptxas 12.8 set a register up in
        # the first alone, and the results were wrong where the first had nothing to do.
        for tile in range(begin + 1, end):
            # Multiplies the weights of the tile before with its values, and this tile's keys.
            stage = count % K_STAGES
            value_stage = (count - 1) % V_STAGES
            value_phase = ((count - 1) // V_STAGES) & 1
            mbarrier.wait(k_full.index(stage), (count // K_STAGES) & 1)
            wait_for_turn(WARPGROUP)
            keys = k_bufs.index(stage).permute((1, 0))
            s = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(value_stage), value_phase)
            acc = warpgroup_mma(p, v_bufs.index(value_stage), acc, is_async=True)
            pass_turn(WARPGROUP)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if (tile < full_begin) | (tile >= full_end):
                s = hide(s, positions, columns, tile * BLOCK_N, sliding_window, HAS_WINDOW)
            next_p, alpha, m, total = fold_scores(s, m, total, scale_log2)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(value_stage), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, o_rows), 1)
            p = gl.convert_layout(narrow(next_p, dtype), p_layout)
            count += 1

        # Values of the last tile, beside the scores of the next unit's first tile
        value_stage = (count - 1) % V_STAGES
        mbarrier.wait(v_full.index(value_stage), ((count - 1) // V_STAGES) & 1)
        tail = my_kv_len - (end - 1) * BLOCK_N
        if tail < BLOCK_N:
            clear_tail(v_parts, value_stage, tail, BLOCK_N, HALVES)
        if is_last:
            wait_for_turn(WARPGROUP)
            acc = warpgroup_mma(p, v_bufs.index(value_stage), acc, is_async=True)
            pass_turn(WARPGROUP)
            acc = warpgroup_mma_wait(0, deps=[acc])
            s = zeros
        else:
            stage = count % K_STAGES
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.wait(k_full.index(stage), (count // K_STAGES) & 1)
            wait_for_turn(WARPGROUP)
            keys = k_bufs.index(stage).permute((1, 0))
            s = warpgroup_mma(next_q, keys, zeros, use_acc=False, is_async=True)
            acc = warpgroup_mma(p, v_bufs.index(value_stage), acc, is_async=True)
            pass_turn(WARPGROUP)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(value_stage), count=1)
        count += 1

        # Output, by way of the buffer of the queries, which are done
        is_empty = total == 0.0
        divisor = gl.where(is_empty, 1.0, total)
        acc = acc * gl.expand_dims(gl.convert_layout(1.0 / divisor, o_rows), 1)
        if HAS_LSE:
            rows = my_tile * BLOCK_M + my_rows
            heads = (my_first_row + rows // GROUP).to(gl.int64) * (NUM_KV_HEADS * GROUP)
            heads = heads + my_kv_head * GROUP + rows % GROUP
            lse_log2 = gl.where(is_empty, NEG_INF, m + gl.log2(divisor))
            gl.store(lse_ptr + heads, lse_log2 * LN2, mask=rows // GROUP < my_qo_len)
        q.store(acc.to(dtype))
        offsets, is_row = row_offsets(
            my_first_row, my_qo_len, my_tile, my_kv_head,
            NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, WARPGROUP,
        )  # fmt: skip
        gl.store(out_ptr + offsets, q.load(ROW_LAYOUT), mask=is_row)

        my_first_row = next_first_row
        my_qo_len = next_qo_len
        my_kv_len = next_kv_len
        my_tile = next_tile
        my_kv_head = next_kv_head
        begin, full_begin, full_end, end = key_range(
            my_qo_len, my_kv_len, my_tile, sliding_window, GROUP, BLOCK_M, BLOCK_N, HAS_WINDOW
        )
        positions = my_kv_len - my_qo_len + (my_tile * BLOCK_M + my_rows) // GROUP
        s = hide(s, positions, columns, begin * BLOCK_N, sliding_window, HAS_WINDOW)
        p, _alpha, m, total = fold_scores(s, no_m, no_total, scale_log2)
        p = gl.convert_layout(narrow(p, dtype), p_layout)


# Not specialized: a layer must not cost a compilation.
@gluon.jit(do_not_specialize=["layer", "num_layers", "sliding_window"])
def paged_prefill_hopper_kernel(
    out_ptr,  # [num_rows, num_qo_heads, head_dim]
    lse_ptr,  # [num_rows, num_qo_heads], float32, natural log; written only if HAS_LSE
    q_ptr,  # [num_rows, num_qo_heads, head_dim]
    pages_desc,  # [num_pages * num_layers * 2 * num_kv_heads * page_size, head_dim]
    page_indptr_ptr,  # [num_requests + 1], int32
    page_indices_ptr,  # [num_table_entries], int32
    unit_indptr_ptr,  # [num_programs + 1], int32: first unit of each program; none is without
    units_ptr,  # [num_units, UNIT_FIELDS], int32: see load_unit
    layer,
    num_layers,
    scale_log2,  # softmax scale * log2(e)
    sliding_window,  # tokens that a query sees; read only if HAS_WINDOW
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    UNIT_FIELDS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    # Grid: (num_programs,), at most one for each multiprocessor
    dtype: gl.constexpr = pages_desc.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_shape: gl.constexpr = [2, GROUP_ROWS, HEAD_DIM]
    q_bufs_0 = gl.allocate_shared_memory(dtype, q_shape, tile_layout)
    q_bufs_1 = gl.allocate_shared_memory(dtype, q_shape, tile_layout)
    k_bufs = gl.allocate_shared_memory(dtype, [K_STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    v_bufs = gl.allocate_shared_memory(dtype, [V_STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], barrier_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], barrier_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], barrier_layout)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                attend,
                (
                    out_ptr, lse_ptr, q_ptr, k_bufs, v_bufs, q_bufs_0,
                    k_full, k_empty, v_full, v_empty, unit_indptr_ptr, units_ptr, scale_log2,
                    sliding_window, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, K_STAGES,
                    V_STAGES, UNIT_FIELDS, HAS_WINDOW, HAS_LSE, 0,
                ),
            ),
            (
                attend,
                (
                    out_ptr, lse_ptr, q_ptr, k_bufs, v_bufs, q_bufs_1,
                    k_full, k_empty, v_full, v_empty, unit_indptr_ptr, units_ptr, scale_log2,
                    sliding_window, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, K_STAGES,
                    V_STAGES, UNIT_FIELDS, HAS_WINDOW, HAS_LSE, 1,
                ),
            ),
            (
                copy_keys_and_values,
                (
                    pages_desc, k_bufs, v_bufs, k_full, k_empty, v_full, v_empty,
                    page_indptr_ptr, page_indices_ptr, unit_indptr_ptr, units_ptr, layer,
                    num_layers, sliding_window, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
                    BLOCK_M, BLOCK_N, K_STAGES, V_STAGES, UNIT_FIELDS, HAS_WINDOW,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
