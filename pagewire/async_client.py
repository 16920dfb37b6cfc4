"""The client. `pagewire.client` wraps it for code without an event loop."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from pagewire.arguments import check_address, check_timeout_s
from pagewire.assembly import CompletionBuilder
from pagewire.errors import ClosedError, ServerError
from pagewire.types import ClusterStatus, Completion, Delta, Model, SamplingOptions, Tokens
from pagewire.wire import (
    Messages,
    Prompt,
    Tools,
    chat_request,
    delta_from,
    detokenize_request,
    error_from,
    generate_request,
    model_from,
    status_from,
    tokenize_chat_request,
    tokenize_request,
)
from protos import inference_pb2, inference_pb2_grpc
from protos.grpc_options import MESSAGE_OPTIONS
from protos.token_ids import unpack_token_ids

DEFAULT_TIMEOUT_S = 600.0
CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 30_000),
    # A router that has come back is found by the caller's next call, not minutes later.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Channel = Any  # grpc.aio.Channel, or what a test puts in its place
ChannelFactory = Callable[[str], Channel]
Answer = TypeVar("Answer")


def open_channel(address: str) -> Channel:
    """Open a plain-text channel to `host:port`; it connects on first use.

    Raises:
        ClosedError: gRPC has been used by the process that this one was forked from. Its threads
            are missing here, so calls would hang without end.
    """
    if _grpc_pid() != os.getpid():
        raise ClosedError(
            "gRPC does not survive a fork: use the start method spawn, or fork before the first"
            " call of a client"
        )
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class AsyncClient:
    """Talks to one router from one event loop, that of its first call; connects by that call.

    Close it with `async with`, or with `aclose`; a closed client cannot be used again. Any number
    of tasks may use one client at the same time.

    Every method takes `model`, the name of a served model ("" for the only one), and `timeout_s`,
    the limit of the whole call in seconds; without it `default_timeout_s` holds. The arguments are
    checked before anything is sent. No call is repeated by itself. Cancelling a call frees
    everything that it holds in the cluster.

    Raises:
        PagewireError: Of the methods; `pagewire.errors` shows the kinds. The constructor and
            `stream` raise InvalidRequestError for a wrong argument, `stream` also ClosedError.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        default_timeout_s: float = DEFAULT_TIMEOUT_S,
        channel_factory: ChannelFactory = open_channel,
    ) -> None:
        self.address = check_address(address)
        self._default_timeout_s = check_timeout_s("default_timeout_s", default_timeout_s)
        self._channel_factory = channel_factory
        self._channel: Channel = None
        self._stub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the channel
        self._is_closed = False

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
        tools: Tools | None = None,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Generate the next message of a chat; return the whole answer.

        `messages` are `Message` values or mappings as OpenAI's API has them, oldest first; `tools`
        are its descriptions of functions, for the model's template. Calls of them stay text.
        """
        return await _collect(
            self.stream_chat(messages, tools=tools, model=model, timeout_s=timeout_s, **sampling),
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "AsyncStream":
        """Start to generate, and return the deltas as they come; use it with `async with`."""
        return self._open_stream(generate_request(prompt, model, sampling), timeout_s)

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "AsyncStream":
        """Like `stream`, for a chat."""
        return self._open_stream(chat_request(messages, tools, model, sampling), timeout_s)

    async def tokenize(
        self, text: str, *, model: str = "", timeout_s: float | None = None
    ) -> Tokens:
        """Return the token ids that `generate` would use for a text."""
        return await self._tokenize(tokenize_request(text, model), timeout_s)

    async def tokenize_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Tokens:
        """Return the token ids that `chat` would use, and the rendered template."""
        return await self._tokenize(tokenize_chat_request(messages, tools, model), timeout_s)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """Return the text of token ids."""
        request = detokenize_request(token_ids, model, skip_special_tokens)
        response = await self._call(self._open().Detokenize, request, timeout_s)
        return str(response.text)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return the served models; none while the cluster is still starting."""
        request = inference_pb2.ListModelsRequest()
        response = await self._call(self._open().ListModels, request, timeout_s)
        return tuple(model_from(model) for model in response.models)

    async def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return the workers, their pages and their hit rates."""
        request = inference_pb2.GetClusterStatusRequest()
        return status_from(await self._call(self._open().GetClusterStatus, request, timeout_s))

    async def aclose(self) -> None:
        """Close the connection; calls that still run raise ClosedError. Harmless when repeated."""
        self._is_closed = True
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None and self._loop is asyncio.get_running_loop():
            await channel.close()

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
        return Tokens(token_ids=tuple(unpack_token_ids(response.token_ids)), text=response.text)

    async def _call(
        self, method: Callable[..., Awaitable[Answer]], request: object, timeout_s: float | None
    ) -> Answer:
        limit_s = self._timeout_s(timeout_s)
        try:
            return await method(request, timeout=limit_s)
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, self.address, limit_s) from failure
        except asyncio.CancelledError:
            if self._is_closed and not _is_caller_cancelled():
                raise _closed() from None
            raise

    def _open_stream(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> "AsyncStream":
        limit_s = self._timeout_s(timeout_s)
        call = self._open().Generate(request, timeout=limit_s)
        return AsyncStream(
            call,
            num_choices=max(request.sampling.n, 1),
            to_error=lambda failure: error_from(failure, self.address, limit_s),
            is_client_closed=lambda: self._is_closed,
        )

    def _open(self) -> Any:
        if self._is_closed:
            raise _closed()
        # A channel belongs to the event loop that is running when it is made.
        loop = asyncio.get_running_loop()
        if self._channel is None:
            self._channel = self._channel_factory(self.address)
            self._stub = inference_pb2_grpc.InferenceServiceStub(  # type: ignore[no-untyped-call]
                self._channel
            )
            self._loop = loop
        elif self._loop is not loop:
            raise ClosedError("the client belongs to another event loop; make one in each")
        return self._stub

    def _timeout_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._default_timeout_s
        return check_timeout_s("timeout_s", timeout_s)


class AsyncStream:
    """The deltas of one call, for one reader.

    Leaving the `async with` block early cancels the call. A stream that was cancelled by its
    reader just ends; other ends before the last delta raise a PagewireError.
    """

    def __init__(
        self,
        call: Any,
        *,
        num_choices: int,
        to_error: Callable[[grpc.aio.AioRpcError], Exception],
        is_client_closed: Callable[[], bool],
    ) -> None:
        self._call = call
        self._builder = CompletionBuilder(num_choices)
        self._to_error = to_error
        self._is_client_closed = is_client_closed
        self._is_cancelled = False
        self._deltas = self._read()

    @property
    def completion(self) -> Completion:
        """The answer so far; whole once the iteration has ended."""
        return self._builder.completion

    def cancel(self) -> None:
        """Stop the call and end the iteration; harmless after the end."""
        self._is_cancelled = True
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._deltas)

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
                if self._is_cancelled:
                    return
                delta = delta_from(response)
                self._builder.add(delta)
                yield delta
        except (IndexError, ValueError) as error:
            raise ServerError(f"cannot read the answer: {error}", code="INTERNAL") from error
        except grpc.aio.AioRpcError as failure:
            if not self._is_cancelled:
                raise self._to_error(failure) from failure
        except asyncio.CancelledError:
            if _is_caller_cancelled():
                raise
            if self._is_cancelled:
                return
            if self._is_client_closed():
                raise _closed() from None
            raise
        finally:  # also of a stream that is dropped without `with`, when it is collected
            self._call.cancel()


async def _collect(stream: AsyncStream) -> Completion:
    async with stream:
        async for _ in stream:
            pass
    return stream.completion


@cache
def _grpc_pid() -> int:
    """Return the process that used gRPC first; a forked one inherits the answer."""
    return os.getpid()


def _is_caller_cancelled() -> bool:
    """Tell a caller that is cancelled from a call that was: both raise the same error."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _closed() -> ClosedError:
    return ClosedError("the client is closed; make a new one")
