"""Large bodies: what they cost is bounded, and no stream waits while they are converted."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from http_gateway.body import MAX_ARRAYS, MAX_OBJECTS, MAX_THREADS, parse_object
from http_gateway.errors import HttpError
from observability.serving_process import SWITCH_S
from tests.http_gateway.bodies import CHAT, RESPONSE, TEXT
from tests.http_gateway.raw_http import RawAnswer, exchange, request
from tests.http_gateway.serving import Gateway
from tests.support.wall_clock import assert_within, on_this_host

MESSAGE = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}


@contextmanager
def loop_watched(served: Gateway, longest_s: float) -> Iterator[None]:
    """Demand that a gateway's loop gets its turn meanwhile."""
    pauses: list[float] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(0.005)
            pauses.append(loop.time() - began)

    watching = asyncio.run_coroutine_threadsafe(watch(), served.loop)
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)  # as in a gateway's process
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        served.run(asyncio.sleep(0.05))  # a pause may last until the answer
        watching.cancel()
    assert_within(max(pauses), on_this_host(longest_s))


# path, body, what converts one of them, words of the error
TOO_MANY = {
    "messages": (
        CHAT,
        {"messages": [MESSAGE] * 10_001},
        "messages._message",
        "messages: found 10001 messages",
    ),
    "messages to tokenize": (
        "/tokenize",
        {"messages": [MESSAGE] * 10_001},
        "messages._message",
        "messages: found 10001 messages",
    ),
    "parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [PART] * 10_001}]},
        "messages._part",
        "messages[0].content: found 10001 parts",
    ),
    "items": (
        RESPONSE,
        {"input": [MESSAGE] * 30_001},
        "response_input.as_object",
        "input: found 30001 items",
    ),
    "parts of an item": (
        RESPONSE,
        {"input": [{"role": "user", "content": [PART] * 10_001}]},
        "messages._part",
        "input[0].content: found 10001 parts",
    ),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_are_counted_before_one_is_converted(
    served: Gateway, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, body, converter, words = TOO_MANY[name]
    converted: list[object] = []
    monkeypatch.setattr(f"http_gateway.{converter}", lambda *given: converted.append(given))
    answer = exchange(served.host_and_port, request(path, json.dumps(body)))

    assert answer.status == 400
    assert words in answer.error["message"]
    assert not converted


MANY = {
    "objects": b'{"a": [' + b"{}," * MAX_OBJECTS + b"{}]}",
    "arrays": b'{"a": [' + b"[]," * MAX_ARRAYS + b"[]]}",
}


@pytest.mark.parametrize("what", MANY)
def test_objects_and_arrays_are_counted(what: str) -> None:
    with pytest.raises(HttpError, match=f"more than 100000 {what}"):
        parse_object(MANY[what])


def test_brackets_in_texts_are_no_objects() -> None:
    body = json.dumps({"prompt": "{" * 2 * MAX_OBJECTS})

    assert parse_object(body.encode()) == json.loads(body)


def chat_of(num_messages: int) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "x" * 40}] * num_messages})


LARGE: dict[str, tuple[str, Callable[[], str]]] = {
    "most messages": (CHAT, lambda: chat_of(10_000)),
    "too many messages": (CHAT, lambda: chat_of(90_000)),
    "too many objects": (CHAT, lambda: chat_of(150_000)),
    "most token ids": (TEXT, lambda: json.dumps({"prompt": list(range(900_000))})),
    "a token id out of range": (
        "/detokenize",
        lambda: json.dumps({"tokens": [*range(900_000), 2**32]}),
    ),
    "fractions": (TEXT, lambda: json.dumps({"prompt": [0.5] * 900_000})),
    "most items": (RESPONSE, lambda: json.dumps({"input": [MESSAGE] * 30_000})),
}


@pytest.mark.parametrize("name", LARGE)
def test_the_loop_goes_on_while_a_large_body_is_converted(served: Gateway, name: str) -> None:
    path, make = LARGE[name]
    data = request(path, make())

    with loop_watched(served, 0.15):
        answer = exchange(served.host_and_port, data, timeout_s=20)

    assert answer.status in (200, 400)


def test_small_bodies_do_not_wait_for_large_ones(served: Gateway) -> None:
    body = json.dumps({"prompt": list(range(900_000))})

    large = request(TEXT, body)
    small = request(TEXT, json.dumps({"prompt": "x"}))

    def ask(data: bytes) -> RawAnswer:
        return exchange(served.host_and_port, data, timeout_s=20)

    with ThreadPoolExecutor(2 * MAX_THREADS) as clients:
        waiting = [clients.submit(ask, large) for _ in range(2 * MAX_THREADS)]
        time.sleep(0.3)
        answer = ask(small)
        assert not all(each.done() for each in waiting), "the comparison needs them"

    assert answer.status == 200
    assert_within(answer.seconds, on_this_host(0.5))
