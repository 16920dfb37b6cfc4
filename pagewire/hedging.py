"""A call that a second router gets as well if the first one has sent nothing for a while.

The first message decides: its router's answer is the call's answer, and the other call is
cancelled. So a router that hangs, or whose requests wait, delays the caller by no more than the
chosen time. Each hedge that starts costs the cluster a second request until then.

Source: "hedged requests" in Dean and Barroso, "The Tail at Scale", 2013.
"""

import asyncio
from collections.abc import Callable

from pagewire.errors import PagewireError
from pagewire.resumption import Reader, ResumableCall
from pagewire.routers import Routers
from pagewire.wire import AnswerPart

# Starts a call at the routers for the reader; so many seconds of its time have passed.
StartCall = Callable[[Routers, Reader, float], ResumableCall]


class HedgedCall:
    """One call at one router or, after a while without a message, at two.

    Args:
        start: Starts the call and, later, its hedge.
        routers: The routers of the call.
        other_routers: The same ones for the hedge, which goes to the one behind the call's.
        reader: Gets the answer of the call that sends the first message.
        after_s: How long to wait for that before the hedge starts, in seconds.

    Raises:
        ClosedError: As `start` does.
    """

    def __init__(
        self,
        start: StartCall,
        routers: Routers,
        other_routers: Routers,
        reader: Reader,
        after_s: float,
    ) -> None:
        self._start = start
        self._other_routers = other_routers
        self._reader = reader
        self._after_s = after_s
        self._chosen: _Side | None = None
        first = _Side(self)
        self._sides = [first]
        self._first = first.call = start(routers, first, 0.0)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(after_s, self._hedge)

    def cancel(self) -> None:
        """End the call silently; harmless after the end."""
        self._timer.cancel()
        sides, self._sides = self._sides, []
        for side in sides:
            side.cancel()

    def received(self, side: "_Side", message: AnswerPart) -> None:
        """Pass on a message, of the side that sent the first one."""
        if self._chosen is None:
            self._chosen = side
            self._timer.cancel()
            others, self._sides = [each for each in self._sides if each is not side], [side]
            for other in others:
                other.cancel()
        self._reader.received(message)

    def ended(self, side: "_Side", error: PagewireError | None) -> None:
        """Pass on the end, unless the other side may still answer."""
        self._timer.cancel()  # a refusal is an answer, too: a hedge would get the same
        self._sides.remove(side)
        if not self._sides:
            self._reader.ended(error)

    def _hedge(self) -> None:
        second = _Side(self)
        self._sides.append(second)
        try:
            self._other_routers.use_after(self._first.address)  # where it is now
            second.call = self._start(self._other_routers, second, self._after_s)
        except PagewireError:  # without a hedge the call is what it was
            self._sides.remove(second)


class _Side:
    """One of the two calls, as its reader."""

    def __init__(self, hedged: HedgedCall) -> None:
        self.call: ResumableCall | None = None
        self._hedged = hedged
        self._is_over = False

    def cancel(self) -> None:
        """End it silently."""
        self._is_over = True
        if self.call is not None:
            self.call.cancel()

    def received(self, message: AnswerPart) -> None:
        if not self._is_over:
            self._hedged.received(self, message)

    def ended(self, error: PagewireError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._hedged.ended(self, error)
