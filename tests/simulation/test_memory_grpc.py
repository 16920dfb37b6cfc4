"""The in-memory gRPC behaves as grpc.aio: each conformance scenario runs on both."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import pytest

from tests.support.memory_grpc import MemoryNetwork
from tests.support.rpc_scenarios import ADDRESS, Client, Handlers, Scenario, on_memory, on_sockets
from tests.support.virtual_time import DeadlockError, Process, run_virtual, wait_until


async def _outcome(awaitable: Awaitable[Any]) -> Any:
    """What awaiting gives, with errors as values."""
    try:
        return await awaitable
    except grpc.aio.AioRpcError as error:
        return (error.code().name, tuple(error.trailing_metadata() or ()))
    except (asyncio.InvalidStateError, asyncio.CancelledError, grpc.aio.UsageError) as error:
        return type(error).__name__


async def _read_all(call: Any) -> list[Any]:
    seen = []
    try:
        async for message in call:
            seen.append(message)
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        seen.append(error.code().name if isinstance(error, grpc.aio.AioRpcError) else "cancelled")
    return seen


async def _unary_results(client: Client, log: list[str]) -> list[Any]:
    call = client.unary(b"metadata", metadata=(("asked", "this"),))
    return [
        await client.unary(b"ab"),
        await call,
        next(iter(await call.initial_metadata())),
        next(iter(await call.trailing_metadata())),
        await call.code(),
        await _outcome(client.unary(b"code")),
        await _outcome(client.missing(b"x")),
        await client.unary(b"deadline"),
        await client.unary(b"deadline", timeout=5.0),
        await client.collect(iter((b"a", b"b", b"c"))),
    ]


async def _stream_results(client: Client, log: list[str]) -> list[Any]:
    return [
        await _read_all(client.stream(b"ok")),
        await _read_all(client.stream(b"abort")),
        await _read_all(client.stream(b"raise")),
        await _read_all(client.write(b"")),
        await _read_all(client.chat(iter((b"x", b"y", b"bye", b"z")))),
        await _read_all(client.chat(iter((b"x", b"y")))),
    ]


async def _read_and_write(client: Client, log: list[str]) -> list[Any]:
    call = client.chat()
    seen: list[Any] = []
    await call.write(b"one")
    seen.append(await call.read())
    seen.append(call.done())
    await call.done_writing()
    seen.append(await _outcome(call.write(b"late")))
    seen.append(await call.read())
    seen.append(await call.read() is grpc.aio.EOF)
    seen.append(await call.read() is grpc.aio.EOF)
    seen.append((call.done(), call.cancelled(), await call.code()))
    seen.append(await _outcome(call.write(b"late")))
    mixed = client.chat(iter((b"x",)))
    seen.append(await _outcome(mixed.write(b"y")))
    mixed.cancel()
    return seen


async def _cancellation(client: Client, log: list[str]) -> list[Any]:
    seen: list[Any] = []
    call = client.chat()
    callbacks: list[Any] = []
    call.add_done_callback(callbacks.append)
    await call.write(b"sleep")
    await _until(lambda: log == ["sleeps"])
    seen.append((call.cancel(), call.cancel(), call.cancelled(), call.done()))
    seen.append(await _outcome(call.read()))
    seen.append(await _outcome(call.write(b"x")))
    seen.append((await call.code(), callbacks == [call]))
    call.add_done_callback(callbacks.append)
    seen.append(len(callbacks))
    await _until(lambda: log == ["sleeps", "cancelled"])
    log.clear()
    # Cancelling the task that reads cancels the call.
    call = client.chat()
    await call.write(b"sleep")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call.read(), timeout=0.2)
    seen.append((call.cancelled(), await call.code()))
    await _until(lambda: log == ["sleeps", "cancelled"])
    log.clear()
    unary = client.unary(b"sleep")
    await _until(lambda: log == ["sleeps"])
    unary.cancel()
    seen.append(await _outcome(unary))
    await _until(lambda: log == ["sleeps", "cancelled"])
    return seen


async def _deadlines(client: Client, log: list[str]) -> list[Any]:
    seen = [
        await _outcome(client.unary(b"sleep", timeout=0.2)),
        await _read_all(client.stream(b"sleep", timeout=0.2)),
    ]
    await _until(lambda: log == ["sleeps", "cancelled"] * 2)
    return seen


async def _stopping(client: Client, log: list[str]) -> list[Any]:
    call = client.chat()
    await call.write(b"sleep")
    await _until(lambda: log == ["sleeps"])
    await client.server.stop(None)
    return [await _outcome(call.read()), await _outcome(client.unary(b"x")), log]


async def _unread_messages(client: Client, log: list[str]) -> list[Any]:
    """An OK status waits for its messages; a cancelled call forgets them."""
    finished = client.stream(b"ok")
    await asyncio.sleep(0.2)
    before = finished.done()
    cancelled = client.stream(b"sleep")
    await _until(lambda: log == ["sleeps"])
    cancelled.cancel()
    return [before, await _read_all(finished), await _read_all(cancelled)]


SCENARIOS: list[Scenario] = [
    _unary_results,
    _stream_results,
    _read_and_write,
    _cancellation,
    _deadlines,
    _stopping,
    _unread_messages,
]


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__.strip("_"))
def test_memory_grpc_behaves_as_grpc_aio(scenario: Scenario) -> None:
    expected = asyncio.run(on_sockets(scenario))

    assert run_virtual(on_memory(scenario, 0.0)) == expected
    assert run_virtual(on_memory(scenario, 0.004)) == expected


tagged: ContextVar[str] = ContextVar("tagged")


class Tagger(grpc.aio.ServerInterceptor):
    """Adds its tag to what later interceptors and the handler see; answers "tags" itself."""

    def __init__(self, tag: str) -> None:
        self._tag = tag

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        tagged.set(tagged.get("") + self._tag)
        handler = await continuation(details)
        if dict(details.invocation_metadata).get("asked") != "tags":
            return handler

        async def answer(request: bytes, context: Any) -> bytes:
            return f"{details.method} {tagged.get()}".encode()

        return grpc.unary_unary_rpc_method_handler(answer)


def test_memory_grpc_asks_interceptors_as_grpc_aio() -> None:
    async def scenario(client: Client, log: list[str]) -> list[Any]:
        asked = (("asked", "tags"),)
        return [
            await client.unary(b"ab"),
            await client.unary(b"ab", metadata=asked),
            await client.missing(b"ab", metadata=asked),
            await _outcome(client.missing(b"ab")),
            await _read_all(client.stream(b"ok")),
        ]

    taggers = [Tagger("a"), Tagger("b")]
    expected = asyncio.run(on_sockets(scenario, taggers))

    assert expected[1:3] == [b"/test.Test/Unary ab", b"/test.Test/Missing ab"]
    assert run_virtual(on_memory(scenario, 0.004, taggers)) == expected


# Faults, which only the in-memory network has.


async def _start(network: MemoryNetwork, log: list[str]) -> Any:
    server = network.server(ADDRESS)
    Handlers(log).register(server)
    await server.start()
    return server


def test_killing_a_server_breaks_its_calls_until_a_new_one_starts() -> None:
    async def scenario() -> None:
        network, log = MemoryNetwork(latency_s=0.001), []
        await _start(network, log)
        client = Client(network.channel(ADDRESS), None)
        call = client.chat()
        await call.write(b"hello")
        assert await call.read() == b"HELLO"
        await call.write(b"sleep")
        await _until(lambda: log == ["sleeps"])

        network.kill(ADDRESS)

        assert await _outcome(call.read()) == ("UNAVAILABLE", ())
        assert await _outcome(client.unary(b"x")) == ("UNAVAILABLE", ())
        assert log == ["sleeps"], "a killed handler runs no cleanup"
        await _start(network, log)
        assert await client.unary(b"x") == b"xx"

    run_virtual(scenario())


def test_a_silently_killed_server_answers_nothing() -> None:
    async def scenario() -> None:
        network, log = MemoryNetwork(latency_s=0.001), []
        await _start(network, log)
        client = Client(network.channel(ADDRESS), None)
        call = client.chat(timeout=5.0)
        await call.write(b"hello")
        assert await call.read() == b"HELLO"

        network.kill(ADDRESS, silently=True)

        assert await _outcome(call.read()) == ("DEADLINE_EXCEEDED", ())
        assert await _outcome(client.unary(b"x", timeout=1.0)) == ("DEADLINE_EXCEEDED", ())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.unary(b"x"), timeout=1.0)

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("fault", "outcome", "seconds"),
    [
        ("kill", ("UNAVAILABLE", ()), 3.0),
        ("pause", ("UNAVAILABLE", ()), 3.0),
        ("cut", ("UNAVAILABLE", ()), 3.0),
        ("short pause", b"HELLO", 2.0),
        ("block", b"HELLO", 10.0),
    ],
)
def test_a_client_that_pings_gives_up_a_server_whose_threads_do_not_answer(
    fault: str, outcome: Any, seconds: float
) -> None:
    async def scenario() -> None:
        network, log = MemoryNetwork(latency_s=0.001, ping_s=3.0), []
        await _start(network, log)
        call = Client(network.channel(ADDRESS), None).chat()
        await call.write(b"first")
        assert await call.read() == b"FIRST"
        server = network.process_at(ADDRESS)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        if fault == "kill":
            network.kill(ADDRESS, silently=True)
        elif fault == "cut":
            network.link("outside", ADDRESS).cut()
        else:
            getattr(server, fault.split()[-1])()
        if isinstance(outcome, bytes):
            loop.call_later(seconds, server.resume)
        await call.write(b"hello")
        if isinstance(outcome, bytes):
            assert await call.read() == outcome
        else:
            assert await _outcome(call.read()) == outcome
        assert loop.time() - started_at == pytest.approx(seconds, abs=0.5)
        call.cancel()

    run_virtual(scenario())


def test_killing_a_client_process_cancels_its_calls_at_the_server() -> None:
    async def scenario() -> None:
        network, log = MemoryNetwork(latency_s=0.001), []
        await _start(network, log)
        process = Process("peer:2")
        with process.entered():
            peer = network.server("peer:2")
            await peer.start()
            client = Client(network.channel(ADDRESS), None)
            process.spawn(_outcome(client.unary(b"sleep")))
        await _until(lambda: log == ["sleeps"])

        network.kill("peer:2")

        await _until(lambda: log == ["sleeps", "cancelled"])
        assert network.num_open_calls == 0

    run_virtual(scenario())


def test_a_paused_server_answers_late() -> None:
    async def scenario() -> float:
        network, log = MemoryNetwork(latency_s=0.001), []
        await _start(network, log)
        client = Client(network.channel(ADDRESS), None)
        network.pause(ADDRESS)
        asyncio.get_running_loop().call_later(7.0, network.resume, ADDRESS)
        assert await client.unary(b"x") == b"xx"
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(7.0, abs=0.01)


def test_a_cut_link_delivers_in_order_once_healed() -> None:
    async def scenario() -> None:
        network, log = MemoryNetwork(latency_s=0.001, jitter_s=0.01), []
        await _start(network, log)
        client = Client(network.channel(ADDRESS), None)
        call = client.chat()
        link = network.link("outside", ADDRESS)
        link.cut()
        for index in range(20):
            await call.write(b"m%d" % index)
        read = asyncio.create_task(call.read())
        await asyncio.sleep(10.0)
        assert not read.done()

        link.heal()

        assert await read == b"M0"
        assert [await call.read() for _ in range(19)] == [b"M%d" % index for index in range(1, 20)]
        network.reset("outside", ADDRESS)
        assert await _outcome(call.read()) == ("UNAVAILABLE", ())
        assert await client.unary(b"x") == b"xx"

    run_virtual(scenario())


def test_a_writer_waits_for_a_slow_reader() -> None:
    async def scenario() -> None:
        network, log = MemoryNetwork(latency_s=0.001), []
        await _start(network, log)
        call = Client(network.channel(ADDRESS), None).chat()
        written = 0

        async def writer() -> None:
            nonlocal written
            for _ in range(100):
                await call.write(b"x" * 10_000)
                written += 1

        writing = asyncio.create_task(writer())
        await asyncio.sleep(1.0)
        assert 6 <= written < 30, "both directions hold a window, not everything"
        for _ in range(100):
            await call.read()
        await writing

    run_virtual(scenario())


def test_waiting_for_a_server_that_never_comes_needs_a_deadline() -> None:
    async def scenario(timeout: float | None) -> Any:
        client = Client(MemoryNetwork().channel(ADDRESS), None)
        return await _outcome(client.unary(b"x", wait_for_ready=True, timeout=timeout))

    assert run_virtual(scenario(3.0)) == ("DEADLINE_EXCEEDED", ())
    with pytest.raises(DeadlockError):
        run_virtual(scenario(None))


def test_the_standard_health_service_runs_on_it() -> None:
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    async def scenario() -> list[int]:
        network = MemoryNetwork()
        server = network.server(ADDRESS)
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await server.start()
        stub = health_pb2_grpc.HealthStub(network.channel(ADDRESS))
        await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        first = await watch.read()
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        second = await watch.read()
        watch.cancel()
        checked = await stub.Check(health_pb2.HealthCheckRequest())
        await wait_until(lambda: not server.calls)
        return [first.status, second.status, checked.status]

    assert run_virtual(scenario()) == [2, 1, 1]
