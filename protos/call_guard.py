"""Protects a server's handlers from silent calls, floods and malformed bytes.

By default grpc.aio reads the request of a unary call before any handler runs, without a deadline,
and answers a request that it cannot parse with UNKNOWN and a traceback in the log. This interceptor
serves every method as a stream of bytes, which looks the same on the wire, and reads the requests
itself:

- A call that sends no request within `request_s` ends with DEADLINE_EXCEEDED.
- While more than `max_silent` calls have no request, the oldest of them ends with
  RESOURCE_EXHAUSTED: a request that arrives in parts takes memory.
- A method with `max_calls` open calls refuses more with RESOURCE_EXHAUSTED. If callers are known,
  one with many open calls is refused earlier, which leaves some to others: protos/shares.py.
- RESOURCE_EXHAUSTED comes with a google.rpc.RetryInfo.
- Bytes that are not a message of the method's type end the call with INVALID_ARGUMENT.
- So does a request of more than `max_fields` fields, before it is parsed: millions of tiny fields
  would stop the event loop for a second.
- So does a request in which `check` finds something, such as a field with too much.
- So does one of more than 4 KiB to a standard service, health or reflection.

Anybody may call health, and reflection where there are no tenants, and gRPC keeps what it has of a
message until the rest comes. So few of their calls may be without a request, and on their streams
each message has the deadline of a request.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from pagewire.protos import common_pb2
from pagewire.protos.call_tasks import mark_seen
from pagewire.protos.grpc_options import LARGE_REQUEST_BYTES
from protos.bad_text import find_bad_text
from protos.field_count import check_num_fields
from protos.retry_delay import retry_info
from protos.shares import may_take

MAX_SILENT = 128
MAX_SILENT_STANDARD = 8  # likewise, of calls to standard services: each may have 64 MiB half sent
YOUNG_S = 0.5  # bursts of calls are accepted faster than their requests are read
REQUEST_S = 10.0  # for the largest request over a slow line
STANDARD_BYTES = 4096  # of a request to a standard service: a name
_CONTRACT = f"/{common_pb2.DESCRIPTOR.package}."  # begins the paths of all other methods
RETRY_DELAY_S = 0.5  # the end of a call cannot be predicted

Serve = Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]
Parse = Callable[[bytes], Awaitable[Any]]


class CallRefused(grpc.RpcError):  # type: ignore[misc] # grpc has no types
    """The guard ends the call. An RpcError, as handlers expect when a stream breaks."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self._code = code

    async def end(self, context: grpc.aio.ServicerContext) -> None:
        """End the call with the status of this error."""
        await context.abort(self._code, str(self))


class NoRoom(CallRefused):
    """There are too many calls; the status says when to try again."""

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._retry_delay_s = retry_delay_s

    async def end(self, context: grpc.aio.ServicerContext) -> None:
        status = status_pb2.Status(code=self._code.value[0], message=str(self))
        status.details.add().Pack(retry_info(self._retry_delay_s))
        rich = rpc_status.to_status(status)
        await context.abort(rich.code, rich.details, rich.trailing_metadata)


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Guards all methods of one server, in the server's event loop.

    Args:
        max_calls: Most open calls of one method.
        max_fields: Of a request with all nested messages; None: not counted.
        check: Raises ValueError for a request that no handler may see; None: they see all.
        max_silent: Most calls without a request, not counting those younger than YOUNG_S.
        request_s: Longest time from the beginning of a call to the end of its request.
        retry_delay_s: Delay suggested to callers that are refused for want of room.
        caller: Returns the caller of the current call; None: callers are not told apart.
    """

    def __init__(
        self,
        *,
        max_calls: int,
        max_fields: int | None = None,
        check: Callable[[Any], None] | None = None,
        max_silent: int = MAX_SILENT,
        request_s: float = REQUEST_S,
        retry_delay_s: float = RETRY_DELAY_S,
        caller: Callable[[], str] | None = None,
    ) -> None:
        self._max_calls = max_calls
        self._max_fields = max_fields
        self._check = check
        self._retry_delay_s = retry_delay_s
        self._caller = caller
        self._num_open: Counter[str] = Counter()  # by method
        self._num_own: Counter[tuple[str, str]] = Counter()  # by method and caller; none is 0
        self._silent, self._silent_standard = (
            _SilentCalls(most, request_s, retry_delay_s)
            for most in (max_silent, min(max_silent, MAX_SILENT_STANDARD))
        )
        self._guarded: dict[str, Any] = {}  # method |-> handler

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return a handler that guards the method's own."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # no such method
        method = handler_call_details.method
        if method not in self._guarded:
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(self, method: str, handler: Any) -> Any:
        respond = _responding(method, handler)
        is_standard = _is_standard(method)
        silent = self._silent_standard if is_standard else self._silent

        async def parse(raw: bytes) -> Any:
            return await self._parse(method, handler.request_deserializer, raw)

        async def serve(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            try:
                with self._place(method):
                    if handler.request_streaming:
                        read = partial(silent.read, context) if is_standard else context.read
                        requests = _Requests(read, parse)
                        await respond(requests, context)
                        if requests.refused:
                            raise requests.refused
                    else:
                        await respond(await parse(await silent.read_only(context)), context)
            except CallRefused as refused:
                await refused.end(context)

        return grpc.stream_stream_rpc_method_handler(
            serve, request_deserializer=None, response_serializer=handler.response_serializer
        )

    @contextmanager
    def _place(self, method: str) -> Iterator[None]:
        num_open = self._num_open[method]
        if num_open >= self._max_calls:
            raise NoRoom(
                f"{self._max_calls} calls of {method} are open, the limit of this server",
                self._retry_delay_s,
            )
        own = None if self._caller is None else (method, self._caller())
        if own and not may_take(self._num_own[own], num_open, self._max_calls):
            raise NoRoom(
                f"{self._num_own[own]} calls of {method} of this caller are open; what is left is "
                "for others",
                self._retry_delay_s,
            )
        self._num_open[method] += 1
        if own:
            self._num_own[own] += 1
        try:
            yield
        finally:
            self._num_open[method] -= 1
            if own:
                self._num_own[own] -= 1
                if not self._num_own[own]:
                    del self._num_own[own]

    async def _parse(
        self, method: str, deserialize: Callable[[bytes], Any] | None, raw: bytes
    ) -> Any:
        try:
            if len(raw) > STANDARD_BYTES and _is_standard(method):
                raise ValueError(f"allowed: at most {STANDARD_BYTES} bytes")
            if self._max_fields is not None and len(raw) > LARGE_REQUEST_BYTES:
                # In a thread, which lets the event loop run in between.
                request_type = method_named(method).input_type
                await asyncio.to_thread(check_num_fields, raw, request_type, self._max_fields)
            request = deserialize(raw) if deserialize else raw
            if self._check is not None:
                self._check(request)
            return request
        except (DecodeError, ValueError) as error:
            reason = str(error)
            # To look at each field takes as long as to count them, so not where none were counted.
            if isinstance(error, DecodeError) and self._max_fields is not None:
                reason = await _bad_text(method, raw) or reason
            raise CallRefused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{len(raw)} bytes are no request of {method}: {reason}",
            ) from None


def method_named(path: str) -> Any:
    """Return the descriptor of a method, given the path of its calls: "/SERVICE/METHOD"."""
    return descriptor_pool.Default().FindMethodByName(path.removeprefix("/").replace("/", "."))


def _is_standard(method: str) -> bool:
    return not method.startswith(_CONTRACT)


class _SilentCalls:
    """Calls that wait for a message: of too many, the oldest end.

    Args:
        most: Not counting those younger than YOUNG_S.
        request_s, retry_delay_s: As of the guard.
    """

    def __init__(self, most: int, request_s: float, retry_delay_s: float) -> None:
        self._most = most
        self._request_s = request_s
        self._retry_delay_s = retry_delay_s
        self._calls: dict[_Silence, None] = {}  # oldest first
        self._trimming: asyncio.TimerHandle | None = None  # set while there are too many

    async def read_only(self, context: grpc.aio.ServicerContext) -> bytes:
        """Return the only request of a call."""
        raw: bytes = await self.read(context)
        if raw is grpc.aio.EOF:
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        return raw

    async def read(self, context: grpc.aio.ServicerContext) -> Any:
        """Return the next message of a call, or EOF."""
        silence = _Silence(asyncio.get_running_loop().time())
        self._calls[silence] = None
        try:
            return await self._read_in_time(context, silence)
        finally:
            self._calls.pop(silence, None)

    async def _read_in_time(self, context: grpc.aio.ServicerContext, silence: "_Silence") -> Any:
        reading: asyncio.Future[bytes] = asyncio.ensure_future(context.read())
        reading.add_done_callback(mark_seen)
        try:
            async with asyncio.timeout(self._request_s) as silence.limit:
                if self._trimming is None:
                    self._trim()
                # Shielded: gRPC leaks some memory for each cancelled operation.
                return await asyncio.shield(reading)
        except TimeoutError:
            if silence.is_ended:
                raise NoRoom(
                    f"no request came, and {self._most} newer calls wait for theirs",
                    self._retry_delay_s,
                ) from None
            raise CallRefused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no request came within {self._request_s:g} s",
            ) from None

    def _trim(self) -> None:
        """End the oldest calls while there are too many, except young ones."""
        loop = asyncio.get_running_loop()
        self._trimming = None
        while len(self._calls) > self._most:
            oldest = next(iter(self._calls))
            if loop.time() < oldest.since + YOUNG_S:
                self._trimming = loop.call_at(oldest.since + YOUNG_S, self._trim)
                return
            del self._calls[oldest]
            oldest.end()


class _Silence:
    """One call that waits for a message."""

    def __init__(self, since: float) -> None:
        self.since = since  # loop time
        self.is_ended = False  # before its time, because of newer ones
        self.limit: asyncio.Timeout | None = None

    def end(self) -> None:
        assert self.limit is not None, "it waits"
        self.is_ended = True
        self.limit.reschedule(asyncio.get_running_loop().time())


class _Requests:
    """The parsed messages of a request stream."""

    def __init__(self, read: Callable[[], Awaitable[Any]], parse: Parse) -> None:
        self.refused: CallRefused | None = None
        self._read = read
        self._parse = parse

    def __aiter__(self) -> "_Requests":
        return self

    async def __anext__(self) -> Any:
        try:
            raw = await self._read()
            if raw is grpc.aio.EOF:
                raise StopAsyncIteration
            return await self._parse(raw)
        except CallRefused as refused:
            self.refused = refused  # a handler may take it for a connection that broke
            raise


async def _bad_text(method: str, raw: bytes) -> str:
    """Return which text of a request is none, if that is what is wrong with it."""
    try:
        return await asyncio.to_thread(find_bad_text, raw, method_named(method).input_type)
    except ValueError:
        return ""  # it is not a message, whatever is in it


def _responding(method: str, handler: Any) -> Serve:
    """Return a function that runs a handler of any kind and writes its responses."""
    function: Any = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    if inspect.isasyncgenfunction(function):

        async def write_all(request: Any, context: grpc.aio.ServicerContext) -> None:
            async with aclosing(function(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        return write_all
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"the handler of {method} is not asynchronous")
    if handler.response_streaming:
        return cast(Serve, function)  # it writes by itself

    async def write_one(request: Any, context: grpc.aio.ServicerContext) -> None:
        response = await function(request, context)
        if context.code() in (None, grpc.StatusCode.OK):
            await context.write(response)

    return write_one
