"""A gateway all of whose connections are open: who gives way to whom."""

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from credentials.door import front_door
from http_gateway.places import SILENT_S
from tests.http_gateway.raw_http import exchange, is_closed, read_answer, request
from tests.http_gateway.serving import Gateway, gateway, scripted
from tests.pagewire.scripted_service import hello
from tests.support.certificates import Authority

PROBE = request("/health", method="GET")
PROMPT = request("/v1/completions", json.dumps({"prompt": "x"}))
# Longer than the tests take: only newcomers end a connection.
LIMITS = {"head_timeout_s": 60.0, "idle_timeout_s": 60.0, "max_connections": 4}


@pytest.fixture
def served() -> Iterator[Gateway]:
    with gateway(lambda: scripted(hello), **LIMITS) as running:
        yield running


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes connections at the end."""
    with ExitStack() as stack:
        yield stack


def connect(served: Gateway, opened: ExitStack, sends: bytes = b"") -> socket.socket:
    connection = opened.enter_context(socket.create_connection(served.host_and_port, timeout=10))
    connection.sendall(sends)
    return connection


def text(connection: socket.socket) -> str:
    """Ask for an answer on a connection that stays open."""
    connection.sendall(PROMPT)
    answer = read_answer(connection, 0.0)
    assert answer.status == 200, answer.body
    return str(json.loads(answer.body)["choices"][0]["text"])


def is_open(connection: socket.socket) -> bool:
    return not is_closed(connection, within_s=0.05)


def wait_free(served: Gateway) -> None:
    """Wait until a place is free again."""
    deadline = time.monotonic() + 10
    while exchange(served.host_and_port, PROBE).status != 200:
        assert time.monotonic() < deadline


def test_strangers_who_send_nothing_give_way_to_probes_and_clients_the_oldest_first(
    served: Gateway, opened: ExitStack
) -> None:
    client = connect(served, opened)
    assert text(client) == "Hello"
    strangers = [connect(served, opened, sends) for sends in (b"", b"POST /v1/comp", b"")]
    time.sleep(SILENT_S + 0.3)

    probe = connect(served, opened, PROBE)
    assert read_answer(probe, 0.0).status == 200
    refusal = read_answer(strangers[0], 0.0)
    assert (refusal.status, refusal.error["code"]) == (503, "too_many_connections")
    assert is_closed(strangers[0])
    assert list(map(is_open, strangers[1:])) == [True, True]
    assert text(connect(served, opened)) == "Hello"
    assert is_closed(strangers[1])
    assert is_open(strangers[2])
    assert text(client) == "Hello", "it stays between two requests"


def test_who_has_asked_before_never_gives_way(served: Gateway, opened: ExitStack) -> None:
    clients = [connect(served, opened) for _ in range(4)]
    assert {text(each) for each in clients} == {"Hello"}
    time.sleep(SILENT_S + 0.3)

    refusals = [exchange(served.host_and_port, PROBE) for _ in range(3)]

    assert {each.error["code"] for each in refusals} == {"too_many_connections"}
    assert {text(each) for each in clients} == {"Hello"}
    clients[0].close()
    wait_free(served)


def test_who_has_just_come_does_not_give_way_yet(served: Gateway, opened: ExitStack) -> None:
    newcomers = [connect(served, opened) for _ in range(4)]

    assert exchange(served.host_and_port, PROBE).status == 503
    assert text(newcomers[0]) == "Hello"


def test_strangers_who_come_back_at_once_keep_nobody_out(
    served: Gateway, opened: ExitStack
) -> None:
    strangers = [connect(served, opened) for _ in range(4)]
    statuses = []
    for _ in range(3):
        time.sleep(SILENT_S + 0.3)
        statuses.append(exchange(served.host_and_port, PROBE).status)
        # Each that was ended comes back.
        strangers = [each if is_open(each) else connect(served, opened) for each in strangers]

    assert statuses == [200] * 3


def test_who_is_about_to_be_closed_keeps_its_place_until_then(opened: ExitStack) -> None:
    limits = {"head_timeout_s": SILENT_S + 0.1, "max_connections": 1}
    with gateway(lambda: scripted(hello), **limits) as served:
        late = connect(served, opened)
        assert read_answer(late, 0.0).status == 408

        assert exchange(served.host_and_port, PROBE).status == 503
        wait_free(served)


def test_over_tls_strangers_give_way_too(tmp_path: Path, opened: ExitStack) -> None:
    authority = Authority(tmp_path)
    context = ssl.create_default_context(cafile=authority.file)
    door = front_door(authority.settings())
    with gateway(lambda: scripted(hello), door=door, **LIMITS) as served:
        where = {"timeout": 10, "context": context}
        strangers = [http.client.HTTPSConnection(*served.host_and_port, **where) for _ in range(4)]
        for each in strangers:
            opened.callback(each.close)
            each.connect()
        time.sleep(SILENT_S + 0.3)
        client = http.client.HTTPSConnection(*served.host_and_port, **where)
        opened.callback(client.close)
        client.request("GET", "/health")

        assert client.getresponse().status == 200
        assert strangers[0].sock.recv(12) == b"HTTP/1.1 503"
