"""The server side of the in-memory gRPC: dispatch, servicer contexts, stopping."""

import asyncio
import contextvars
import functools
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import grpc

from tests.support.memory_wire import Pipe
from tests.support.virtual_time import Process, current_process

if TYPE_CHECKING:
    from tests.support.memory_grpc import MemoryNetwork

_LOGGER = logging.getLogger(__name__)

Metadata = tuple[tuple[str, Any], ...]


class HalfClose:
    """The client writes no more."""


class Reset:
    """The client cancelled, its deadline passed, or its connection broke."""


class Headers:
    """The server's initial metadata."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata


class Status:
    """The end of a call as the server, or the network in its stead, says it."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: Metadata = (), is_broken: bool = False
    ) -> None:
        self.code = code
        self.details = details
        self.metadata = metadata
        self.is_broken = is_broken  # unread messages are lost


class MemoryServer(grpc.aio.Server):
    """Runs registered servicers; made by MemoryNetwork.server."""

    def __init__(
        self,
        network: "MemoryNetwork",
        address: str,
        process: Process,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
    ) -> None:
        self.network = network
        self.address = address
        self.process = process
        self.calls: dict[ServerCall, None] = {}
        self._interceptors = tuple(interceptors)
        self._handlers: dict[str, Any] = {}
        self._generic_handlers: list[Any] = []
        self._is_started = False
        self._stopped = asyncio.Event()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None:
        self._generic_handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        for method, handler in method_handlers.items():
            self._handlers[f"/{service_name}/{method}"] = handler

    def add_insecure_port(self, address: str) -> int:
        """Accept any port; the address is the one given to MemoryNetwork.server."""
        return int(self.address.rpartition(":")[2] or 1) if ":" in self.address else 1

    def add_secure_port(self, address: str, server_credentials: Any) -> int:
        return self.add_insecure_port(address)

    async def start(self) -> None:
        assert not self._is_started, "a server starts once"
        self._is_started = True
        self.network.listen(self.address, self)

    async def stop(self, grace: float | None) -> None:
        self.network.stop_listening(self.address, self)
        tasks = [call.task for call in self.calls]
        if tasks and grace:
            await asyncio.wait(tasks, timeout=grace)
        for call in list(self.calls):
            call.stop()
        if tasks:
            await asyncio.wait(tasks)
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        try:
            await asyncio.wait_for(self._stopped.wait(), timeout)
        except TimeoutError:
            return True
        return False

    async def find_handler(self, method: str, metadata: Metadata) -> Any:
        """Ask the interceptors, each of which may ask those after it and the servicers."""

        async def ask(index: int, details: Any) -> Any:
            if index < len(self._interceptors):
                next_one = functools.partial(ask, index + 1)
                return await self._interceptors[index].intercept_service(next_one, details)
            return self._registered(details)

        return await ask(0, _CallDetails(method, metadata))

    def _registered(self, details: "_CallDetails") -> Any:
        if details.method in self._handlers:
            return self._handlers[details.method]
        found = (generic.service(details) for generic in self._generic_handlers)
        return next((handler for handler in found if handler is not None), None)


class _CallDetails(NamedTuple):
    """What interceptors and generic handlers are asked with."""

    method: str
    invocation_metadata: Metadata


class ServerCall(grpc.aio.ServicerContext):
    """One call at its server; also the context that its handler sees."""

    def __init__(
        self,
        server: MemoryServer,
        *,
        method: str,
        metadata: Metadata,
        deadline: float | None,
        client: Process,
        reply: Pipe,
    ) -> None:
        self._server = server
        self._method = method
        self._metadata = metadata
        self._deadline = deadline
        self._client = client
        self._reply = reply
        self.request_pipe: Pipe | None = None  # set by the call, to report what was read
        self._inbox: deque[bytes] = deque()
        self._half_closed = False
        self._reader: asyncio.Future[None] | None = None
        self._headers_sent = False
        self._status_sent = False
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing: Metadata = ()
        self._abort_error: grpc.aio.AbortError | None = None
        self._was_reset = False
        self._done_callbacks: list[Callable[[Any], None]] = []
        self._is_done = False
        self._timer: asyncio.TimerHandle | None = None
        self._handler: Any = None  # set before the first message is read
        context = contextvars.copy_context()
        context.run(current_process.set, server.process)
        loop = asyncio.get_running_loop()
        server.calls[self] = None
        self.task = loop.create_task(self._run(), name=f"rpc {method}", context=context)
        if deadline is not None:
            self._timer = loop.call_at(
                deadline, self._client_left, context=server.network.context.copy()
            )

    # From the network.

    def arrive(self, element: Any) -> None:
        if isinstance(element, bytes):
            self._inbox.append(element)
        elif isinstance(element, HalfClose):
            self._half_closed = True
        else:
            self._client_left()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _client_left(self) -> None:
        if not self._was_reset and not self._is_done:
            self._was_reset = True
            self._reply.close()
            self.task.cancel()

    def stop(self) -> None:
        """Abort the call because the server stops."""
        self._send_status(Status(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls", (), True))
        self._client_left()

    # Running the handler.

    async def _run(self) -> None:
        try:
            await self._handle()
        except asyncio.CancelledError:
            pass  # as grpc.aio: no status; a client that did not cancel waits for its deadline
        except grpc.aio.AbortError:
            pass
        except Exception as error:
            _LOGGER.exception("Unexpected error in %s", self._method)
            code = self._code if self._code is not grpc.StatusCode.OK else _UNKNOWN
            self._send_status(Status(code, f"Unexpected {type(error)}: {error}", self._trailing))
        finally:
            self._is_done = True
            del self._server.calls[self]
            if self._timer is not None:
                self._timer.cancel()
            for callback in self._done_callbacks:
                callback(self)

    async def _handle(self) -> None:
        self._handler = handler = await self._server.find_handler(self._method, self._metadata)
        if handler is None:
            self._send_status(Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        if handler.request_streaming:
            request: Any = _Requests(self)
        else:
            request = await self.read()
            if request is grpc.aio.EOF:
                return
        if handler.response_streaming:
            method = handler.stream_stream if handler.request_streaming else handler.unary_stream
            if inspect.isasyncgenfunction(method):
                async for response in method(request, self):
                    await self.write(response)
            else:
                await method(request, self)
        else:
            method = handler.stream_unary if handler.request_streaming else handler.unary_unary
            response = await method(request, self)
            if self._abort_error is None and self._code is grpc.StatusCode.OK:
                await self.write(response)
        self._send_status(Status(self._code, self._details, self._trailing))

    def _send_headers(self, metadata: Metadata = ()) -> None:
        if not self._headers_sent:
            self._headers_sent = True
            self._reply.send(Headers(metadata))

    def _send_status(self, status: Status) -> None:
        if not self._status_sent:
            self._status_sent = True
            self._send_headers()
            self._reply.send(status)

    # The context, as handlers use it.

    async def read(self) -> Any:
        while not self._inbox:
            if self._half_closed:
                return grpc.aio.EOF
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message = self._inbox.popleft()
        assert self.request_pipe is not None
        self.request_pipe.was_read(message)
        deserializer = self._handler.request_deserializer
        return deserializer(message) if deserializer else message

    async def write(self, message: Any) -> None:
        if self._status_sent:
            raise asyncio.InvalidStateError("RPC already finished.")
        serializer = self._handler.response_serializer
        data = serializer(message) if serializer else message
        self._send_headers()
        self._reply.send(data)
        await self._reply.wait_for_window()

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        if self._headers_sent:
            raise RuntimeError("Send initial metadata failed: already sent")
        self._send_headers(tuple(initial_metadata))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        if self._abort_error is not None:
            raise RuntimeError("Abort already called!")
        if code is grpc.StatusCode.OK:
            code = _UNKNOWN
        self._code, self._details = code, details
        self._trailing = tuple(trailing_metadata) or self._trailing
        self._abort_error = grpc.aio.AbortError("Locally aborted.")
        self._send_status(Status(code, details, self._trailing))
        raise self._abort_error

    async def abort_with_status(self, status: Any) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details

    def set_compression(self, compression: Any) -> None:
        """Accept and ignore."""

    def disable_next_message_compression(self) -> None:
        """Accept and ignore."""

    def peer(self) -> str:
        return f"memory:{self._client.name}"

    def peer_identities(self) -> None:
        return None

    def peer_identity_key(self) -> None:
        return None

    def auth_context(self) -> dict[str, Any]:
        return {}

    def time_remaining(self) -> float | None:  # type: ignore[override]
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._done_callbacks.append(callback)

    def cancelled(self) -> bool:
        return self._is_done and self._was_reset

    def done(self) -> bool:
        return self._is_done


class _Requests:
    """The request iterator that a handler gets."""

    def __init__(self, call: ServerCall) -> None:
        self._call = call

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self._call.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


_UNKNOWN = grpc.StatusCode.UNKNOWN
