"""Delivers a request's messages to its client, and notices a client that stopped reading."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from pagewire.protos.call_tasks import mark_seen
from router.errors import SlowClient

Message = TypeVar("Message")


class Delivery(Generic[Message]):
    """The delivery of one call's messages.

    A write that the client blocks is never cancelled: gRPC would keep its memory and could not send
    a status after it. The write ends with the call.

    Args:
        messages: To write, in order.
        begin: Sends the headers before the first message; None: already sent. gRPC would send them
            with the message, and then no status while the client blocks it.
        write: Returns when the client has room for the next message.
        timeout_s: Longest time of one write.
    """

    def __init__(
        self,
        messages: AsyncGenerator[Message, None],
        *,
        begin: Callable[[], Awaitable[None]] | None,
        write: Callable[[Message], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self._messages = messages
        self._begin = begin
        self._write = write
        self._timeout_s = timeout_s
        self._blocked_since: float | None = None  # loop time; a write is under way
        self._is_over = False

    async def run(self) -> None:
        """Write all messages.

        Raises:
            SlowClient: The client read nothing for too long.
        """
        loop = asyncio.get_running_loop()
        writing = loop.create_task(self._write_all())
        try:
            while not writing.done():
                since = loop.time() if self._blocked_since is None else self._blocked_since
                remaining_s = since + self._timeout_s - loop.time()
                if remaining_s <= 0:
                    raise SlowClient(f"the client took nothing for {self._timeout_s:g} s")
                await asyncio.wait({writing}, timeout=remaining_s)
            writing.result()
        finally:
            self._is_over = True
            if self._blocked_since is None:
                writing.cancel()
            writing.add_done_callback(mark_seen)  # of a call that is over

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        begin = self._begin
        async with aclosing(self._messages) as messages:
            async for message in messages:
                self._blocked_since = loop.time()
                if begin:
                    await begin()
                    begin = None
                await self._write(message)
                self._blocked_since = None
                if self._is_over:
                    return
