"""Pieces of Hopper kernels whose two warpgroups of 64 rows take turns on the tensor cores.

Source of the turns: FlashAttention-3 (Shah et al., 2024), ping-pong scheduling.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
    # Two to a register, as the matrix instruction wants them; the compiler's own conversion
    # shuffles bytes.
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
