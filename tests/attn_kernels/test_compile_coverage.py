"""Each pair of what an attention kernel is compiled with is compiled for Hopper beside this test.

The tile, which is how a kernel is compiled, is among the parts: so none that a launcher can choose
is left out.
"""

from itertools import product

import pytest

from tests.attn_kernels import (
    test_compile_cascade,
    test_compile_sm90,
    test_decode_hopper,
    test_prefill_hopper,
)
from tests.attn_kernels.sm90_shapes import (
    CAP,
    DTYPES,
    HEAD_DIMS,
    KERNELS,
    PAGE_SIZES,
    SHAPES,
    WINDOW,
    Shape,
)

HEADS = [(4, 4), (32, 8), (28, 4), (16, 1)]  # one of each kind of group
ALL = [
    Shape(*heads, head_dim, page_size, dtype, window, cap, has_lse, over_fp8, is_exact, overlaps)
    for heads, head_dim, page_size, (dtype, over_fp8), window, cap in product(
        HEADS, HEAD_DIMS, PAGE_SIZES, DTYPES, (None, WINDOW), (None, CAP)
    )
    for has_lse, is_exact, overlaps in product((False, True), repeat=3)
]
COMPILED = {
    "decode": test_compile_sm90.DECODE_SHAPES,
    "decode on Hopper": test_decode_hopper.COMPILED_SHAPES,
    "prefill": test_compile_sm90.PREFILL_SHAPES,
    "prefill on Hopper": test_prefill_hopper.COMPILED_SHAPES,
    "shared part": test_compile_cascade.FEW_ROWS_SHAPES,
    "shared part on Hopper": test_compile_cascade.MANY_ROWS_SHAPES,
}


@pytest.mark.parametrize("name", KERNELS)
def test_each_pair_is_compiled(name: str) -> None:
    kernel = KERNELS[name]

    taken = kernel.pairs(shape for shape in ALL if kernel.takes(shape))

    assert taken <= kernel.pairs(COMPILED[name])


def test_decode_is_compiled_for_each_group() -> None:
    assert {shape.group for shape in COMPILED["decode"]} == set(range(1, 17))


def test_what_is_served_is_compiled_for_each_kernel() -> None:
    assert all(SHAPES[0] in shapes for shapes in COMPILED.values())


def test_a_shape_left_out_is_missed() -> None:
    kernel = KERNELS["decode"]
    without = [shape for shape in COMPILED["decode"] if shape.head_dim != 96]

    assert not kernel.pairs(ALL) <= kernel.pairs(without)
