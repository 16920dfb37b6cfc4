"""Spaces the messages of streams, so that what messages cost leaves the router time for tokens.

A message costs the router about 45 us of CPU however many tokens it carries, a token about 5 us. So
tokens of a stream gather after each of its messages, longer the more streams there are: all streams
together send one message every 80 us at most, which leaves half of a core for tokens. With few
streams no token waits.
"""

import asyncio
from collections.abc import Callable

MESSAGE_S = 80e-6  # between two messages of any streams
TICK_S = 1e-3  # streams that are due within it share a timer

Wake = Callable[[], None]


class Pacer:
    """The pace of a router's streams.

    Args:
        most_s: The longest that tokens gather; 0: they never do.

    Attributes:
        num_sending: Choices whose tokens come now; the messages of each are its own.
    """

    def __init__(self, most_s: float) -> None:
        self.num_sending = 0
        self._most_s = most_s
        self._ticks: dict[int, list[Wake]] = {}  # number of a tick |-> what to call then

    @property
    def interval_s(self) -> float:
        """How long tokens of a stream gather after a message."""
        return min(self._most_s, self.num_sending * MESSAGE_S)

    def call_at(self, due_at: float, wake: Wake) -> None:
        """Call `wake` at the last tick that is not after a loop time, or soon if it has passed."""
        tick = int(due_at / TICK_S)
        wakes = self._ticks.get(tick)
        if wakes is None:
            wakes = self._ticks[tick] = []
            asyncio.get_running_loop().call_at(tick * TICK_S, self._wake, tick)
        wakes.append(wake)

    def _wake(self, tick: int) -> None:
        for wake in self._ticks.pop(tick):
            wake()
