"""Puts messages that wait for a stream into one message, which is cheaper than one each."""

import asyncio
from collections import deque
from typing import Any, Generic, TypeVar

from pagewire.protos.grpc_options import LARGE_REQUEST_BYTES

READS_MORE_KEY = "pagewire-reads-more"  # header of a router that reads GenerateManyRequest.more
READS_TOKENS_KEY = "pagewire-reads-tokens"  # metadata of a caller that reads CallTokens
MAX_MORE = 255  # messages within another one
ENVELOPE_BYTES = 16  # most bytes around each of them

# One with a field `more` for others of its type, such as a SessionRequest
Message = TypeVar("Message", bound=Any)


class Waiting(Generic[Message]):
    """Messages that wait for the writer of a stream, which takes many at once."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._is_closed = False
        self._is_changed = asyncio.Event()
        self._is_taken = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Message) -> None:
        """Add the next message."""
        self._messages.append(message)
        self._is_changed.set()

    def close(self) -> None:
        """Note that no more messages come."""
        self._is_closed = True
        self._is_changed.set()

    async def take(self) -> Message | None:
        """Wait for messages; return the first with others in its `more`, or None after the last."""
        while not self._messages:
            if self._is_closed:
                return None
            self._is_changed.clear()
            await self._is_changed.wait()
        message = gather(self._messages)
        self._is_taken.set()
        return message

    async def wait_until_few(self, most: int) -> None:
        """Return when at most so many messages wait."""
        while len(self._messages) > most:
            self._is_taken.clear()
            await self._is_taken.wait()


def gather(waiting: deque[Message]) -> Message:
    """Take messages from a non-empty queue; return the first with the others in its `more`.

    The result is not a large message unless one of them is.
    """
    first = waiting.popleft()
    num_bytes = first.ByteSize()
    more: list[Message] = []
    while waiting and len(more) < MAX_MORE:
        num_bytes += waiting[0].ByteSize() + ENVELOPE_BYTES
        if num_bytes > LARGE_REQUEST_BYTES:
            break
        more.append(waiting.popleft())
    first.more.extend(more)
    return first


def scatter(message: Message) -> tuple[Message, ...]:
    """Return a message and those in its `more`, in order."""
    return (message, *message.more)
