"""Pieces that Hopper kernels share, among them turns of two warpgroups on the tensor cores.

Source of the turns: FlashAttention-3 (Shah et al., 2024), ping-pong scheduling.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

GROUP_ROWS = gl.constexpr(64)  # rows of a warpgroup
NEG_INF = gl.constexpr(float("-inf"))
FIRST_TURN = gl.constexpr(8)  # barriers of the hardware; Triton takes 0 to 3, a turn 8 and 9

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.6 has the latter


@gluon.jit
def wait_for_turn(WARPGROUP: gl.constexpr):
    named_barrier("bar.sync", FIRST_TURN + WARPGROUP)


@gluon.jit
def pass_turn(WARPGROUP: gl.constexpr):
    named_barrier("bar.arrive", FIRST_TURN + 1 - WARPGROUP)


@gluon.jit
def named_barrier(instruction: gl.constexpr, barrier: gl.constexpr):
    # An element for each thread of the warpgroup: each executes the instruction once.
    threads = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    asm: gl.constexpr = f"{instruction} {barrier}, 256; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def narrow(p, dtype: gl.constexpr):
    # Two to a register, as the matrix instruction requires; the compiler's own conversion shuffles
    # bytes.
    if dtype == gl.bfloat16:
        narrowed = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [p],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        narrowed = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=True, pack=2
        )
    return narrowed


@gluon.jit
def widen(x, dtype: gl.constexpr):
    # fp8 (e4m3) to half precision, exactly; NaN becomes 480 in bfloat16. To bfloat16 the hardware
    # goes through float16, at a sixteenth of the rate of these: exponent and mantissa are moved to
    # their places, four to a register, and a product with 2**120 corrects the exponent's bias.
    if dtype == gl.bfloat16:
        widened = gl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, sign, bias;
            mov.b32 bias, 0x7b807b80;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            and.b32 sign, low, 0x80008000;
            shr.b32 low, low, 4;
            and.b32 low, low, 0x07f007f0;
            or.b32 low, low, sign;
            and.b32 sign, high, 0x80008000;
            shr.b32 high, high, 4;
            and.b32 high, high, 0x07f007f0;
            or.b32 high, high, sign;
            mul.rn.bf16x2 $0, low, bias;
            mul.rn.bf16x2 $1, high, bias;
            }
            """,
            "=r,=r,r",
            [x],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        widened = x.to(dtype)
    return widened


@gluon.jit
def clear_tail(parts, tile, tail, BLOCK_N: gl.constexpr, HALVES: gl.constexpr):
    # Zeros the rows of a tile from `tail` on, in parts of 16 rows and a block of columns: rows past
    # the end may hold anything, also NaN, and 0 * NaN is NaN. Warpgroups may write the same.
    PARTS: gl.constexpr = BLOCK_N // 16
    COLUMNS: gl.constexpr = parts.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, layout)), 1)
    for part in range(tail // 16, PARTS):
        for half in gl.static_range(HALVES):
            values_smem = parts.index((tile * HALVES + half) * PARTS + part)
            values = values_smem.load(layout)
            in_request = (rows + part * 16 < tail) & gl.full([16, COLUMNS], True, gl.int1, layout)
            values_smem.store(gl.where(in_request, values, gl.zeros_like(values)))
    fence_async_shared()
