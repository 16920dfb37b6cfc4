"""The stream to one prefill worker, which all attempts at it share.

The first attempt opens it, and each goes by an id of its own. A stream that breaks ends its
attempts; the next attempt opens another one. Without attempts it stays open, for a ping a second.
"""

import asyncio
import logging
from typing import Any, Protocol

import grpc

from decode_worker.errors import PrefillFailed
from decode_worker.wire import (
    CHANNEL_CLOSED,
    PrefillEnd,
    PrefillMessage,
    call_failed,
    leave_message,
    open_prefill,
    prefill_message_from_proto,
    transfer_message,
)
from kv_transfer.errors import TransferError
from kv_transfer.messages import ReceiverMessage
from observability.logs import fields
from pagewire.protos.gathering import Waiting, scatter

logger = logging.getLogger(__name__)


class PrefillClient:
    """The channel to one start of a prefill worker, and its stream.

    Args:
        channel: To it; closed with this client.
        write_s: How long the worker may leave a message unread.
    """

    def __init__(self, channel: grpc.aio.Channel, *, write_s: float) -> None:
        self.channel = channel
        self._write_s = write_s
        self._stream: PrefillStream | None = None

    def stream(self) -> "PrefillStream":
        """Return the stream, opened if there is none; raises PrefillFailed if this is closed."""
        if self._stream is None or self._stream.is_over:
            self._stream = PrefillStream(open_prefill(self.channel), write_s=self._write_s)
        return self._stream

    async def close(self) -> None:
        """End the stream and close the channel."""
        if self._stream is not None:
            await self._stream.close()
        await self.channel.close()


class Attempt(Protocol):
    """An attempt, as its stream sees it."""

    @property
    def request_id(self) -> str:
        """Of the request that it is part of, for logs."""
        ...

    def take(self, message: PrefillMessage) -> None:
        """Take a message of the prefill worker; the last one is a PrefillEnd."""
        ...


class PrefillStream:
    """The stream to one start of a prefill worker."""

    def __init__(self, call: Any, *, write_s: float) -> None:
        self.is_over = False
        self._call = call
        self._write_s = write_s
        self._attempts: dict[int, Attempt] = {}  # attempt id |-> one that has not ended
        self._last_id = 0
        self._waiting: Waiting[Any] = Waiting()
        self._error: PrefillFailed | None = None  # why the writer has given up
        loop = asyncio.get_running_loop()
        self._writing = loop.create_task(self._write(), name="prefill-writer")
        self._reading = loop.create_task(self._read(), name="prefill-reader")
        self._reading.add_done_callback(self._end)

    def begin(self, start: Any, attempt: Attempt) -> "AttemptLine":
        """Send the start of an attempt (wire.start_message), which then gets the worker's messages.

        Nothing of an attempt is sent once the worker has ended it.
        """
        self._last_id += 1
        line = AttemptLine(self, self._last_id)
        self._attempts[self._last_id] = attempt
        self.post(self._last_id, start)
        return line

    def post(self, attempt_id: int, request: Any) -> None:
        """Send a message of an attempt, unless that has ended."""
        if attempt_id in self._attempts:
            request.attempt_id = attempt_id
            self._waiting.add(request)

    def forget(self, attempt_id: int) -> None:
        """Hand over no further messages of the worker to an attempt."""
        self._attempts.pop(attempt_id, None)

    async def close(self) -> None:
        """End the stream, and all attempts with it."""
        self._reading.cancel()
        await asyncio.wait({self._reading, self._writing})

    async def _read(self) -> PrefillFailed:
        """Hand over messages until the stream ends; return why it did."""
        try:
            # Iteration yields what came before the status; read() may drop it.
            async for response in self._call:
                for each in scatter(response):
                    self._take(each)
        except grpc.aio.AioRpcError as failure:
            return call_failed(failure)
        except PrefillFailed as violation:
            return violation
        except Exception:
            logger.exception("prefill_stream_crashed")
            return PrefillFailed("an internal error")
        return PrefillFailed("the prefill worker ended the stream")

    def _end(self, reading: "asyncio.Task[PrefillFailed]") -> None:
        """Tell all attempts; a callback, because a task that is cancelled early never begins."""
        self.is_over = True
        self._writing.cancel()
        self._call.cancel()
        # A call that is cancelled, by its writer or with its channel, cancels its reader.
        reason = PrefillFailed(CHANNEL_CLOSED) if reading.cancelled() else reading.result()
        attempts, self._attempts = self._attempts, {}
        for attempt in attempts.values():
            _hand_over(attempt, PrefillEnd(error=self._error or reason))

    async def _write(self) -> None:
        try:
            while True:
                message = await self._waiting.take()
                async with asyncio.timeout(self._write_s):
                    await self._call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the reader learns the same and says why
        except TimeoutError:
            self._error = PrefillFailed(f"a message was not read within {self._write_s:g} s")
            self._call.cancel()
        except Exception:  # a bug: attempts that are never sent would wait for their deadlines
            logger.exception("prefill_writer_crashed")
            self._call.cancel()

    def _take(self, response: Any) -> None:
        attempt_id = response.attempt_id
        if not 0 < attempt_id <= self._last_id:
            raise PrefillFailed(f"attempt_id: found {attempt_id}; allowed: 1 to {self._last_id}")
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return  # it came too late
        if response.HasField("end"):
            self.forget(attempt_id)
        try:
            message = prefill_message_from_proto(response)
        except (ValueError, TransferError) as error:
            message = PrefillEnd(error=PrefillFailed(f"a message that cannot be read: {error}"))
        _hand_over(attempt, message)


class AttemptLine:
    """The part of a stream that is one attempt's."""

    def __init__(self, stream: PrefillStream, attempt_id: int) -> None:
        self._stream = stream
        self._attempt_id = attempt_id

    def send(self, message: ReceiverMessage) -> None:
        """Send a transfer message, unless the attempt has ended."""
        self._stream.post(self._attempt_id, transfer_message(message))

    def leave(self) -> None:
        """Abort the attempt unless it has ended, and take no more of it."""
        self._stream.post(self._attempt_id, leave_message())
        self.forget()

    def forget(self) -> None:
        """Take no more of the attempt; the last acknowledgement ends it at the worker."""
        self._stream.forget(self._attempt_id)


def _hand_over(attempt: Attempt, message: PrefillMessage) -> None:
    try:
        attempt.take(message)
    except Exception:
        # A bug in one attempt must not end those that share the stream.
        logger.exception(
            "message_crashed",
            extra=fields(request_id=attempt.request_id, message=type(message).__name__),
        )
        if not isinstance(message, PrefillEnd):
            _hand_over(attempt, PrefillEnd(error=PrefillFailed("an internal error")))
