"""Costs of cascade and flat attention on a device: arithmetic for the planner."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy.typing as npt

FloatArray = npt.NDArray[Any]

# What CascadeModel has otherwise for a pool of fp8: decode waits for its conversion, wherever it
# reads from. To refit, on the device in question: `python -m benchmarks.cascade_border --dtype
# float8_e4m3fn --out sweep.json` (bfloat16 for the defaults of CascadeModel), a downhill simplex
# over the relative errors of `flat_us` and `cascade_us` against the sweep's rows, errors that
# favour sharing counted twice, and tests/benchmarks/test_cascade_border.py on a second sweep.
FP8_FIT: dict[str, Any] = {
    "hbm_bytes_per_us": 2.05e6,
    "repeated_bytes_per_us": 2.3e6,
    "own_us": 5.0,
    "read_bytes_per_us": 2.28e6,
    "write_back_us_per_byte": 0.128e-6,
    "launch_us": 8.4,
    "flat_repeated_bytes_per_us": 2.35e6,
    "repeat_norm": 1.02,
    "excess_weight": 0.45,
    "flat_turn_us": 0.7,
    "max_flat_write_back_us": 4.9,
    "shared_launch_us": 4.4,
    "shared_bytes_per_us": 2.0e6,
    "shared_weight": 0.78,
    "long_shared_weight": 0.62,
    "own_repeated_bytes_per_us": 2.0e6,
    "own_turn_us": 1.2,
    "late_us": 2.3,
    "fold_us": 0.76,
    "max_write_back_us": 10.4,
}
LONG_SHARED_US = 10.0  # what the shared part's busiest program takes beyond it shows less


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeModel:
    """Costs of the work on a device, for choosing a side; times of one layer in us.

    The defaults are fitted to one H200 with head_dim 128 and half precision, on the forests of
    benchmarks.cascade_border, so that sharing never slows one down and is rarely missed where it
    would be faster. A layer's time is sums and norms of its parts, not a simulation.
    """

    num_kv_heads: int
    members_per_tile: int  # requests whose query heads fill a tile
    token_bytes: int  # K and V of a token, all heads
    num_programs: int  # of the shared part's launch
    num_decode_programs: int
    num_flat_lanes: int  # of flat decode
    tile_token_us: float  # a tile and a token of one key-value head, in a program of the former

    # To choose nodes, and to cut what they share
    hbm_bytes_per_us: float = 3.95e6
    repeated_bytes_per_us: float = 8.0e6  # keys that another request reads at about this time
    item_us: float = 4.3  # filling a pipeline, storing the results
    store_us: float = 1.0  # storing one more slot, and filling the pipeline again
    own_us: float = 0.3  # a request's own keys, however few, in a program of decode
    slot_us: float = 0.25  # folding one more slot, in a program of decode

    # To compare the whole with flat decode
    read_bytes_per_us: float = 4.41e6  # while L2 has nothing to write back
    write_back_us_per_byte: float = 0.086e-6  # of all that is read, for what L2 held ...
    max_flat_write_back_us: float = 7.4  # ... at most, in flat decode
    max_write_back_us: float = 11.3  # ... and in cascade; both as fitted, not what L2 holds
    launch_us: float = 7.7  # flat decode of few tokens
    flat_repeated_bytes_per_us: float = 6.2e6  # keys that another request reads as well
    repeat_norm: float = 1.25  # of both reads in flat decode: 1 where neither hides the other
    excess_weight: float = 0.35  # how much of a busiest lane's excess over the others shows
    flat_turn_us: float = 0.16  # each request of a lane
    shared_launch_us: float = 4.6  # both launches of cascade, before any item
    shared_bytes_per_us: float = 3.83e6  # the read of shared keys
    shared_weight: float = 0.94  # how much of the shared part's busiest program shows ...
    long_shared_weight: float = 0.3  # ... beyond LONG_SHARED_US
    own_repeated_bytes_per_us: float = 5.7e6
    own_turn_us: float = 0.0  # each request of a lane of decode; shows only in fp8
    late_us: float = 0.9  # more requests than half of decode's lanes
    fold_us: float = 0.4  # a slot for each program of decode
    fold_weight: float = 1.0  # query heads of a slot and their size, over those of the fit
    fold_path_us: float = 0.1  # a slot of the request that has most, for what they exceed the fit
    margin: float = 0.9  # cascade must be estimated faster than flat by this factor

    def sharing_all(self) -> Self:
        """Return the model in which repeated reads never pay off: for warm-up and tests."""
        return replace(self, repeated_bytes_per_us=1e-3, margin=math.inf)

    def read_us(self, num_tokens: int) -> float:
        """Return the time to read tokens from memory."""
        return num_tokens * self.token_bytes / self.hbm_bytes_per_us

    def reread_us(self, num_tokens: int) -> float:
        """Return the cost of tokens that other requests read, too, when nodes are chosen."""
        return num_tokens * self.token_bytes / self.repeated_bytes_per_us

    def flat_us(
        self, num_distinct: int, num_repeated: int, num_requests: int, lane_excess: float
    ) -> float:
        """Return the time of flat decode.

        Args:
            num_distinct: Tokens, once.
            num_repeated: How many more times one is read.
            num_requests: Requests.
            lane_excess: Load of the busiest lane over the average.
        """
        max_us = self.max_flat_write_back_us
        read_us = self._read_and_write_back_us(num_distinct, num_distinct, max_us)
        repeated_us = num_repeated * self.token_bytes / self.flat_repeated_bytes_per_us
        norm = self.repeat_norm
        reads_us = float((read_us**norm + repeated_us**norm) ** (1 / norm))
        excess_us = reads_us * self.excess_weight * (lane_excess - 1)
        turns = -(-num_requests // self.num_flat_lanes)
        return self.launch_us + reads_us + excess_us + turns * self.flat_turn_us

    def cascade_us(
        self,
        num_shared: int,
        num_own: int,
        num_repeated: int,
        num_requests: int,
        num_slots: int,
        max_slots: int,
        ends_us: float,
    ) -> float:
        """Return the time of both launches of cascade.

        Args:
            num_shared: Tokens that the shared part reads, once.
            num_own: Tokens left to the decode kernel, once.
            num_repeated: How many more times it reads one.
            num_requests: Requests.
            num_slots: Slots of the shared part, of all requests.
            max_slots: The slots of the request with the most.
            ends_us: The busiest program of the shared part.
        """
        shared_us = num_shared * self.token_bytes / self.shared_bytes_per_us
        shared_us += self.shared_weight * min(ends_us, LONG_SHARED_US)
        shared_us += self.long_shared_weight * max(ends_us - LONG_SHARED_US, 0.0)
        num_read = num_shared + num_own
        own_us = self._read_and_write_back_us(num_own, num_read, self.max_write_back_us)
        own_us += num_repeated * self.token_bytes / self.own_repeated_bytes_per_us
        slots_per_program = num_slots * self.num_kv_heads / self.num_decode_programs
        own_us += slots_per_program * self.fold_us * self.fold_weight
        own_us += max_slots * self.fold_path_us * (self.fold_weight - 1)
        turns = -(-num_requests * self.num_kv_heads // self.num_decode_programs)
        own_us += turns * self.own_turn_us
        if 2 * num_requests * self.num_kv_heads > self.num_decode_programs:
            own_us += self.late_us
        return self.shared_launch_us + shared_us + own_us

    def _read_and_write_back_us(self, num_tokens: int, num_read: int, max_us: float) -> float:
        """Return the time to read tokens, and for L2 to write back while `num_read` are read."""
        bytes_read = num_read * self.token_bytes
        write_back_us = min(bytes_read * self.write_back_us_per_byte, max_us)
        return num_tokens * self.token_bytes / self.read_bytes_per_us + write_back_us

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
