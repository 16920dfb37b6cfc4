"""Generate calls to one router: most share one stream, large ones go separately.

A message on the stream costs both sides much more than a call in it. So calls that start or end
within one turn of the event loop share a message, and so do the router's answers to them. Answers
are passed on at once: a slow reader delays no other caller.
"""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import grpc

from pagewire.failures import FailureWithin, failure_from, failure_from_status, stream_ended
from pagewire.protos import inference_pb2
from pagewire.protos.call_tasks import is_own_cancellation
from pagewire.protos.gathering import READS_MORE_KEY, gather
from pagewire.protos.grpc_options import MAX_STREAM_AGE_S
from pagewire.wire import AnswerPart, NextToken

ENVELOPE_BYTES = 64  # most bytes of a GenerateManyRequest around the request it starts
MAX_MS = 2**32 - 1
HEADERS_S = 0.05  # longest wait of several calls for headers that say whether they may share one
FINISH_S = 0.5  # longest wait for a router to end a stream whose client closes
_BROKEN_WRITE = "Internal error from Core"  # grpc.aio's words

Metadata = tuple[tuple[str, str], ...]  # of a call


class Receiver(Protocol):
    """Gets the output of a call; neither method may raise."""

    def received(self, message: AnswerPart) -> None:
        """Take the next message."""

    def ended(self, failure: FailureWithin | None) -> None:
        """Take the end, always last; None: the answer is complete."""


class RunningCall:
    """One call at one router.

    Args:
        receiver: Gets its output.
        cancel: Tells the router to stop it.
    """

    def __init__(self, receiver: Receiver, cancel: Callable[[], None]) -> None:
        self.is_over = False
        self._receiver = receiver
        self._cancel = cancel
        # As in all its messages; empty before the first.
        self._request_id = ""
        self._begins_in_reasoning = False

    def cancel(self) -> None:
        """End it silently; harmless after the end."""
        if not self.is_over:
            self.is_over = True
            self._cancel()

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        """Pass on a message."""
        if not self.is_over:
            if not self._request_id:
                self._request_id = message.request_id
                self._begins_in_reasoning = message.begins_in_reasoning
            self._receiver.received(message)

    def take_token(self, token_id: int, index: int, text: str) -> None:
        """Pass on a message with one token, which has come without the rest."""
        if not self.is_over:
            self._receiver.received(
                NextToken(self._request_id, self._begins_in_reasoning, token_id, index, text)
            )

    def end(self, failure: FailureWithin | None) -> None:
        """Pass on the end; only the first one counts."""
        if not self.is_over:
            self.is_over = True
            self._receiver.ended(failure)


class CallStream:
    """One GenerateMany stream, in the event loop that creates it.

    Args:
        open_call: Opens it at the router.
        address: The address of the router, for error messages.
    """

    def __init__(self, open_call: Callable[[], Any], address: str) -> None:
        self.is_open = True  # to new calls
        self.is_over = False
        self._call = open_call()
        self._address = address
        self._calls: dict[int, RunningCall] = {}  # call id |-> running call
        self._ids = itertools.count(1)
        self._outbox: deque[inference_pb2.GenerateManyRequest] = deque()
        self._has_mail = asyncio.Event()
        self._is_finishing = False  # nothing follows what is in the outbox
        self._reads_more = False  # the router has said so
        self._has_headers = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._read(), name="calls-reader"),
            loop.create_task(self._write(), name="calls-writer"),
        ]
        # Routers end old connections, and nothing else ends an idle stream.
        self._age_limit = loop.call_later(MAX_STREAM_AGE_S, self.retire)

    @property
    def is_idle(self) -> bool:
        """Whether no call runs on it."""
        return not self._calls

    def start(
        self,
        request: inference_pb2.GenerateRequest,
        receiver: Receiver,
        *,
        timeout_s: float,
        interval_s: float,
    ) -> RunningCall:
        """Start a call; its router aborts it after `timeout_s`."""
        call_id = next(self._ids)
        call = RunningCall(receiver, lambda: self._cancel(call_id))
        self._calls[call_id] = call
        self._post(
            inference_pb2.GenerateManyRequest(
                call_id=call_id,
                start=request,
                timeout_ms=max(1, min(math.ceil(1000 * timeout_s), MAX_MS)),
                interval_ms=min(math.ceil(1000 * interval_s), MAX_MS),
            )
        )
        return call

    def retire(self) -> None:
        """Start no more calls; the stream ends with the last running call."""
        self.is_open = False
        if not self._calls:
            self.end(None)

    def end(self, failure: FailureWithin | None) -> None:
        """End the stream, and its running calls with the failure."""
        self.is_open, self.is_over = False, True
        self._age_limit.cancel()
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(failure)

    async def finish(self, failure: FailureWithin) -> None:
        """End the running calls with the failure at once, then the stream when the router ends it.

        The end of a cancelled stream may reach gRPC's queue after the last turn of the event loop.
        A later loop of the process then finds it there and logs `Event loop is closed`. Once the
        router has ended the stream, nothing can follow.
        """
        self.is_open, self._is_finishing = False, True
        calls, self._calls = self._calls, {}
        for call_id, call in calls.items():
            self._post(inference_pb2.GenerateManyRequest(call_id=call_id))
            call.end(failure)
        self._has_mail.set()
        try:
            await asyncio.wait(self._tasks, timeout=FINISH_S)
        finally:
            self.end(None)

    def _post(self, message: inference_pb2.GenerateManyRequest) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    def _cancel(self, call_id: int) -> None:
        if self._calls.pop(call_id, None):
            self._post(inference_pb2.GenerateManyRequest(call_id=call_id))
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if not self.is_open and not self._calls:
            self.end(None)

    async def _write(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader learns why
            while await self._has_mail.wait():
                self._has_mail.clear()
                if len(self._outbox) > 1:
                    await self._wait_for_headers()
                while self._outbox:
                    message = gather(self._outbox) if self._reads_more else self._outbox.popleft()
                    await self._call.write(message)
                if self._is_finishing:
                    await self._call.done_writing()
                    return

    async def _wait_for_headers(self) -> None:
        """Wait for a moment, so that a burst of calls on a new stream needs one message."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HEADERS_S):
                await self._has_headers.wait()

    async def _read(self) -> None:
        failure: FailureWithin = partial(stream_ended, self._address)
        try:
            headers = await self._call.initial_metadata()
            self._reads_more = any(key == READS_MORE_KEY for key, _ in headers or ())
            self._has_headers.set()
            while (message := await self._call.read()) is not grpc.aio.EOF:
                columns = message.tokens
                for call_id, token_id, index, text in zip(
                    columns.call_ids, columns.token_ids, columns.indices, columns.texts, strict=True
                ):
                    if call := self._calls.get(call_id):  # else it was cancelled meanwhile
                        call.take_token(token_id, index, text)
                for result in message.results:
                    self._take(result)
        except grpc.aio.AioRpcError as error:
            # A write to a stream that has just ended hides the reason; a later error shows it.
            if error.details() != _BROKEN_WRITE:
                failure = partial(failure_from, error, self._address)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
        except Exception:
            self.end(failure)
            raise
        if not self._is_finishing:  # or it would cancel the writer, whose last event may be to come
            self.end(failure)

    def _take(self, result: inference_pb2.CallResult) -> None:
        call = self._calls.get(result.call_id)
        if call is None:  # cancelled meanwhile
            return
        if status := result.error_status:
            del self._calls[result.call_id]
            call.end(partial(failure_from_status, status, self._address))
        else:
            call.take(result.response)
            if result.response.HasField("usage"):
                self._calls.pop(result.call_id, None)
                call.end(None)
        self._end_if_idle()


class SingleCall(RunningCall):
    """A separate Generate call; a message too large for the router ends no other call with it.

    Args:
        call: The open gRPC call.
        address: The address of the router, for error messages.
        receiver: Gets its output.
    """

    def __init__(self, call: Any, address: str, receiver: Receiver) -> None:
        super().__init__(receiver, call.cancel)
        self.task = asyncio.create_task(self._read(call, address), name="call-reader")

    async def _read(self, call: Any, address: str) -> None:
        failure: FailureWithin | None = None
        try:
            async for message in call:
                self.take(message)
        except grpc.aio.AioRpcError as error:
            failure = partial(failure_from, error, address)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            failure = partial(stream_ended, address)
        self.end(failure)
