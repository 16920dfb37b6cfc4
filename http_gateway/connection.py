"""One HTTP/1.1 connection: uvicorn's protocol, with the limits that it lacks.

uvicorn bounds neither the head of a request nor its time, accepts any number of pipelined requests,
does not notice a client that leaves while another request waits, and never ends a write that the
client does not read. Requests refused here never reach the application; answers use its format.
"""

import asyncio
import logging
import socket
from enum import Enum, auto
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from http_gateway.config import GatewayConfig
from http_gateway.errors import INVALID, SERVER, HttpError
from http_gateway.places import Places
from observability.logs import fields
from observability.rare_line import RareLine
from pagewire.shown import shown

log = logging.getLogger(__name__)

VERSIONS = ("1.0", "1.1")
MAX_HEADERS = 100
MAX_PIPELINED = 8  # requests that wait while another one is answered
# The first bytes of other protocols that clients speak here by mistake
_BEGINNINGS = {b"PRI * HTTP/2.0": "HTTP/2", b"\x16\x03": "TLS"}
TOO_MANY_WAIT = "too_many_pipelined_requests"
LINGER_S = 1.0  # for a client that still sends what nobody reads, or says no goodbye
# Notice within a minute that a peer has vanished: seconds of silence, between probes,
# and number of probes.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}


class _Part(Enum):
    """The part of a request that is being read."""

    BETWEEN = auto()  # two requests
    HEAD = auto()
    BODY = auto()


class Connection(HttpToolsProtocol):
    """A guarded connection; its application is called only with whole, small heads.

    Args:
        limits: The gateway's.
        places: Those of all the gateway's connections.
        refusals: Logs those of all the gateway's connections.
        is_retiring: Set when each of the gateway's connections is to close after its next answer.
        uvicorn: The arguments of uvicorn's protocols.
    """

    def __init__(
        self,
        limits: GatewayConfig,
        places: Places,
        refusals: RareLine,
        is_retiring: asyncio.Event,
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._places = places
        self._refusals = refusals
        self._is_retiring = is_retiring
        self._head_bytes = 0  # of the whole parts of the head that is being read
        self._unparsed_bytes = 0  # that came after the last whole head or part of a body
        self._num_headers = 0
        self._part = _Part.BETWEEN
        self._framing: list[bytes] = []  # of a body that the parser takes for another protocol
        self._is_framing = False  # the parser is told of it
        self._is_deaf = False  # reads and drops: the connection is about to close
        self._is_stopping = False  # the gateway
        self._refusal: HttpError | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None  # set once no more answers are written
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it as one too many."""
        super().connection_made(transport)
        self._raw = transport
        self.transport = _GentleTransport(transport, self)  # type: ignore[assignment]
        if sock := transport.get_extra_info("socket"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if not self._places.take(self, self.loop.time()):
            self._refuse(_too_many_connections(self._limits.max_connections))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered, even if others wait."""
        super().connection_lost(exc)
        self._places.leave(self)
        for timer in (self._head_timer, self._write_timer, self._end_timer):
            if timer:
                timer.cancel()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._is_answering:
            assert self._answering
            self._disconnect(self._answering)

    def eof_received(self) -> None:
        """Take a client that sends nothing more for one that has left."""
        self._close()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, unless the connection is about to close."""
        self._unset_keepalive_if_required()
        if self._is_deaf:
            return
        self._unparsed_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or _invalid(error, data))
            return
        if self._unparsed_bytes > self._limits.max_head_bytes:
            self._refuse(_large_head(self._limits.max_head_bytes))
        elif not (self._part is _Part.BODY or self._is_answering or self._head_timer):
            self._await_head()

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:  # no other protocol is spoken here
                data = data[upgrade.args[0] :]
                if self._framing:
                    self._expect_body()

    def _expect_body(self) -> None:
        """Have a new parser read what follows a head as the body that the head announced."""
        head = [b"POST / HTTP/1.1", *self._framing, b"", b""]
        self._framing = []
        self.parser = httptools.HttpRequestParser(self)
        self._is_framing = True
        self.parser.feed_data(b"\r\n".join(head))
        self._is_framing = False

    # Parser callbacks: their errors end the parsing.

    def on_message_begin(self) -> None:
        """Begin a head."""
        if self._is_framing:
            return
        super().on_message_begin()
        self._head_bytes = self._num_headers = self._unparsed_bytes = 0
        self._part = _Part.HEAD

    def on_url(self, url: bytes) -> None:
        """Count a part of the request's target."""
        if self._is_framing:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer of a chunked body is only counted.

        Among the headers, a trailer could name a caller or a host that a proxy before the gateway
        has not seen (RFC 9110, 6.5.1).
        """
        if self._is_framing:
            return
        self._num_headers += 1
        self._count(len(name) + len(value))
        if self._part is _Part.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End a head: the request waits, or is answered."""
        if self._is_framing:
            return
        self._part = _Part.BODY
        self._unparsed_bytes = 0
        self._await_no_head()
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on this connection"
            self._stop_with(HttpError(400, message, code=TOO_MANY_WAIT))
        self._check_head()
        self._places.keep(self)
        if self.parser.should_upgrade():
            self._framing = [
                b"%b: %b" % each
                for each in self.headers
                if each[0] in (b"content-length", b"transfer-encoding")
            ]
        previous = self.cycle
        super().on_headers_complete()
        if self._is_retiring.is_set():
            self.cycle.keep_alive = False
            if previous and not previous.response_started:  # it has not said that it is the last
                previous.keep_alive = True
        if sum(len(cycle.body) for cycle, _ in self.pipeline) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # paused for a request that waits; its client may leave

    def on_body(self, body: bytes) -> None:
        """Take a part of a request's body."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def _check_head(self) -> None:
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            self._stop_with(_no_http(f"its version is {version}"))
        # A proxy before the gateway may have used another one of them (RFC 9112, 3.2).
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            self._stop_with(_no_http(f"it has {num_hosts or 'no'} Host headers"))
        *others, last = _transfer_codings(self.headers) or [b""]
        if others and last == b"chunked":  # otherwise the parser refuses it: it has no end
            self._stop_with(_coded(others))

    def on_message_complete(self) -> None:
        """End a request's body."""
        if self._framing:
            return  # it still comes
        self._part = _Part.BETWEEN
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_head_bytes or self._num_headers > MAX_HEADERS:
            self._stop_with(_large_head(self._limits.max_head_bytes))

    def _stop_with(self, refusal: HttpError) -> None:
        self._refusal = refusal
        raise refusal

    # Ends.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Go on with the next request, unless this one's body is still arriving unread."""
        if self._part is _Part.BODY and not self.pipeline:
            self.server_state.total_requests += 1
            self.close_gently()
            return
        super().on_response_complete()

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        cycle.disconnected = True
        cycle.message_event.set()

    def _await_head(self) -> None:
        seconds = self._limits.head_timeout_s
        self._head_timer = self.loop.call_later(seconds, self._refuse, _slow_head(seconds))

    def _await_no_head(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, refusal: HttpError) -> None:
        """Answer a malformed request and close; only close while another is answered."""
        self._is_deaf = True
        if refusal.code == TOO_MANY_WAIT and self.pipeline:
            self.pipeline[0][0].keep_alive = False  # the newest: older ones are answered, too
            return
        self.pipeline.clear()
        if self._is_answering:
            assert self._answering
            is_in_body = self._part is _Part.BODY and self.cycle is self._answering
            if self._answering.response_started or not is_in_body:
                self._answering.keep_alive = False
                return
            self._disconnect(self._answering)  # it waits for the rest of its body
        self._write_refusal(refusal)
        self.close_gently()

    def give_way(self) -> None:
        """Refuse a client that has sent no request, and close at once, for a newcomer."""
        self._is_deaf = True
        self._write_refusal(_too_many_connections(self._limits.max_connections))
        self._close()

    def _write_refusal(self, refusal: HttpError) -> None:
        self._refusals.write(status=refusal.status, reason=str(refusal))
        body = refusal.body
        head = [
            b"HTTP/1.1 %d %b" % (refusal.status, REASONS[refusal.status]),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            *(f"{name}: {value}".encode() for name, value in refusal.headers),
        ]
        self._raw.write(b"\r\n".join(head) + b"\r\n\r\n" + body)

    def close_gently(self) -> None:
        """Close, but let a client that still sends read the answer first.

        Closing a socket that holds unread data resets the connection, and the client may lose the
        part of the answer that it has not read yet.
        """
        if self.is_closing:
            return
        self._places.keep(self)
        self._await_no_head()  # a refusal could not be written
        if not self._is_deaf and self._part is not _Part.BODY:
            self._close()
            return
        self._is_deaf = True
        if self._raw.can_write_eof():
            self._raw.write_eof()
        self.flow.resume_reading()
        self._end_timer = self.loop.call_later(LINGER_S, self._close)

    def shutdown(self) -> None:
        """Close after the answer that runs, if one does: the gateway stops."""
        self._is_stopping = True
        super().shutdown()
        if self._raw.is_closing():
            self._close()  # it has less time now

    def _close(self) -> None:
        """Close; the client has some time for what it has not read yet.

        Over TLS it must say goodbye, too. Idle clients do not, so a stop does not wait for it; nor
        does a refusal, or silent strangers would keep their places.
        """
        self._await_no_head()
        if self._end_timer:
            self._end_timer.cancel()
        if not self._raw.is_closing():
            self._raw.close()  # once: after a second call, asyncio's TLS cannot abort
        is_brief = self.scheme == "https" and (self._is_stopping or self._is_deaf)
        seconds = LINGER_S if is_brief else self._limits.slow_client_timeout_s
        self._end_timer = self.loop.call_later(seconds, self.abort)

    def end_after_answer(self) -> None:
        """Close after the answer that runs; requests that wait behind it get none."""
        if self._is_answering:
            assert self._answering
            self._answering.keep_alive = False

    def abort(self) -> None:
        """Close at once; what the client has not read is lost."""
        self._raw.abort()

    @property
    def is_closing(self) -> bool:
        """Whether no more answers are written."""
        return self._end_timer is not None or self._raw.is_closing()

    def pause_writing(self) -> None:
        """Give a client that reads nothing some time."""
        super().pause_writing()
        seconds = self._limits.slow_client_timeout_s
        self._write_timer = self.loop.call_later(seconds, self._drop_slow_client)

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        if self._write_timer:
            self._write_timer.cancel()
            self._write_timer = None

    def _drop_slow_client(self) -> None:
        log.info("slow_client", extra=fields(seconds=self._limits.slow_client_timeout_s))
        self.abort()


class _GentleTransport:
    """The transport as uvicorn sees it: only the connection closes it."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self.write = transport.write
        self.get_extra_info = transport.get_extra_info
        self.close = connection.close_gently
        self._connection = connection

    def is_closing(self) -> bool:
        return self._connection.is_closing


def _invalid(error: httptools.HttpParserError, data: bytes) -> HttpError:
    if isinstance(error, httptools.HttpParserCallbackError):
        return _no_http("its target is malformed")  # uvicorn failed to parse it
    for beginning, protocol in _BEGINNINGS.items():
        if data.startswith(beginning):
            return _no_http(f"it begins as {protocol}")
    return _no_http(str(error))


def _no_http(found: str) -> HttpError:
    return HttpError(400, f"this is not an HTTP/1.1 request: {found}", code="invalid_http")


def _transfer_codings(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the transfer codings of a body, in the order in which they were applied."""
    values = b",".join(value for name, value in headers if name == b"transfer-encoding")
    return [coding for each in values.split(b",") if (coding := each.strip().lower())]


def _coded(others: list[bytes]) -> HttpError:
    found = shown(b", ".join(others).decode("latin-1"))
    message = f"transfer-encoding: found {found} before 'chunked'; allowed: 'chunked' alone"
    return HttpError(501, message, param="transfer-encoding", code="unsupported_transfer_coding")


def _large_head(max_bytes: int) -> HttpError:
    message = f"the request's head takes more than {max_bytes} bytes, or {MAX_HEADERS} lines"
    return HttpError(431, message, code="headers_too_large")


def _slow_head(seconds: float) -> HttpError:
    message = f"no whole request line and headers within {seconds:g} s"
    return HttpError(408, message, kind=INVALID, code="request_timeout")


def _too_many_connections(limit: int) -> HttpError:
    return HttpError(
        503,
        f"{limit} connections are open, the limit of this gateway",
        kind=SERVER,
        code="too_many_connections",
        headers=(("retry-after", "1"),),
    )
