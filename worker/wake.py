"""Wakes the step loop, and knows whether more requests may follow at once."""

import asyncio
import math

# A router takes in the calls of a burst by the message, and passes them on together. Until its next
# message it needs some 0.3 ms for each.
NEXT_CALL_S = 0.001  # after a call that came alone
NEXT_MESSAGE_S = 0.006  # after several
SEVERAL = 4


class Wake(asyncio.Event):
    """Set it to have the scheduler look again: something was submitted, ended, committed or freed.

    The first requests of a burst must not have a second step launched ahead: all others would wait
    for two steps instead of one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arrived_at = -math.inf
        self._num_together = 0  # arrivals of which each followed the one before at once

    @property
    def is_in_burst(self) -> bool:
        """Whether requests have just arrived, so that others may follow."""
        gap_s = NEXT_MESSAGE_S if self._num_together >= SEVERAL else NEXT_CALL_S
        return asyncio.get_running_loop().time() - self._arrived_at < gap_s

    def set_by_arrival(self) -> None:
        """Set it for a request that can be computed from now on."""
        now = asyncio.get_running_loop().time()
        self._num_together = self._num_together + 1 if now - self._arrived_at < NEXT_CALL_S else 1
        self._arrived_at = now
        self.set()
