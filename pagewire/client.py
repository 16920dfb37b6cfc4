"""The client for code without an event loop: `AsyncClient` on a background thread."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from pagewire.async_client import (
    DEFAULT_TIMEOUT_S,
    AsyncClient,
    AsyncStream,
    ChannelFactory,
    open_channel,
)
from pagewire.types import ClusterStatus, Completion, Delta, Model, SamplingOptions, Tokens
from pagewire.wire import Messages, Prompt

Answer = TypeVar("Answer")


class Client:
    """Talks to one router; the methods are those of `AsyncClient`. Safe to use from threads."""

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        default_timeout_s: float = DEFAULT_TIMEOUT_S,
        channel_factory: ChannelFactory = open_channel,
    ) -> None:
        self._client = AsyncClient(
            address, default_timeout_s=default_timeout_s, channel_factory=channel_factory
        )
        self._background = _BackgroundLoop()

    @property
    def address(self) -> str:
        """Where the router is, `host:port`."""
        return self._client.address

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Generate for a text or a sequence of token ids; return the whole answer."""
        return self._background.run(
            self._client.generate(prompt, model=model, timeout_s=timeout_s, **sampling)
        )

    def chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Generate the next message of a chat; return the whole answer."""
        return self._background.run(
            self._client.chat(messages, model=model, timeout_s=timeout_s, **sampling)
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "Stream":
        """Generate and yield deltas as they come; use it with `with`."""

        async def start() -> AsyncStream:
            return self._client.stream(prompt, model=model, timeout_s=timeout_s, **sampling)

        return Stream(self._background.run(start()), self._background)

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "Stream":
        """Like `stream`, for a chat."""

        async def start() -> AsyncStream:
            return self._client.stream_chat(messages, model=model, timeout_s=timeout_s, **sampling)

        return Stream(self._background.run(start()), self._background)

    def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = None) -> Tokens:
        """Return the token ids that `generate` would use for a text."""
        return self._background.run(self._client.tokenize(text, model=model, timeout_s=timeout_s))

    def tokenize_chat(
        self, messages: Messages, *, model: str = "", timeout_s: float | None = None
    ) -> Tokens:
        """Return the token ids that `chat` would use, and the rendered template."""
        return self._background.run(
            self._client.tokenize_chat(messages, model=model, timeout_s=timeout_s)
        )

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return the served models."""
        return self._background.run(self._client.list_models(timeout_s=timeout_s))

    def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return the workers, their pages and their hit rates."""
        return self._background.run(self._client.status(timeout_s=timeout_s))

    def close(self) -> None:
        """Cancel what runs, close the connection and end the background thread."""
        if not self._background.is_closed:
            self._background.run(self._client.aclose())
            self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Stream:
    """The deltas of one call. Leaving the `with` block early cancels the call."""

    def __init__(self, stream: AsyncStream, background: "_BackgroundLoop") -> None:
        self._stream = stream
        self._deltas = aiter(stream)
        self._background = background

    @property
    def completion(self) -> Completion:
        """The answer so far; whole once the iteration has ended."""
        return self._stream.completion

    def cancel(self) -> None:
        """Stop the call; harmless after its end."""

        async def cancel() -> None:
            self._stream.cancel()

        self._background.run(cancel())

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        delta = self._background.run(_next(self._deltas))
        if delta is None:
            raise StopIteration
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class _BackgroundLoop:
    """An event loop on its own daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.name = "pagewire-client"
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run `work` on the loop and wait; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(deltas: Any) -> Delta | None:
    # StopAsyncIteration cannot pass through a future, so the end is None.
    return await anext(deltas, None)
