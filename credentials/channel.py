"""The caller's side: a channel whose calls carry proofs, and that accepts only proven answers.

It wraps calls itself: grpc.aio's client interceptors put a task and queues around each stream.
"""

import hmac
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc

from credentials.cluster import Callee
from credentials.gate import ANSWER_KEY, CALL_KEY, INCARNATION_KEY


class ProvenChannel(grpc.aio.Channel):  # type: ignore[misc] # gRPC has no types
    """A channel to one start of one worker. It accepts no message from any other process.

    Args:
        channel: To the worker's address; closed with this one.
        callee: The worker. If another process has its address, that process's own gate refuses, and
            any answer ends the call with UNAUTHENTICATED before it is read.
    """

    def __init__(self, channel: grpc.aio.Channel, callee: Callee) -> None:
        self._channel = channel
        self._callee = callee

    def unary_unary(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._proving(method, self._channel.unary_unary(method, *codec, **options), _Single)

    def unary_stream(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._proving(method, self._channel.unary_stream(method, *codec, **options), _Stream)

    def stream_unary(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._proving(method, self._channel.stream_unary(method, *codec, **options), _Single)

    def stream_stream(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._proving(
            method, self._channel.stream_stream(method, *codec, **options), _Stream
        )

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> "ProvenChannel":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _proving(
        self, method: str, call: Callable[..., Any], wrap: "type[_ProvenCall]"
    ) -> Callable[..., Any]:
        def make(*request: Any, metadata: Any = None, **options: Any) -> Any:
            header, answer = self._callee.prove(method)
            metadata = (*(metadata or ()), (CALL_KEY, header))
            return wrap(call(*request, metadata=metadata, **options), answer, self._callee)

        return make


def told_incarnation(failure: grpc.aio.AioRpcError) -> int | None:
    """Return which start of the callee refused a call that meant another one; None: no such end.

    Nothing proves it. A caller that believes a lie makes calls that the callee refuses.
    """
    told = dict(failure.trailing_metadata() or ()).get(INCARNATION_KEY, "")
    return int(told) if told.isdecimal() and int(told) < 2**64 else None


class _ProvenCall:
    """A call that passes on messages only after the callee has proven itself."""

    def __init__(self, call: Any, answer: bytes, callee: Callee) -> None:
        self._call = call
        self._answer = answer
        self._callee = callee
        self._is_proven = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)  # attributes that do not read: write, cancel, code ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.add_done_callback(lambda _: callback(self))

    async def _prove(self) -> None:
        if self._is_proven:
            return
        headers = await self._call.initial_metadata()
        answer = headers.get(ANSWER_KEY) or b""
        if not hmac.compare_digest(answer, self._answer):
            self._call.cancel()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.aio.Metadata(),
                grpc.aio.Metadata(),
                details=f"the process that answered is not {self._callee.party}",
            )
        self._is_proven = True


class _Single(_ProvenCall):
    """A call with one response."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._respond().__await__()

    async def _respond(self) -> Any:
        response = await self._call
        await self._prove()
        return response


class _Stream(_ProvenCall):
    """A call with a stream of responses. A status without messages needs no proof."""

    async def read(self) -> Any:
        message = await self._call.read()
        if message is not grpc.aio.EOF:
            await self._prove()
        return message

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._call:
            await self._prove()
            yield message
