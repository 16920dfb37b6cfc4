"""HTTP over TLS: who is answered, and what a renewal changes for whom."""

import asyncio
import http.client
import json
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.certificates import gateway_client
from credentials.door import front_door
from http_gateway import connection
from pagewire import Tls
from tests.http_gateway.raw_http import request
from tests.http_gateway.serving import Gateway, gateway, scripted
from tests.pagewire.scripted_service import STOP, hello, response, usage
from tests.support.certificates import Authority, Pair
from tests.support.waiting import wait_until
from tests.support.wall_clock import assert_within


def context_of(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    if pair:
        context.load_cert_chain(*pair)
    return context


def connect(served: Gateway, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    connection = http.client.HTTPSConnection(*served.host_and_port, timeout=10, context=context)
    connection.connect()
    return connection


def models(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/v1/models")
    return str(json.load(connection.getresponse())["data"][0]["id"])


def names(connection: http.client.HTTPSConnection) -> list[str]:
    shown: Any = connection.sock.getpeercert()  # type: ignore[union-attr]
    return [name for _, name in shown["subjectAltName"]]


def test_answers_are_encrypted_and_nobody_is_answered_in_clear(authority: Authority) -> None:
    with gateway(lambda: scripted(hello), door=front_door(authority.settings())) as served:
        body = json.dumps({"prompt": "x"})
        connection = connect(served, context_of(authority))
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert json.load(connection.getresponse())["choices"][0]["text"] == "Hello"

        plain = http.client.HTTPConnection(*served.host_and_port, timeout=10)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            models(plain)


def test_a_client_needs_a_certificate_where_one_is_wanted(
    authority: Authority, tmp_path: Path
) -> None:
    door = front_door(authority.settings(asks_clients=True))
    other = Authority(tmp_path, "other")
    with gateway(lambda: scripted(hello), door=door) as served:
        known = context_of(authority, authority.pair("somebody"))
        assert models(connect(served, known)) == "tiny"
        for pair in (None, other.pair("somebody")):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                models(connect(served, context_of(authority, pair)))


@pytest.mark.parametrize("has_name", [True, False])
def test_new_connections_show_a_renewed_certificate_while_old_ones_live(
    authority: Authority, has_name: bool
) -> None:
    settings = authority.settings()
    with gateway(lambda: scripted(hello), door=front_door(settings)) as served:
        context = context_of(authority)
        context.check_hostname = has_name  # without it no name is sent
        old = connect(served, context)
        assert models(old) == "tiny"

        pair = Pair(settings.front.certificate_file, settings.front.key_file)
        authority.pair("localhost", "127.0.0.1", "renewed", replaces=pair)

        new = connect(served, context)
        assert "renewed" in names(new)
        assert "renewed" not in names(old)
        assert models(old) == models(new) == "tiny"


def test_a_renewal_that_is_half_written_is_told_once_and_not_used(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    settings = authority.settings()
    with gateway(lambda: scripted(hello), door=front_door(settings)) as served:
        Path(settings.front.key_file).write_bytes(b"-----BEGIN PRIVATE KEY-----\nMIGH")
        for _ in range(3):
            assert models(connect(served, context_of(authority))) == "tiny"

    (line,) = [each for each in caplog.records if each.getMessage() == "renewal_refused"]
    told = vars(line)["fields"]
    assert (line.levelno, told["option"]) == (logging.WARNING, "front_tls.key_file")
    assert settings.front.key_file in told["reason"]
    assert "MIGH" not in str(told)


def test_a_client_that_never_greets_is_disconnected_in_time(authority: Authority) -> None:
    door = front_door(authority.settings())
    with (
        gateway(lambda: scripted(hello), door=door, head_timeout_s=0.3) as served,
        socket.create_connection(served.host_and_port, timeout=10) as silent,
    ):
        began = time.monotonic()
        assert silent.recv(1) == b""
        assert_within(time.monotonic() - began, 8)


def test_a_client_that_takes_nothing_is_disconnected(authority: Authority) -> None:
    async def floods(call: Any, context: Any) -> AsyncIterator[Any]:
        for index in range(10_000):
            yield response("x" * 10_000, [1], first_index=index)
            await asyncio.sleep(0.001)

    door = front_door(authority.settings())
    body = b'{"prompt": "x", "stream": true}'
    with (
        gateway(lambda: scripted(floods), door=door, slow_client_timeout_s=0.5) as served,
        socket.socket() as plain,
    ):
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(served.host_and_port)
        with context_of(authority).wrap_socket(plain, server_hostname="localhost") as silent:
            silent.sendall(request("/v1/completions", body))
            wait_until(served.backend.cancelled.is_set)


def test_a_client_that_is_idle_holds_up_no_stop(authority: Authority) -> None:
    door = front_door(authority.settings())
    with gateway(lambda: scripted(hello), door=door) as served:
        idle = connect(served, context_of(authority))
        assert models(idle) == "tiny"
        began = time.monotonic()
        served.run(served.server.stop(8.0))
        assert_within(time.monotonic() - began, 4)
        idle.close()


def test_a_client_that_still_sends_gets_its_refusal(authority: Authority) -> None:
    # TLS has no half-closed connections; what lingers must end all the same.
    door = front_door(authority.settings())
    with gateway(lambda: scripted(hello), door=door, max_head_bytes=500) as served:
        connection = connect(served, context_of(authority))
        connection.request("GET", "/" + "x" * 2000)

        assert connection.getresponse().status == 431


@pytest.mark.parametrize("asks_clients", [False, True])
def test_a_renewal_that_its_router_does_not_use_leaves_it_connected(
    authority: Authority, asks_clients: bool
) -> None:
    settings = authority.settings(asks_clients=asks_clients)
    door = front_door(settings)
    pair = Pair(settings.front.certificate_file, settings.front.key_file)
    whole = Path(pair.certificate_file).read_bytes()
    with gateway(lambda: scripted(hello, door), router_tls=gateway_client(settings)) as served:

        def asked() -> list[int]:
            """Make a call, which begins on a new connection if what is trusted has changed."""
            connection = http.client.HTTPConnection(*served.host_and_port)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/tokenize", json.dumps({"prompt": "x"}), headers)
            return list(json.load(connection.getresponse())["tokens"])

        assert asked()
        other = authority.pair("localhost")
        Path(pair.certificate_file).write_bytes(Path(other.certificate_file).read_bytes())
        assert asked(), "its key is not yet there"
        authority.pair("localhost", replaces=pair, days=(-2, -1))
        assert asked(), "it has expired"
        Path(pair.certificate_file).write_bytes(whole)
        assert asked(), "its key is another's now"
        authority.pair("localhost", "127.0.0.1", replaces=pair)
        assert asked(), "it is whole"
        authority.pair("other.example", replaces=pair)
        assert asked(), "it has other names"


def test_it_connects_to_a_router_over_tls(authority: Authority) -> None:
    settings = authority.settings(asks_clients=True)
    tls = gateway_client(settings)
    door = front_door(settings)
    with gateway(lambda: scripted(hello, door), router_tls=tls) as served:
        assert models(http.client.HTTPConnection(*served.host_and_port)) == "tiny"

    with gateway(lambda: scripted(hello), router_tls=Tls(authority_file=authority.file)) as served:
        connection = http.client.HTTPConnection(*served.host_and_port)
        connection.request("GET", "/v1/models")
        answer = connection.getresponse()
        assert (answer.status, b"does not speak TLS" in answer.read()) == (503, True)


def test_a_refused_client_that_says_no_goodbye_is_soon_gone(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    door = front_door(authority.settings())
    with gateway(lambda: scripted(hello), door=door, max_head_bytes=500) as served:
        client = connect(served, context_of(authority)).sock
        client.sendall(b"GET /%b HTTP/1.1\r\n\r\n" % (b"x" * 2000))
        assert client.recv(100).startswith(b"HTTP/1.1 431 ")
        began = time.monotonic()
        while served.server._server.server_state.connections:  # type: ignore[union-attr]
            assert_within(time.monotonic() - began, 4)
            time.sleep(0.01)


def test_a_client_that_pauses_gets_the_rest_of_its_last_answer(authority: Authority) -> None:
    async def megabytes(request: Any, context: Any) -> AsyncIterator[Any]:
        for index in range(5):
            yield response("x" * 1_000_000, [1], first_index=index)
        yield response("", [1], first_index=5, finish_reason=STOP, usage=usage())

    door = front_door(authority.settings())
    with gateway(lambda: scripted(megabytes), door=door) as served:
        client = connect(served, context_of(authority))
        headers = {"content-type": "application/json", "connection": "close"}
        client.request("POST", "/v1/completions", json.dumps({"prompt": "x"}), headers)
        answer = client.getresponse()
        time.sleep(connection.LINGER_S + 0.5)

        assert len(json.load(answer)["choices"][0]["text"]) == 5_000_000
