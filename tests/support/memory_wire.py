"""What calls of the in-memory gRPC run over: links with latency and faults, and ordered pipes.

A pipe is one direction of one call. What was sent arrives in order, after the link's latency, and
a writer waits while more than a window of bytes is unread, as HTTP/2 flow control makes it wait.
"""

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from typing import Any

_ROUNDING_S = 1e-9


class Link:
    """Between two processes, both directions."""

    def __init__(self, rng: random.Random, latency_s: float, jitter_s: float) -> None:
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self.is_cut = False
        self.on_cut: list[Callable[[], None]] = []
        self._rng = rng
        self._waiting: list[Pipe] = []

    def delay(self) -> float:
        return self.latency_s + (self._rng.random() * self.jitter_s if self.jitter_s else 0.0)

    def cut(self) -> None:
        """Deliver nothing; what is sent waits, as TCP's retransmissions do, until `heal`."""
        self.is_cut = True
        for tell in self.on_cut:
            tell()

    def heal(self) -> None:
        self.is_cut = False
        waiting, self._waiting = self._waiting, []
        for pipe in waiting:
            pipe.drain()

    def wait_for_heal(self, pipe: "Pipe") -> None:
        if pipe not in self._waiting:
            self._waiting.append(pipe)


class Pipe:
    """One direction of one call."""

    def __init__(
        self,
        link: Link,
        network_context: contextvars.Context,
        arrive: Callable[[Any], None],
        window_bytes: int,
    ) -> None:
        self._window_bytes = window_bytes
        self._link = link
        self._context = network_context
        self._arrive = arrive
        self._queue: deque[tuple[float, Any]] = deque()  # (due, element)
        self._last_due = 0.0
        self._unread_bytes = 0
        self._writer: asyncio.Future[None] | None = None
        self.is_closed = False

    def send(self, element: Any) -> None:
        """Queue an element; a closed pipe swallows it."""
        if self.is_closed:
            return
        loop = asyncio.get_running_loop()
        delay = self._link.delay()
        due = max(self._last_due, loop.time() + delay)
        self._last_due = due
        self._queue.append((due, element))
        if isinstance(element, bytes):
            self._unread_bytes += len(element)
        if due <= loop.time():
            loop.call_soon(self.drain, context=self._context)
        else:
            loop.call_at(due, self.drain, context=self._context)

    async def wait_for_window(self) -> None:
        """Wait until the peer has read enough; at most one writer waits."""
        while self._unread_bytes > self._window_bytes and not self.is_closed:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    def was_read(self, message: bytes) -> None:
        self._unread_bytes -= len(message)
        if self._unread_bytes <= self._window_bytes:
            self._wake_writer()

    def close(self) -> None:
        """Swallow what is sent from now on; what is under way still arrives."""
        self.is_closed = True
        self._wake_writer()

    def discard(self) -> None:
        """Close and drop what is under way."""
        self.close()
        self._queue.clear()

    def drain(self) -> None:
        now = asyncio.get_running_loop().time() + _ROUNDING_S
        while self._queue and self._queue[0][0] <= now:
            if self._link.is_cut:
                self._link.wait_for_heal(self)
                return
            self._arrive(self._queue.popleft()[1])

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
