"""A Generate call that outlives its router: the next one gets everything received so far.

Before the first message, nothing has been delivered. A call that is lost, or that a router cannot
serve yet, is then repeated, for at most a second after its start or the loss, so that a caller soon
learns that it is not served; for five seconds where a router that has served may start again. After
the first message, another router, or the same one when it is back, continues from what was
received. The client's limit bounds the search for that router.
"""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from pagewire.calls import Metadata, RunningCall
from pagewire.errors import (
    AuthenticationError,
    ClosedError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PagewireError,
    ServerError,
    TlsError,
    UnavailableError,
)
from pagewire.failures import CallFailure, FailureWithin, timed_out
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import pack_token_ids, token_array
from pagewire.routers import FIRST_PAUSE_S, LONGEST_PAUSE_S, Routers, pause_within
from pagewire.wire import AnswerPart, NextToken

MAX_LOSSES = 16  # of routers, during one call

OnRouterLost = Callable[[str, float], None]


@dataclass(slots=True)
class _Received:
    """The part of one choice received so far."""

    token_ids: "array[int]" = field(default_factory=lambda: token_array(b""))
    text_chars: int = 0
    is_finished: bool = False


class Reader(Protocol):
    """Gets the messages of a call from any router; neither method may raise."""

    def received(self, message: AnswerPart) -> None:
        """Take the next message."""

    def ended(self, error: PagewireError | None) -> None:
        """Take the end, always last; None: the answer is complete."""


class ResumableCall:
    """One call, at one router after another.

    Args:
        request: To send.
        routers: To send it to.
        reader: Gets the answer.
        metadata: The metadata of each call.
        timeout_s: The time limit of the whole call.
        spent_s: How much of that has passed already.
        resume_s: How long to look for another router after each loss; 0: not at all.
        interval_s: Tokens that arrive within it share a message.
        on_router_lost: Called for each loss of a router after the first message, with its address
            and the seconds for which the call looks for another one. The event loop logs what it
            raises.

    Raises:
        ClosedError: The client was closed, or belongs to another event loop or process.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        routers: Routers,
        reader: Reader,
        metadata: Metadata,
        timeout_s: float,
        spent_s: float = 0.0,
        resume_s: float,
        interval_s: float = 0.0,
        on_router_lost: OnRouterLost | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._routers = routers
        self._reader = reader
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._resume_s = resume_s
        self._interval_s = interval_s
        self._on_router_lost = on_router_lost
        self._deadline = self._loop.time() + timeout_s - spent_s
        self._is_over = False
        self._token = b""
        self._received: dict[int, _Received] = {}  # choice |->
        self._num_resumed = 0  # continued calls that have received something
        self._explaining: asyncio.Task[None] | None = None
        self._barred: set[str] = set()  # addresses of routers that TLS keeps it from
        self._num_losses = 0
        self._lost: PagewireError | None = None  # the error of the latest loss; None: all is well
        self._lost_at = 0.0  # loop time
        self._begin_s = 0.0  # how long it goes on after that, if it has received nothing
        self._pause_s = FIRST_PAUSE_S
        self._start(timeout_s - spent_s)
        self._timer = self._loop.call_at(self._deadline, self._time_out)

    @property
    def address(self) -> str:
        """The address of the router that has it or, after a loss, gets it next."""
        return self._address if self._lost is None else self._routers.address

    def cancel(self) -> None:
        """End the call silently; harmless after the end."""
        if not self._is_over:
            self._is_over = True
            self._timer.cancel()
            self._call.cancel()
            if self._explaining and self._explaining is not asyncio.current_task():
                self._explaining.cancel()

    def received(self, message: AnswerPart) -> None:
        """Pass on a message of the running call."""
        try:
            self._note(message)
        except ValueError as wrong:
            self._end(ServerError(f"cannot read the answer: {wrong}", code="INTERNAL"))
        else:
            self._reader.received(message)

    def ended(self, failure: FailureWithin | None) -> None:
        """Pass on the end of the running call, or plan the next one."""
        if not failure:
            self._end(None)
            return
        told = failure(self._timeout_s)
        if told.is_router_lost and not self._received:
            self._explaining = self._loop.create_task(self._explain(told), name="explain-loss")
        else:
            self._go_on(told)

    def _start(self, timeout_s: float) -> None:
        self._address = self._routers.address
        self._began_at = self._loop.time()
        self._has_begun = False  # this call has received something
        self._is_resumed = False  # ... and continues another
        self._call: RunningCall = self._routers.start(
            self._request,
            self,
            metadata=self._metadata,
            timeout_s=timeout_s,
            interval_s=self._interval_s,
        )

    def _end(self, error: PagewireError | None) -> None:
        self.cancel()
        self._reader.ended(error)

    def _time_out(self) -> None:
        self._end(timed_out(self._address, self._timeout_s))

    def _note(self, message: AnswerPart) -> None:
        if not self._has_begun:
            self._has_begun = self._routers.has_served = True
            self._is_resumed = self._request.HasField("resume")
            self._lost, self._pause_s = None, FIRST_PAUSE_S
            self._num_resumed += self._is_resumed
        choice = self._received.get(message.choice)
        if choice is None:
            choice = self._received[message.choice] = _Received()
        choice.text_chars += len(message.text)
        if isinstance(message, NextToken):
            if self._is_resumed:
                self._check_index(message, choice)
            choice.token_ids.append(message.token_id)
            return
        self._token = message.resume_token or self._token
        if token_ids := message.token_ids:
            if self._is_resumed:
                self._check_index(message, choice)
            choice.token_ids.extend(token_array(token_ids))
        choice.is_finished = choice.is_finished or bool(message.finish_reason)
        if self._num_resumed > 1 and message.HasField("usage"):
            # Each router counts only the resumption that led to it.
            message.usage.stats.resumptions += self._num_resumed - 1

    def _check_index(self, message: AnswerPart, choice: _Received) -> None:
        if message.first_index != len(choice.token_ids):
            raise ValueError(
                f"token {message.first_index} of choice {message.choice} arrived instead "
                f"of {len(choice.token_ids)}, from a router that does not resume calls"
            )

    async def _explain(self, failure: CallFailure) -> None:
        """Find out why no router could be reached, before the call continues or ends."""
        try:
            error = await self._routers.explain(failure.error, self._address)
        except Exception:  # a bug, which asyncio logs; the call need not wait for its time limit
            if not self._is_over:
                self._go_on(failure)
            raise
        if not self._is_over:
            is_barred = isinstance(error, TlsError)
            if is_barred:
                self._barred.add(self._address)
            # Retrying does not fix TLS, but another router may serve.
            is_last = is_barred and self._barred.issuperset(self._routers.addresses)
            self._go_on(replace(failure, error=error, is_router_lost=not is_last))

    def _go_on(self, failure: CallFailure) -> None:
        """Plan the next call, or end with the error of this one."""
        error = failure.error
        # The remaining routers may have no room yet for the lost one's calls.
        is_crowd = self._lost is not None and isinstance(error, OverloadedError)
        is_early = failure.is_unready and not self._received
        if not failure.is_router_lost and not is_crowd and not is_early:
            self._end(self._told(error))
            return
        now = self._loop.time()
        is_new = self._lost is None
        if self._lost is None:
            # A router that cannot serve may have waited for workers itself, and would do so again.
            self._lost, self._lost_at = error, self._began_at if is_early else now
            self._num_losses += 1
            self._begin_s = self._routers.begin_s(failure)
        patience_s = self._resume_s if self._received else min(self._begin_s, self._resume_s)
        can_go_on = bool(self._token) or not self._received
        ends_at = min(self._lost_at + patience_s, self._deadline)
        pause_s = pause_within(self._lost_at + patience_s - now, self._pause_s, failure)
        is_given_up = not can_go_on or self._num_losses > MAX_LOSSES
        if is_given_up or pause_s is None or now + pause_s >= self._deadline:
            self._end(self._lost)
            return
        if is_new and self._received and self._on_router_lost:
            # Not from here: what it raises would end the reader of all calls of the stream.
            self._loop.call_soon(self._on_router_lost, self._address, ends_at - now)
        if failure.is_unready:
            self._routers.pass_over(self._address)
        else:
            self._routers.leave(self._address)
        self._loop.call_later(pause_s, self._start_again)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _start_again(self) -> None:
        if self._is_over:
            return
        self._take_along()
        try:
            self._start(self._deadline - self._loop.time())
        except ClosedError as error:
            self._end(error)

    def _told(self, error: PagewireError) -> PagewireError:
        """Return the caller's error, which must not be that of a token it knows nothing about."""
        is_refused = isinstance(error, InvalidRequestError | NotFoundError | AuthenticationError)
        if self._lost is None or not self._received or not is_refused:
            return error
        violations = error.violations if isinstance(error, InvalidRequestError) else ()
        if any(each.field.split(".")[0] == "resume" for each in violations):
            why = "its call began too long ago, or the cluster that served it is gone"
        else:
            why = f"it serves otherwise: {error}"
        told = (
            f"{self._lost}; the router at {self._address} cannot continue the answer: {why}. What "
            "has arrived of it is all that there is; start again for a whole one"
        )
        return UnavailableError(told, code=self._lost.code)

    def _take_along(self) -> None:
        """Put everything received so far into the request."""
        if not self._received:
            return
        resume = inference_pb2.Resumption(token=self._token)
        for number, each in self._received.items():
            resume.choices.add(
                choice=number,
                token_ids=pack_token_ids(each.token_ids),
                text_chars=each.text_chars,
                finished=each.is_finished,
            )
        self._request.resume.CopyFrom(resume)
