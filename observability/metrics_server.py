"""Serves the metrics of a process to Prometheus, over HTTP on a separate port."""

import asyncio
import ipaddress
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, TypeVar
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from observability.local_names import is_local_name

T = TypeVar("T")

MAX_SCRAPES = 8  # at a time
CEDE_S = 0.5  # for a connection that must give up its place
DEADLINE_S = 10.0  # for a whole request, from its connection to the last byte of the answer
STATUS_S = 2.0  # for the event loop to answer a scrape
POLL_S = 0.1  # how often the server checks whether it must stop
MAX_LINE_BYTES = 65536  # of a request's first line
MAX_SHOWN_CHARS = 100  # of what a client sent
NAME = "pagewire"  # in the header `server`, where Python would tell its version


def ask_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a loop of another thread: only the loop reads its state.

    Raises:
        TimeoutError: The loop does not answer within STATUS_S, or has ended.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError as error:
        raise TimeoutError("the loop has ended") from error
    return answer.result(STATUS_S)


class MetricsServer:
    """A thread that accepts connections, and one more for each running scrape.

    On the loopback address it answers no web page; see is_local_name.

    Args:
        registry: The metrics, collected in these threads.
        host, port: The address that Prometheus scrapes.
        tls: TLS of the connections; None: they are in clear.
        is_operator: Returns whether a request with this `authorization` header, empty if absent,
            may be answered. Called in these threads; it and the registry's collectors may raise
            TimeoutError.

    Raises:
        OSError: The port is in use or not allowed to this user.

    Attributes:
        port: Where it listens.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        is_operator: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._server = _Server(host, port, tls)
        tell = make_wsgi_app(registry)
        is_local = ipaddress.ip_address(str(self._server.server_address[0])).is_loopback

        def answer(request: Any, start_response: Any) -> Iterable[bytes]:
            plain = ("content-type", "text/plain")
            called = request.get("HTTP_HOST", "")
            if is_local and not is_local_name(called):
                start_response("403 Forbidden", [plain])
                found = ascii(called[:MAX_SHOWN_CHARS])
                return [f"host: found {found}; allowed: an address, or localhost\n".encode()]
            try:
                if is_operator(request.get("HTTP_AUTHORIZATION", "")):
                    request[_PLACE].is_proven = True
                    told: Iterable[bytes] = tell(request, start_response)
                    return told
            except TimeoutError:
                start_response("503 Service Unavailable", [plain])
                return [b"the process does not answer in time\n"]
            start_response("401 Unauthorized", [plain, ("www-authenticate", "Bearer")])
            return [b"metrics are for operators; allowed: the bearer token of one\n"]

        self._server.set_app(answer)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; takes up to POLL_S. Running scrapes finish on their own."""
        self._server.shutdown()
        self._server.server_close()


_PLACE = "pagewire.place"  # of a request's environment


@dataclass(eq=False, slots=True)
class _Place:
    """One connection among those that are served."""

    connection: socket.socket
    address: str  # of the client
    is_proven: bool = False  # the client may read the metrics


class Places:
    """Gives places to connections, so that silent ones keep nobody from reading metrics.

    If all are taken, one is cut off: first of those that have proven nothing, of the address that
    has the most, the oldest. One that is being answered gives way to other addresses only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Semaphore(MAX_SCRAPES)
        self._taken: list[_Place] = []  # the oldest first

    def take(self, connection: socket.socket, address: str) -> _Place | None:
        """Return a place, after CEDE_S at the latest; None: there is none."""
        if not self._free.acquire(blocking=False):
            with self._lock:
                victim = self._victim(address)
            if victim is None:
                return None
            _cut_off(victim.connection)
            if not self._free.acquire(timeout=CEDE_S):
                return None
        place = _Place(connection, address)
        with self._lock:
            self._taken.append(place)
        return place

    def give_back(self, place: _Place) -> None:
        with self._lock:
            self._taken.remove(place)
        self._free.release()

    def _victim(self, address: str) -> _Place | None:
        num_of = Counter(each.address for each in self._taken)
        may = [
            each
            for each in self._taken
            if not each.is_proven or num_of[each.address] > num_of[address] + 1
        ]
        return min(may, key=lambda each: (each.is_proven, -num_of[each.address]), default=None)

    def of(self, connection: Any) -> _Place:
        """Return the place of a connection that has one."""
        with self._lock:
            return next(each for each in self._taken if each.connection is connection)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # a port belongs to one process
    request_queue_size = 128  # behind five strangers, the default, a client waits for a second

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self.places = Places()
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type] # of IPv6 there is more

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own method asks a name server for its name
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> Any:
        request, client_address = super().get_request()
        if self._tls is not None:  # the handshake is the business of the request's own thread
            request = self._tls.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
        return request, client_address

    def process_request(self, request: Any, client_address: Any) -> None:
        place = self.places.take(request, client_address[0])
        if place is None:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread that would
            self.places.give_back(place)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        place = self.places.of(request)
        deadline = threading.Timer(DEADLINE_S, _cut_off, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self.places.give_back(place)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client that leaves, or sends nonsense, is not an error of the process."""


def _cut_off(connection: socket.socket) -> None:
    with suppress(OSError):  # it is over
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not TLS's, which belongs to a thread


class _AnswerHandler(ServerHandler):
    server_software = NAME


class _Handler(WSGIRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Answer one request, as the base class does, under another name."""
        self.raw_requestline = self.rfile.readline(MAX_LINE_BYTES + 1)
        if len(self.raw_requestline) > MAX_LINE_BYTES:
            self.requestline = self.request_version = self.command = ""
            self.send_error(414)
            return
        if self.parse_request():
            environ = self.get_environ()
            handler = _AnswerHandler(self.rfile, self.wfile, self.get_stderr(), environ)  # type: ignore[arg-type]
            handler.request_handler = self  # type: ignore[attr-defined]
            handler.run(self.server.get_app())  # type: ignore[arg-type]

    def version_string(self) -> str:
        return NAME

    def get_environ(self) -> dict[str, Any]:
        return {**super().get_environ(), _PLACE: self.server.places.of(self.connection)}

    def log_message(self, *_: Any) -> None:
        """Log nothing: scrapes come all the time."""
