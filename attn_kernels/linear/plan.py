"""Which tile of the Hopper kernel is fastest for a shape: arithmetic, no device.

A tile takes as long as its products or, if that is more, the copies of its operands to shared
memory, and then it is stored; programs take their tiles one after the other. Meanwhile both
matrices and the result pass the memory: the two hide each other for the most part.
"""

import functools
import math
from dataclasses import dataclass

GATE_GROUP = 8  # rows of gates in a weight, before as many of what they gate
GROUP_ROWS = 64  # of the instruction, which a warpgroup executes
MAX_COLUMNS = 256  # of the instruction
STORE_COLUMNS = 64  # outputs of a box of results

# Of an H200, by its data sheet. In a clock a multiprocessor multiplies 2,048 pairs of 16-bit
# numbers, and 64 bytes reach it.
CLOCKS_PER_US = 1755
PRODUCTS_PER_CLOCK = 2048
BYTES_PER_CLOCK = 64
NUM_BYTES = 2  # of an element
# As measured (benchmarks/results/linear-h200.json)
MEMORY_BYTES_PER_US = 4.0e6
STORE_US = 1.2  # of a tile's results, and until products run again


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperLinearTile:
    """How the kernel is compiled. All tiles of a dtype give the same bits, those of Triton's, too.

    The first operand of the product are inputs or, if it is swapped, weights: 64 rows for each of
    one to three warpgroups. The second one has up to 256 rows. Triton's blocks are powers of two:
    a swapped product may have a second, narrower block of rows, its tail. One of 32 rows takes no
    longer than a quarter of one of 128 does; less than that hardly saves time.
    """

    block_m: int  # rows, without the tail
    tail_m: int = 0
    block_n: int  # outputs
    block_k: int
    num_stages: int  # of operands in shared memory
    is_swapped: bool = False

    def __post_init__(self) -> None:
        first, second = self.block_m, self.block_n
        if self.is_swapped:
            first, second = second, first
        assert first in (GROUP_ROWS, 2 * GROUP_ROWS, 3 * GROUP_ROWS)
        assert second <= MAX_COLUMNS
        assert self.block_n % (STORE_COLUMNS if self.is_swapped else 2 * STORE_COLUMNS) == 0
        assert self.is_swapped or not self.tail_m

    @property
    def num_rows(self) -> int:
        """Return how many rows of the result a tile has."""
        return self.block_m + self.tail_m

    def num_tiles(self, num_rows: int, num_out: int) -> int:
        """Return how many tiles a product has."""
        return -(-num_rows // self.num_rows) * -(-num_out // self.block_n)

    @property
    def num_warpgroups(self) -> int:
        """Return how many warpgroups multiply."""
        return (self.block_n if self.is_swapped else self.block_m) // GROUP_ROWS


# For more than 64 rows
HOPPER_TILES = (
    HopperLinearTile(block_m=128, block_n=256, block_k=64, num_stages=4),
    HopperLinearTile(block_m=192, block_n=128, block_k=64, num_stages=4),
    HopperLinearTile(block_m=128, block_n=128, block_k=64, num_stages=6),
    HopperLinearTile(block_m=128, block_n=192, block_k=64, num_stages=4, is_swapped=True),
    HopperLinearTile(
        block_m=128, tail_m=32, block_n=128, block_k=64, num_stages=5, is_swapped=True
    ),
    HopperLinearTile(block_m=128, tail_m=32, block_n=64, block_k=64, num_stages=7, is_swapped=True),
    HopperLinearTile(block_m=128, block_n=64, block_k=64, num_stages=8, is_swapped=True),
    HopperLinearTile(block_m=64, block_n=64, block_k=128, num_stages=6, is_swapped=True),
)


@functools.lru_cache(maxsize=1 << 16)
def hopper_tile(num_rows: int, num_out: int, num_in: int, num_programs: int) -> HopperLinearTile:
    """Return the tile that is estimated fastest.

    Of equals it is the one that reads weights least often, then the smallest: more programs.
    """

    def cost(tile: HopperLinearTile) -> tuple[float, int, int]:
        us = estimated_us(tile, num_rows, num_out, num_in, num_programs)
        return us, -(-num_rows // tile.num_rows), tile.num_rows * tile.block_n

    return min(HOPPER_TILES, key=cost)


def estimated_us(
    tile: HopperLinearTile, num_rows: int, num_out: int, num_in: int, num_programs: int
) -> float:
    """Return the estimated time of a launch, but for what any launch takes."""
    product_clocks = tile.num_rows * tile.block_n * num_in / PRODUCTS_PER_CLOCK
    # The copy engine takes as long again for rows outside of a matrix.
    copied_rows = max(tile.num_rows, 2 * tile.num_rows - num_rows) + tile.block_n
    copy_clocks = copied_rows * num_in * NUM_BYTES / BYTES_PER_CLOCK
    tile_us = max(product_clocks, copy_clocks) / CLOCKS_PER_US + STORE_US
    num_elements = num_rows * num_in + num_out * num_in + num_rows * num_out
    memory_us = num_elements * NUM_BYTES / MEMORY_BYTES_PER_US
    return math.hypot(-(-tile.num_tiles(num_rows, num_out) // num_programs) * tile_us, memory_us)
