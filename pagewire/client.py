"""The client for code without an event loop: `AsyncClient` on a background thread."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar, Unpack

from pagewire.async_client import (
    DEFAULT_RESUME_S,
    DEFAULT_TIMEOUT_S,
    AsyncClient,
    AsyncStream,
)
from pagewire.errors import ClosedError
from pagewire.protos.call_tasks import mark_seen
from pagewire.resumption import OnRouterLost
from pagewire.routers import ChannelFactory
from pagewire.tls import Tls
from pagewire.types import ClusterStatus, Completion, Delta, Model, SamplingOptions, Tokens
from pagewire.wire import Messages, Prompt, Tools

Answer = TypeVar("Answer")
T = TypeVar("T")
LOOK_UP_S = 0.2


class Client:
    """Talks to a cluster's routers, with the methods and arguments of `AsyncClient`.

    Close it by `with` or `close`; a closed client cannot be used again. Any number of threads may
    use one client at the same time. Calls block their thread, so code in an event loop should use
    `AsyncClient`. A client does not survive a fork: a child process must create its own. Fork
    before the parent's first call or, better, use the start method spawn. `on_router_lost` is
    called on the background thread of all clients, where any call of a client raises
    RuntimeError, as it would wait for itself.

    Raises:
        PagewireError: From any method; `pagewire.errors` lists the subclasses. The constructor
            raises InvalidRequestError for a wrong argument.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "localhost:50051",
        *,
        token: str | None = None,
        default_timeout_s: float = DEFAULT_TIMEOUT_S,
        resume_s: float = DEFAULT_RESUME_S,
        hedge_after_s: float = 0.0,
        on_router_lost: OnRouterLost | None = None,
        tls: Tls | None = None,
        channel_factory: ChannelFactory | None = None,
    ) -> None:
        self._client = AsyncClient(
            address,
            token=token,
            default_timeout_s=default_timeout_s,
            resume_s=resume_s,
            hedge_after_s=hedge_after_s,
            on_router_lost=on_router_lost,
            tls=tls,
            channel_factory=channel_factory,
        )
        self._background = _Background()

    @property
    def address(self) -> str:
        """The address of the router that gets calls, `host:port`."""
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
            lambda: self._client.generate(prompt, model=model, timeout_s=timeout_s, **sampling)
        )

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Generate the next message of a chat; return the whole answer.

        `messages` are `Message` values or mappings in the format of OpenAI's API, oldest first;
        `tools` are function descriptions in its format, for the model's template. The answer
        contains calls as text.
        """
        return self._background.run(
            lambda: self._client.chat(
                messages, tools=tools, model=model, timeout_s=timeout_s, **sampling
            )
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "Stream":
        """Start to generate and return a stream of deltas; use it with `with`."""

        async def start() -> AsyncStream:
            return self._client.stream(prompt, model=model, timeout_s=timeout_s, **sampling)

        return Stream(self._background.run(start), self._background)

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        model: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> "Stream":
        """Like `stream`, for a chat."""

        async def start() -> AsyncStream:
            return self._client.stream_chat(
                messages, tools=tools, model=model, timeout_s=timeout_s, **sampling
            )

        return Stream(self._background.run(start), self._background)

    def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = None) -> Tokens:
        """Return the token ids that `generate` would use for a text."""
        return self._background.run(
            lambda: self._client.tokenize(text, model=model, timeout_s=timeout_s)
        )

    def tokenize_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Tokens:
        """Return the token ids that `chat` would use, and the rendered template."""
        return self._background.run(
            lambda: self._client.tokenize_chat(
                messages, tools=tools, model=model, timeout_s=timeout_s
            )
        )

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """Return the text of token ids."""
        return self._background.run(
            lambda: self._client.detokenize(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                model=model,
                timeout_s=timeout_s,
            )
        )

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return the served models; none while the cluster is still starting."""
        return self._background.run(lambda: self._client.list_models(timeout_s=timeout_s))

    def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return the workers, their pages and their hit rates."""
        return self._background.run(lambda: self._client.status(timeout_s=timeout_s))

    def close(self) -> None:
        """Close the connection; running calls raise ClosedError. Harmless when repeated."""
        if not self._background.is_foreign:
            self._background.run(self._client.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """The deltas of one call, for one reader at a time: a second one gets a RuntimeError.

    Leaving the `with` block early cancels the call. A stream that its reader or another thread
    cancels just ends; any other end before the last delta raises a PagewireError.
    """

    def __init__(self, stream: AsyncStream, background: "_Background") -> None:
        self._stream = stream
        self._background = background
        self._is_cancelled = False

    @property
    def completion(self) -> Completion:
        """The answer so far; complete once the iteration has ended."""
        return self._stream.completion

    def cancel(self) -> None:
        """Stop the call and end the iteration; harmless after the end."""

        async def cancel() -> None:
            self._stream.cancel()

        self._is_cancelled = True
        with suppress(ClosedError):  # after a fork there is nothing to cancel
            self._background.run(cancel)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        delta = None if self._is_cancelled else self._background.run(lambda: _next(self._stream))
        if delta is None:
            raise StopIteration
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class _Background:
    """The process's event loop for its sync clients, on a daemon thread that the first call starts.

    All clients share it because gRPC keeps every loop that it has seen, and may pass it an event
    even after the last call has ended: a loop per client would leak and, once closed, fail.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the client's; its threads then exist only there."""
        return self._pid != os.getpid()

    def run(self, work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Run `work` on the loop and wait; an interrupt of the caller cancels it.

        An interrupt can arrive between any two steps of this thread. So the thread creates no
        coroutine, which might never start, and holds no lock that a future of the loop would need.
        """
        if self.is_foreign:
            raise ClosedError("the client belongs to the process before the fork; make one here")
        loop = _shared_loop(self._pid)
        if _runs_here(loop):  # in a callback, or a __del__ that the collector calls there
            raise RuntimeError(
                "call: found the background thread of all clients; allowed: any other thread"
            )
        tasks: list[asyncio.Task[Answer]] = []  # the one, once it has started
        done: SimpleQueue[asyncio.Task[Answer]] = SimpleQueue()

        async def answer() -> Answer:
            return await work()

        def start() -> None:
            tasks.append(loop.create_task(answer()))
            tasks[0].add_done_callback(finish)

        def finish(task: asyncio.Task[Answer]) -> None:
            mark_seen(task)  # even if the caller no longer waits
            done.put(task)

        def cancel() -> None:
            while tasks:  # emptied: the task references the error, which references this frame
                tasks.pop().cancel()

        try:
            loop.call_soon_threadsafe(start)
            return _wait(done).result()
        except BaseException:
            loop.call_soon_threadsafe(cancel)
            raise


def _wait(queue: "SimpleQueue[T]") -> T:
    """Take from a queue, waking up now and then.

    An interrupt does not end a wait without a timeout if another thread ran when it arrived.
    """
    while True:
        with suppress(Empty):
            return queue.get(timeout=LOOK_UP_S)


_starting = threading.Lock()


def _shared_loop(pid: int) -> asyncio.AbstractEventLoop:
    with _starting:
        return _start_loop(pid)


@cache
def _start_loop(_pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="pagewire-client", daemon=True).start()
    return loop


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    with suppress(RuntimeError):  # no loop runs in this thread
        return asyncio.get_running_loop() is loop
    return False


async def _next(stream: AsyncStream) -> Delta | None:
    # StopAsyncIteration cannot pass through a future, so the end is None.
    return await anext(stream, None)
