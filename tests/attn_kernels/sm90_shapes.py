"""What attention is compiled for Hopper with, and which pairs of its parts that leaves out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
import torch

from attn_kernels.cascade.launch import HopperSharedTile, shared_tile
from attn_kernels.checks import HALF_DTYPES
from attn_kernels.decode.launch import HopperDecodeTile, decode_tile
from attn_kernels.prefill import launch_hopper
from attn_kernels.prefill.launch_triton import prefill_tile

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (1, 16, 32, 64, 128)
DTYPES = ((BF16, BF16), (FP16, FP16), (FP8, BF16), (FP8, FP16))  # of pages and of queries
WINDOW, CAP = 4096, 30.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A pool, and what attention over it is made and run with."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of pages
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_lse: bool = False
    over_fp8: torch.dtype = BF16  # of queries over pages in fp8; over others it is the pages'
    is_exact: bool = True  # cascade only
    overlaps: bool = False  # decode only

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def q_dtype(self) -> torch.dtype:
        return self.over_fp8 if self.dtype == FP8 else self.dtype

    def pages(self) -> torch.Tensor:
        return torch.empty(
            2, 2, 2, self.num_kv_heads, self.page_size, self.head_dim, dtype=self.dtype
        )

    def scales(self) -> dict[str, torch.Tensor]:
        if self.dtype != FP8:
            return {}
        scale = torch.empty(2, self.num_kv_heads)
        return {"k_scale": scale, "v_scale": scale}

    def __str__(self) -> str:
        parts = [
            f"{self.num_qo_heads}of{self.num_kv_heads}-d{self.head_dim}-p{self.page_size}",
            str(self.dtype).removeprefix("torch."),
            f"q-{self.q_dtype}".replace("torch.", "") if self.q_dtype != self.dtype else "",
            "window" if self.sliding_window else "",
            "cap" if self.soft_cap else "",
            "lse" if self.has_lse else "",
            "" if self.is_exact else "inexact",
            "overlaps" if self.overlaps else "",
        ]
        return "-".join(filter(None, parts))


# Llama-3-8B's shape first, then each head size, page size, group and dtype that ships.
PLAIN_SHAPES = [
    Shape(32, 8, 128, 64, BF16),
    Shape(32, 8, 128, 16, FP16),
    Shape(32, 8, 64, 32, BF16),
    Shape(40, 8, 96, 64, BF16),
    Shape(28, 4, 128, 128, BF16),
    Shape(16, 1, 128, 64, BF16),
    Shape(4, 4, 128, 64, BF16),
    Shape(16, 8, 256, 64, BF16),
    Shape(16, 8, 256, 16, BF16),
    Shape(32, 8, 128, 64, torch.float32),
    Shape(32, 8, 128, 64, FP8),
    Shape(32, 8, 128, 16, FP8),
    Shape(32, 8, 64, 32, FP8),
    Shape(40, 8, 96, 64, FP8),
    Shape(16, 8, 256, 64, FP8),
    Shape(16, 8, 256, 16, FP8),
    Shape(64, 8, 128, 64, BF16),
]
# With those above, each pair of head size, page size, dtypes, kind of group, options and
# tile (test_compile_coverage), rather than all combinations: each takes some seconds.
OPTION_SHAPES = [
    Shape(32, 8, 128, 1, BF16, WINDOW, CAP, has_lse=True, is_exact=False),
    Shape(5, 1, 64, 16, FP16, WINDOW, is_exact=False),
    Shape(6, 2, 96, 1, BF16, None, CAP, is_exact=False),
    Shape(16, 8, 256, 1, FP16, has_lse=True, is_exact=False),
    Shape(16, 8, 256, 32, BF16, WINDOW, CAP, is_exact=False),
    Shape(32, 8, 128, 1, FP8, WINDOW, over_fp8=FP16, is_exact=False),
    Shape(10, 2, 64, 128, FP8, None, CAP, has_lse=True, is_exact=False),
    Shape(40, 8, 96, 16, FP8, None, CAP, over_fp8=FP16, is_exact=False),
    Shape(16, 8, 256, 64, FP8, WINDOW, CAP, has_lse=True, over_fp8=FP16, is_exact=False),
    Shape(32, 32, 256, 1, FP8, WINDOW, CAP, is_exact=False),
    Shape(28, 2, 96, 128, FP16, WINDOW, CAP, has_lse=True, overlaps=True),
    Shape(16, 1, 256, 32, FP8, has_lse=True, over_fp8=FP16, overlaps=True),
    Shape(4, 4, 96, 32, FP16, WINDOW, has_lse=True, is_exact=False, overlaps=True),
    Shape(
        56,
        8,
        256,
        128,
        FP8,
        WINDOW,
        CAP,
        has_lse=True,
        over_fp8=FP16,
        is_exact=False,
        overlaps=True,
    ),
    Shape(8, 8, 64, 16, FP8, has_lse=True, over_fp8=FP16, overlaps=True),
    Shape(48, 4, 64, 1, FP8, WINDOW, overlaps=True),
    Shape(32, 32, 256, 128, BF16, WINDOW, CAP, has_lse=True, overlaps=True),
    Shape(15, 1, 64, 64, FP16, WINDOW, CAP, is_exact=False, overlaps=True),
    Shape(32, 8, 96, 128, FP8, WINDOW, over_fp8=FP16, is_exact=False, overlaps=True),
    Shape(28, 4, 128, 32, FP8, None, CAP, is_exact=False, overlaps=True),
    Shape(11, 1, 256, 16, BF16, is_exact=False, overlaps=True),
    Shape(6, 1, 256, 16, FP16, has_lse=True, overlaps=True),
    # The rest of the groups
    Shape(9, 1, 128, 16, BF16),
    Shape(10, 1, 128, 16, BF16, is_exact=False),
    Shape(13, 1, 128, 32, FP16, WINDOW, CAP, has_lse=True),
]
SHAPES = PLAIN_SHAPES + OPTION_SHAPES


# Of those that ship plainly, each width of numbers that the matrix unit takes
ALWAYS = [SHAPES[0], Shape(40, 8, 96, 64, FP8)]


def compiled_with(
    shapes: Iterable[Shape], always: Sequence[Shape] = ALWAYS
) -> pytest.MarkDecorator:
    """Parametrize a test with shapes; some in each run, the rest in thorough.

    Args:
        shapes: All of them.
        always: Those of each run.
    """
    parameters = [
        pytest.param(shape, marks=() if shape in always else pytest.mark.thorough)
        for shape in shapes
    ]
    return pytest.mark.parametrize("shape", parameters, ids=str)


POOL = ("head_dim", "page_size", "dtypes")
FEW, MANY = 8, 1024  # query rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One of the kernels of attention."""

    parts: tuple[str, ...]  # what it depends on, beside the tile
    tile_of: Callable[[Shape], object]
    takes: Callable[[Shape], bool] = lambda shape: True

    def pairs(self, shapes: Iterable[Shape]) -> set[object]:
        """Return the pairs of parts, the tile among them, that some of the shapes have."""
        found: set[object] = set()
        for shape in shapes:
            all_parts = parts_of(shape)
            parts = [(name, all_parts[name]) for name in self.parts]
            found.update(combinations([*parts, ("tile", self.tile_of(shape))], 2))
        return found

    def covering(self, shapes: list[Shape]) -> list[Shape]:
        """Return some of the shapes, the first among them, that have all pairs.

        All groups, too, if the kernel pads them.
        """
        has = {shape: self.pairs([shape]) for shape in shapes}
        if "group" in self.parts:
            has = {shape: pairs | {shape.group} for shape, pairs in has.items()}
        chosen = {shapes[0]}
        missing = set().union(*has.values()) - has[shapes[0]]
        while missing:
            best = max(shapes, key=lambda shape: len(has[shape] & missing))
            chosen.add(best)
            missing -= has[best]
        return [shape for shape in shapes if shape in chosen]


def division_by(group: int) -> str:
    """Say what becomes of a division by a group."""
    if group == 1:
        return "none"
    return "shift" if group in (2, 4, 8, 16) else "multiplication"


def parts_of(shape: Shape) -> dict[str, object]:
    """Return the parts of a shape by name."""
    return {
        "head_dim": shape.head_dim,
        "page_size": shape.page_size,
        "dtypes": (shape.dtype, shape.q_dtype),
        # Decode pads the group, prefill divides by it, and to the shared part it is a mere factor.
        "group": "more than eight" if shape.group > 8 else division_by(shape.group),
        "division": division_by(shape.group),
        "window": shape.sliding_window is not None,
        "cap": shape.soft_cap is not None,
        "lse": shape.has_lse,
        "exact": shape.is_exact,
        "overlaps": shape.overlaps,
    }


def _decode_tile_on_hopper(shape: Shape) -> object:
    return decode_tile(shape.pages(), is_hopper=True, beside_shared=shape.overlaps)


def _shared_tile_of_many(shape: Shape) -> object:
    return shared_tile(shape.pages(), MANY, is_hopper=True)


KERNELS = {
    "decode": Kernel(
        parts=(*POOL, "group", "window", "cap", "lse", "overlaps"),
        tile_of=lambda shape: decode_tile(shape.pages(), is_hopper=False),
    ),
    "decode on Hopper": Kernel(
        parts=(*POOL, "group", "window", "cap", "lse", "overlaps"),
        tile_of=_decode_tile_on_hopper,
        takes=lambda shape: isinstance(_decode_tile_on_hopper(shape), HopperDecodeTile),
    ),
    "prefill": Kernel(
        parts=(*POOL, "division", "window", "cap", "lse"),
        tile_of=lambda shape: prefill_tile(shape.head_dim, shape.dtype.itemsize),
    ),
    "prefill on Hopper": Kernel(
        parts=(*POOL, "division", "window", "lse"),
        tile_of=lambda shape: launch_hopper.HopperTile(),
        takes=lambda shape: (
            shape.head_dim in launch_hopper.HEAD_DIMS
            and shape.page_size in launch_hopper.PAGE_SIZES
            and shape.dtype in HALF_DTYPES
            and shape.soft_cap is None
        ),
    ),
    "shared part": Kernel(
        parts=(*POOL, "cap", "exact"),
        tile_of=lambda shape: shared_tile(shape.pages(), FEW, is_hopper=True),
    ),
    "shared part on Hopper": Kernel(
        parts=(*POOL, "cap", "exact"),
        tile_of=_shared_tile_of_many,
        takes=lambda shape: isinstance(_shared_tile_of_many(shape), HopperSharedTile),
    ),
}
