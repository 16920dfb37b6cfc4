"""A router's answers to one HTTP request: the messages of one call or several, as they come.

Messages that arrive between two reads are kept and taken together: a slow client costs the gateway
memory for its untaken text, and delays no other client.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire import PagewireError

Message = tuple[int, Any]  # number of the call, its GenerateResponse


class Answers:
    """The calls of one HTTP request, for one reader.

    Args:
        num_calls: The number of started calls.
        cancel: Cancels running calls: after an error of one, or when the reader closes early.
        tick_s: Period after which `next` returns without news.
    """

    def __init__(self, num_calls: int, *, cancel: Callable[[], None], tick_s: float) -> None:
        self._num_running = num_calls
        self._cancel = cancel
        self._tick_s = tick_s
        self.failed_call = 0  # the call that ended all
        self._arrived: list[Message] = []
        self._error: PagewireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False  # since the last tick
        self._loop = asyncio.get_running_loop()
        self._ticker = self._loop.call_later(tick_s, self._tick)

    @property
    def is_over(self) -> bool:
        """Whether everything was taken and nothing more comes."""
        return not self._num_running and not self._arrived

    async def next(self) -> list[Message]:
        """Wait for messages and return all of them; nothing after a period without any.

        Raises:
            PagewireError: A call failed; raised after all earlier messages were taken.
        """
        if not self._arrived and self._num_running and self._error is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        if not arrived and self._error is not None:
            raise self._error
        return arrived

    def close(self) -> None:
        """Cancel running calls; harmless when repeated."""
        self._ticker.cancel()
        if self._num_running:
            self._num_running = 0
            self._cancel()

    def add(self, call: int, response: Any) -> None:
        """Take a message of a call."""
        self._arrived.append((call, response))
        self._has_news = True
        self._wake()

    def end(self, call: int, error: PagewireError | None) -> None:
        """Note the end of a call; the first error ends all, after the messages that arrived."""
        if error is None:
            self._num_running -= 1
        elif self._error is None:
            self._error, self.failed_call = error, call
            self._cancel()
        self._wake()

    def _tick(self) -> None:
        if not self._has_news:
            self._wake()
        self._has_news = False
        self._ticker = self._loop.call_later(self._tick_s, self._tick)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class CallReader:
    """Takes the messages of one call; a `pagewire.resumption.Reader`."""

    answers: Answers
    number: int  # of the call

    def received(self, message: Any) -> None:
        """Add a message."""
        self.answers.add(self.number, message)

    def ended(self, error: PagewireError | None) -> None:
        """Note the end."""
        self.answers.end(self.number, error)
