"""A call through the gate behaves as one without it, for whoever may make it."""

import asyncio
import re
from typing import Any

import grpc
import pytest

from credentials.channel import ProvenChannel, told_incarnation
from credentials.cluster import ClusterCredentials
from credentials.gate import CALL_KEY, INCARNATION_KEY, ServerGate, current_caller
from credentials.secret import ClusterSecret
from observability.rare_line import LOG_PERIOD_S
from pagewire.protos import worker_pb2
from tests.simulation import test_memory_grpc as plain
from tests.support.memory_grpc import MemoryNetwork
from tests.support.rpc_scenarios import Client, Handlers, Scenario, on_memory, on_sockets
from tests.support.virtual_time import run_virtual

SECRET = ClusterSecret(bytes(range(32)))
ROUTER = ClusterCredentials(SECRET.keys_of("router", "router-0"), 5)
DECODE = ClusterCredentials(SECRET.keys_of("decode", "decode-0"), 7)
METHODS = ("Unary", "Stream", "Collect", "Chat", "Write", "Missing")
CALLERS = {f"/test.Test/{method}": {"router"} for method in METHODS}


def gate() -> ServerGate:
    return ServerGate(DECODE, CALLERS)


def proving(channel: Any) -> ProvenChannel:
    return ProvenChannel(channel, ROUTER.callee(DECODE.party))


async def unary_results(client: Client, log: list[str]) -> list[Any]:
    return [
        await client.unary(b"ab"),
        await client.unary(b"deadline", timeout=5.0),
        await plain._outcome(client.unary(b"code")),
        await plain._outcome(client.missing(b"x")),
        await client.collect(iter((b"a", b"b", b"c"))),
    ]


@pytest.mark.parametrize(
    "scenario",
    [unary_results, *(each for each in plain.SCENARIOS if each is not plain._unary_results)],
    ids=lambda each: each.__name__.strip("_"),
)
def test_a_proven_call_behaves_as_a_plain_one(scenario: Scenario) -> None:
    expected = asyncio.run(on_sockets(scenario))

    assert asyncio.run(on_sockets(scenario, [gate()], proving)) == expected
    assert run_virtual(on_memory(scenario, 0.004, [gate()], proving)) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("7", 7),
        (str(2**64 - 1), 2**64 - 1),
        (str(2**64), None),
        ("9" * 5000, None),  # more digits than int() takes
        ("-1", None),
        ("", None),
    ],
    ids=lambda each: str(each)[:24],
)
def test_whatever_a_stranger_tells_as_its_incarnation_is_read_or_ignored(
    text: str, told: int | None
) -> None:
    metadata = grpc.aio.Metadata((INCARNATION_KEY, text))
    code = grpc.StatusCode.FAILED_PRECONDITION
    failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata)

    assert told_incarnation(failure) == told


def test_handlers_know_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unary(self: Handlers, request: bytes, context: Any) -> bytes:
        return str(current_caller()).encode()

    async def stream(self: Handlers, request: bytes, context: Any) -> Any:
        yield str(current_caller()).encode()

    async def scenario(client: Client, log: list[str]) -> list[Any]:
        return [await client.unary(b""), *(await plain._read_all(client.stream(b"")))]

    monkeypatch.setattr(Handlers, "unary", unary)
    monkeypatch.setattr(Handlers, "stream", stream)
    told = [b"router-0 (incarnation 5)"] * 2

    assert asyncio.run(on_sockets(scenario, [gate()], proving)) == told
    assert run_virtual(on_memory(scenario, 0.0, [gate()], proving)) == told


class Impostor(grpc.aio.ServerInterceptor):
    """Lets in everybody and answers what it likes, as a process on a dead worker's port may."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if self._answer is None:
            return await continuation(details)
        from credentials.gate import _answering

        return _answering(await continuation(details), self._answer)


@pytest.mark.parametrize("answer", [None, b"", bytes(32)], ids=["none", "empty", "forged"])
def test_nothing_that_an_impostor_answers_is_read(answer: bytes | None) -> None:
    async def scenario(client: Client, log: list[str]) -> list[Any]:
        chat = client.chat()
        await chat.write(b"hello")
        refused = [
            await plain._outcome(client.unary(b"ab")),
            await plain._outcome(client.collect(iter((b"a",)))),
            await plain._outcome(chat.read()),
            *(await plain._read_all(client.stream(b"ok"))),
        ]
        return [*refused, chat.cancelled()]

    told = [("UNAUTHENTICATED", ())] * 3 + ["UNAUTHENTICATED", True]
    impostor = [Impostor(answer)]

    assert asyncio.run(on_sockets(scenario, impostor, proving)) == told
    assert run_virtual(on_memory(scenario, 0.0, impostor, proving)) == told


# What a worker answers |-> what its caller is told.
TOO_MUCH = {
    worker_pb2.GetInfoResponse(transports=["tcp"] * 17).SerializeToString(): (
        "transports: found 17 items; allowed: at most 16"
    ),
    b"\x0a": "1 bytes are no answer of /pagewire.v1.WorkerService/GetInfo: ",
}


@pytest.mark.parametrize("answer", TOO_MUCH, ids=["too much", "no message"])
def test_an_answer_that_the_contract_excludes_ends_the_call_of_a_proven_worker(
    answer: bytes,
) -> None:
    rightful = worker_pb2.GetInfoResponse(transports=["tcp"]).SerializeToString()

    async def one(request: Any, context: Any) -> bytes:
        return answer

    async def many(request: Any, context: Any) -> Any:
        yield rightful
        yield answer
        yield rightful

    def worker(server: Any) -> Any:
        handlers = {
            "GetInfo": grpc.unary_unary_rpc_method_handler(one),
            "Watch": grpc.unary_stream_rpc_method_handler(many),
        }
        service = grpc.method_handlers_generic_handler("pagewire.v1.WorkerService", handlers)
        server.add_generic_rpc_handlers((service,))
        return server

    async def by_reads(stream: Any, seen: list[Any]) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            seen.append(message)

    async def by_iteration(stream: Any, seen: list[Any]) -> None:
        async for message in stream:
            seen.append(message)

    async def told(channel: Any) -> list[Any]:
        parse = worker_pb2.GetInfoResponse.FromString
        path = "/pagewire.v1.WorkerService/"
        seen: list[Any] = []
        for read_all in (by_reads, by_iteration):
            stream = channel.unary_stream(f"{path}Watch", None, parse)(b"")
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await read_all(stream, seen)
            seen += [ended.value.code(), stream.cancelled()]
        with pytest.raises(grpc.aio.AioRpcError, match=re.escape(TOO_MUCH[answer])) as refused:
            await channel.unary_unary(f"{path}GetInfo", None, parse)(b"")
        return [*seen, refused.value.code()]

    async def on_memory() -> list[Any]:
        network = MemoryNetwork(latency_s=0.0, jitter_s=0.0)
        server = worker(network.server("worker:1", [ServerGate(DECODE)]))
        await server.start()
        seen = await told(proving(network.channel("worker:1")))
        await server.stop(None)
        return seen

    async def on_sockets() -> list[Any]:
        server = worker(grpc.aio.server(interceptors=[ServerGate(DECODE)]))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with proving(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) as channel:
            seen = await told(channel)
        await server.stop(None)
        return seen

    first = worker_pb2.GetInfoResponse(transports=["tcp"])
    internal = grpc.StatusCode.INTERNAL
    assert run_virtual(on_memory()) == [first, internal, True] * 2 + [internal]
    assert asyncio.run(on_sockets()) == [first, internal, True] * 2 + [internal]


def test_a_flood_of_strangers_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(client: Client, log: list[str]) -> list[Any]:
        for _ in range(2):
            for _ in range(50):
                await plain._outcome(client.unary(b"secret", metadata=((CALL_KEY, b"garbage"),)))
            await asyncio.sleep(LOG_PERIOD_S)
        return []

    run_virtual(on_memory(scenario, 0.0, [gate()]))

    first, second = [each for each in caplog.records if each.message == "call_refused"]
    assert first.fields["method"] == "/test.Test/Unary"
    assert first.fields["peer"] == "memory:outside"
    assert first.fields["not_logged"] == 0
    assert second.fields["not_logged"] == 49
