"""The client. `pagewire.client` wraps it for code without an event loop."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self, Unpack

from pagewire.arguments import (
    check_addresses,
    check_hedge_after_s,
    check_resume_s,
    check_timeout_s,
    given_token,
)
from pagewire.assembly import CompletionBuilder
from pagewire.errors import ClosedError, PagewireError, ServerError
from pagewire.hedging import HedgedCall
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import unpack_token_ids
from pagewire.resumption import OnRouterLost, Reader, ResumableCall
from pagewire.routers import BEGIN_S, ChannelFactory, Connector, Routers, no_better
from pagewire.tls import Tls, check_tls
from pagewire.types import ClusterStatus, Completion, Delta, Model, SamplingOptions, Tokens
from pagewire.wire import (
    AnswerPart,
    Messages,
    Prompt,
    Tools,
    chat_request,
    delta_from,
    detokenize_request,
    generate_request,
    model_from,
    status_from,
    tokenize_chat_request,
    tokenize_request,
)

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RESUME_S = 30.0


class AsyncClient:
    """Talks to a cluster's routers from the event loop of its first call, which also connects.

    `address` is the `host:port` of a router, or of a load balancer such as a Kubernetes Service; or
    a sequence of these. The client uses one until it is lost. A stream that loses its router
    continues at the next one, or at the same one when it is back, without a lost, repeated or
    changed token. It looks for a router for `resume_s` seconds (0: not at all). A call that has
    received nothing yet is repeated with growing pauses, for a second at most, if its router is
    lost or answers UNAVAILABLE, as without a ready worker. A generation is repeated for five
    seconds, as long as a restart takes, if its router says that it stops, or is lost after it has
    served this client. Any other refusal is final.

    With `hedge_after_s` above 0, a generation that has received nothing for so many seconds also
    goes to the next router, or once more to the only address. The router that answers first goes
    on, and the other call is cancelled. It costs the cluster up to twice the work.

    `on_router_lost` is called when a stream that has begun loses its router, with the router's
    address and the seconds for which the stream looks for another one. It runs in the event loop,
    which logs what it raises.

    Unread output of a stream waits in memory, at most the rest of its answer, and delays no other
    call.

    The connection is in clear unless `tls` is given. `token` identifies the caller's tenant to
    routers that require one (AuthenticationError); its default is the environment variable
    PAGEWIRE_TOKEN, if set.

    Close it by `async with` or `aclose`; a closed client cannot be used again. Any number of tasks
    may use one client at the same time. Where a process has one event loop after the other, close
    each client in its own loop. A later loop may still log `Event loop is closed` if a router was
    lost or did not answer, or a call other than a generation was cancelled, just before the end of
    an earlier one: gRPC passes on what comes late. This harms no call.

    Every method takes `model`, the name of a served model ("" for the only one), and `timeout_s`,
    the limit of the whole call in seconds, by default `default_timeout_s`. Arguments are checked
    before anything is sent. Cancelling a call frees everything that it holds in the cluster.

    Raises:
        PagewireError: From any method; `pagewire.errors` lists the subclasses. The constructor and
            `stream` raise InvalidRequestError for a wrong argument, `stream` also ClosedError.
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
        connect = Connector(check_tls(tls))
        addresses = check_addresses(address)

        def routers() -> Routers:
            return Routers(
                addresses,
                channel_factory or connect,
                no_better if channel_factory else connect.explain,
                given_token(token),
                patience_s=min(BEGIN_S, check_resume_s(resume_s)),
            )

        self._routers = routers()
        self._hedge_after_s = check_hedge_after_s(hedge_after_s)
        self._other_routers = routers() if self._hedge_after_s else None
        self._default_timeout_s = check_timeout_s("default_timeout_s", default_timeout_s)
        self._resume_s = check_resume_s(resume_s)
        self._on_router_lost = on_router_lost

    @property
    def address(self) -> str:
        """The address of the router that gets calls, `host:port`."""
        return self._routers.address

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

        `messages` are `Message` values or mappings in the format of OpenAI's API, oldest first;
        `tools` are function descriptions in its format, for the model's template. The answer
        contains calls as text.
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
        """Start to generate and return a stream of deltas; use it with `async with`."""
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
        response = await self._call("Detokenize", request, timeout_s)
        return str(response.text)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return the served models; none while the cluster is still starting."""
        request = inference_pb2.ListModelsRequest()
        response = await self._call("ListModels", request, timeout_s)
        return tuple(model_from(model) for model in response.models)

    async def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """Return the workers, their pages and their hit rates."""
        request = inference_pb2.GetClusterStatusRequest()
        return status_from(await self._call("GetClusterStatus", request, timeout_s))

    async def aclose(self) -> None:
        """Close the connections; running calls raise ClosedError. Harmless when repeated.

        It waits for half a second at most until the routers have ended the streams.
        """
        both = (self._routers, self._other_routers)
        await asyncio.gather(*(each.aclose() for each in both if each))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _tokenize(
        self, request: inference_pb2.TokenizeRequest, timeout_s: float | None
    ) -> Tokens:
        response = await self._call("Tokenize", request, timeout_s)
        return Tokens(token_ids=tuple(unpack_token_ids(response.token_ids)), text=response.text)

    async def _call(self, method: str, request: object, timeout_s: float | None) -> Any:
        limit_s = self._timeout_s(timeout_s)
        return await self._routers.call(method, request, limit_s, self._routers.metadata)

    def _open_stream(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> "AsyncStream":
        inbox = _Inbox()
        limit_s = self._timeout_s(timeout_s)

        def start(routers: Routers, reader: Reader, spent_s: float) -> ResumableCall:
            own = inference_pb2.GenerateRequest()
            own.CopyFrom(request)  # a call that is resumed changes it
            return ResumableCall(
                own,
                routers=routers,
                reader=reader,
                metadata=routers.metadata,
                timeout_s=limit_s,
                spent_s=spent_s,
                resume_s=self._resume_s,
                on_router_lost=self._on_router_lost,
            )

        call: ResumableCall | HedgedCall
        others, after_s = self._other_routers, self._hedge_after_s
        if others is None or after_s >= limit_s:
            call = start(self._routers, inbox, 0.0)
        else:
            call = HedgedCall(start, self._routers, others, inbox, after_s)
        return AsyncStream(call, inbox, num_choices=max(request.sampling.n, 1))

    def _timeout_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._default_timeout_s
        return check_timeout_s("timeout_s", timeout_s)


class AsyncStream:
    """The deltas of one call, for one reader at a time: a second one gets a RuntimeError.

    Leaving the `async with` block early cancels the call. A stream that its reader cancels just
    ends; any other end before the last delta raises a PagewireError. Reading in another event loop
    than the one that started the stream raises ClosedError.
    """

    def __init__(
        self, call: ResumableCall | HedgedCall, inbox: "_Inbox", *, num_choices: int
    ) -> None:
        self._call = call
        self._inbox = inbox
        self._builder = CompletionBuilder(num_choices)

    @property
    def completion(self) -> Completion:
        """The answer so far; complete once the iteration has ended."""
        return self._builder.completion

    def cancel(self) -> None:
        """Stop the call and end the iteration; harmless after the end."""
        self._call.cancel()
        self._inbox.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            while (waiting := self._inbox.wait()) is not None:
                await waiting
            message = self._inbox.take()
            if message is None:
                raise StopAsyncIteration
            delta = delta_from(message)
            self._builder.add(delta)
        except (IndexError, ValueError) as error:
            self.cancel()
            raise ServerError(f"cannot read the answer: {error}", code="INTERNAL") from error
        except asyncio.CancelledError:
            self.cancel()
            raise
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # A stream dropped without `with`; any thread may run this.
        if not self._inbox.is_closed:
            with suppress(RuntimeError):  # the loop is closed, so the call is over
                self._inbox.loop.call_soon_threadsafe(self._call.cancel)


class _Inbox:
    """Unread messages of a call, for one reader."""

    def __init__(self) -> None:
        self.is_closed = False  # no more messages will arrive
        self.loop = asyncio.get_running_loop()
        self._messages: deque[AnswerPart] = deque()
        self._error: PagewireError | None = None  # after the messages
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while it waits

    def received(self, message: AnswerPart) -> None:
        """Append a message."""
        self._messages.append(message)
        if self._waiter is not None:
            self._wake()

    def ended(self, error: PagewireError | None) -> None:
        """Note the end, which follows the messages."""
        self.is_closed = True
        self._error = error
        self._wake()

    def close(self) -> None:
        """Drop unread messages and end."""
        self._messages.clear()
        self.ended(None)

    def wait(self) -> "asyncio.Future[None] | None":
        """Return what to wait for before another look; None: `take` knows what comes next.

        Raises:
            ClosedError: The reader runs in another event loop, where nothing would wake it.
            RuntimeError: Another reader waits.
        """
        if self._messages or self.is_closed:
            return None
        if asyncio.get_running_loop() is not self.loop:
            raise ClosedError("the stream belongs to another event loop; start one in each")
        if self._waiter is not None and not self._waiter.done():  # nothing would wake it any more
            raise RuntimeError("stream: found a second reader that waits; allowed: one at a time")
        self._waiter = self.loop.create_future()
        return self._waiter

    def take(self) -> AnswerPart | None:
        """Return the next message; None: there are no more. `wait` comes before.

        Raises:
            PagewireError: The call has failed; once, after all messages received before.
        """
        if self._messages:
            return self._messages.popleft()
        error, self._error = self._error, None
        if error:
            raise error
        return None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # its task may have been cancelled
            waiter.set_result(None)


async def _collect(stream: AsyncStream) -> Completion:
    async with stream:
        async for _ in stream:
            pass
    return stream.completion
