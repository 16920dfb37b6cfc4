import asyncio
import json
import logging
import re

import pytest
from grpc_health.v1 import health, health_pb2_grpc

from observability.logs import configure_logging, fields
from protos.rpc_server import rpc_server
from tests.support.raw_call import raw_call

AWKWARD = {
    "reason": "UNAVAILABLE: no connection, errno=111",
    "body": '{"code": 8, "message": "full"}',
    "empty": "",
    "lines": "first\nsecond",
    "path": r"C:\pages",
    "name": "Zoë",
    "command": "\x1b[2J",
}


@pytest.fixture
def logged(capsys):
    """Returns what a call to a logger writes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def lines_of(line_format, call):
        configure_logging("info", line_format)
        call(logging.getLogger("test"))
        return capsys.readouterr().err.splitlines()

    yield lines_of
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_keeps_each_value_as_it_is(logged):
    values = AWKWARD | {"pages": 3, "ms": 1.5, "is_last": True, "nothing": None}

    [line] = logged("json", lambda log: log.info("transfer_done", extra=fields(**values)))

    parsed = json.loads(line)
    assert (parsed["event"], parsed["level"], parsed["logger"]) == ("transfer_done", "info", "test")
    assert {name: parsed[name] for name in values} == values


def test_text_quotes_what_would_not_be_read_back_as_one_value(logged):
    extra = fields(pages=3, address="h:1", **AWKWARD)

    [line] = logged("text", lambda log: log.warning("worker_lost", extra=extra))

    assert "WARNING test worker_lost pages=3 address=h:1 reason=" in line
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)
    read = {name: json.loads(value) if value[0] == '"' else value for name, value in found}
    assert read == {"pages": "3", "address": "h:1", **AWKWARD}


def test_a_message_of_another_library_is_left_whole(logged):
    message = 'a == b is true, "x y" and retries=3 of 4'

    [line] = logged("json", lambda log: log.info(message))

    assert json.loads(line)["event"] == message


def test_a_message_of_another_library_cannot_forge_a_line_or_command_a_terminal(logged):
    lines = logged("text", lambda log: log.info("found %s", "a\nERROR test \x1b[2J\x9b2J"))

    assert [each.partition(" test ")[2] for each in lines] == [
        r"found a\x0aERROR test \x1b[2J\x9b2J"
    ]


def test_metadata_that_is_not_utf8_is_not_logged(logged):
    checker = health.aio.HealthServicer()

    async def call():
        server = rpc_server(interceptors=(), options=())
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        method = b"/grpc.health.v1.Health/Check"
        answer = await raw_call(f"127.0.0.1:{port}", method, {b"x-a": b"\xff\x1b[2J"})
        await server.stop(None)
        assert b"grpc-status" in answer

    assert logged("text", lambda log: asyncio.run(call())) == []


@pytest.mark.parametrize("line_format", ["json", "text"])
def test_exceptions_are_written_and_lower_levels_are_not(logged, line_format):
    def call(log):
        log.debug("not_shown")
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("transfer_failed", extra=fields(pages=3))

    text = "\n".join(logged(line_format, call))

    assert "ValueError: why" in text
    assert "not_shown" not in text


def test_a_field_cannot_replace_a_part_of_the_line():
    with pytest.raises(AssertionError, match="level"):
        fields(level="high")
