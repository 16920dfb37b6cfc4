"""A Generate call that outlives its router: what was received goes along to the next one.

Until the first message has come nothing was delivered, and a lost call is made anew, for a second
at most: who reaches no router hears of it soon. From then on another router, or the same one when
it has come back, goes on behind what was received, and is looked for as long as the client allows.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from pagewire.errors import (
    ConnectionFailedError,
    InvalidRequestError,
    OverloadedError,
    PagewireError,
    TlsError,
)
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import TOKEN_BYTES
from pagewire.routers import Routers
from pagewire.wire import error_from, is_router_lost

BEGIN_S = 1.0  # for a call that has not begun
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between two calls; each is twice as long
MAX_LOSSES = 16  # of routers, during one call


@dataclass(slots=True)
class _Received:
    """What has come of one choice."""

    token_ids: bytearray = field(default_factory=bytearray)  # packed
    text_chars: int = 0
    is_finished: bool = False


class ResumableCall:
    """The messages of one call, for one reader.

    Args:
        request: What to send.
        routers: Where to.
        timeout_s: Of the whole call.
        resume_s: How long another router is looked for after each loss; 0: not at all.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        routers: Routers,
        timeout_s: float,
        resume_s: float,
    ) -> None:
        self.is_cancelled = False
        self._request = request
        self._routers = routers
        self._timeout_s = timeout_s
        self._resume_s = resume_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._token = b""
        self._received: dict[int, _Received] = {}  # choice |->
        self._num_losses = 0
        self._lost: PagewireError | None = None  # the error of the latest loss; None: all is well
        self._lost_at = 0.0  # loop time
        self._pause_s = FIRST_PAUSE_S
        self._stopped = asyncio.Event()
        self._open(timeout_s)

    def cancel(self) -> None:
        """End the call; harmless after the end."""
        self.is_cancelled = True
        self._stopped.set()
        self._call.cancel()

    async def messages(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yield all messages, whichever router they come from; none after `cancel`.

        Raises:
            PagewireError: The call has failed.
            ValueError: A router does not go on where the lost one was.
        """
        while not self.is_cancelled:
            try:
                async for message in self._call:
                    if self.is_cancelled:
                        return
                    self._note(message)
                    yield message
                return
            except grpc.aio.AioRpcError as failure:
                if self.is_cancelled:
                    return
                await self._go_on(failure)

    def _open(self, timeout_s: float) -> None:
        self._address = self._routers.address
        self._call: Any = self._routers.stub().Generate(
            self._request, timeout=timeout_s, metadata=self._routers.metadata
        )

    def _note(self, message: inference_pb2.GenerateResponse) -> None:
        self._lost, self._pause_s = None, FIRST_PAUSE_S
        self._token = message.resume_token or self._token
        choice = self._received.get(message.choice)
        if choice is None:
            choice = self._received[message.choice] = _Received()
        num_tokens = len(choice.token_ids) // TOKEN_BYTES
        is_resumed = self._request.HasField("resume")
        if is_resumed and message.token_ids and message.first_index != num_tokens:
            raise ValueError(
                f"token {message.first_index} of choice {message.choice} came instead "
                f"of {num_tokens}, from a router that does not resume calls"
            )
        choice.token_ids += message.token_ids
        choice.text_chars += len(message.text)
        choice.is_finished = choice.is_finished or bool(message.finish_reason)

    async def _go_on(self, failure: grpc.aio.AioRpcError) -> None:
        """Make the next call, or raise what the failure of this one means."""
        now = asyncio.get_running_loop().time()
        error = error_from(failure, self._address, self._timeout_s)
        if not is_router_lost(failure) and not self._is_crowd(failure):
            raise self._told(error) from failure
        if not self._received:
            error = await self._routers.explain(error, self._address)
            if isinstance(error, TlsError):
                raise error from failure  # which no second attempt mends
        if self._lost is None:
            self._lost, self._lost_at = error, now
            self._num_losses += 1
        patience_s = self._resume_s if self._received else min(BEGIN_S, self._resume_s)
        can_go_on = bool(self._token) or not self._received
        ends_at = min(self._lost_at + patience_s, self._deadline)
        pause_s = self._pause_s
        if isinstance(error, OverloadedError):
            pause_s = max(pause_s, error.retry_after_s or 0.0)
        if not can_go_on or self._num_losses > MAX_LOSSES or now + pause_s >= ends_at:
            raise self._lost from failure
        self._routers.leave(self._address)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if not self.is_cancelled:
            self._take_along()
            self._open(self._deadline - asyncio.get_running_loop().time())

    def _is_crowd(self, failure: grpc.aio.AioRpcError) -> bool:
        """Return whether the routers that are left have no room yet for what a lost one had."""
        return self._lost is not None and failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    def _told(self, error: PagewireError) -> PagewireError:
        """Return what the caller is told: it knows nothing of a token that is refused."""
        if self._lost is not None and self._received and isinstance(error, InvalidRequestError):
            told = f"{self._lost}; no other router can go on: {error}"
            return ConnectionFailedError(told, code=self._lost.code)
        return error

    def _take_along(self) -> None:
        """Put what was received into the request."""
        if not self._received:
            return
        resume = inference_pb2.Resumption(token=self._token)
        for number, each in self._received.items():
            resume.choices.add(
                choice=number,
                token_ids=bytes(each.token_ids),
                text_chars=each.text_chars,
                finished=each.is_finished,
            )
        self._request.resume.CopyFrom(resume)
