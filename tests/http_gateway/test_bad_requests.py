"""What breaks the rules of HTTP and JSON: a clear error at once, no other stream held up.

Wrong values are in test_bad_fields.py, what breaks the rules of gRPC in test_bad_calls.py.
"""

import gzip
import json
import socket
import time

import pytest

from http_gateway.connection import MAX_PIPELINED
from pagewire.protos.token_ids import unpack_token_ids
from router.tokenizer import Tokenizer
from tests.http_gateway.canaries import SONG, singing
from tests.http_gateway.parrot import MARKS, parrot, write_folder
from tests.http_gateway.raw_http import exchange, is_closed, read_answer, request
from tests.http_gateway.serving import gateway, real_router
from tests.support.waiting import wait_until
from tests.support.wall_clock import assert_within

AT_ONCE_S = 1.0
CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NEEDED = {
    CHAT: "messages",
    TEXT: "prompt",
    RESPONSE: "input",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}
LIMITS = {
    "max_body_mib": 1,
    "head_timeout_s": 0.4,
    "body_timeout_s": 0.4,
    "idle_timeout_s": 0.4,
    "max_connections": 30,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"), MARKS["plain"])


@pytest.fixture(scope="module")
def worker(folder):
    return parrot(folder, token_s=0.004)


@pytest.fixture(scope="module")
def served(folder, worker):
    with gateway(lambda: real_router(worker, folder), **LIMITS) as running, singing(running):
        yield running
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text())
    prompts = {tokenizer.decode(unpack_token_ids(each.prompt_token_ids)) for each in worker.submits}
    assert not [each for each in prompts if "BAD" in each], "no bad request reached a worker"


@pytest.fixture
def address(served):
    return served.host_and_port


@pytest.mark.parametrize("path", NEEDED)
def test_a_request_without_what_it_needs_says_what_is_missing(address, path):
    answer = exchange(address, request(path, "{}"))

    assert answer.status == 400
    assert answer.error["param"] == NEEDED[path]


@pytest.mark.parametrize("path", NEEDED)
def test_a_slip_in_the_name_of_what_a_request_needs_is_told_before_that_it_is_missing(
    address, path
):
    name = NEEDED[path]
    slip = name[:3] + name[4:]

    error = exchange(address, request(path, json.dumps({slip: ["BAD"]}))).error

    meant = f"{slip}: found an unknown parameter (did you mean {name!r}?); allowed: "
    assert error["message"].startswith(meant)
    assert (error["param"], error["code"]) == (slip, "unknown_parameter")


FUNCTION = '{"tools": [{"type": "function", "function": {"nam": "f"}}]}'
FORMAT = '{"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}'


@pytest.mark.parametrize(
    ("body", "slip"),
    [(FUNCTION, "tools[0].function.nam"), (FORMAT, "response_format.json_schema.shema")],
)
def test_a_slip_within_is_told_before_what_is_missing(address, body, slip):
    error = exchange(address, request(CHAT, body)).error

    assert error["message"].startswith(f"{slip}: found an unknown parameter (did you mean ")


DEEP = "[" * 100_000
WRONG_BODIES = {
    "nothing": (b"", "it is empty"),
    "blanks": (b" \n", "it is empty"),
    "an array": (b"[]", "it is an array"),
    "a number": (b"5", "it is a number"),
    "a real number": (b"5e1", "it is a number"),
    "a string": (b'"{}"', "it is a string"),
    "a switch": (b"true", "it is true or false"),
    "null": (b"null", "it is null"),
    "cut off": (b'{"messages": [', "in line 1, column 15"),
    "two objects": (b"{}{}", "Extra data"),
    "single quotes": (b"{'a': 1}", "not a JSON object"),
    "a comment": (b'{"a": 1 /* x */}', "not a JSON object"),
    "a repeated key": (b'{"messages": [], "messages": []}', "'messages' is given twice"),
    "a repeated key inside": (b'{"a": {"b": 1, "b": 2}}', "'b' is given twice"),
    "NaN": (b'{"temperature": NaN}', "NaN is not a JSON number"),
    "Infinity": (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
    "bad UTF-8": (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), "is not UTF-8"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "it begins with a byte order mark"),
    "a control character": (b'{"prompt": "\x00"}', "not a JSON object"),
    "an endless number": (b'{"seed": ' + b"1" * 100_000 + b"}", "more than 4300 digits"),
    "an integer of 5,000 digits": (b'{"seed": ' + b"1" * 5000 + b"}", "more than 4300 digits"),
    "deep arrays": (b'{"a": ' + DEEP.encode(), "not a JSON object"),
    "deep objects": (b'{"a":' * 100_000, "not a JSON object"),
    "many values": (b'{"a": [' + b"[]," * 400_000 + b"[]]}", "more than"),
}


@pytest.mark.parametrize("name", WRONG_BODIES)
def test_what_is_no_json_object_is_refused_with_the_place(address, name):
    body, words = WRONG_BODIES[name]
    answer = exchange(address, request(CHAT, body))

    if len(body) > 2**20:
        assert answer.status == 413
        return
    assert answer.status == 400
    assert answer.error["code"] == "invalid_json"
    assert words in answer.error["message"]
    assert_within(answer.seconds, AT_ONCE_S)


HEADERS = {
    "a form": ({"content_type": "application/x-www-form-urlencoded"}, 415, "content-type"),
    "text": ({"content_type": "text/plain"}, 415, "content-type"),
    "no type": ({"content_type": None}, 415, "content-type"),
    "compressed": ({"content_encoding": "gzip"}, 415, "content-encoding"),
    "twice compressed": ({"content_encoding": "gzip, gzip"}, 415, "content-encoding"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_other_types_of_content_are_refused(address, name):
    headers, status, param = HEADERS[name]
    bomb = gzip.compress(b" " * 2**20)
    answer = exchange(address, request(CHAT, bomb, **headers))

    assert (answer.status, answer.error["param"]) == (status, param)
    assert_within(answer.seconds, AT_ONCE_S)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_may_be_called_so_in_any_case_and_with_parameters(address, kind):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})

    assert exchange(address, request(CHAT, body, content_type=kind)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("POST", "/", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/responses/resp_1", 404, "not_found"),
        ("GET", "/" + "x" * 8000, 404, "not_found"),
        ("GET", "/%00%ff%fe", 404, "not_found"),
        ("GET", "/../../etc/passwd", 404, "not_found"),
        ("POST", f"{CHAT}/", 404, "not_found"),
    ],
)
def test_other_paths_and_methods_are_refused(address, method, path, status, code):
    answer = exchange(address, request(path, method=method))

    assert (answer.status, answer.error["code"]) == (status, code)
    assert len(answer.body) < 1000
    assert_within(answer.seconds, AT_ONCE_S)


@pytest.mark.parametrize(
    ("path", "meant"),
    [("/chat/completions", CHAT), ("/v1/v1/models", "/v1/models"), ("/v1/completion", TEXT)],
)
def test_a_path_that_was_probably_meant_is_told(address, path, meant):
    told = exchange(address, request(path)).error["message"]

    assert f"{path}: there is no such endpoint (did you mean '{meant}'?); allowed: /, " in told


def test_an_endpoint_that_is_not_there_does_not_read_what_comes(address):
    head = request("/v1/embeddings", content_type="application/json", content_length="100000000")
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(head + b"x" * 10_000)
        answer = read_answer(connection, time.monotonic())

        assert answer.status == 404
        assert is_closed(connection)


# Bodies


def test_a_request_beyond_what_the_router_reads_is_refused_and_ends_no_other(folder):
    # 8 MiB for what is no prompt; see RouterConfig.max_request_bytes.
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    router = real_router(parrot(folder, token_s=0.004), folder, max_prompt_chars=1000)
    with gateway(lambda: router) as served, singing(served):
        for body in (
            {"prompt": "x" * 9 * 2**20},
            {"messages": [{"role": "user", "content": "x" * 9 * 2**20}]},
            {"prompt": "x", "stop": ["y" * 9 * 2**20]},
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [call] * 30_000}]},
        ):
            path = CHAT if "messages" in body else TEXT
            data = request(path, json.dumps(body))
            answer = exchange(served.host_and_port, data, timeout_s=30)

            assert answer.status in (400, 413), answer.body[:300]
            assert b"allowed: at most" in answer.body or b"characters" in answer.body
            assert len(answer.body) < 1000


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(address):
    head = request(CHAT, content_type="application/json", content_length=str(2**40))
    answer = exchange(address, head)

    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert answer.error["message"] == "the body takes more than 1 MiB"
    assert answer.headers["connection"] == "close"
    assert_within(answer.seconds, AT_ONCE_S)


def test_zeros_before_the_length_of_a_body_do_not_count(address):
    body = json.dumps({"prompt": "hello"})
    zeros = "0" * 5000  # more digits than int() takes
    answer = exchange(address, request(TEXT, body, content_length=f"{zeros}{len(body)}"))

    assert answer.status == 200, answer.body


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_and_its_sender_can_read_why(address, is_chunked):
    size = 3 * 2**20
    if is_chunked:
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        head = request(CHAT, content_type="application/json", transfer_encoding="chunked")
        data = head + chunk * (size // 65536) + b"0\r\n\r\n"
    else:
        data = request(CHAT, b" " * size)

    answer = exchange(address, data)

    assert answer.status == 413


def test_a_body_without_end_is_refused(address):
    head = request(CHAT, content_type="application/json", transfer_encoding="chunked")
    with socket.create_connection(address, timeout=5) as connection:
        started = time.monotonic()
        connection.sendall(head)
        for _ in range(10):  # slowly, so that its size is not what ends it
            connection.sendall(b"1\r\n \r\n")
            time.sleep(0.05)
        answer = read_answer(connection, started)

        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert_within(answer.seconds, AT_ONCE_S + 0.4)
        assert is_closed(connection)


def test_a_body_that_stays_away_is_refused(address):
    answer = exchange(address, request(CHAT, content_type="application/json", content_length="99"))

    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert_within(answer.seconds, AT_ONCE_S)


def test_a_broken_chunk_is_refused_at_once(address):
    head = request(CHAT, content_type="application/json", transfer_encoding="chunked")
    answer = exchange(address, head + b"zz\r\n{}\r\n0\r\n\r\n")

    assert (answer.status, answer.error["code"]) == (400, "invalid_http")
    assert_within(answer.seconds, 0.3)  # not only when the time for the body is over


@pytest.mark.parametrize(
    "lines", [["gzip, chunked"], ["gzip", "Chunked"], ["x-gzip;q=1 , deflate,,chunked"]]
)
def test_a_transfer_coding_that_nobody_decodes_is_refused(address, lines):
    packed = gzip.compress(json.dumps({"messages": [{"role": "user", "content": "BAD"}]}).encode())
    coded = b"".join(b"transfer-encoding: %b\r\n" % each.encode() for each in lines)
    head = request(CHAT, content_type="application/json")[:-2] + coded + b"\r\n"
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed))
        answer = read_answer(connection, 0.0)

        assert (answer.status, answer.error["code"]) == (501, "unsupported_transfer_coding")
        assert answer.error["message"].endswith("allowed: 'chunked' alone")
        assert is_closed(connection)


@pytest.mark.parametrize("coding", ["gzip", "identity", "chunked, gzip", "chunked, chunked"])
def test_a_transfer_coding_that_hides_where_the_body_ends_is_refused(address, coding):
    head = request(CHAT, content_type="application/json", transfer_encoding=coding)
    answer = exchange(address, head + b"2\r\n{}\r\n0\r\n\r\n")

    assert (answer.status, answer.error["code"]) == (400, "invalid_http")


@pytest.mark.parametrize("coding", ["Chunked", ", chunked"])
def test_chunks_may_be_announced_in_any_case_and_behind_an_empty_element(address, coding):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    head = request(CHAT, content_type="application/json", transfer_encoding=coding)
    answer = exchange(address, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))

    assert answer.status == 200


def test_expected_continuation_is_asked_for_unless_the_body_is_refused(address):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    with socket.create_connection(address, timeout=5) as connection:
        head = request(CHAT, body, expect="100-continue")[: -len(body)]
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert read_answer(connection, 0.0).status == 200
    big = request(
        CHAT, content_type="application/json", content_length=str(2**30), expect="100-continue"
    )
    assert exchange(address, big).status == 413


# Heads

WRONG_HEADS = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another version": b"GET /health HTTP/9.9\r\n\r\n",
    "an unknown method": b"BREW /health HTTP/1.1\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nhost gateway\r\n\r\n",
    "a blank in a name": b"GET /health HTTP/1.1\r\nho st: x\r\n\r\n",
    "a null byte": b"GET /health HTTP/1.1\r\nhost: \x00\r\n\r\n",
    "two lengths": b"POST /x HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    "an endless length": b"POST /v1/completions HTTP/1.1\r\ncontent-length: "
    + b"9" * 30
    + b"\r\n\r\n",
    "another version's head": b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n",
    "a port that is none": b"GET http://x:99999/health HTTP/1.1\r\nhost: x\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nhost: x\r\n y\r\n\r\n",
}


def test_a_refused_head_is_not_refused_again_when_its_time_is_over(address):
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(WRONG_HEADS["no HTTP"])
        answer = read_answer(connection, time.monotonic())
        assert (answer.status, answer.error["code"]) == (400, "invalid_http")
        time.sleep(2 * LIMITS["head_timeout_s"])  # less than LINGER_S
    # A second answer would have crashed its timer, which the gateway's fixture reports.


@pytest.mark.parametrize("name", WRONG_HEADS)
def test_what_is_no_request_is_refused_and_the_connection_closed(address, name):
    with socket.create_connection(address, timeout=5) as connection:
        started = time.monotonic()
        connection.sendall(WRONG_HEADS[name])
        answer = read_answer(connection, started)

        assert (answer.status, answer.error["code"]) == (400, "invalid_http")
        if name in ("HTTP/2", "TLS"):
            assert answer.error["message"].endswith(f": it begins as {name}")
        assert_within(answer.seconds, AT_ONCE_S)
        assert is_closed(connection)


LARGE_HEADS = {
    "one header": b"GET /health HTTP/1.1\r\nx: " + b"a" * 40_000 + b"\r\n\r\n",
    "a header without end": b"GET /health HTTP/1.1\r\nx: " + b"a" * 400_000,
    "a name without end": b"GET /health HTTP/1.1\r\n" + b"a" * 400_000,
    "many headers": b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n",
    "a path without end": b"GET /" + b"a" * 400_000,
    "a long path": b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",
    "trailers": request(TEXT, content_type="application/json", transfer_encoding="chunked")
    + b"2\r\n{}\r\n0\r\n"
    + b"x: y\r\n" * 200
    + b"\r\n",
}


@pytest.mark.parametrize("name", LARGE_HEADS)
def test_a_head_that_is_too_large_is_refused(address, name):
    answer = exchange(address, LARGE_HEADS[name])

    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
    assert_within(answer.seconds, AT_ONCE_S)


def test_a_trailer_without_end_is_refused(address):
    kind = {"content_type": "application/json", "transfer_encoding": "chunked"}
    answer = exchange(address, request(CHAT, **kind) + b"2\r\n{}\r\n0\r\nx: " + b"a" * 300_000)

    assert (answer.status, answer.error["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n", b"\r\n"])
def test_a_head_that_does_not_come_is_refused(address, sent):
    answer = exchange(address, sent)

    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert_within(answer.seconds, AT_ONCE_S)


def test_a_head_that_comes_byte_by_byte_has_no_more_time(address):
    with socket.create_connection(address, timeout=5) as connection:
        started = time.monotonic()
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(12):
            connection.sendall(b"x")
            time.sleep(0.05)
        answer = read_answer(connection, started)

    assert answer.status == 408


def test_empty_lines_without_end_are_no_way_to_stay(address):
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(request("/health", method="GET"))
        assert read_answer(connection, 0.0).status == 200
        started = time.monotonic()
        for _ in range(12):
            connection.sendall(b"\r\n")
            time.sleep(0.05)

        assert read_answer(connection, started).status == 408


# Connections


def test_a_connection_is_kept_for_further_requests_and_closed_when_idle(address):
    with socket.create_connection(address, timeout=5) as connection:
        for _ in range(3):
            connection.sendall(request("/health", method="GET"))
            assert read_answer(connection, 0.0).status == 200
        connection.sendall(request(CHAT, '{"messages": 5}'))
        assert read_answer(connection, 0.0).status == 400
        started = time.monotonic()
        connection.sendall(request("/health", method="GET"))
        assert read_answer(connection, 0.0).status == 200

        assert is_closed(connection)
        seconds = time.monotonic() - started
        assert seconds > 0.2
        assert_within(seconds, 2)


def test_pipelined_requests_are_answered_in_order(address):
    bodies = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(3)]
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(b"".join(request(CHAT, json.dumps(each)) for each in bodies))
        data = b""
        while data.count(b"finish_reason") < 3:
            data += connection.recv(65536)

    assert [data.index(f"say {i}".encode()) for i in range(3)] == sorted(
        data.index(f"say {i}".encode()) for i in range(3)
    )


def test_a_flood_of_pipelined_requests_is_cut_short(address, worker):
    before = len(worker.submits)
    body = json.dumps({"messages": [{"role": "user", "content": SONG}]})
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(request(CHAT, body) * 500)

        assert read_answer(connection, 0.0).status == 200
    assert len(worker.submits) - before < 20


def test_pipelined_requests_within_the_limit_are_answered_and_then_the_connection_ends(address):
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(request("/health", method="GET") * 12)
        data = b""
        while received := connection.recv(65536):
            data += received

    assert data.count(b"HTTP/1.1 200") == 1 + MAX_PIPELINED
    assert data.count(b"connection: close") == 1


def test_garbage_behind_a_request_does_not_reach_its_answer(address):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(request(CHAT, body) + b"\x00\x01garbage\r\n\r\n")
        answer = read_answer(connection, time.monotonic())

        assert answer.status == 200
        assert b"[DONE]" in answer.body
        assert is_closed(connection)


def test_an_upgrade_is_not_made_and_the_request_answered(address):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    for upgrade in ("h2c", "websocket"):
        data = request(CHAT, body, connection="upgrade", upgrade=upgrade)
        answer = exchange(address, data)

        assert answer.status == 200
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == "hi"


def test_an_upgrade_with_a_chunked_body_is_answered_and_its_body_is_no_other_request(address):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    kind = {"content_type": "application/json", "transfer_encoding": "chunked"}
    head = request(CHAT, connection="upgrade", upgrade="h2c", **kind)
    with socket.create_connection(address, timeout=5) as connection:
        for _ in range(2):
            for part in (head, b"%x\r\n" % len(body) + body[:9], body[9:] + b"\r\n0\r\n\r\n"):
                connection.sendall(part)
                time.sleep(0.02)
            answer = read_answer(connection, 0.0)

            assert answer.status == 200, answer.body
            assert json.loads(answer.body)["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize(
    "framing",
    [
        {"transfer_encoding": "gzip"},
        {"transfer_encoding": "chunked", "content_length": "5"},
        {"content_length": "5_0"},
        {"content_length": "+5"},
    ],
    ids=str,
)
def test_an_upgrade_with_a_body_of_unknown_length_is_refused(address, framing):
    head = request(CHAT, content_type="application/json", **framing)
    upgrade = request(
        CHAT, content_type="application/json", connection="upgrade", upgrade="h2c", **framing
    )
    for each in (head, upgrade):
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(each + request("/v1/models", method="GET"))
            answer = read_answer(connection, time.monotonic())

            assert answer.status == 400
            assert answer.error["code"] == "invalid_http"
            assert is_closed(connection), "what follows is no request"


def test_more_connections_than_allowed_are_refused_and_the_others_go_on(address):
    connections = [socket.create_connection(address, timeout=5) for _ in range(40)]
    try:
        # Those within the limit are told in the end that they sent no request.
        answers = [read_answer(each, 0.0) for each in connections]
        refused = [each for each in answers if each.status == 503]
        assert 8 <= len(refused) <= 14
        assert {each.error["code"] for each in refused} == {"too_many_connections"}
        assert {each.headers["retry-after"] for each in refused} == {"1"}
    finally:
        for each in connections:
            each.close()
    deadline = time.monotonic() + 10
    while exchange(address, request("/health", method="GET")).status != 200:
        assert time.monotonic() < deadline, "the places of those that left are not free"


def test_a_client_that_sends_nothing_more_is_taken_for_gone(address, folder, worker):
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text())
    before = len(worker.submits)

    def submitted() -> set[str]:  # by this client, beside the canaries
        return {
            each.request_id
            for each in worker.submits[before:]
            if "my last words" in tokenizer.decode(unpack_token_ids(each.prompt_token_ids))
        }

    body = json.dumps({"messages": [{"role": "user", "content": f"my last words: {SONG * 3}"}]})
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(request(CHAT, body))
        wait_until(submitted)
        connection.shutdown(socket.SHUT_WR)

        assert is_closed(connection, within_s=10)
    wait_until(lambda: submitted().intersection(worker.cancels))


USER = {"role": "user", "content": "x"}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
IN_CHAT = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def parts(*content):
    return {"role": "user", "content": list(content)}


def without(call, name):
    return {each: value for each, value in call.items() if each != name}


def called(call):
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, result]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": None}, "tokens"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [None]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": [parts({"type": "text"})]}, "messages[0].content[0].text"),
        (CHAT, {"messages": [parts({"type": "refusal"})]}, "messages[0].content[0].refusal"),
        ("/v1/responses", {"input": [{"role": "user"}]}, "input[0].content"),
        ("/v1/responses", {"input": [parts({"type": "input_text"})]}, "input[0].content[0].text"),
        ("/v1/responses", {"input": [USER, {"content": "x"}]}, "input[1].role"),
        ("/v1/responses", {"instructions": "x", "input": [{"content": "x"}]}, "input[0].role"),
        ("/v1/completions", {"prompt": ["x", None]}, "prompt[1]"),
        (CHAT, called({**IN_CHAT, "function": {}}), "messages[1].tool_calls[0].function.name"),
        (CHAT, {"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ("/v1/responses", {"input": [USER, OUTPUT | {"output": None}]}, "input[1].output"),
    ],
)
def test_what_is_missing_is_called_none(address, path, body, param):
    answer = exchange(address, request(path, json.dumps(body)))

    assert answer.status == 400
    assert answer.error["message"].startswith(f"{param}: found none; allowed: ")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *[
            (RESPONSE, {"input": [USER, without(CALL, name)]}, f"input[1].{name}")
            for name in ("call_id", "name", "arguments")
        ],
        (RESPONSE, {"input": [USER, CALL, without(OUTPUT, "call_id")]}, "input[2].call_id"),
        (CHAT, called(without(IN_CHAT, "id")), "messages[1].tool_calls[0].id"),
        *[
            (
                CHAT,
                called(IN_CHAT | {"function": without(IN_CHAT["function"], name)}),
                f"messages[1].tool_calls[0].function.{name}",
            )
            for name in ("name", "arguments")
        ],
    ],
)
def test_a_call_that_lacks_a_field_is_no_call_with_an_empty_one(address, path, body, param):
    error = exchange(address, request(path, json.dumps(body))).error

    assert error["message"] == f"{param}: found none; allowed: a string"
    assert (error["param"], error["code"]) == (param, "missing_required_parameter")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSE, {"input": [USER, CALL | {"call_id": ""}]}, "input[1].call_id"),
        (RESPONSE, {"input": [USER, CALL, OUTPUT | {"call_id": ""}]}, "input[2].call_id"),
        (CHAT, called(IN_CHAT | {"id": ""}), "messages[1].tool_calls[0].id"),
        (
            CHAT,
            {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": ""}]},
            "messages[1].tool_call_id",
        ),
    ],
)
def test_a_call_needs_an_id_that_tells_it_from_others(address, path, body, param):
    error = exchange(address, request(path, json.dumps(body))).error

    assert error["message"] == f"{param}: found an empty id; allowed: at least one character"
    assert error["param"] == param


def test_a_slip_in_the_name_of_a_calls_id_is_told_before_that_it_is_missing(address):
    slip = without(CALL, "call_id") | {"callid": "c"}

    error = exchange(address, request(RESPONSE, json.dumps({"input": [USER, slip]}))).error

    told = "input[1].callid: found an unknown parameter (did you mean 'input[1].call_id'?); "
    assert error["message"].startswith(told)


def test_a_call_of_a_function_may_have_no_arguments(address):
    bodies = {
        RESPONSE: {"input": [USER, CALL | {"arguments": ""}, OUTPUT]},
        CHAT: called(IN_CHAT | {"function": {"name": "f", "arguments": ""}}),
    }
    for path, body in bodies.items():
        assert exchange(address, request(path, json.dumps(body)), timeout_s=10).status == 200


REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ([USER, CALL | {"name": ""}], "input[1].name: found an empty name; "),
        ([USER, USER | {"role": "robot"}], "input[1].role: found 'robot'; "),
        (
            [USER, CALL, OUTPUT, REASONING, CALL, CALL | {"name": ""}],
            "input[5].name: found an empty",
        ),
        ([USER, *[CALL | {"arguments": "x" * 9}] * 2000], "input: found "),
    ],
)
def test_what_is_wrong_in_a_message_is_named_by_its_item(address, items, found):
    body = {"instructions": "x", "input": items}

    answer = exchange(address, request("/v1/responses", json.dumps(body)))

    assert answer.status == 400
    assert answer.error["message"].startswith(found)
    assert answer.error["param"] == found.partition(":")[0]
