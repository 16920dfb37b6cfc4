"""The stream between this router and a decode worker, and the requests that share it.

The session's reader feeds each `Stream` and never waits for a client; a client's call takes from
its stream at its own pace, and no faster than the router's. A stream outlives a session: when that
breaks, the request continues over another session, as the next attempt.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from observability.logs import fields
from pagewire.protos.call_tasks import is_own_cancellation
from pagewire.protos.gathering import Waiting
from router import wire
from router.errors import (
    AttemptFailed,
    RequestCrashed,
    RequestFailed,
    RouterError,
    WrongDelta,
    WrongMessage,
)
from router.generation import Choice, Delta, Failure, Generation, Output
from router.lost_reason import lost_reason
from router.pacing import Pace, Pacer
from router.placement import Placement
from router.worker import Worker

logger = logging.getLogger(__name__)

# google.rpc.Code numbers of failures that another worker, or a later start of it, may not have.
_FAILED_PRECONDITION, _ABORTED, _UNAVAILABLE, _RESOURCE_EXHAUSTED = 9, 10, 14, 8
_RETRYABLE = {_FAILED_PRECONDITION, _ABORTED, _UNAVAILABLE}

# Takes the reason why an attempt is over; None: all output has come.
AttemptOver = Callable[[AttemptFailed | RequestFailed | None], None]


class Stream:
    """A request on its way: fed by a session, drained by the client's call.

    Args:
        generation: The state that is fed and drained.
        pacer: Decides how long tokens gather after each message.
        pace: The cost of its messages, and the shortest time that its tokens gather.
        on_ready: Called when there is something to take that is due, or the end; must not raise.

    Attributes:
        is_over: Nothing more will come: the last `take` returns what is left.
        error: Why it ended, unless all was received.
    """

    def __init__(
        self, generation: Generation, pacer: Pacer, pace: Pace, on_ready: Callable[[], None]
    ) -> None:
        self.generation = generation
        choices = generation.choices
        self._lone = choices[0] if len(choices) == 1 else None
        self.first_number = 0  # of its choices in the session of the attempt
        self.has_logprobs = generation.request.sampling.logprobs is not None
        self.placement: Placement | None = None
        self.began_at = asyncio.get_running_loop().time()
        self.is_over = False
        self.error: RouterError | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.driver: asyncio.Task[None] | None = None  # while something has to be waited for
        self._pacer = pacer
        self._pace = pace
        self._on_ready = on_ready
        self._is_paced = False  # counted there
        self._is_flowing = False  # a token of the attempt has come
        self._due_at = 0.0  # loop time; what comes before it gathers
        self._is_gathering = False  # the pacer will end it
        self._on_attempt_over: AttemptOver | None = None  # None: no attempt runs

    @property
    def _sending_us(self) -> int:
        return self._pace.message_us * len(self.generation.choices)  # each has messages of its own

    def take(self) -> list[Output]:
        """Return the output that came since the last time; later output gathers for a while."""
        self._is_gathering = False
        outputs = self.generation.take_outputs()
        if outputs and not self.is_over:
            now = asyncio.get_running_loop().time()
            self._due_at = now + self._pacer.interval_s(self._pace)
        return outputs

    def take_token(self, now: float) -> tuple[int, int, str] | None:
        """Do what `take` does if one token of a lone choice has come: its index, it, its text.

        None: nothing was taken.
        """
        token = self._lone.take_token() if self._lone else None
        if token is not None:
            self._is_gathering = False
            self._due_at = now + self._pacer.interval_s(self._pace)
        return token

    def begin_attempt(self, on_over: AttemptOver) -> None:
        """Take deltas from now on; `on_over` gets the reason why they end, None: all came."""
        self._on_attempt_over = on_over
        self._is_flowing = False

    def end_attempt(self, error: AttemptFailed | RequestFailed | None) -> None:
        """End the attempt, if one runs."""
        on_over, self._on_attempt_over = self._on_attempt_over, None
        if on_over is not None:
            on_over(error)

    def on_token(self, choice: Choice, token_id: int, index: int, now: float) -> bool:
        """Take over a token of the running attempt; False: it needs the care of `on_delta`."""
        if not self._is_flowing or not self.generation.add_token(choice, token_id, index, now):
            return False
        if now >= self._due_at:
            self._on_ready()
        elif not self._is_gathering:
            self._gather()
        return True

    def on_delta(self, delta: Delta, now: float) -> None:
        """Take over a delta, unless it is stale; a wrong one ends the attempt."""
        if self._on_attempt_over is None:
            return
        generation = self.generation
        num_unfinished = generation.num_unfinished
        try:
            is_fresh = generation.accept(delta, now)
        except WrongDelta as wrong:
            self.end_attempt(AttemptFailed(str(wrong)))
            return
        if not is_fresh:
            return
        self._is_flowing = True
        if self.placement:
            self.placement.prefilled(now)
            generation.device = self.placement.decode.device
        if not self._is_paced:
            self._is_paced = True
            self._pacer.change(self._sending_us)
        if generation.is_finished:
            self.end_attempt(None)  # which ends the stream
        elif now >= self._due_at or generation.num_unfinished < num_unfinished:
            self._on_ready()
        elif not self._is_gathering:
            self._gather()

    def _gather(self) -> None:
        self._is_gathering = True
        self._pacer.call_at(self._due_at, self._on_ready)

    def on_failure(self, failure: Failure, *, is_leaving: bool) -> None:
        """End the attempt because the worker reports its end, unless that is stale.

        Args:
            failure: The report.
            is_leaving: The worker leaves as planned, and gets nothing more.
        """
        if not self.generation.fail_attempt(failure.attempt):
            return
        self.generation.failed_passes = failure.failed_passes
        if failure.code in _RETRYABLE:
            has_computed = failure.code == _ABORTED  # a pass failed
            is_hand_over = is_leaving and failure.code == _UNAVAILABLE
            self.end_attempt(
                AttemptFailed(
                    failure.message, is_refusal=not has_computed, is_hand_over=is_hand_over
                )
            )
        elif failure.code == _RESOURCE_EXHAUSTED:
            self.end_attempt(AttemptFailed(failure.message, is_refusal=True, is_overload=True))
        else:
            self.end_attempt(RequestFailed(failure.code, failure.message))

    def end(self, error: RouterError | None) -> None:
        """Let the client's call see the end; the first end counts."""
        if not self.is_over:
            self.is_over = True
            if self._is_paced:
                self._pacer.change(-self._sending_us)
            # A deadline may pass between the last token and this; the client has its result.
            self.error = None if self.generation.is_finished else error
            self._on_ready()


class Session:
    """The stream between this router and one incarnation of a decode worker."""

    def __init__(self, worker: Worker, router_id: str, contract_version: int) -> None:
        assert worker.model, "it takes requests"
        self.worker = worker
        self._vocab_size = worker.model.vocab_size
        self.streams: dict[str, Stream] = {}  # request_id |-> stream
        # Number of a choice, as told to the worker |-> whose it is
        self._numbered: dict[int, tuple[Stream, Choice]] = {}
        self._next_number = 0
        # Holds at most two messages per request, and one per choice.
        self._outbox: Waiting[Any] = Waiting()
        self._hello = wire.hello(router_id, worker.member.incarnation, contract_version)
        self.task: asyncio.Task[None] | None = None

    def add(self, stream: Stream, message: Any) -> None:
        """Send the message that submits a stream's attempt."""
        self.streams[stream.generation.request.request_id] = stream
        message.submit.first_stream = stream.first_number = self._next_number
        for choice in stream.generation.choices:
            self._numbered[self._next_number] = stream, choice
            self._next_number += 1
        self._outbox.add(message)

    def remove(self, stream: Stream) -> None:
        """Drop a stream; cancel its choices that are still open at the worker."""
        request_id = stream.generation.request.request_id
        if self.streams.get(request_id) is stream:
            del self.streams[request_id]
            for choice in stream.generation.choices:
                del self._numbered[stream.first_number + choice.index]
            if stream.generation.is_running_at_worker:
                self._outbox.add(wire.cancel(request_id))

    def fail(self, reason: str) -> None:
        """End the attempts of all streams; each request continues elsewhere."""
        streams, self.streams = self.streams, {}
        self._numbered = {}
        for stream in streams.values():
            stream.end_attempt(AttemptFailed(reason))

    async def run(self) -> str:
        """Exchange messages until the session breaks; return why it did."""
        call = wire.open_session(self.worker.channel)
        writer = asyncio.create_task(
            self._write(call), name=f"session-writer-{self.worker.member.worker_id}"
        )
        try:
            # Iteration yields what came before the status; read() may drop it.
            async for message in call:
                self._receive(message)
            return "the worker ended the session"
        except grpc.aio.AioRpcError as error:
            return f"the session broke: {lost_reason(error)}"
        except WrongMessage as wrong:
            return f"the session broke: {wrong}"
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            return "the session was cancelled"  # by its writer, or with its channel
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.wait([writer], timeout=1)

    async def _write(self, call: Any) -> None:
        try:
            await call.write(self._hello)
            while True:
                await call.write(await self._outbox.take())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader learns the same and says why
        except Exception:  # a bug: requests that are never sent would wait for their deadlines
            worker_id = self.worker.member.worker_id
            logger.exception("session_writer_crashed", extra=fields(worker_id=worker_id))
            call.cancel()

    def _receive(self, message: Any) -> None:
        now = asyncio.get_running_loop().time()
        columns = message.tokens
        token_ids = columns.token_ids[:]  # a list, which is read in less time
        if not len(token_ids) == len(columns.streams) == len(columns.indices):
            raise _uneven(columns)
        if token_ids and max(token_ids) >= self._vocab_size:
            self._end_unknown(columns.streams, token_ids)
        for number, token_id, index in zip(
            columns.streams, token_ids, columns.indices, strict=True
        ):
            if numbered := self._numbered.get(number):  # else the attempt is over
                stream, choice = numbered
                try:
                    if not stream.on_token(choice, token_id, index, now):
                        self._feed(stream, _delta(stream, choice, token_id, index), now)
                except Exception:
                    _crash(stream)
        for each in message.deltas:
            if found := self.streams.get(each.request_id):  # else the request is over
                try:
                    delta = wire.delta(
                        each, has_logprobs=found.has_logprobs, vocab_size=self._vocab_size
                    )
                    self._feed(found, delta, now)
                except WrongDelta as wrong:
                    self._end_wrong(found, str(wrong))
                except Exception:
                    _crash(found)
        for each in message.failures:
            if found := self.streams.get(each.request_id):
                failure = wire.failure(each)
                if failure.is_leaving:
                    self.worker.note_leaving()
                try:
                    found.on_failure(failure, is_leaving=self.worker.is_leaving)
                except Exception:
                    _crash(found)

    def _end_unknown(self, numbers: Sequence[int], token_ids: Sequence[int]) -> None:
        """End the attempts of choices for which a token came that the model does not have."""
        for number, token_id in zip(numbers, token_ids, strict=True):
            if token_id >= self._vocab_size and (numbered := self._numbered.get(number)):
                told = wire.unknown_token("token_ids", token_id, self._vocab_size)
                self._end_wrong(numbered[0], told)

    def _end_wrong(self, stream: Stream, told: str) -> None:
        stream.end_attempt(AttemptFailed(f"{self.worker.member.worker_id}: {told}"))

    def _feed(self, stream: Stream, delta: Delta, now: float) -> None:
        stream.on_delta(delta, now)
        # The worker then frees choices that have ended here but not there.
        if choices := stream.generation.take_stopped():
            self._outbox.add(wire.cancel(stream.generation.request.request_id, choices))


def _uneven(columns: Any) -> WrongMessage:
    lengths = f"{len(columns.streams)}, {len(columns.token_ids)} and {len(columns.indices)}"
    return WrongMessage(
        f"tokens: found {lengths} streams, token_ids and indices; allowed: as many of each"
    )


def _delta(stream: Stream, choice: Choice, token_id: int, index: int) -> Delta:
    return Delta(
        attempt=stream.generation.attempt,
        choice=choice.index,
        first_index=index,
        token_ids=[token_id],
    )


def _crash(stream: Stream) -> None:
    """End a stream after a bug, which must not affect those that share the session."""
    request_id = stream.generation.request.request_id
    logger.exception("request_crashed", extra=fields(request_id=request_id))
    crash = RequestCrashed(request_id)
    stream.end(crash)
    stream.end_attempt(crash)
