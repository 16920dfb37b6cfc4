"""Kernel body of a linear layer for Hopper: the same bits as bodies.py.

A persistent program per multiprocessor, in partitions: one warp copies boxes of both operands into
a ring in shared memory (TMA), and one to three warpgroups multiply. The copies run ahead across
tiles, so that a tile's first operands arrive while the results of the tile before are stored.

The instruction takes 64 rows of the first operand for each warpgroup, and up to 256 of the second
one. Weights come first where there are few inputs: then those need not fill 64 rows. Blocks are
powers of two; a tile of other heights has a second product, its tail.

The copy engine fills rows outside of a matrix slowly. So the last tile of a row or column of tiles
begins where it ends with the matrix, and what it shares with the tile before is written twice, with
the same bits.

Source: CUTLASS's cooperative kernels for Hopper; Triton's Gluon tutorials 7 and 8.
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

from attn_kernels.linear import plan
from attn_kernels.warpgroups import GROUP_ROWS, narrow

STORE_COLUMNS = gl.constexpr(plan.STORE_COLUMNS)
GATE_GROUP = gl.constexpr(plan.GATE_GROUP)


@gluon.jit
def place_of(
    tile, num_rows, num_out, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BAND: gl.constexpr
):
    # First row and first output of a tile. As in bodies.py: bands of BAND row tiles, which change
    # fastest.
    num_row_tiles = (num_rows + ROWS - 1) // ROWS
    num_out_tiles = (num_out + BLOCK_N - 1) // BLOCK_N
    tiles_per_band = BAND * num_out_tiles
    first_row_tile = tile // tiles_per_band * BAND
    band = gl.minimum(num_row_tiles - first_row_tile, BAND)
    place = tile % tiles_per_band
    row = (first_row_tile + place % band) * ROWS
    output = place // band * BLOCK_N
    row = gl.minimum(row, gl.maximum(num_rows - ROWS, 0))
    return row, gl.minimum(output, gl.maximum(num_out - BLOCK_N, 0))


@gluon.jit
def num_tiles_of(num_rows, num_out, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    return ((num_rows + ROWS - 1) // ROWS) * ((num_out + BLOCK_N - 1) // BLOCK_N)


@gluon.jit
def copy_operands(
    x_desc,
    x_tail_desc,
    weight_desc,
    buffers,
    sizes,
    BLOCK_M: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
):
    x_bufs, x_tails, weight_bufs, _, _, full, empty = buffers
    num_rows, num_out, num_in = sizes
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_K: gl.constexpr = x_bufs.shape[2]
    X_ROWS: gl.constexpr = x_desc.block_type.shape[0]
    WEIGHT_ROWS: gl.constexpr = weight_desc.block_type.shape[0]
    X_BOXES: gl.constexpr = BLOCK_M // X_ROWS
    WEIGHT_BOXES: gl.constexpr = BLOCK_N // WEIGHT_ROWS
    STAGE_BYTES: gl.constexpr = (BLOCK_M + TAIL + BLOCK_N) * BLOCK_K * 2
    num_tiles = num_tiles_of(num_rows, num_out, BLOCK_M + TAIL, BLOCK_N)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, output = place_of(tile, num_rows, num_out, BLOCK_M + TAIL, BLOCK_N, BAND)
        for start in range(0, num_in, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            my_full = full.index(stage)
            mbarrier.expect(my_full, STAGE_BYTES)
            for box in gl.static_range(WEIGHT_BOXES):
                tma.async_copy_global_to_shared(
                    weight_desc,
                    [output + box * WEIGHT_ROWS, start],
                    my_full,
                    weight_bufs.index(stage * WEIGHT_BOXES + box),
                )
            for box in gl.static_range(X_BOXES):
                tma.async_copy_global_to_shared(
                    x_desc,
                    [row + box * X_ROWS, start],
                    my_full,
                    x_bufs.index(stage * X_BOXES + box),
                )
            if TAIL:
                tma.async_copy_global_to_shared(
                    x_tail_desc, [row + BLOCK_M, start], my_full, x_tails.index(stage)
                )
            stage += 1
            wraps = stage == STAGES
            stage = gl.where(wraps, 0, stage)
            phase = gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    # Computed, not carried by the loop as a second variable: Triton takes two names of one value
    # before a loop for one in it.
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def halves(x):
    # [64, N] -> twice [64, N / 2]: its first and its last columns; in registers
    N: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N // 2, 16])
    parts = gl.permute(gl.reshape(x, [x.shape[0], 2, N // 2]), (0, 2, 1))
    low, high = gl.split(parts)
    return (
        gl.convert_layout(low, layout, assert_trivial=True),
        gl.convert_layout(high, layout, assert_trivial=True),
    )


@gluon.jit
def gated(gate, up, dtype: gl.constexpr):
    # As in bodies.py
    gate = narrow(gate, dtype).to(gl.float32)
    silu = (gate / (1.0 + gl.exp(-gate))).to(dtype)
    return silu.to(gl.float32) * narrow(up, dtype).to(gl.float32)


@gluon.jit
def gated_columns(x, dtype: gl.constexpr):
    # [64, N] -> [64, N / 2], as in bodies.py; in registers
    N: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N // 2, 16])
    pairs = gl.reshape(x, [x.shape[0], N // (2 * GATE_GROUP), 2, GATE_GROUP])
    gate, up = gl.split(gl.permute(pairs, (0, 1, 3, 2)))
    out = gl.reshape(gated(gate, up, dtype), [x.shape[0], N // 2])
    return gl.convert_layout(out, layout, assert_trivial=True)


@gluon.jit
def gated_rows(x, dtype: gl.constexpr):
    # [64, N] -> [32, N], likewise
    pairs = gl.reshape(x, [x.shape[0] // (2 * GATE_GROUP), 2, GATE_GROUP, x.shape[1]])
    gate, up = gl.split(gl.permute(pairs, (0, 2, 3, 1)))
    return gl.reshape(gated(gate, up, dtype), [x.shape[0] // 2, x.shape[1]])


@gluon.jit
def column_parts(x):
    # [64, N] -> N / 64 parts of 64 columns
    N: gl.constexpr = x.shape[1]
    if N == STORE_COLUMNS:
        parts = (x,)
    else:
        low, high = halves(x)
        parts = column_parts(low) + column_parts(high)
    return parts


@gluon.jit
def store_swapped(
    acc,
    out_desc,
    bias_ptr,
    out_box,
    row,
    output,
    num_out,
    PENDING: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IS_GATED: gl.constexpr,
):
    # [64, N] -> N rows of the result; the box is free as soon as PENDING stores are left
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, acc.shape[1], 16])
    dtype: gl.constexpr = out_box.dtype
    if HAS_BIAS:
        outputs = output + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
        bias = gl.load(bias_ptr + outputs, mask=outputs < num_out, other=0.0)
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    if IS_GATED:
        acc = gated_rows(acc, dtype)
        output = output // 2
    tma.store_wait(PENDING)
    out_box.permute((1, 0)).store(acc.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, output], out_box)


@gluon.jit
def multiply(
    out_desc,
    out_tail_desc,
    bias_ptr,
    buffers,
    sizes,
    HAS_BIAS: gl.constexpr,
    IS_GATED: gl.constexpr,
    IS_SWAPPED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    x_bufs, x_tails, weight_bufs, out_boxes, out_tails, full, empty = buffers
    num_rows, num_out, num_in = sizes
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_K: gl.constexpr = x_bufs.shape[2]
    COLUMNS: gl.constexpr = BLOCK_M if IS_SWAPPED else BLOCK_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dtype: gl.constexpr = x_bufs.dtype
    OUT_BOXES: gl.constexpr = out_boxes.shape[0] // WARPGROUPS
    num_tiles = num_tiles_of(num_rows, num_out, BLOCK_M + TAIL, BLOCK_N)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, output = place_of(tile, num_rows, num_out, BLOCK_M + TAIL, BLOCK_N, BAND)
        acc = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, layout)
        if TAIL:
            tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
            weight_layout: gl.constexpr = gl.DotOperandLayout(0, tail_layout, 2)
            tail = gl.zeros([GROUP_ROWS, TAIL], gl.float32, tail_layout)
        for start in range(0, num_in, BLOCK_K):
            mbarrier.wait(full.index(stage), phase)
            if IS_SWAPPED:
                first = weight_bufs.index(stage * WARPGROUPS + WARPGROUP)
                second = x_bufs.index(stage).permute((1, 0))
            else:
                first = x_bufs.index(stage * WARPGROUPS + WARPGROUP)
                second = weight_bufs.index(stage).permute((1, 0))
            # After each wait the products before the last one are done: their operands may be
            # replaced.
            if TAIL:
                # From registers: a narrow product that reads the weights from shared memory again
                # takes as long as one of 48 rows.
                weights = first.load(weight_layout)
                x_tail = x_tails.index(stage).permute((1, 0))
                tail = warpgroup_mma(weights, x_tail, tail, is_async=True)
                acc = warpgroup_mma(first, second, acc, is_async=True)
                acc, tail = warpgroup_mma_wait(1, deps=[acc, tail])
            else:
                acc = warpgroup_mma(first, second, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1, pred=start > 0)
            stage += 1
            wraps = stage == STAGES
            stage = gl.where(wraps, 0, stage)
            phase = gl.where(wraps, phase ^ 1, phase)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), count=1)

        if IS_SWAPPED:
            output += WARPGROUP * GROUP_ROWS
            NUM_STORES: gl.constexpr = 2 if TAIL else 1
            store_swapped(
                acc, out_desc, bias_ptr, out_boxes.index(WARPGROUP), row, output, num_out,
                NUM_STORES - 1, HAS_BIAS, IS_GATED,
            )  # fmt: skip
            if TAIL:
                store_swapped(
                    tail, out_tail_desc, bias_ptr, out_tails.index(WARPGROUP), row + BLOCK_M,
                    output, num_out, NUM_STORES - 1, HAS_BIAS, IS_GATED,
                )  # fmt: skip
        else:
            row += WARPGROUP * GROUP_ROWS
            NUM_STORED: gl.constexpr = COLUMNS // 2 if IS_GATED else COLUMNS
            if IS_GATED:
                if HAS_BIAS:
                    outputs = output + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
                    bias = gl.load(bias_ptr + outputs, mask=outputs < num_out, other=0.0)
                    acc += gl.expand_dims(bias.to(gl.float32), 0)
                acc = gated_columns(acc, dtype)
                output = output // 2
            parts = column_parts(acc)
            part_layout: gl.constexpr = gl.NVMMADistributedLayout(
                [3, 0], [4, 1], [16, STORE_COLUMNS, 16]
            )
            for part in gl.static_range(NUM_STORED // STORE_COLUMNS):
                part_acc = parts[part]
                if HAS_BIAS and not IS_GATED:
                    outputs = output + gl.arange(0, STORE_COLUMNS, gl.SliceLayout(0, part_layout))
                    bias = gl.load(bias_ptr + outputs, mask=outputs < num_out, other=0.0)
                    part_acc += gl.expand_dims(bias.to(gl.float32), 0)
                tma.store_wait(OUT_BOXES - 1)
                out_box = out_boxes.index(WARPGROUP * OUT_BOXES + part % OUT_BOXES)
                out_box.store(narrow(part_acc, dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(out_desc, [row, output], out_box)
                output += STORE_COLUMNS
    tma.store_wait(0)


# Not specialized: a shape must not cost a compilation.
@gluon.jit(do_not_specialize=["num_rows", "num_out", "num_in"])
def linear_hopper_kernel(
    out_desc,  # [num_rows, num_out], or [num_rows, num_out / 2] if IS_GATED
    out_tail_desc,  # the same in boxes of TAIL rows; None if that is 0
    x_desc,  # [num_rows, num_in]
    x_tail_desc,  # likewise
    weight_desc,  # [num_out, num_in]
    bias_ptr,  # [num_out]; read only if HAS_BIAS
    num_rows,
    num_out,
    num_in,
    HAS_BIAS: gl.constexpr,
    IS_GATED: gl.constexpr,
    IS_SWAPPED: gl.constexpr,
    BLOCK_M: gl.constexpr,  # rows
    TAIL: gl.constexpr,  # rows after those, 0 unless IS_SWAPPED
    BLOCK_N: gl.constexpr,  # outputs
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,  # parts of both operands in shared memory
    OUT_BOXES: gl.constexpr,  # of a warpgroup, in shared memory: results on their way out
    WARPGROUPS: gl.constexpr,  # 1 to 3 that multiply
    BAND: gl.constexpr,  # row tiles that share weights while those are in the L2 cache
):
    # Grid: at most one program for each multiprocessor; tiles are dealt one by one.
    dtype: gl.constexpr = x_desc.dtype
    X_BOXES: gl.constexpr = 1 if IS_SWAPPED else WARPGROUPS
    WEIGHT_BOXES: gl.constexpr = WARPGROUPS if IS_SWAPPED else 1
    x_bufs = gl.allocate_shared_memory(
        dtype, [STAGES * X_BOXES, BLOCK_M // X_BOXES, BLOCK_K], x_desc.layout
    )
    weight_bufs = gl.allocate_shared_memory(
        dtype, [STAGES * WEIGHT_BOXES, BLOCK_N // WEIGHT_BOXES, BLOCK_K], weight_desc.layout
    )
    OUT_SHAPE: gl.constexpr = [WARPGROUPS * OUT_BOXES] + out_desc.block_type.shape  # noqa: RUF005
    out_boxes = gl.allocate_shared_memory(dtype, OUT_SHAPE, out_desc.layout)
    x_tails, out_tails = x_bufs, out_boxes  # any buffers: without TAIL, nothing uses them
    if TAIL:
        x_tails = gl.allocate_shared_memory(dtype, [STAGES, TAIL, BLOCK_K], x_tail_desc.layout)
        TAIL_SHAPE: gl.constexpr = [WARPGROUPS] + out_tail_desc.block_type.shape  # noqa: RUF005
        out_tails = gl.allocate_shared_memory(dtype, TAIL_SHAPE, out_tail_desc.layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    fence_async_shared()

    buffers = (x_bufs, x_tails, weight_bufs, out_boxes, out_tails, full, empty)
    sizes = (num_rows, num_out, num_in)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        out_desc, out_tail_desc, bias_ptr, buffers, sizes, HAS_BIAS, IS_GATED,
                        IS_SWAPPED, BLOCK_M, TAIL, BLOCK_N, BAND, WARPGROUPS, 0,
                    ),
                ),
                (
                    copy_operands,
                    (
                        x_desc, x_tail_desc, weight_desc, buffers, sizes, BLOCK_M, TAIL, BLOCK_N,
                        BAND,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        out_desc, out_tail_desc, bias_ptr, buffers, sizes, HAS_BIAS, IS_GATED,
                        IS_SWAPPED, BLOCK_M, TAIL, BLOCK_N, BAND, WARPGROUPS, 0,
                    ),
                ),
                (
                    multiply,
                    (
                        out_desc, out_tail_desc, bias_ptr, buffers, sizes, HAS_BIAS, IS_GATED,
                        IS_SWAPPED, BLOCK_M, TAIL, BLOCK_N, BAND, WARPGROUPS, 1,
                    ),
                ),
                (
                    copy_operands,
                    (
                        x_desc, x_tail_desc, weight_desc, buffers, sizes, BLOCK_M, TAIL, BLOCK_N,
                        BAND,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        out_desc, out_tail_desc, bias_ptr, buffers, sizes, HAS_BIAS, IS_GATED,
                        IS_SWAPPED, BLOCK_M, TAIL, BLOCK_N, BAND, WARPGROUPS, 0,
                    ),
                ),
                (
                    multiply,
                    (
                        out_desc, out_tail_desc, bias_ptr, buffers, sizes, HAS_BIAS, IS_GATED,
                        IS_SWAPPED, BLOCK_M, TAIL, BLOCK_N, BAND, WARPGROUPS, 1,
                    ),
                ),
                (
                    multiply,
                    (
                        out_desc, out_tail_desc, bias_ptr, buffers, sizes, HAS_BIAS, IS_GATED,
                        IS_SWAPPED, BLOCK_M, TAIL, BLOCK_N, BAND, WARPGROUPS, 2,
                    ),
                ),
                (
                    copy_operands,
                    (
                        x_desc, x_tail_desc, weight_desc, buffers, sizes, BLOCK_M, TAIL, BLOCK_N,
                        BAND,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
