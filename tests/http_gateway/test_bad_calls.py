"""Calls and connections that break every rule, at the gRPC door: refused at once, others go on.

What breaks the rules of HTTP is in test_bad_requests.py, wrong values are in test_bad_fields.py.
"""

import gzip
import socket
import time
from collections.abc import Iterable, Iterator

import grpc
import pytest

from pagewire.protos import inference_pb2, inference_pb2_grpc
from tests.http_gateway.parrot import MARKS, write_folder
from tests.http_gateway.raw_http import is_closed
from tests.http_gateway.serving import Gateway, gateway
from tests.http_gateway.whole_cluster import singing, whole_cluster
from tests.support.wall_clock import assert_within, on_this_host

AT_ONCE_S = 1.0
GENERATE = "/pagewire.v1.InferenceService/Generate"
FINE = inference_pb2.GenerateRequest(text="go on", sampling={"max_tokens": 4, "ignore_eos": True})
MODELS = inference_pb2.ListModelsRequest()
MIB = 2**20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = write_folder(tmp_path_factory.mktemp("model"), MARKS["plain"])
    with gateway(lambda: whole_cluster(folder)) as running, singing(running):
        yield running
        assert not [each for each in running.backend.prompts if "BAD" in each]


@pytest.fixture
def channel(served: Gateway) -> Iterator[grpc.Channel]:
    """A channel with a connection of its own, and no limits of the client."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 100 * MIB),
    ]
    with grpc.insecure_channel(served.router_address, options=options) as opened:
        yield opened


def answers(channel: grpc.Channel) -> bool:
    """Whether a right call of the same connection is answered."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return sum(len(each.token_ids) for each in stub.Generate(FINE, timeout=10)) == 4 * 4


# name |-> what is sent as the request, status, words of the answer
BAD_MESSAGES: dict[str, tuple[bytes, str, str]] = {
    "garbage": (b"\xff\xff\xff", "INVALID_ARGUMENT", "are no request"),
    "a cut message": (FINE.SerializeToString()[:-1], "INVALID_ARGUMENT", "are no request"),
    "a text longer than its message": (b"\x12\xff\xff\x03x", "INVALID_ARGUMENT", "are no request"),
    "a number without end": (b"\x08" + b"\xff" * 11, "INVALID_ARGUMENT", "are no request"),
    "an unknown wire type": (b"\x0f", "INVALID_ARGUMENT", "are no request"),
    "an end without a group": (b"\x0c", "INVALID_ARGUMENT", "are no request"),
    "groups within groups": (b"\x0b" * 100_000, "INVALID_ARGUMENT", "are no request"),
    "nothing at all": (b"", "INVALID_ARGUMENT", "prompt: found nothing; allowed: one of text"),
    "only fields of tomorrow": (b"\xf8\x07\x01" * 10, "INVALID_ARGUMENT", "prompt: found nothing"),
    "a number where a text should be": (b"\x10\x05", "INVALID_ARGUMENT", "prompt: found nothing"),
    "millions of empty messages": (
        b"\x22\xfe\xff\xff\x01" + b"\x0a\x00" * (2 * MIB - 1),
        "INVALID_ARGUMENT",
        "found more than 100000 fields; allowed: at most 100000",
    ),
    "a message that is too large": (
        b"\x12" + b"x" * 20 * MIB,
        "RESOURCE_EXHAUSTED",
        "larger than max",
    ),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_what_is_no_request_is_refused_and_the_connection_goes_on(
    channel: grpc.Channel, name: str
) -> None:
    raw, code, words = BAD_MESSAGES[name]

    error, seconds = refused(channel, [raw])

    assert error.code().name == code, error
    assert words in error.details()
    assert len(error.details()) < 500
    assert_within(seconds, on_this_host(AT_ONCE_S))
    assert answers(channel)


@pytest.mark.parametrize("levels", [200, 15_000, 90_000])
def test_messages_within_messages_are_refused_without_following_them(
    channel: grpc.Channel, levels: int
) -> None:
    heads, size = [], 0  # of the inner ones first
    for _ in range(levels):
        heads.append(b"\x7a" + varint(size))
        size += len(heads[-1])
    raw = b"".join(reversed(heads))

    error, seconds = refused(channel, [raw], method="/pagewire.v1.InferenceService/GenerateMany")

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(error.details()) < 500
    assert_within(seconds, on_this_host(AT_ONCE_S))


def varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    out = []
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_a_compressed_bomb_is_refused_before_it_has_burst(channel: grpc.Channel) -> None:
    raw = b"\x12" + b"B" * 60 * MIB
    assert len(gzip.compress(raw)) < 2**16, "small on the wire"
    call = channel.stream_stream(GENERATE)(
        iter([raw]), timeout=20, compression=grpc.Compression.Gzip
    )

    with pytest.raises(grpc.RpcError) as caught:
        next(call)

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in caught.value.details()
    assert answers(channel)


METADATA: dict[str, Iterable[tuple[str, str]]] = {
    "a large value": [("x", "y" * 200_000)],
    "many values": [(f"x{i}", "y" * 100) for i in range(2000)],
    "one key again and again": [("x", "y" * 10)] * 5000,
}


@pytest.mark.parametrize("name", METADATA)
def test_a_flood_of_metadata_is_refused(channel: grpc.Channel, name: str) -> None:
    error, seconds = refused(channel, [FINE.SerializeToString()], metadata=list(METADATA[name]))

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_within(seconds, on_this_host(AT_ONCE_S))
    assert answers(channel)


def test_a_call_that_ends_without_a_request_is_told_so(channel: grpc.Channel) -> None:
    error, seconds = refused(channel, [])

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "the call has no request"
    assert_within(seconds, on_this_host(AT_ONCE_S))


def test_methods_that_are_not_there_are_unimplemented(channel: grpc.Channel) -> None:
    for method in ("/pagewire.v1.InferenceService/Shutdown", "/x", "/" + "x" * 5000):
        error, seconds = refused(channel, [b""], method=method)

        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert_within(seconds, on_this_host(AT_ONCE_S))


def test_hundreds_of_calls_that_are_dropped_at_once_leave_nothing(
    served: Gateway, channel: grpc.Channel
) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    for _ in range(300):
        stub.Generate(FINE).cancel()

    assert answers(channel)
    wait_for_canaries_alone(served)


def test_a_deadline_that_has_passed_ends_a_call_and_frees_it(
    served: Gateway, channel: grpc.Channel
) -> None:
    error, seconds = refused(channel, [FINE.SerializeToString()], timeout=1e-6)

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_within(seconds, on_this_host(AT_ONCE_S))
    wait_for_canaries_alone(served)


def wait_for_canaries_alone(served: Gateway) -> None:
    """Return when no call is left but theirs."""
    deadline = time.monotonic() + 10
    while served.backend.router.admission.num_active > 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def refused(
    channel: grpc.Channel,
    messages: list[bytes],
    *,
    method: str = GENERATE,
    timeout: float = 10,
    metadata: Iterable[tuple[str, str]] = (),
) -> tuple[grpc.RpcError, float]:
    """Make a call that has to be refused; returns its error, and how long it took."""
    inference_pb2_grpc.InferenceServiceStub(channel).ListModels(MODELS, timeout=10)  # connects
    started = time.monotonic()
    call = channel.stream_stream(method)(iter(messages), timeout=timeout, metadata=list(metadata))
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    return caught.value, time.monotonic() - started


# Bytes by hand

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


HELLO = PREFACE + frame(SETTINGS)
# name |-> what is sent; whether the server then has to end the connection at once
BYTES: dict[str, tuple[bytes, bool]] = {
    "HTTP/1.1": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", True),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, True),
    "garbage": (bytes(range(256)) * 8, True),
    "half a preface": (PREFACE[:10], False),
    "a preface and silence": (HELLO, False),
    "a frame longer than any may be": (
        HELLO + b"\xff\xff\xff" + bytes([DATA, 0, 0, 0, 0, 1]),
        True,
    ),
    "data of no stream": (HELLO + frame(DATA, b"x"), False),
    "data of a stream that was never begun": (HELLO + frame(DATA, b"x" * 100, stream=9), False),
    "headers that cannot be read": (HELLO + frame(HEADERS, b"\xff" * 100, flags=4, stream=1), True),
    "headers of stream 0": (HELLO + frame(HEADERS, b"", flags=4), False),
    "settings of a wrong length": (HELLO + frame(SETTINGS, b"x" * 7), True),
    "a window without room": (HELLO + frame(WINDOW, bytes(4)), False),
    "a window that overflows": (HELLO + frame(WINDOW, b"\x7f\xff\xff\xff") * 2, False),
    "a flood of settings": (HELLO + frame(SETTINGS, b"\x00\x03\x00\x00\x00\x64") * 20_000, False),
    "a flood of pings": (HELLO + frame(PING, b"12345678") * 20_000, False),
    "a flood of resets": (
        HELLO + b"".join(frame(RESET, b"\x00\x00\x00\x08", stream=i) for i in range(1, 20_000, 2)),
        False,
    ),
    "headers without end": (
        HELLO + frame(HEADERS, b"", stream=1) + frame(CONTINUATION, b"x" * 1000, stream=1) * 5000,
        False,
    ),
    "frames of tomorrow": (HELLO + frame(200, b"x" * 100) * 1000, False),
    "a goodbye": (HELLO + frame(GOAWAY, bytes(8)), False),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_call_end_no_more_than_their_own_connection(
    served: Gateway, channel: grpc.Channel, name: str
) -> None:
    data, has_to_end = BYTES[name]
    host, _, port = served.router_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        started = time.monotonic()
        try:
            connection.sendall(data)
        except (ConnectionError, TimeoutError):
            has_to_end = True  # it has been, while more came
        assert answers(channel), "others are served meanwhile"
        if has_to_end:
            assert is_closed(connection, within_s=5)
            assert_within(time.monotonic() - started, on_this_host(AT_ONCE_S))
        else:
            connection.shutdown(socket.SHUT_WR)  # half of it is open
            assert is_closed(connection, within_s=5)
    assert answers(channel)


def test_connections_that_say_nothing_keep_nobody_out(
    served: Gateway, channel: grpc.Channel
) -> None:
    host, _, port = served.router_address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=5) for _ in range(200)]
    try:
        for each in silent[::2]:
            each.sendall(PREFACE[:5])
        assert answers(channel)
    finally:
        for each in silent:
            each.close()
    assert answers(channel)
