"""Each pair of what an attention kernel is compiled with is compiled for Hopper beside this test.

The tile, which is how a kernel is compiled, is among the parts: so none that a launcher can choose
is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import pytest

from attn_kernels import prefill_hopper
from attn_kernels.cascade import HopperSharedTile, shared_tile
from attn_kernels.checks import HALF_DTYPES
from attn_kernels.decode import HopperDecodeTile, decode_tile
from attn_kernels.prefill_triton import prefill_tile
from tests.attn_kernels import (
    test_compile_cascade,
    test_decode_hopper,
    test_prefill_hopper,
)
from tests.attn_kernels.sm90_shapes import (
    CAP,
    DTYPES,
    HEAD_DIMS,
    PAGE_SIZES,
    SHAPES,
    WINDOW,
    Shape,
    missing_pairs,
)

HEADS = [(4, 4), (32, 8), (28, 4), (16, 1)]  # one of each kind of group
ALL = [
    Shape(*heads, head_dim, page_size, dtype, window, cap, has_lse, over_fp8, is_exact, overlaps)
    for heads, head_dim, page_size, (dtype, over_fp8), window, cap in product(
        HEADS, HEAD_DIMS, PAGE_SIZES, DTYPES, (None, WINDOW), (None, CAP)
    )
    for has_lse, is_exact, overlaps in product((False, True), repeat=3)
]
POOL = ("head_dim", "page_size", "dtypes", "group")
FEW, MANY = 8, 1024  # rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    compiled: Sequence[Shape]
    parts: tuple[str, ...]  # what it depends on, beside the tile
    tile_of: Callable[[Shape], object]
    takes: Callable[[Shape], bool] = lambda shape: True


def on_hopper(shape: Shape) -> object:
    return decode_tile(shape.pages(), is_hopper=True, beside_shared=shape.overlaps)


def of_many(shape: Shape) -> object:
    return shared_tile(shape.pages(), MANY, is_hopper=True)


KERNELS = {
    "decode": Kernel(
        compiled=SHAPES,
        parts=(*POOL, "window", "cap", "lse", "overlaps"),
        tile_of=lambda shape: decode_tile(shape.pages(), is_hopper=False),
    ),
    "decode on Hopper": Kernel(
        compiled=test_decode_hopper.COMPILED_SHAPES,
        parts=(*POOL, "window", "cap", "lse", "overlaps"),
        tile_of=on_hopper,
        takes=lambda shape: isinstance(on_hopper(shape), HopperDecodeTile),
    ),
    "prefill": Kernel(
        compiled=SHAPES,
        parts=(*POOL, "window", "cap", "lse"),
        tile_of=lambda shape: prefill_tile(shape.head_dim, shape.dtype.itemsize),
    ),
    "prefill on Hopper": Kernel(
        compiled=test_prefill_hopper.COMPILED_SHAPES,
        parts=(*POOL, "window", "lse"),
        tile_of=lambda shape: prefill_hopper.HopperTile(),
        takes=lambda shape: (
            shape.head_dim in prefill_hopper.HEAD_DIMS
            and shape.page_size in prefill_hopper.PAGE_SIZES
            and shape.dtype in HALF_DTYPES
            and shape.soft_cap is None
        ),
    ),
    "shared part": Kernel(
        compiled=SHAPES,
        parts=(*POOL, "cap", "exact"),
        tile_of=lambda shape: shared_tile(shape.pages(), FEW, is_hopper=True),
    ),
    "shared part on Hopper": Kernel(
        compiled=test_compile_cascade.MANY_ROWS_SHAPES,
        parts=(*POOL, "cap", "exact"),
        tile_of=of_many,
        takes=lambda shape: isinstance(of_many(shape), HopperSharedTile),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_each_pair_is_compiled(name: str) -> None:
    kernel = KERNELS[name]
    taken = [shape for shape in ALL if kernel.takes(shape)]

    missing = missing_pairs(kernel.compiled, taken, kernel.parts, kernel.tile_of)

    assert missing == set()


def test_each_group_is_compiled() -> None:
    assert {shape.group for shape in SHAPES} == set(range(1, 17))


def test_a_shape_left_out_is_missed() -> None:
    kernel = KERNELS["decode"]
    without = [shape for shape in kernel.compiled if shape.head_dim != 96]

    assert missing_pairs(without, ALL, kernel.parts, kernel.tile_of)
