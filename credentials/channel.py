"""The caller's side: a channel whose calls carry proofs, and that accepts only proven answers.

A proven answer is also held to the limits of the contract: whoever is proven may be broken.

It wraps calls itself: grpc.aio's client interceptors put a task and queues around each stream.
"""

import hmac
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from credentials.cluster import Callee
from credentials.gate import ANSWER_KEY, CALL_KEY, INCARNATION_KEY
from protos.call_guard import method_named
from protos.peer_limits import parse_checked

MAX_DIGITS = len(str(2**64))


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
        return self._proving(self._channel.unary_unary, _Single, method, *codec, **options)

    def unary_stream(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._proving(self._channel.unary_stream, _Stream, method, *codec, **options)

    def stream_unary(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._proving(self._channel.stream_unary, _Single, method, *codec, **options)

    def stream_stream(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._proving(self._channel.stream_stream, _Stream, method, *codec, **options)

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
        self,
        open_method: Callable[..., Any],
        wrap: "type[_ProvenCall]",
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **options: Any,
    ) -> Callable[..., Any]:
        reader = response_deserializer and _reader(method, response_deserializer)
        call = open_method(method, request_serializer, reader, **options)

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
    is_short = len(told) <= MAX_DIGITS  # int() raises for thousands of digits
    return int(told) if is_short and told.isdecimal() and int(told) < 2**64 else None


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for an answer that cannot be accepted: gRPC would log an error and pass on None."""

    reason: str


def _reader(method: str, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a function that parses a method's answers and checks them."""
    descriptor = method_named(method).output_type

    def read(raw: bytes) -> Any:
        try:
            return parse_checked(raw, descriptor, parse)
        except (DecodeError, ValueError) as error:
            return _Unreadable(f"{len(raw)} bytes are no answer of {method}: {error}")

    return read


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

    async def _accept(self, message: Any) -> Any:
        """Return a message of the callee."""
        if not self._is_proven:
            await self._prove()
        if type(message) is _Unreadable:
            self._refuse(grpc.StatusCode.INTERNAL, message.reason)
        return message

    async def _prove(self) -> None:
        headers = await self._call.initial_metadata()
        answer = headers.get(ANSWER_KEY) or b""
        if not hmac.compare_digest(answer, self._answer):
            self._refuse(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the process that answered is not {self._callee.party}",
            )
        self._is_proven = True

    def _refuse(self, code: grpc.StatusCode, reason: str) -> NoReturn:
        self._call.cancel()
        empty = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(code, empty, empty, details=reason)


class _Single(_ProvenCall):
    """A call with one response."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._respond().__await__()

    async def _respond(self) -> Any:
        return await self._accept(await self._call)


class _Stream(_ProvenCall):
    """A call with a stream of responses. A status without messages needs no proof."""

    async def read(self) -> Any:
        message = await self._call.read()
        return message if message is grpc.aio.EOF else await self._accept(message)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._call:
            yield await self._accept(message)
