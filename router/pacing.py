"""Spaces the messages of streams, so that the cost of messages leaves the router time for tokens.

A message costs the router CPU time however many tokens it carries: about 45 us if each request is a
separate gRPC call, about 11 us in a stream that calls share, about 3 us there if it is a row of
columns. A token costs 3 us or more. So the tokens of a stream gather after each of its messages;
the more streams there are, the longer. With few streams no token waits.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

TICK_S = 1e-3  # streams that are due within it share a timer

OWN_CALL_US = 80  # of a message, where each request is a separate gRPC call
SHARED_CALL_US = 20  # where calls share a stream
ROW_US = 6  # ... and a message of one token is a row of columns

Wake = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How often a stream may send.

    Attributes:
        message_us: Microseconds of the router's time budgeted for each message. This is about twice
            the cost of a message, which leaves half of a core for tokens.
        least_s: The shortest time that its tokens gather.
    """

    message_us: int
    least_s: float = 0.0


class Pacer:
    """The pace of a router's streams.

    Args:
        most_s: The longest that tokens gather; 0: they never do.

    Attributes:
        sending_us: Budget of one message for each choice that receives tokens now, microseconds.
    """

    def __init__(self, most_s: float) -> None:
        self.sending_us = 0
        self._most_s = most_s
        self._shared_s = 0.0  # how long tokens gather if their pace asks for no more
        self._ticks: dict[int, list[Wake]] = {}  # number of a tick |-> callbacks

    def change(self, message_us: int) -> None:
        """Note that a choice begins (above 0) or ceases to receive tokens."""
        self.sending_us += message_us
        self._shared_s = min(self._most_s, self.sending_us * 1e-6)

    def interval_s(self, pace: Pace) -> float:
        """Return how long tokens of a stream gather after a message."""
        return pace.least_s if pace.least_s > self._shared_s else self._shared_s

    def call_at(self, due_at: float, wake: Wake) -> None:
        """Call `wake` at the last tick up to a loop time, or soon if that has passed."""
        tick = int(due_at / TICK_S)
        wakes = self._ticks.get(tick)
        if wakes is None:
            wakes = self._ticks[tick] = []
            asyncio.get_running_loop().call_at(tick * TICK_S, self._wake, tick)
        wakes.append(wake)

    def _wake(self, tick: int) -> None:
        for wake in self._ticks.pop(tick):
            wake()
