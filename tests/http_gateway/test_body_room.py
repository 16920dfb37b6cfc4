"""Bodies that are still being read: their memory is bounded, and no tenant takes all of it."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from http_gateway.body import ROOM_BODIES
from http_gateway.body_room import MIB, SMALL_BYTES, BodyRoom
from http_gateway.errors import HttpError
from protos.shares import GREED
from router.tenants.registry import Tenants
from tests.http_gateway.parrot import parrot, write_folder
from tests.http_gateway.raw_http import exchange, is_closed, read_answer, request
from tests.http_gateway.serving import Gateway, gateway, real_router
from tests.router.tenants.known import rules, tenants

ROOM = 9 * MIB


def test_a_single_tenant_gets_nearly_all() -> None:
    room = BodyRoom(ROOM)

    with room.place("acme") as place:
        place.hold(ROOM * GREED // (GREED + 1))
        with pytest.raises(HttpError) as refusal:
            place.hold(ROOM * GREED // (GREED + 1) + 1)

    assert refusal.value.status == 503
    assert refusal.value.message.startswith("body: found bodies of 8 MiB")
    assert ("retry-after", "1") in refusal.value.headers


def test_another_tenant_finds_room() -> None:
    room = BodyRoom(ROOM)

    with room.place("acme") as full, room.place("globex") as other:
        full.hold(8 * MIB)
        other.hold(MIB * GREED // (GREED + 1))
        with pytest.raises(HttpError):
            full.hold(8 * MIB + 1)


def test_room_is_left_however_a_body_ends() -> None:
    room = BodyRoom(ROOM)

    with room.place("acme") as place:
        place.hold(4 * MIB)
        place.hold(8 * MIB)
    with suppress(KeyError), room.place("acme") as place:
        place.hold(4 * MIB)
        raise KeyError

    assert not room._room._own
    assert not room._room.taken


def test_small_bodies_need_no_room() -> None:
    room = BodyRoom(ROOM)

    with room.place("acme") as full, room.place("acme") as small:
        full.hold(8 * MIB)
        small.hold(SMALL_BYTES)
        with pytest.raises(HttpError):
            small.hold(SMALL_BYTES + 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder: Path = write_folder(tmp_path_factory.mktemp("model"))
    known: Tenants = tenants(rules("acme"), rules("globex"))
    with gateway(
        lambda: real_router(parrot(folder), folder, tenants=known), max_body_mib=1
    ) as running:
        yield running


def held_back(served: Gateway, key: str) -> socket.socket:
    """Send a body of 1 MiB but for its last byte."""
    text = json.dumps({"prompt": ""})
    body = text.encode().ljust(MIB)
    data = request("/v1/completions", body, authorization=f"Bearer {key}")
    connection = socket.create_connection(served.host_and_port, timeout=5)
    connection.sendall(data[:-1])
    return connection


def test_bodies_whose_end_is_held_back_shut_out_no_other_tenant(served: Gateway) -> None:
    with ExitStack() as held:
        opened = [held.enter_context(held_back(served, "acme")) for _ in range(ROOM_BODIES + 4)]
        time.sleep(0.5)
        num_refused = 0
        for each in opened:
            each.settimeout(0.05)
            try:
                answer = read_answer(each, time.monotonic())
            except TimeoutError:
                continue
            num_refused += 1
            assert (answer.status, answer.error["code"]) == (503, "too_many_bodies")
            assert answer.headers["retry-after"] == "1"
            assert is_closed(each)

        assert num_refused >= 4 + ROOM_BODIES - ROOM_BODIES * GREED // (GREED + 1)
        assert num_refused < len(opened)
        body = json.dumps({"prompt": "x"}).encode().ljust(MIB)
        other = request("/v1/completions", body, authorization="Bearer globex")
        assert exchange(served.host_and_port, other).status == 200

    body = json.dumps({"prompt": "x"}).encode().ljust(MIB)
    again = request("/v1/completions", body, authorization="Bearer acme")
    assert exchange(served.host_and_port, again).status == 200
