"""Ends of all kinds: of clients, of routers, of calls and of the gateway itself."""

import asyncio
import json
import logging
import os
import resource
import socket
import threading
import time

import grpc
import openai
import pytest
from google.rpc import error_details_pb2

from http_gateway.answers import Answers
from http_gateway.config import GatewayConfig
from http_gateway.found_routers import FoundRouters
from http_gateway.server import GatewayServer
from observability.logs import ATTRIBUTE
from pagewire import ClosedError, UnavailableError, calls, routers
from pagewire.routers import Connector
from router import front
from tests.http_gateway.bodies import BODIES, CHAT, RESPONSE, TEXT, body_of
from tests.http_gateway.canaries import singing
from tests.http_gateway.conftest import openai as client_of
from tests.http_gateway.parrot import parrot, write_folder
from tests.http_gateway.raw_http import exchange, is_closed, read_answer, request
from tests.http_gateway.serving import gateway, real_router, scripted
from tests.pagewire.scripted_service import (
    STOP,
    ScriptedService,
    abort,
    never_ends,
    response,
    retry_after,
    serving,
    two_words,
    usage,
    violation,
    waiting_for,
)
from tests.support.virtual_time import run_virtual
from tests.support.waiting import wait_until
from tests.support.wall_clock import assert_within, on_this_host


async def never_begins(call, context):
    await asyncio.sleep(60)
    yield


async def floods(call, context):
    for index in range(10_000):
        yield response("x" * 10_000, [1], first_index=index)
        await asyncio.sleep(0.001)


def test_calls_outlive_the_connections_that_a_router_ends_for_their_age(monkeypatch, tmp_path):
    monkeypatch.setattr(front, "CONNECTION_AGE_MS", 200)
    for module in (front, calls):
        monkeypatch.setattr(module, "MAX_STREAM_AGE_S", 0.2)
    folder = write_folder(tmp_path)
    router = real_router(parrot(folder), folder, request_timeout_s=3.0)
    with gateway(lambda: router) as served, singing(served):
        time.sleep(4.5)  # the first connection ends after 3.6 s
        link = served.server._link
        assert len(link._routers._streams) <= 3, "of those that are over none is kept"


# Clients that leave


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("script", [never_begins, never_ends])
def test_a_client_that_leaves_cancels_its_call_at_the_router(path, is_stream, script):
    with gateway(lambda: scripted(script)) as served:
        with socket.create_connection(served.host_and_port) as connection:
            connection.sendall(request(path, body_of(path, stream=is_stream)))
            wait_until(lambda: served.backend.requests)
        wait_until(served.backend.cancelled.is_set)


def test_a_client_that_leaves_is_noticed_although_it_has_sent_its_next_request():
    with gateway(lambda: scripted(never_begins)) as served:
        with socket.create_connection(served.host_and_port) as connection:
            connection.sendall(request(TEXT, body_of(TEXT)))
            wait_until(lambda: served.backend.requests)
            connection.sendall(request("/health", method="GET"))
        wait_until(served.backend.cancelled.is_set)


def test_no_more_is_read_behind_requests_whose_bodies_are_many_bytes():
    body = request(TEXT, body_of(TEXT, prompt="x" * 60_000))
    with (
        gateway(lambda: scripted(never_begins)) as served,
        socket.create_connection(served.host_and_port) as client,
    ):
        client.sendall(request(TEXT, body_of(TEXT)))
        wait_until(lambda: served.backend.requests)
        (connection,) = served.server._server.server_state.connections
        for num_waiting in (1, 2, 3):
            client.sendall(body)
            wait_until(lambda num=num_waiting: len(connection.pipeline) == num)

        wait_until(lambda: connection.flow.read_paused)


def test_a_head_that_grows_while_another_request_is_answered_ends_the_connection():
    end = threading.Event()

    async def script(call, context):
        while not end.is_set():
            await asyncio.sleep(0.01)
        yield response("x", [1], finish_reason=STOP, usage=usage())

    with (
        gateway(lambda: scripted(script)) as served,
        socket.create_connection(served.host_and_port, timeout=10) as connection,
    ):
        connection.sendall(request(TEXT, body_of(TEXT)))
        wait_until(lambda: served.backend.requests)
        connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * 300_000)
        end.set()

        assert read_answer(connection, 0.0).status == 200
        assert is_closed(connection)


@pytest.mark.parametrize("who", ["idle gateway", "client"])
def test_a_closed_connection_whose_client_reads_nothing_is_given_up(who):
    """Less is unread than makes the gateway's writers wait."""
    # Between two requests a busy host may pause, but not for so long.
    limits = {"idle_timeout_s": 2.0, "slow_client_timeout_s": 0.3}
    with gateway(lambda: scripted(two_words), **limits) as served:
        state = served.server._server.server_state
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(served.host_and_port)
            connection = wait_until(lambda: next(iter(state.connections), None))
            while not connection._raw.get_write_buffer_size():
                num_answers = state.total_requests
                client.sendall(request("/page/cluster.js", method="GET"))
                wait_until(lambda before=num_answers: state.total_requests > before)
            assert not connection.flow.write_paused
            if who == "client":
                client.shutdown(socket.SHUT_WR)

            wait_until(lambda: not state.connections)


def waiting(cancelled, fails=()):
    """A script whose calls wait until they are cancelled, and are noted then; some fail at once."""

    async def script(call, context):
        if call.text in fails:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "no worker")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(call.text)
            raise
        yield

    return script


def test_a_client_that_leaves_cancels_all_calls_of_a_batch():
    cancelled = []
    with gateway(lambda: scripted(waiting(cancelled))) as served:
        with socket.create_connection(served.host_and_port) as connection:
            connection.sendall(request(TEXT, body_of(TEXT, prompt=["a", "b", "c"])))
            wait_until(lambda: len(served.backend.requests) == 3)
        wait_until(lambda: sorted(cancelled) == ["a", "b", "c"])


def test_a_call_of_a_batch_that_fails_ends_the_others():
    cancelled = []
    with gateway(lambda: scripted(waiting(cancelled, fails="b"))) as served:
        answer = exchange(
            served.host_and_port, request(TEXT, body_of(TEXT, prompt=["a", "b", "c"]))
        )
        assert answer.status == 503
        wait_until(lambda: sorted(cancelled) == ["a", "c"])


def test_a_call_of_a_batch_that_fails_ends_the_others_though_nobody_reads():
    async def scenario():
        ends = []
        answers = Answers(2, cancel=lambda: ends.append("cancelled"), tick_s=1.0)
        answers.add(0, "text")
        answers.end(1, UnavailableError("no worker", code="UNAVAILABLE"))

        assert ends == ["cancelled"]
        assert await answers.next() == [(0, "text")]
        with pytest.raises(UnavailableError):
            await answers.next()
        answers.close()

    run_virtual(scenario())


def test_a_client_that_takes_nothing_is_disconnected_and_holds_up_nobody():
    async def script(call, context):
        follow = floods if call.text == "flood" else two_words
        async for each in follow(call, context):
            yield each

    backend = gateway(lambda: scripted(script), slow_client_timeout_s=0.5)
    with backend as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(served.host_and_port)
        connection.sendall(request(TEXT, body_of(TEXT, prompt="flood", stream=True)))
        wait_until(lambda: served.backend.requests)
        for _ in range(10):
            answer = exchange(served.host_and_port, request(TEXT, body_of(TEXT)))
            assert_within(answer.seconds, on_this_host(1))
            time.sleep(0.05)
        wait_until(served.backend.cancelled.is_set)
        assert is_closed(connection)


# Errors of the router


ERRORS = [
    (grpc.StatusCode.RESOURCE_EXHAUSTED, (retry_after(1.2),), 429, "rate_limit_exceeded"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, (), 429, "rate_limit_exceeded"),
    (grpc.StatusCode.UNAVAILABLE, (), 503, "unavailable"),
    (grpc.StatusCode.ABORTED, (), 503, "unavailable"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, (), 504, "timeout"),
    (grpc.StatusCode.CANCELLED, (), 499, "cancelled"),
    (grpc.StatusCode.INTERNAL, (), 500, "internal_error"),
    (grpc.StatusCode.UNKNOWN, (), 500, "internal_error"),
    (grpc.StatusCode.UNAUTHENTICATED, (), 401, "invalid_api_key"),
    (grpc.StatusCode.PERMISSION_DENIED, (), 403, "permission_denied"),
    (grpc.StatusCode.NOT_FOUND, (), 404, "model_not_found"),
    (grpc.StatusCode.INVALID_ARGUMENT, (violation("sampling.top_p", "bad"),), 400, None),
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        (violation("prompt.text", "bad", "PROMPT_TOO_LONG"),),
        400,
        "context_length_exceeded",
    ),
]


@pytest.fixture(scope="module")
def failing():
    """A gateway whose router fails as the prompt says: by number, after some text or at once."""

    async def script(call, context):
        text = call.text or call.chat.messages[-1].content
        number, _, when = text.partition(" ")
        code, details, _, _ = ERRORS[int(number)]
        if when == "late":
            yield response("some text", [1])
        await abort(context, code, "told why", *details)

    with gateway(lambda: scripted(script)) as served:
        yield served


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_an_error_before_the_first_token_has_its_status(failing, number):
    _, details, status, code = ERRORS[number]
    for is_stream in (False, True):
        body = body_of(TEXT, prompt=str(number), stream=is_stream)
        answer = exchange(failing.host_and_port, request(TEXT, body))

        assert (answer.status, answer.error["code"]) == (status, code)
        words = f"{answer.error['param']}: bad" if status == 400 else "told why"
        assert answer.error["message"].endswith(words)
        assert answer.headers.get("retry-after") == ("2" if details and status == 429 else None)
        if details and status == 429:
            assert answer.headers["retry-after-ms"] == "1200"
        kind = "rate_limit_error" if status == 429 else "server_error"
        assert answer.error["type"] == (
            "invalid_request_error" if status in (400, 401, 403, 404) else kind
        )


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_error_in_the_middle_of_a_stream_is_an_event(failing, path):
    prompt = {"prompt": "2 late"}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "2 late"}]}
    body = json.dumps({**prompt, "stream": True})
    answer = exchange(failing.host_and_port, request(path, body))

    events = [each for each in answer.body.split(b"\n\n") if b"data: " in each]
    assert answer.status == 200
    assert b"some text" in answer.body
    error = json.loads(events[-1].partition(b"data: ")[2])["error"]
    assert (error["code"], error["message"]) == ("unavailable", "told why")
    assert b"[DONE]" not in answer.body, "nothing looks like a whole answer"


def test_openais_client_raises_what_a_stream_ends_with(failing):
    stream = client_of(failing).completions.create(model="tiny", prompt="2 late", stream=True)

    with pytest.raises(openai.APIError, match="told why"):
        for _ in stream:
            pass


def test_openais_client_raises_its_errors_by_status(failing):
    kinds = {
        429: openai.RateLimitError,
        401: openai.AuthenticationError,
        403: openai.PermissionDeniedError,
        503: openai.InternalServerError,
    }
    for number, (_, _, status, _) in enumerate(ERRORS):
        if status in kinds:
            with pytest.raises(kinds[status], match="told why"):
                client_of(failing).completions.create(model="tiny", prompt=str(number))


def test_a_response_that_fails_in_the_middle_says_so_by_its_own_event(failing):
    stream = client_of(failing).responses.create(model="tiny", input="2 late", stream=True)

    last = list(stream)[-1]

    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.message == "told why"


# Waiting


def test_a_stream_that_waits_gets_comments_which_clients_skip():
    async def script(call, context):
        await asyncio.sleep(1)
        async for each in two_words(call, context):
            yield each

    with gateway(lambda: scripted(script), comment_period_s=0.1) as served:
        raw = exchange(served.host_and_port, request(TEXT, body_of(TEXT, stream=True)))
        stream = client_of(served).completions.create(model="tiny", prompt="x", stream=True)

        assert raw.body.count(b": waiting\n\n") >= 2
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert raw.headers["cache-control"] == "no-cache"
        assert "".join(each.choices[0].text for each in stream) == "Hello there"


def test_an_error_behind_a_comment_is_an_event():
    is_commented = threading.Event()

    async def script(call, context):
        while not is_commented.is_set():
            await asyncio.sleep(0.01)
        await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield

    with gateway(lambda: scripted(script), comment_period_s=0.1) as served:
        for path, sign in ((TEXT, b'"code": "rate_limit_exceeded"'), (RESPONSE, b"failed")):
            is_commented.clear()
            with socket.create_connection(served.host_and_port, timeout=10) as connection:
                connection.sendall(request(path, body_of(path, stream=True)))
                received = b""
                while sign not in received:
                    data = connection.recv(65536)
                    assert data, received
                    received += data
                    if b": waiting" in received:
                        is_commented.set()

            assert received.startswith(b"HTTP/1.1 200 ")


def test_a_router_that_hangs_is_given_up_when_its_time_is_over():
    with gateway(lambda: scripted(never_begins), request_timeout_s=0.1) as served:
        answer = exchange(served.host_and_port, request(TEXT, body_of(TEXT)))

        assert (answer.status, answer.error["code"]) == (504, "timeout")
        wait_until(served.backend.cancelled.is_set)


def test_the_router_is_asked_to_gather_what_nobody_waits_for():
    async def at_once(call, context):
        yield response("x", [1], finish_reason=STOP, usage=usage())

    for config, asked in (({}, 0), ({"stream_interval_s": 0.2}, 200)):
        with gateway(lambda: scripted(at_once), **config) as served:
            for is_stream in (True, False):
                body = body_of(TEXT, stream=is_stream)
                assert exchange(served.host_and_port, request(TEXT, body)).status == 200
            assert served.backend.intervals_ms == [asked, 1000]


# Routers that leave


def test_a_router_that_is_away_is_told_at_once_and_found_when_it_comes_back(monkeypatch):
    monkeypatch.setattr(routers, "RESTART_S", 0.2)

    async def scenario():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        where = [f"127.0.0.1:{port}"]

        async def find_routers():
            return where

        server = GatewayServer(find_routers, config=GatewayConfig(), host="127.0.0.1", port=0)
        host, _, http_port = (await server.start()).rpartition(":")
        address = (host, int(http_port))

        async def ask(path=TEXT):
            return await asyncio.to_thread(exchange, address, request(path, body_of(path)))

        try:
            away = await ask()
            assert (away.status, away.error["code"]) == (503, "unavailable")
            assert_within(away.seconds, 1)
            health = await asyncio.to_thread(exchange, address, request("/health", method="GET"))
            ready = await asyncio.to_thread(exchange, address, request("/ready", method="GET"))
            assert (health.status, ready.status) == (200, 503)
            for _ in range(2):  # another port each time, as that of a router that Ray starts anew
                async with serving(two_words) as (router, _):
                    where[0] = router
                    assert (await ask()).status == 200
                    assert (await ask()).status == 200
                async with asyncio.timeout(5):
                    while (await ask()).status == 200:
                        await asyncio.sleep(0.01)
        finally:
            await server.stop(0.0)

    asyncio.run(scenario())


def test_a_router_that_stops_is_waited_for_until_its_next_start(monkeypatch):
    monkeypatch.setattr(routers, "BEGIN_S", 0.2)
    asked = []

    async def stopping(request, context):
        asked.append(time.monotonic())
        stops = error_details_pb2.ErrorInfo(reason="ROUTER_STOPS", domain="pagewire")
        await abort(context, grpc.StatusCode.UNAVAILABLE, "the router is stopping", stops)
        yield

    async def scenario():
        where = []

        async def find_routers():
            return where

        server = GatewayServer(find_routers, config=GatewayConfig(), host="127.0.0.1", port=0)
        try:
            host, _, port = (await server.start()).rpartition(":")
            asking = asyncio.to_thread(exchange, (host, int(port)), request(TEXT, body_of(TEXT)))
            async with serving(two_words) as (next_start, _):
                async with serving(stopping) as (router, _):
                    where[:] = [router]
                    answer = asyncio.create_task(asking)
                    async with asyncio.timeout(10):
                        while not asked or time.monotonic() < asked[0] + routers.BEGIN_S:
                            await asyncio.sleep(0.01)
                    assert not answer.done()
                    where[:] = [next_start]
                assert (await answer).status == 200
        finally:
            await server.stop(0.0)

    asyncio.run(scenario())


def test_those_who_look_for_a_router_at_the_same_time_look_together():
    num_looks = 0

    async def find_routers():
        nonlocal num_looks
        num_looks += 1
        await asyncio.sleep(5)
        raise UnavailableError("the router is starting", code="UNAVAILABLE")

    async def scenario():
        loop = asyncio.get_running_loop()
        routers = FoundRouters(find_routers, Connector())
        told = await asyncio.gather(*(routers.locate() for _ in range(9)), return_exceptions=True)
        assert {type(each) for each in told} == {UnavailableError}
        assert (loop.time(), num_looks) == (5, 1)

        waiting = asyncio.create_task(routers.locate())
        await asyncio.sleep(1)
        await routers.aclose()
        assert "find-routers" not in {each.get_name() for each in asyncio.all_tasks()}
        with pytest.raises(ClosedError):
            await waiting

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("method", "asking"),
    [
        ("Tokenize", request("/tokenize", json.dumps({"prompt": "x"}))),
        ("Check", request("/ready", method="GET")),
    ],
    ids=["tokenize", "ready"],
)
def test_a_short_call_whose_router_is_replaced_meanwhile_is_made_at_the_new_one(
    monkeypatch, method, asking
):
    answer = getattr(ScriptedService, method)
    asked = []

    async def hang_once(self, request, context):
        asked.append(self)
        if len(asked) == 1:
            await asyncio.sleep(60)
        return await answer(self, request, context)

    async def scenario():
        async with serving(two_words) as (old, _), serving(two_words) as (new, _):
            where = [old]

            async def find_routers():
                return where

            server = GatewayServer(find_routers, config=GatewayConfig(), host="127.0.0.1", port=0)
            host, _, port = (await server.start()).rpartition(":")
            calls = []
            try:
                for _ in range(2):
                    call = asyncio.to_thread(exchange, (host, int(port)), asking)
                    calls.append(asyncio.create_task(call))
                    async with asyncio.timeout(5):
                        while not asked:
                            await asyncio.sleep(0.01)
                    where = [new]
                return [(await each).status for each in calls]
            finally:
                await server.stop(0.0)

    monkeypatch.setattr(ScriptedService, method, hang_once)

    assert asyncio.run(scenario()) == [200, 200]
    assert [each is asked[0] for each in asked] == [True, False, False]


@pytest.mark.parametrize("first", ["is gone", "has no worker"])
def test_a_gateway_is_ready_if_any_of_its_routers_serves(first):
    async def scenario():
        async with serving(two_words) as (gone, _):
            pass
        async with serving(two_words) as (idle, service), serving(two_words) as (serves, _):
            service.has_worker = False
            where = [gone if first == "is gone" else idle, serves]

            async def find_routers():
                return where

            server = GatewayServer(find_routers, config=GatewayConfig(), host="127.0.0.1", port=0)
            host, _, port = (await server.start()).rpartition(":")
            try:
                asking = request("/ready", method="GET")
                return (await asyncio.to_thread(exchange, (host, int(port)), asking)).status
            finally:
                await server.stop(0.0)

    assert asyncio.run(scenario()) == 200


def test_calls_that_lose_their_router_fail_and_say_why():
    async def scenario():
        async with serving(never_ends) as (router, service):

            async def find_routers():
                return [router]

            server = GatewayServer(find_routers, config=GatewayConfig(), host="127.0.0.1", port=0)
            host, _, port = (await server.start()).rpartition(":")
            address = (host, int(port))
            calls = [
                asyncio.to_thread(exchange, address, request(TEXT, body_of(TEXT, stream=stream)))
                for stream in (False, True)
            ]
            running = asyncio.gather(*calls)
            async with asyncio.timeout(5):
                while len(service.requests) < 2:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
        try:
            return await running
        finally:
            await server.stop(0.0)

    whole, stream = asyncio.run(scenario())

    assert whole.status == 503
    assert b'"error"' in stream.body
    assert b"[DONE]" not in stream.body


# The gateway's own end


def test_a_gateway_that_stops_finishes_what_runs_and_takes_nothing_new():
    release = threading.Event()
    with gateway(lambda: scripted(waiting_for(release))) as served:
        with (
            socket.create_connection(served.host_and_port) as running,
            socket.create_connection(served.host_and_port) as idle,
        ):
            running.sendall(request(TEXT, body_of(TEXT, stream=True)))
            wait_until(lambda: served.backend.requests)
            stopping = threading.Thread(target=lambda: served.run(served.server.stop(5.0)))
            stopping.start()
            assert is_closed(idle)
            with pytest.raises(ConnectionError):
                socket.create_connection(served.host_and_port)
            release.set()
            answer = read_answer(running, time.monotonic())
        stopping.join(5)

        assert b"there" in answer.body
        assert b"[DONE]" in answer.body


@pytest.mark.parametrize("path", BODIES)
def test_a_gateway_that_stops_tells_clients_whose_answers_outlast_its_grace(path):
    with (
        gateway(lambda: scripted(never_ends)) as served,
        socket.create_connection(served.host_and_port) as whole,
        socket.create_connection(served.host_and_port) as stream,
        socket.create_connection(served.host_and_port) as sending,
    ):
        whole.sendall(2 * request(path, body_of(path)))  # the second one waits behind the first
        stream.sendall(request(path, body_of(path, stream=True)))
        sending.sendall(request(path, "{", content_length="100"))
        wait_until(lambda: len(served.backend.requests) == 2)
        assert stream.recv(1)
        started = time.monotonic()
        served.run(served.server.stop(0.2))

        assert_within(time.monotonic() - started, 2)
        for each in (whole, sending):
            answer = read_answer(each, started)
            assert (answer.status, answer.error["code"]) == (503, "unavailable")
            assert answer.error["message"] == "the gateway stopped"
            assert answer.headers["content-type"] == "application/json"
            assert len(answer.headers["x-request-id"]) == 32
            assert is_closed(each)
        begun = read_answer(stream, started)  # it is only read to the end if the end is marked
        last = begun.body.removesuffix(b"0\r\n\r\n").rstrip().split(b"\n\n")[-1]
        assert b"the gateway stopped" in last
        assert (b"response.failed" if path == RESPONSE else b'data: {"error": {') in last
        assert b"[DONE]" not in begun.body
        wait_until(served.backend.cancelled.is_set)


def test_a_gateway_that_stops_does_not_wait_for_a_client_that_reads_nothing(caplog):
    caplog.set_level(logging.INFO)
    with gateway(lambda: scripted(floods)) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(served.host_and_port)
        connection.sendall(request(TEXT, body_of(TEXT, stream=True)))
        (guest,) = wait_until(lambda: served.server._server.server_state.connections)
        wait_until(lambda: guest.flow.write_paused)
        started = time.monotonic()
        served.run(served.server.stop(0.2))

        assert_within(time.monotonic() - started, 4)
        assert is_closed(connection)
        (line,) = [each for each in caplog.records if each.getMessage() == "http_request"]
        assert getattr(line, ATTRIBUTE)["outcome"] == "unavailable"


def test_a_port_in_use_is_an_error_of_the_start():
    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            server = GatewayServer(
                lambda: asyncio.sleep(0), config=GatewayConfig(), host="127.0.0.1", port=port
            )
            with pytest.raises(OSError, match="in use"):
                await server.start()
            await server.stop(0.0)

    asyncio.run(scenario())


# Connections beyond what the process may open


def test_a_lack_of_files_is_logged_once_and_passes(caplog):
    with gateway(lambda: scripted(two_words)) as served:
        health = request("/health", method="GET")
        assert exchange(served.host_and_port, health).status == 200  # it has loaded its modules
        clients = [socket.socket() for _ in range(50)]
        free = os.dup(0)
        os.close(free)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # any further file is refused
        try:
            for each in clients:
                each.settimeout(5)
                each.connect(served.host_and_port)
            time.sleep(2.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in clients:
            each.sendall(health)
            assert read_answer(each, time.monotonic()).status == 200
            each.close()

    told = [each for each in caplog.records if "resource" in str(each.msg) or "accept" in each.msg]
    assert [each.getMessage() for each in told] == ["accept_failed"]
    assert "Too many open files" in told[0].fields["reason"]
