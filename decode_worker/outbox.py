"""Messages that wait for one router. A slow router gets longer messages and delays no other."""

import asyncio
from dataclasses import dataclass, replace

from decode_worker.errors import SlowRouter
from decode_worker.request import Request, TokenDelta
from worker.errors import WorkerError


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFailure:
    """A request ended without a result."""

    request_id: str
    attempt: int
    error: WorkerError
    failed_passes: int = 0  # of the request, on this worker and on others


class Outbox:
    """Collects deltas until the session's writer takes them all; merges those of a choice.

    Attributes:
        is_overrun: Too many tokens waited: all is dropped, `take` raises, nothing is added.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self.is_overrun = False
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._deltas: dict[tuple[Request, int], TokenDelta] = {}  # (request, choice) |-> delta
        self._failures: list[RequestFailure] = []
        self._changed = asyncio.Event()
        self._is_closed = False
        self._error: WorkerError | None = None

    def push(self, delta: TokenDelta) -> None:
        """Add the next tokens of a choice; may leave the outbox overrun."""
        if self.is_overrun:
            return
        key = (delta.request, delta.choice)
        earlier = self._deltas.get(key)
        if earlier is not None:
            delta = replace(
                delta,
                tokens=earlier.tokens + delta.tokens,
                first_index=earlier.first_index,
                has_stats=earlier.has_stats or delta.has_stats,
            )
        self._deltas[key] = delta
        self._count()

    def fail(self, failure: RequestFailure) -> None:
        """Add the failure of a request; its tokens so far go first. It counts as one more token."""
        if self.is_overrun:
            return
        self._failures.append(failure)
        self._count()

    def discard(self, request: Request) -> None:
        """Drop the messages about a request that its router no longer wants."""
        for key in [key for key in self._deltas if key[0] is request]:
            self._num_tokens -= len(self._deltas.pop(key).tokens)

    def close(self, error: WorkerError | None = None) -> None:
        """Let `take` end: after the messages that wait, or at once with an error."""
        self._is_closed = True
        self._error = self._error or error
        self._changed.set()

    def _count(self) -> None:
        self._num_tokens += 1
        if self._num_tokens > self._max_tokens:
            self._deltas, self._failures = {}, []
            self.is_overrun = True
            self.close(SlowRouter(f"more than {self._max_tokens} tokens wait to be read"))
        self._changed.set()

    async def take(self) -> tuple[list[TokenDelta], list[RequestFailure]] | None:
        """Return all waiting messages, as soon as there is one; None when closed and empty.

        Raises:
            WorkerError: The error that the outbox was closed with.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._deltas or self._failures:
                deltas, failures = list(self._deltas.values()), self._failures
                self._deltas, self._failures, self._num_tokens = {}, [], 0
                return deltas, failures
            if self._is_closed:
                return None
            self._changed.clear()
            await self._changed.wait()
