"""Streams on which no call runs: too many of them get little time to start one.

gRPC keeps what it has of a message until the rest comes, and a stream may be silent for as long as
it likes. Whoever fills the memory with halves of messages needs many such streams.
"""

import asyncio
from collections.abc import Callable, Hashable

MOST_IDLE = 32  # that have no limit
IDLE_S = 3.0  # for others; large requests come by Generate


class IdleStreams:
    """The idle GenerateMany streams of a router."""

    def __init__(self) -> None:
        self._unlimited: set[Hashable] = set()
        self._limits: dict[Hashable, asyncio.TimerHandle] = {}  # other stream |-> its time limit

    def add(self, stream: Hashable, end: Callable[[], None]) -> None:
        """Note that a stream is idle; `end` is called when it has been idle for too long."""
        if len(self._unlimited) < MOST_IDLE:
            self._unlimited.add(stream)
        else:
            self._limits[stream] = asyncio.get_running_loop().call_later(IDLE_S, end)

    def discard(self, stream: Hashable) -> None:
        """Note that a stream is idle no more, or over; a no-op if it was not."""
        self._unlimited.discard(stream)
        if limit := self._limits.pop(stream, None):
            limit.cancel()
