"""What cascade and flat attention cost on a device: arithmetic for the planner."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy.typing as npt

FloatArray = npt.NDArray[Any]

# What CascadeModel has otherwise for a pool of fp8: decode waits for its conversion, wherever it
# reads from.
FP8_FIT: dict[str, Any] = {
    "hbm_bytes_per_us": 2.05e6,
    "repeated_bytes_per_us": 2.3e6,
    "flat_repeated_bytes_per_us": 2.75e6,
    "repeat_norm": 1.05,
    "excess_weight": 0.7,
    "launch_us": 10.1,
    "own_us": 5.0,
    "shared_launch_us": 2.5,
    "shared_weight": 0.8,
    "shared_read_weight": 0.1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeModel:
    """What the work costs on a device, to choose a side; times of one layer in us.

    The defaults are fitted to one H200 with head_dim 128 and half precision, to the forests of
    benchmarks.cascade_border: so that none is shared that is slower for it, and few are not shared
    that would be faster. A layer's time is sums and norms of the parts', not a simulation.
    """

    num_kv_heads: int
    members_per_tile: int  # requests whose query heads fill a tile
    token_bytes: int  # K and V of a token, all heads
    num_programs: int  # of the shared part's launch
    num_decode_programs: int
    num_flat_lanes: int  # of flat decode
    tile_token_us: float  # a tile and a token of one key-value head, in a program of the former

    hbm_bytes_per_us: float = 3.95e6  # what decode reads, while L2 writes back what it held
    repeated_bytes_per_us: float = 8.0e6  # keys that another request reads at about this time
    flat_repeated_bytes_per_us: float = 6.75e6  # the same, with one program on a multiprocessor
    repeat_norm: float = 1.25  # of both times in flat decode: 1 where neither hides the other
    excess_weight: float = 0.7  # how much of a busiest lane's excess over the others shows
    launch_us: float = 10.3  # flat decode of few tokens
    item_us: float = 4.3  # filling a pipeline, storing the results
    store_us: float = 1.0  # storing one more slot, and filling the pipeline again
    own_us: float = 0.3  # a request's own keys, however few, in a program of decode
    slot_us: float = 0.25  # folding one more slot, in a program of decode
    shared_launch_us: float = 6.2  # cascade of few tokens
    shared_weight: float = 1.1  # how much of the shared part's items and of folds shows
    shared_read_weight: float = 0.3  # how much of the read of shared keys shows
    margin: float = 0.905  # cascade must be estimated faster than flat by this factor

    def sharing_all(self) -> Self:
        """Return the model in which reading what others read never pays: for warm-up and tests."""
        return replace(self, repeated_bytes_per_us=1e-3, margin=math.inf)

    def read_us(self, num_tokens: int) -> float:
        """Return the time to read tokens from memory."""
        return num_tokens * self.token_bytes / self.hbm_bytes_per_us

    def reread_us(self, num_tokens: int) -> float:
        """Return the time that the decode kernel takes for tokens that others read as well."""
        return num_tokens * self.token_bytes / self.repeated_bytes_per_us

    def flat_us(self, num_distinct: int, num_repeated: int, lane_excess: float) -> float:
        """Return the time of flat decode.

        Args:
            num_distinct: Tokens, once.
            num_repeated: How many more times one is read.
            lane_excess: Load of the busiest lane over the average.
        """
        repeated_us = num_repeated * self.token_bytes / self.flat_repeated_bytes_per_us
        norm = self.repeat_norm
        reads_us = float((self.read_us(num_distinct) ** norm + repeated_us**norm) ** (1 / norm))
        return self.launch_us + reads_us * (1 + self.excess_weight * (lane_excess - 1))

    def cascade_us(
        self, num_shared: int, num_own: int, num_repeated: int, ends_us: float, parts_us: float
    ) -> float:
        """Return the time of both launches of cascade.

        Args:
            num_shared: Tokens that the shared part reads, once.
            num_own: Tokens left to the decode kernel, once.
            num_repeated: How many more times it reads one.
            ends_us: The busiest program of the shared part.
            parts_us: `own_parts_us`.
        """
        reads_us = self.shared_read_weight * self.read_us(num_shared) + self.read_us(num_own)
        work_us = self.shared_weight * (ends_us + parts_us) + self.reread_us(num_repeated)
        return self.shared_launch_us + reads_us + work_us

    def run_us(self, num_members: int, num_tokens: int) -> float:
        """Return the device time that a shared run takes, the fold of its slots included."""
        units = -(-num_members // self.members_per_tile) * self.num_kv_heads
        work = units * (num_tokens * self.tile_token_us + self.item_us) / self.num_programs
        folds = num_members * self.num_kv_heads / self.num_decode_programs
        return max(work, self.read_us(num_tokens)) + folds * self.slot_us

    def shared_item_us(self, num_tokens: FloatArray, num_slots: FloatArray) -> FloatArray:
        """Return the times of items in a program of the shared part."""
        # A program's share of the bandwidth, of keys that other tiles read as well
        rate = self.repeated_bytes_per_us * self.num_kv_heads / self.num_programs
        token_us = max(self.tile_token_us, self.token_bytes / rate)
        return num_tokens * token_us + self.item_us + (num_slots - 1) * self.store_us

    def own_parts_us(self, num_requests: int, max_slots: int) -> float:
        """Return the time of requests' own parts without the reads: folds of their slots."""
        rounds = max(num_requests * self.num_kv_heads / self.num_decode_programs, 1.0)
        return rounds * (self.own_us + max_slots * self.slot_us)
