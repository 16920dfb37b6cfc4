"""Wakes the step loop, and knows whether more requests may follow at once."""

import asyncio
import math

# Requests of one burst reach a worker some 0.4 ms apart: as fast as a router takes them in.
BURST_GAP_S = 0.001


class Wake(asyncio.Event):
    """Set it to have the scheduler look again: something was submitted, ended, committed or freed.

    The first requests of a burst must not have a second step launched ahead: all others would wait
    for two steps instead of one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arrived_at = -math.inf

    @property
    def is_in_burst(self) -> bool:
        """Whether a request has just arrived, so that others may follow."""
        return asyncio.get_running_loop().time() - self._arrived_at < BURST_GAP_S

    def set_by_arrival(self) -> None:
        """Set it for a request that can be computed from now on."""
        self._arrived_at = asyncio.get_running_loop().time()
        self.set()
