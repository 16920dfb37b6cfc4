"""One request and its answer: an endpoint's input and output, and their log line."""

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

import pagewire
from http_gateway.body import Bodies
from http_gateway.config import GatewayConfig
from http_gateway.errors import CLIENT_CLOSED, SERVER, ClientLeft, HttpError, http_error
from http_gateway.hosts import check_host
from http_gateway.http_metrics import Metrics
from http_gateway.sse import compact, json_bytes
from observability.logs import fields
from observability.rare_line import RareLine
from observability.tracing import NO_SPAN, NoSpan, begin_trace
from pagewire.protos.trace_context import TraceContext, trace_context
from pagewire.shown import writes_json
from pagewire.tracing import caller_span

log = logging.getLogger(__name__)
T = TypeVar("T")

# A value that metadata can carry. The router decides whether it is a token.
AUTHORIZATION = re.compile(rb"[\x21-\x7e][\x20-\x7e]{0,4095}")
UNREADABLE = "unreadable"
CRASHED, STOPPED = "internal_error", "unavailable"  # codes of errors, and outcomes
REQUEST_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)
# Polled all the time: neither counted as work nor logged.
PROBES = {"/health", "/ready", "/metrics", "/cluster"}
EVENT_STREAM = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),  # asks nginx to pass events on at once
)


class Record:
    """The log line, span and metrics of one request, never its content."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.path = ""  # one of the gateway's own; empty: unknown
        self.status = 0
        self.outcome = "ok"
        self.is_admitted = False  # whether its caller may call
        self.tenant = ""  # its tenant; empty: the router does not distinguish callers
        self.model = ""
        self.is_stream = False
        self.router_request_id = ""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.first_token_at = 0.0  # loop time
        self.started_at = asyncio.get_running_loop().time()
        self.span: NoSpan = NO_SPAN

    @property
    def elapsed_s(self) -> float:
        """Time since the request arrived."""
        return asyncio.get_running_loop().time() - self.started_at

    def write(self, method: str, strangers: RareLine) -> None:
        """Write the line and end the span.

        `strangers` writes the line if anybody could have sent the request.
        """
        ttft_ms = None
        if self.first_token_at:
            ttft_ms = round(1000 * (self.first_token_at - self.started_at), 1)
        generation = {
            "model": self.model,
            "stream": self.is_stream,
            "router_request_id": self.router_request_id,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_ms": ttft_ms,
        }
        values = {
            "request_id": self.request_id,
            "method": method,
            "path": self.path or "-",
            "status": self.status,
            "outcome": self.outcome,
            "total_ms": round(1000 * self.elapsed_s, 1),
            **({"tenant": self.tenant} if self.tenant else {}),
            **(generation if self.model else {}),
        }
        self.span.end("" if self.outcome == "ok" else self.outcome, **values)
        values |= self.span.log_fields
        if self.path in PROBES:
            log.debug("http_request", extra=fields(**values))
        elif self.is_admitted:
            log.info("http_request", extra=fields(**values))
        else:
            strangers.write(**values)


class Exchange:
    """One request as an endpoint sees it."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        config: GatewayConfig,
        metrics: Metrics,
        bodies: Bodies,
        *,
        reads_body: bool,
    ) -> None:
        self.record: Record = scope["record"]
        self.config = config
        self.metrics = metrics
        self.rename_field: Callable[[str], str] = lambda field: field  # see http_gateway.errors
        self.stream_error: Callable[[HttpError], bytes] = _error_event
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self._headers = dict(scope["headers"])
        self.authorization = _authorization(scope)
        self.host = self._headers.get(b"host", b"").decode("latin-1")
        self._receive = receive
        self._send = send
        self._send_body: Send = scope["send_body"]
        self._bodies = bodies
        self._num_body_bytes = 0
        self._is_body_left = reads_body
        self._has_started = False
        self._has_ended = False

    async def read_json(self) -> dict[str, Any]:
        """Return the request's JSON object; raises HttpError, or ClientLeft."""
        body = await self._bodies.read(self._headers, self._receive, self.record.tenant)
        self._num_body_bytes = body.num_bytes
        self._is_body_left = False
        return body.value

    async def convert(self, function: Callable[[], T]) -> T:
        """Return the result of a function that checks or converts the request's JSON object."""
        return await self._bodies.work(function, self._num_body_bytes)

    async def run(self, answer: Awaitable[None]) -> None:
        """Run the endpoint until it ends or the client leaves; its errors are answered, too.

        Raises:
            ClientLeft: The client no longer waits for the answer.
        """
        has_left = False
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch_client())
                try:
                    await self._answer(answer)
                finally:
                    watching.cancel()
        except* ClientLeft:
            has_left = True
        if has_left:  # raised within, it would be in a group: so do early versions of Python 3.11
            raise ClientLeft

    async def answer_json(self, body: object) -> None:
        """Answer with JSON."""
        await self.answer(200, json_bytes(compact(body)), (("content-type", "application/json"),))

    async def answer(
        self, status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Answer with a complete body."""
        await self._start(status, (*headers, ("content-length", str(len(body)))))
        self._has_ended = True
        await self._send_body({"type": "http.response.body", "body": body})

    async def send_events(self, events: bytes) -> None:
        """Send events as soon as the client takes them; the first ones begin the answer."""
        if not self._has_started:
            await self._start(200, EVENT_STREAM)
        await self._send_body({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        """Send the last events and end the answer."""
        if not self._has_started:
            await self.send_events(b"")
        await self._send_body({"type": "http.response.body", "body": events})
        self._has_ended = True  # only now: it may be cancelled while the client reads nothing

    async def fail(self, error: HttpError) -> None:
        """Answer with an error: as a status, or as an event if the answer has begun."""
        self.record.outcome = error.code or "invalid"
        if self._has_ended:
            return
        if self._has_started:
            await self.end_events(self.stream_error(error))
            return
        self.record.status = error.status
        headers = [("content-type", "application/json"), *error.headers]
        if self._is_body_left:
            headers.append(("connection", "close"))
        await self.answer(error.status, error.body, headers)

    async def crash(self) -> None:
        """Log and answer the current error, a bug of the gateway; no other request is affected."""
        log.exception("request_crashed", extra=fields(request_id=self.record.request_id))
        await self.fail(internal_error())

    async def _answer(self, answer: Awaitable[None]) -> None:
        try:
            await answer
        except HttpError as error:
            await self.fail(error)
        except pagewire.PagewireError as error:
            await self.fail(http_error(error, self.rename_field))
        except Exception:
            await self.crash()

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._has_ended:
            raise ClientLeft

    async def _start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        encoded = [(name.encode(), value.encode()) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})
        self._has_started = True  # only now: it may be cancelled while earlier answers are unread


class Endpoint:
    """An ASGI application for one path: reads the request, and answers it while a client waits.

    Args:
        path: The path of the route, for log and metrics.
        answer: Answers an exchange; its errors become the answer.
        admit: Given the authorization, returns the request's tenant or raises PagewireError, before
            the body is read. None: anybody may call.
        reads_body: Whether it gets the request's JSON object; otherwise an empty one.
        config: The gateway's limits.
        metrics: Those of all endpoints.
        bodies: Reads the requests' bodies.
        checks_host: Whether a caller without a tenant must address this host by a known name.
    """

    def __init__(
        self,
        path: str,
        answer: Callable[[Exchange, dict[str, Any]], Awaitable[None]],
        *,
        admit: Callable[[str], Awaitable[str]] | None,
        config: GatewayConfig,
        metrics: Metrics,
        bodies: Bodies,
        reads_body: bool = True,
        checks_host: bool,
    ) -> None:
        self._path = path
        self._answer = answer
        self._admit = admit
        self._config = config
        self._metrics = metrics
        self._bodies = bodies
        self._reads_body = reads_body
        self._checks_host = checks_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        scope["record"].path = self._path
        writes_json.set(True)  # in the context of this request's own task, as the span below
        exchange = Exchange(
            scope,
            receive,
            send,
            self._config,
            self._metrics,
            self._bodies,
            reads_body=self._reads_body,
        )
        try:
            if self._admit:
                exchange.record.tenant = await self._admit(exchange.authorization)
            if self._checks_host and not exchange.record.tenant:
                check_host(exchange.host, self._config.hosts)
            exchange.record.is_admitted = self._admit is not None
            if self._reads_body:
                span = begin_trace(f"{scope['method']} {self._path}", _caller(scope))
                exchange.record.span = span
                caller_span.set(span.context)
            body = await exchange.read_json() if self._reads_body else {}
            await exchange.run(self._answer(exchange, body))
        except HttpError as error:  # head or body is wrong
            await exchange.fail(error)
        except pagewire.PagewireError as error:  # of whoever asks
            await exchange.fail(http_error(error, exchange.rename_field))
        except ClientLeft:
            record = exchange.record
            record.status, record.outcome = CLIENT_CLOSED, "client_left"
        except Exception:
            await exchange.crash()
        except asyncio.CancelledError:  # the gateway stops, and this request's grace is over
            await exchange.fail(_stopped())  # the server bounds this wait


def _caller(scope: Scope) -> TraceContext:
    """Return the caller's trace context; whoever reads it checks whether it is valid."""
    headers = scope["headers"]
    return trace_context((key.decode("latin-1"), value.decode("latin-1")) for key, value in headers)


class RequestLog:
    """The outermost ASGI application: names each request, counts it and writes its line."""

    def __init__(self, app: Callable[..., Awaitable[None]], metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._strangers = RareLine(log, logging.INFO, "http_request")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; an error of the application is noted, and raised again."""
        record = scope["record"] = Record(_request_id(scope))
        scope["send_body"] = send  # no layer in between touches bodies
        header = (b"x-request-id", record.request_id.encode())

        async def send_noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        is_probe = scope["path"] in PROBES
        try:
            with nullcontext() if is_probe else self._metrics.running():
                await self._app(scope, receive, send_noted)
        except asyncio.CancelledError:  # of an answer that no Endpoint gives
            record.outcome = STOPPED
            raise
        except Exception:
            record.outcome = CRASHED
            log.exception("request_crashed", extra=fields(request_id=record.request_id))
            raise  # uvicorn ends the connection
        finally:
            self._metrics.end(record.path, scope["method"], record.status)
            record.write(scope["method"], self._strangers)


def internal_error() -> HttpError:
    """Make the error for a bug of the gateway."""
    message = "internal error; see the gateway's log"
    return HttpError(500, message, kind=SERVER, code=CRASHED)


def _stopped() -> HttpError:
    return HttpError(503, "the gateway stopped", kind=SERVER, code=STOPPED)


def _error_event(error: HttpError) -> bytes:
    return b"data: " + error.body + b"\n\n"


def _authorization(scope: Scope) -> str:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if not any(given):
        return ""
    # Of two, whatever stands before the gateway may have looked at the other one.
    is_readable = len(given) == 1 and AUTHORIZATION.fullmatch(given[0])
    return given[0].decode() if is_readable else UNREADABLE


def _request_id(scope: Scope) -> str:
    """Return the client's own id of a request, if it gave a valid one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
