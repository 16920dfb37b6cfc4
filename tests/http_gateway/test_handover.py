"""A gateway takes over the listener of another one, on real sockets: no client notices."""

import asyncio
import json
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from credentials.door import front_door
from http_gateway.config import GatewayConfig
from http_gateway.handover import PASS_S, NotPassedOn, receive_listener, send_listener
from http_gateway.server import GatewayServer
from tests.http_gateway.raw_http import RawAnswer, exchange, is_closed, read_answer, request
from tests.http_gateway.serving import Gateway, gateway, scripted
from tests.pagewire.scripted_service import two_words, waiting_for
from tests.support.certificates import Authority
from tests.support.virtual_time import run_virtual
from tests.support.waiting import wait_until

TEXT = "/v1/completions"
LIMITS = {"head_timeout_s": 0.5}  # how long a gateway that retires looks for late connections


def ask_text(*, stream: bool = False) -> bytes:
    return request(TEXT, json.dumps({"prompt": "x", "stream": stream}))


@contextmanager
def begun_stream(served: Gateway) -> Iterator[socket.socket]:
    """The connection of a client whose stream has reached the router."""
    with socket.create_connection(served.host_and_port, timeout=10) as stream:
        stream.sendall(ask_text(stream=True))
        wait_until(lambda: served.backend.requests)
        yield stream


def retire(served: Gateway, grace_s: float) -> "Future[None]":
    return asyncio.run_coroutine_threadsafe(served.server.retire(grace_s), served.loop)


class Load:
    """Clients that ask again and again, and what they have got; an error of any ends in `stop`."""

    def __init__(self, served: Gateway) -> None:
        self._address = served.host_and_port
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor()
        clients = [self._on_new_connections, self._on_kept_connections] * 2
        self.answers: list[RawAnswer] = []
        self._running = [self._threads.submit(each) for each in clients]

    def _on_new_connections(self) -> None:
        while not self._is_over.is_set():
            self.answers.append(exchange(self._address, ask_text()))

    def _on_kept_connections(self) -> None:
        while not self._is_over.is_set():
            with socket.create_connection(self._address, timeout=5.0) as connection:
                while not self._is_over.is_set():
                    connection.sendall(ask_text())
                    answer = read_answer(connection, 0.0)
                    self.answers.append(answer)
                    if answer.headers.get("connection") == "close":
                        break

    def stop(self) -> None:
        self._is_over.set()
        self._threads.shutdown()
        for each in self._running:
            each.result()
        assert all(each.status == 200 for each in self.answers)


@contextmanager
def load(served: Gateway) -> Iterator[Load]:
    asking = Load(served)
    try:
        yield asking
    finally:
        asking.stop()


def test_no_request_fails_while_a_gateway_takes_over_and_a_running_stream_ends_whole() -> None:
    release = threading.Event()
    with (
        gateway(lambda: scripted(waiting_for(release)), **LIMITS) as old,
        begun_stream(old) as stream,
    ):
        old.backend.script = two_words  # for what comes from now on
        with load(old) as asking, gateway(lambda: scripted(two_words), predecessor=old) as new:
            assert new.address == old.address
            wait_until(lambda: new.backend.requests)
            ending = retire(old, 30.0)
            number = len(asking.answers)
            wait_until(lambda: len(asking.answers) > number + 200)
            release.set()
            answer = read_answer(stream, 0.0)

            assert b"there" in answer.body
            assert b"[DONE]" in answer.body
            stream.sendall(ask_text())  # at once, as a client does that keeps its connection
            assert read_answer(stream, 0.0).headers["connection"] == "close"
            ending.result(5)
            asking.stop()
            assert len(old.backend.requests) > 1


@pytest.mark.parametrize("has_asked", [False, True])
def test_a_connection_that_was_idle_is_answered_once_more_and_then_closes(has_asked: bool) -> None:
    with (
        gateway(lambda: scripted(two_words), **LIMITS) as served,
        socket.create_connection(served.host_and_port, timeout=10) as client,
    ):
        if has_asked:
            client.sendall(ask_text())
            assert "connection" not in read_answer(client, 0.0).headers
        wait_until(lambda: served.server._server.server_state.connections)
        ending = retire(served, 30.0)
        time.sleep(2 * LIMITS["head_timeout_s"] if has_asked else 0.2)
        client.sendall(3 * ask_text())  # pipelined

        answers = b""
        while more := client.recv(65536):
            answers += more
        assert answers.count(b"HTTP/1.1 200") == 3
        assert answers.count(b"connection: close") == 1
        ending.result(5)


def test_a_connection_that_is_just_being_accepted_when_its_gateway_retires_is_served() -> None:
    with gateway(lambda: scripted(two_words), **LIMITS) as served:
        clients: Future[socket.socket] = Future()

        async def connect_and_retire() -> None:
            client = socket.create_connection(served.host_and_port, timeout=10)
            await asyncio.sleep(0)  # the event loop sees it
            await asyncio.sleep(0)  # and accepts it, but has no transport yet
            clients.set_result(client)
            await served.server.retire(30.0)

        ending = asyncio.run_coroutine_threadsafe(connect_and_retire(), served.loop)
        with clients.result(5) as client:
            client.sendall(ask_text())
            assert read_answer(client, 0.0).status == 200
        ending.result(5)


def test_what_outlasts_the_grace_of_a_gateway_that_retires_ends_as_when_it_stops() -> None:
    with (
        gateway(lambda: scripted(waiting_for(threading.Event())), **LIMITS) as served,
        socket.create_connection(served.host_and_port, timeout=10) as idle,
        begun_stream(served) as stream,
    ):
        retire(served, 0.3).result(10)

        assert b"the gateway stopped" in read_answer(stream, 0.0).body
        assert is_closed(idle)


def test_a_connection_that_begins_tls_when_its_gateway_has_retired_is_served(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    context = ssl.create_default_context(cafile=authority.file)
    door = front_door(authority.settings())
    with gateway(lambda: scripted(two_words), door=door, **LIMITS) as served:
        with socket.create_connection(served.host_and_port, timeout=10) as plain:
            time.sleep(0.1)  # it is accepted
            ending = retire(served, 30.0)
            time.sleep(0.2)
            with context.wrap_socket(plain, server_hostname="localhost") as client:
                client.sendall(ask_text())
                assert read_answer(client, 0.0).status == 200
        ending.result(5)


def test_a_gateway_that_dies_while_its_predecessor_still_answers_comes_back_at_its_port() -> None:
    """Ray starts it again; the predecessor has closed its copy of the listener."""
    release = threading.Event()
    with (
        gateway(lambda: scripted(waiting_for(release)), **LIMITS) as old,
        begun_stream(old) as stream,
    ):
        with gateway(lambda: scripted(two_words), predecessor=old):
            ending = retire(old, 30.0)
            time.sleep(0.1)

        async def start_again() -> None:
            host, port = old.host_and_port
            config = GatewayConfig()
            again = GatewayServer(lambda: asyncio.sleep(0), config=config, host=host, port=port)
            assert await again.start() == old.address
            await again.stop(0.0)

        asyncio.run(start_again())
        release.set()
        assert b"[DONE]" in read_answer(stream, 0.0).body
        stream.close()
        ending.result(5)


# The way from one to the other


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Those in which processes met; none may be left."""
    made: list[str] = []
    mkdtemp = tempfile.mkdtemp

    def note(*arguments: Any, **named: Any) -> str:
        made.append(mkdtemp(*arguments, **named))
        assert os.stat(made[-1]).st_mode & 0o777 == 0o700
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", note)
    yield made
    assert made
    assert not [each for each in made if os.path.exists(each)]


def test_who_waited_in_the_queue_of_a_listener_is_served_from_its_copy(
    listener: socket.socket, folders: list[str]
) -> None:
    async def send(path: str) -> None:
        send_listener(listener, path)

    with socket.create_connection(listener.getsockname()) as client:
        with asyncio.run(receive_listener(send)) as received:
            listener.close()
            assert not os.get_inheritable(received.fileno())
            accepted, _ = received.accept()
            with accepted:
                accepted.sendall(b"served")
        assert client.recv(100) == b"served"


def test_a_listener_that_does_not_come_in_time_is_told(folders: list[str]) -> None:
    async def main() -> None:
        with pytest.raises(NotPassedOn, match="did not pass on its listener within 10 s"):
            await receive_listener(lambda path: asyncio.sleep(2 * PASS_S))
        assert asyncio.get_running_loop().time() == pytest.approx(PASS_S)

    run_virtual(main())


def test_an_error_of_who_is_asked_is_told_as_it_is(folders: list[str]) -> None:
    async def fail(path: str) -> None:
        raise ValueError("it has ended")

    with pytest.raises(ValueError, match="it has ended"):
        asyncio.run(receive_listener(fail))


def test_a_listener_is_neither_given_to_another_user_nor_taken_from_one(
    listener: socket.socket, folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    told = f"found {own}; allowed: {own + 1}"

    async def refused(path: str) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(NotPassedOn, match=told):
            send_listener(listener, path)

    async def passed(path: str) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: own)
        send_listener(listener, path)
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)

    for ask in (refused, passed):
        with pytest.raises(NotPassedOn, match=told):
            asyncio.run(receive_listener(ask))


def test_who_asks_a_gateway_too_late_gets_nothing(
    listener: socket.socket, folders: list[str]
) -> None:
    paths: list[str] = []

    async def note(path: str) -> None:
        paths.append(path)
        send_listener(listener, path)

    asyncio.run(receive_listener(note)).close()
    with pytest.raises(FileNotFoundError):  # its successor has given up
        send_listener(listener, paths[0])
    listener.close()
    with pytest.raises(OSError, match="Bad file descriptor"):  # it has retired
        asyncio.run(receive_listener(note))
