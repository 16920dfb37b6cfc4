"""The server of metrics: what it tells, to whom, and for how long."""

import asyncio
import socket
import ssl
import threading
import time
import urllib.error
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from credentials.door import front_door
from observability import metrics_server
from observability.metrics_server import MAX_SCRAPES, MetricsServer, Places, ask_loop
from tests.support.certificates import Authority
from tests.support.scrapes import samples, scrape
from tests.support.wall_clock import assert_within


@contextmanager
def serving(registry: CollectorRegistry, **options: Any) -> Iterator[str]:
    server = MetricsServer(registry, "127.0.0.1", 0, **options)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()


def test_a_port_of_its_own_tells_what_the_registry_holds_until_it_is_closed() -> None:
    registry = CollectorRegistry()
    counter = Counter("pagewire_things", "Things.", registry=registry)
    with serving(registry) as address:
        counter.inc(3)
        assert samples(scrape(address))["pagewire_things_total",] == 3
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(address)


def ask(address: str, request: bytes) -> tuple[str, str]:
    """Return head and body of the answer to a request made by hand."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        (b"localhost:9400", True),
        (b"127.0.0.1:9400", True),
        (b"[::1]:9400", True),
        (b"", True),
        (b"evil.example.org:9400", False),
        (b"localhost.evil.example.org", False),
        (b"127.0.0.1.evil.example.org", False),
        (b"\xe9", False),
    ],
)
@pytest.mark.parametrize("home", ["127.0.0.1", "::1", "0.0.0.0"])
def test_a_page_whose_name_leads_to_this_host_reads_no_metrics(
    home: str, host: bytes, is_answered: bool
) -> None:
    server = MetricsServer(CollectorRegistry(), home, 0)
    try:
        address = f"{home}:{server.port}"
        head, body = ask(address, b"GET /metrics HTTP/1.1\r\nhost: %b\r\n\r\n" % host)
    finally:
        server.close()

    status, is_open = head.split()[1], home == "0.0.0.0"  # other hosts may call it by any name
    assert status == ("200" if is_answered or is_open else "403")
    assert body == "" or body.endswith("; allowed: an address, or localhost\n")


def test_a_caller_without_a_host_is_no_browser() -> None:
    with serving(CollectorRegistry()) as address:
        assert ask(address, b"GET /metrics HTTP/1.0\r\n\r\n")[0].split()[1] == "200"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /metrics HTTP/1.1", 200),
        (b"GET /metrics and more HTTP/1.1", 400),
        (b"GET /metrics?broken HTTP/1.1", 500),
    ],
)
def test_an_answer_does_not_tell_the_version_of_python(
    request_line: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down() -> Iterable[Metric]:
        raise ValueError("a bug")

    registry = CollectorRegistry()
    if b"broken" in request_line:
        monkeypatch.setattr(registry, "collect", break_down)
    with serving(registry) as address:
        head, _ = ask(address, request_line + b"\r\n\r\n")

    assert head.split()[1] == str(status)
    assert "server: pagewire" in head.lower().split("\r\n")


def test_metrics_travel_encrypted_where_the_door_says_so(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = front_door(authority.settings()).ssl_context("127.0.0.1")
    trusting = ssl.create_default_context(cafile=authority.file)
    with serving(CollectorRegistry(), tls=tls) as address:
        assert scrape(address, trusting) == ""
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            scrape(address)


@pytest.mark.parametrize("home", ["127.0.0.1", "127.0.0.2"])
def test_strangers_who_say_nothing_keep_nobody_from_reading_metrics(home: str) -> None:
    with serving(CollectorRegistry()) as address, ExitStack() as stack:
        host, _, port = address.rpartition(":")
        silent = [
            stack.enter_context(
                socket.create_connection((host, int(port)), source_address=(home, 0))
            )
            for _ in range(50)
        ]
        began = time.monotonic()

        assert scrape(address) == ""

        assert_within(time.monotonic() - began, 3.0)  # without giving way it takes ten
        assert silent[-MAX_SCRAPES - 1].recv(1) == b"", "more than there are places"
        silent[-1].settimeout(0)
        with pytest.raises(BlockingIOError):  # of those that stay
            silent[-1].recv(1)


@pytest.mark.parametrize(("others", "has_place"), [("10.0.0.1", False), ("10.0.0.2", True)])
def test_who_is_answered_gives_way_to_other_addresses_only(others: str, has_place: bool) -> None:
    places = Places()
    ours = [socket.socketpair() for _ in range(MAX_SCRAPES)]
    for connection, _ in ours:
        place = places.take(connection, "10.0.0.1")
        assert place is not None
        place.is_proven = True

    def give_way() -> None:
        assert ours[0][0].recv(1) == b""  # the oldest was cut off
        places.give_back(places.of(ours[0][0]))

    with ThreadPoolExecutor(1) as pool, socket.socket() as newcomer:
        leaving = pool.submit(give_way) if has_place else None
        assert (places.take(newcomer, others) is not None) == has_place
        if leaving:
            leaving.result()
    for connection in chain.from_iterable(ours):
        connection.close()


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_stranger_who_says_little_is_cut_off(
    has_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE_S", 0.05)
    settings = Authority(tmp_path).settings()
    tls = front_door(settings).ssl_context("127.0.0.1") if has_tls else None
    with serving(CollectorRegistry(), tls=tls) as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.send(b"\x16" if has_tls else b"G")
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""


def test_a_collector_that_fails_costs_one_scrape() -> None:
    class Failing(Collector):
        is_broken = True

        def collect(self) -> Iterable[Metric]:
            if self.is_broken:
                raise TimeoutError
            return ()

    failing = Failing()
    registry = CollectorRegistry()
    registry.register(failing)
    with serving(registry) as address:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            scrape(address)
        failing.is_broken = False
        assert scrape(address) == ""


def test_a_port_belongs_to_one_process() -> None:
    with serving(CollectorRegistry()) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(OSError, match="in use"):
            MetricsServer(CollectorRegistry(), "127.0.0.1", port)


def test_a_loop_that_does_not_answer_costs_a_scrape_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []

    async def scenario() -> None:
        loop, is_over = asyncio.get_running_loop(), threading.Event()

        def ask() -> None:
            with pytest.raises(TimeoutError):
                ask_loop(loop, lambda: 1)
            is_over.set()

        with monkeypatch.context() as patch:
            patch.setattr(metrics_server, "STATUS_S", 0.05)
            asking = asyncio.create_task(asyncio.to_thread(ask))
            await asyncio.sleep(0)
            assert is_over.wait(10), "it gives up while the loop is busy"
            await asking
        told.append(await asyncio.to_thread(ask_loop, loop, lambda: 2))

    asyncio.run(scenario())

    assert told == [2]


def test_a_loop_that_has_ended_costs_a_scrape_and_no_more() -> None:
    loop = asyncio.new_event_loop()
    loop.close()

    with pytest.raises(TimeoutError, match="the loop has ended"):
        ask_loop(loop, lambda: 1)
