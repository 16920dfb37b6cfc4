"""The client side of the in-memory gRPC: call objects with the surface of grpc.aio's."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any

import grpc

from tests.support.memory_server import HalfClose, Headers, Reset, ServerCall, Status
from tests.support.memory_wire import Pipe
from tests.support.virtual_time import Process

if TYPE_CHECKING:
    from tests.support.memory_grpc import MemoryChannel

_CANCELLED = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", (), True)


class Call(grpc.aio.Call):
    """State that all four kinds of calls share."""

    def __init__(
        self,
        channel: "MemoryChannel",
        method: str,
        request_serializer: Any,
        response_deserializer: Any,
        *,
        timeout: float | None,
        metadata: Any,
        wait_for_ready: bool | None,
    ) -> None:
        if channel.is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        loop = asyncio.get_running_loop()
        self._channel = channel
        self._network = channel.network
        self._method = method
        self._serializer = request_serializer
        self._deserializer = response_deserializer
        self._metadata = tuple((str(key), value) for key, value in metadata or ())
        self._wait_for_ready = bool(wait_for_ready)
        self._deadline = None if timeout is None else loop.time() + timeout
        self._inbox: deque[bytes | Status] = deque()
        self._headers: tuple[Any, ...] | None = None
        self._status: Status | None = None
        self._locally_cancelled = False
        self._waiters: list[asyncio.Future[None]] = []
        self._done_callbacks: list[Callable[[Any], None]] = []
        self._request_pipe: Pipe | None = None
        self._reply_pipe: Pipe | None = None
        self._half_closed = False
        self._style: str | None = None
        self.client_process: Process = channel.process
        self.server_process: Process | None = None
        self.is_pinged = False  # the network looks whether the server comes back into reach
        self._timer: asyncio.TimerHandle | None = None
        self._network.opened(self)
        channel.calls[self] = None
        if self._deadline is not None:
            self._timer = loop.call_at(
                self._deadline,
                self._finish,
                Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", (), True),
                context=self._network.context.copy(),
            )
        self._connecting = loop.create_task(self._connect(), name=f"connect {method}")

    # Connecting and ending.

    async def _connect(self) -> None:
        """Find the server and open the call there; a call that cannot ends UNAVAILABLE."""
        network, address = self._network, self._channel.address
        server = network.server_at(address)
        while server is None and self._wait_for_ready and self._status is None:
            await network.changed()
            server = network.server_at(address)
        if self._status is not None:
            return
        if server is None or self.client_process.state == "dead":
            details = f"failed to connect to all addresses; last error: {address}: refused"
            self._finish(Status(grpc.StatusCode.UNAVAILABLE, details, (), True))
            return
        self.server_process = server.process
        network.connected(self)
        self._reply_pipe = network.pipe(server.process, self.client_process, self._arrive)
        if server.process.state == "dead":  # killed silently: nobody answers
            self._request_pipe = network.pipe(
                self.client_process, server.process, lambda element: None
            )
            self._wake()
            return
        opened: list[ServerCall] = []
        reply_pipe = self._reply_pipe

        def arrive(element: Any) -> None:
            if not opened:
                if isinstance(element, Reset) or server.process.state == "dead":
                    return
                call = ServerCall(
                    server,
                    method=self._method,
                    metadata=self._metadata,
                    deadline=self._deadline,
                    client=self.client_process,
                    reply=reply_pipe,
                )
                call.request_pipe = request_pipe
                opened.append(call)
            if not isinstance(element, Headers):
                opened[0].arrive(element)

        request_pipe = network.pipe(self.client_process, server.process, arrive)
        self._request_pipe = request_pipe
        request_pipe.send(Headers(self._metadata))
        self._wake()

    def _arrive(self, element: Any) -> None:
        if isinstance(element, Headers):
            self._headers = element.metadata
        elif isinstance(element, Status) and (element.is_broken or not self._inbox):
            self._finish(element)
        else:
            self._inbox.append(element)
        self._wake()

    def _finish(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        if status.is_broken:
            self._inbox.clear()
            if self._request_pipe is not None:
                self._request_pipe.send(Reset())
            if self._reply_pipe is not None:
                self._reply_pipe.discard()
        if self._request_pipe is not None:
            self._request_pipe.close()
        if self._timer is not None:
            self._timer.cancel()
        self._connecting.cancel()
        self._network.closed(self)
        self._channel.calls.pop(self, None)
        self._wake()
        for callback in self._done_callbacks:
            callback(self)

    def break_off(self, dead: Process | None, *, silently: bool) -> None:
        """Lose the connection; `dead` is the process that died, if one did."""
        request_pipe, reply_pipe = self._request_pipe, self._reply_pipe
        if request_pipe is None or reply_pipe is None:
            if dead is self.client_process:
                self._network.closed(self)
            return
        lost = Status(grpc.StatusCode.UNAVAILABLE, "Socket closed", (), True)
        if not silently:  # after what the dead side had already sent
            if dead is not self.client_process:
                reply_pipe.send(lost)
            if dead is not self.server_process:
                request_pipe.send(Reset())
        request_pipe.close()
        reply_pipe.close()
        if dead is self.client_process:
            self._network.closed(self)
            if self._timer is not None:
                self._timer.cancel()

    def ping_failed(self) -> None:
        """Give up the connection: nobody answers."""
        self._finish(Status(grpc.StatusCode.UNAVAILABLE, "ping timeout", (), True))

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait_for_change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def _connected(self) -> None:
        while self._request_pipe is None and self._status is None:
            await self._wait_for_change()

    async def wait_done(self, timeout: float) -> None:
        """Wait until the call ends, at most `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self._status is None:
                    await self._wait_for_change()
        except TimeoutError:
            return

    # Receiving.

    async def _receive(self) -> Any:
        """Return the next message or EOF; cancelling the waiting task cancels the call."""
        try:
            while not self._inbox and self._status is None:
                await self._wait_for_change()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not self._inbox:
            return grpc.aio.EOF
        message = self._inbox.popleft()
        assert isinstance(message, bytes)
        assert self._reply_pipe is not None
        self._reply_pipe.was_read(message)
        if self._inbox and isinstance(self._inbox[0], Status):
            self._finish(self._inbox.popleft())  # type: ignore[arg-type]
        return self._deserializer(message) if self._deserializer else message

    def _raise_for_status(self) -> None:
        assert self._status is not None
        if self._locally_cancelled:
            raise asyncio.CancelledError
        if self._status.code is not grpc.StatusCode.OK:
            raise self._error()

    def _error(self) -> grpc.aio.AioRpcError:
        assert self._status is not None
        return grpc.aio.AioRpcError(
            self._status.code,
            grpc.aio.Metadata(*(self._headers or ())),
            grpc.aio.Metadata(*self._status.metadata),
            details=self._status.details,
        )

    # Sending.

    async def _send(self, request: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        data = self._serializer(request) if self._serializer else request
        try:
            await self._connected()
            if self._status is not None:
                self._raise_for_status()
            assert self._request_pipe is not None
            self._request_pipe.send(data)
            await self._request_pipe.wait_for_window()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _close_sending(self) -> None:
        if self._status is not None or self._half_closed:
            return
        self._half_closed = True
        await self._connected()
        if self._request_pipe is not None:
            self._request_pipe.send(HalfClose())

    # What every call offers.

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._locally_cancelled = True
        self._finish(_CANCELLED)
        return True

    def cancelled(self) -> bool:
        return self._status is not None and self._status.code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._status is not None

    def time_remaining(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._status is not None:
            callback(self)
        else:
            self._done_callbacks.append(callback)

    async def initial_metadata(self) -> Any:
        while self._headers is None and self._status is None:
            await self._wait_for_change()
        return grpc.aio.Metadata(*(self._headers or ()))

    async def _final(self) -> Status:
        while self._status is None:
            await self._wait_for_change()
        return self._status

    async def trailing_metadata(self) -> Any:
        return grpc.aio.Metadata(*(await self._final()).metadata)

    async def code(self) -> grpc.StatusCode:
        return (await self._final()).code

    async def details(self) -> str:
        return (await self._final()).details

    async def debug_error_string(self) -> str:
        return (await self._final()).details

    async def wait_for_connection(self) -> None:
        await self._connected()
        if self._status is not None:
            self._raise_for_status()


class _UnaryResponse(Call):
    """Awaiting the call gives the response."""

    _response: "asyncio.Task[Any]"

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            response = yield from self._response
        except asyncio.CancelledError:
            self.cancel()
            raise
        if response is grpc.aio.EOF:
            self._raise_for_status()
            # As grpc.aio: a cancellation that comes after the status is an error with code OK.
            raise self._error()
        return response

    async def _receive_response(self) -> Any:
        try:
            response = await self._receive()
            while self._status is None:
                await self._wait_for_change()
        except asyncio.CancelledError:
            self.cancel()
            return grpc.aio.EOF
        return response if self._status.code is grpc.StatusCode.OK else grpc.aio.EOF

    def cancel(self) -> bool:
        was_open = super().cancel()
        if was_open:
            self._response.cancel()
        return was_open


class _StreamResponse(Call):
    """Messages through the iterator or read(), never both."""

    _iterator: AsyncIterator[Any] | None = None

    def _use(self, style: str) -> None:
        if self._style not in (None, style):
            raise grpc.aio.UsageError(
                "The iterator and read/write APIs may not be mixed on a single RPC."
            )
        self._style = style

    def __aiter__(self) -> AsyncIterator[Any]:
        self._use("iterator")
        if self._iterator is None:
            self._iterator = self._messages()
        return self._iterator

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self._receive()) is not grpc.aio.EOF:
            yield message
        self._raise_for_status()

    async def read(self) -> Any:
        if self._status is not None and not self._inbox:
            self._raise_for_status()
            return grpc.aio.EOF
        self._use("read")
        message = await self._receive()
        if message is grpc.aio.EOF:
            self._raise_for_status()
        return message


class _StreamRequest(Call):
    """Requests from an iterator given at the start, or through write()."""

    _poller: "asyncio.Task[None] | None" = None

    def _begin(self, request_iterator: Any) -> None:
        if request_iterator is not None:
            self._poller = asyncio.get_running_loop().create_task(self._consume(request_iterator))

    async def _consume(self, requests: Any) -> None:
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    await self._send(request)
            else:
                for request in requests:
                    await self._send(request)
            await self._close_sending()
        except grpc.aio.AioRpcError:
            return
        except BaseException:  # as grpc.aio: a failing iterator cancels the call, quietly
            self.cancel()

    def _require_no_iterator(self) -> None:
        if self._poller is not None:
            raise grpc.aio.UsageError(
                "The iterator and read/write APIs may not be mixed on a single RPC."
            )

    def cancel(self) -> bool:
        was_open = super().cancel()
        if was_open and self._poller is not None:
            self._poller.cancel()
        return was_open

    async def write(self, request: Any) -> None:
        self._require_no_iterator()
        await self._send(request)

    async def done_writing(self) -> None:
        self._require_no_iterator()
        await self._close_sending()


class UnaryUnaryCall(_UnaryResponse, grpc.aio.UnaryUnaryCall):
    def __init__(self, request: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._response = asyncio.get_running_loop().create_task(self._invoke(request))

    async def _invoke(self, request: Any) -> Any:
        await _send_only(self, request)
        return await self._receive_response()


class UnaryStreamCall(_StreamResponse, grpc.aio.UnaryStreamCall):
    def __init__(self, request: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sending = asyncio.get_running_loop().create_task(_send_only(self, request))


class StreamUnaryCall(_StreamRequest, _UnaryResponse, grpc.aio.StreamUnaryCall):
    def __init__(self, request_iterator: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begin(request_iterator)
        self._response = asyncio.get_running_loop().create_task(self._receive_response())


class StreamStreamCall(_StreamRequest, _StreamResponse, grpc.aio.StreamStreamCall):
    def __init__(self, request_iterator: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begin(request_iterator)


async def _send_only(call: Call, request: Any) -> None:
    """Send the one request of a call; its failures show when the response is awaited."""
    try:
        await call._send(request)
        await call._close_sending()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
    except asyncio.CancelledError:
        call.cancel()


class MultiCallable:
    """What channel.unary_unary and its sisters return."""

    def __init__(self, call_type: Any, channel: "MemoryChannel", method: Any, *codec: Any) -> None:
        self._call_type = call_type
        self._channel = channel
        self._method = method.decode() if isinstance(method, bytes) else method
        self._codec = codec

    def __call__(
        self,
        request: Any = None,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        return self._call_type(
            request,
            self._channel,
            self._method,
            *self._codec,
            timeout=timeout,
            metadata=metadata,
            wait_for_ready=wait_for_ready,
        )


def _maker(call_type: Any) -> Callable[..., MultiCallable]:
    def make(*args: Any) -> MultiCallable:
        return MultiCallable(call_type, *args)

    return make


MULTI_CALLABLES = {
    "unary_unary": _maker(UnaryUnaryCall),
    "unary_stream": _maker(UnaryStreamCall),
    "stream_unary": _maker(StreamUnaryCall),
    "stream_stream": _maker(StreamStreamCall),
}
