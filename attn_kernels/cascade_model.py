"""What cascade and flat attention cost on a device: arithmetic for the planner."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy.typing as npt

FloatArray = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeModel:
    """What the work costs on a device, to choose a side; times of one layer in us.

    The defaults are fitted to one H200 with head_dim 128.
    """

    num_kv_heads: int
    members_per_tile: int  # requests whose query heads fill a tile
    token_bytes: int  # K and V of a token, all heads
    num_programs: int  # of the shared part's launch
    num_decode_programs: int
    tile_token_us: float  # a tile and a token of one key-value head, in a program of the former

    hbm_bytes_per_us: float = 4.2e6
    repeated_bytes_per_us: float = 8.0e6  # keys that another request reads at about this time
    flat_repeated_bytes_per_us: float = 6.7e6  # the same, with one program on a multiprocessor
    item_us: float = 4.3  # filling a pipeline, storing the results
    store_us: float = 1.0  # storing one more slot, and filling the pipeline again
    own_us: float = 9.0  # a request's own keys, however few, in a program of decode
    slot_us: float = 0.25  # folding one more slot, in a program of decode
    launch_us: float = 10.0  # flat decode of few tokens
    extra_us: float = 2.0  # what a second launch adds
    margin: float = 0.9  # cascade must be estimated faster than flat by this factor

    def sharing_all(self) -> Self:
        """Return the model in which reading what others read never pays: for warm-up and tests."""
        return replace(self, repeated_bytes_per_us=1e-3, margin=math.inf)

    def read_us(self, num_tokens: int) -> float:
        """Return the time to read tokens from memory."""
        return num_tokens * self.token_bytes / self.hbm_bytes_per_us

    def reread_us(self, num_tokens: int) -> float:
        """Return the time that the decode kernel takes for tokens that others read as well."""
        return num_tokens * self.token_bytes / self.repeated_bytes_per_us

    def reread_flat_us(self, num_tokens: int) -> float:
        """Return the same of flat decode."""
        return num_tokens * self.token_bytes / self.flat_repeated_bytes_per_us

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
        """Return the least time of the decode kernel, which folds the slots of each request."""
        rounds = max(num_requests * self.num_kv_heads / self.num_decode_programs, 1.0)
        return rounds * (self.own_us + max_slots * self.slot_us)
