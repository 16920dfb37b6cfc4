"""The client. `pagewire.client` wraps it for code without an event loop."""

from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from pagewire.assembly import CompletionBuilder
from pagewire.types import ClusterStatus, Completion, Delta, Model, SamplingOptions, Tokens
from pagewire.wire import (
    Messages,
    Prompt,
    chat_prompt,
    chat_request,
    delta_from,
    error_from,
    generate_request,
    model_from,
    status_from,
    unpack_token_ids,
)
from protos import inference_pb2, inference_pb2_grpc

DEFAULT_TIMEOUT_S = 600.0
MAX_MESSAGE_BYTES = 64 * 2**20
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
)

Channel = Any  # grpc.aio.Channel, or what a test puts in its place
ChannelFactory = Callable[[str], Channel]
Answer = TypeVar("Answer")


def open_channel(address: str) -> Channel:
    """Open a plain-text channel to `host:port`; it connects on first use."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class AsyncClient:
    """Talks to one router.

    Every method takes `timeout_s`, the limit of the whole call; without it `default_timeout_s`
    holds. Methods raise `PagewireError`s. Cancelling a call frees everything it holds.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        default_timeout_s: float = DEFAULT_TIMEOUT_S,
        channel_factory: ChannelFactory = open_channel,
    ) -> None:
        self.address = address
        self._default_timeout_s = default_timeout_s
        self._channel_factory = channel_factory
        self._channel: Channel = None
        self._stub: Any = None

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Generate for a text or a sequence of token ids; return the whole answer."""
        return await _collect(
            self.stream(prompt, model=model, timeout_s=timeout_s, **sampling),
        )

    async def chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Generate the next message of a chat; return the whole answer."""
        return await _collect(
            self.stream_chat(messages, model=model, timeout_s=timeout_s, **sampling),
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "AsyncStream":
        """Generate and yield deltas as they come; use it with `async with`."""
        request = generate_request(prompt, model, sampling)
        return self._open_stream(request, timeout_s)

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "AsyncStream":
        """Like `stream`, for a chat."""
        return self._open_stream(chat_request(messages, model, sampling), timeout_s)

    async def tokenize(
        self, text: str, *, model: str = "", timeout_s: float | None = None
    ) -> Tokens:
        """Return the token ids that `generate` would use for a text."""
        request = inference_pb2.TokenizeRequest(model=model, text=text)
        return await self._tokenize(request, timeout_s)

    async def tokenize_chat(
        self, messages: Messages, *, model: str = "", timeout_s: float | None = None
    ) -> Tokens:
        """Return the token ids that `chat` would use, and the rendered template."""
        request = inference_pb2.TokenizeRequest(model=model, chat=chat_prompt(messages))
        return await self._tokenize(request, timeout_s)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return the served models."""
        request = inference_pb2.ListModelsRequest()
        response = await self._call(self._open().ListModels, request, timeout_s)
        return tuple(model_from(model) for model in response.models)

    async def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return the workers, their pages and their hit rates."""
        request = inference_pb2.GetClusterStatusRequest()
        return status_from(await self._call(self._open().GetClusterStatus, request, timeout_s))

    async def aclose(self) -> None:
        """Cancel what runs and close the connection."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = self._stub = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _tokenize(
        self, request: inference_pb2.TokenizeRequest, timeout_s: float | None
    ) -> Tokens:
        response = await self._call(self._open().Tokenize, request, timeout_s)
        return Tokens(token_ids=unpack_token_ids(response.token_ids), text=response.text)

    async def _call(
        self, method: Callable[..., Awaitable[Answer]], request: object, timeout_s: float | None
    ) -> Answer:
        try:
            return await method(request, timeout=self._timeout_s(timeout_s))
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, self.address) from failure

    def _open_stream(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> "AsyncStream":
        call = self._open().Generate(request, timeout=self._timeout_s(timeout_s))
        num_choices = max(request.sampling.n, 1)
        return AsyncStream(call, num_choices=num_choices, address=self.address)

    def _open(self) -> Any:
        # A channel belongs to the event loop that is running when it is made.
        if self._channel is None:
            self._channel = self._channel_factory(self.address)
            self._stub = inference_pb2_grpc.InferenceServiceStub(  # type: ignore[no-untyped-call]
                self._channel
            )
        return self._stub

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self._default_timeout_s if timeout_s is None else timeout_s


class AsyncStream:
    """The deltas of one call. Leaving the `async with` block early cancels the call."""

    def __init__(self, call: Any, *, num_choices: int, address: str) -> None:
        self._call = call
        self._builder = CompletionBuilder(num_choices)
        self._address = address
        self._deltas = self._read()

    @property
    def completion(self) -> Completion:
        """The answer so far; whole once the iteration has ended."""
        return self._builder.completion

    def cancel(self) -> None:
        """Stop the call; harmless after its end."""
        self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    async def _read(self) -> AsyncIterator[Delta]:
        try:
            async for response in self._call:
                delta = delta_from(response)
                self._builder.add(delta)
                yield delta
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, self._address) from failure


async def _collect(stream: AsyncStream) -> Completion:
    async with stream:
        async for _ in stream:
            pass
    return stream.completion
