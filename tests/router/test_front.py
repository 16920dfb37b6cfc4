import asyncio
import itertools
import logging
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import descriptor_pool

from decode_worker.server import DecodeServicer
from options.option import WrongOptions, options_of
from pagewire import AsyncClient
from pagewire.protos import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2_grpc
from pagewire.protos.grpc_options import WORKER_SERVER_OPTIONS
from pagewire.protos.token_ids import pack_token_ids
from pagewire.routers import CHANNEL_OPTIONS
from prefill_worker.server import PrefillServicer
from protos.call_guard import MAX_SILENT, CallGuard
from router import idle_streams
from router.config import RouterConfig
from router.front import make_server, server_options
from router.router import Router
from tests.router.real_front import real_front
from tests.router.scripted_worker import ScriptedWorker
from tests.support.log_records import records_of
from tests.support.wall_clock import assert_within

ROOT = Path(__file__).parents[2]
WAVE = 250  # calls that are opened at once


def test_a_client_that_waits_long_does_not_ping_more_often_than_a_router_allows():
    allowed = dict(server_options(RouterConfig()))["grpc.http2.min_ping_interval_without_data_ms"]
    sent = dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"]

    assert 2 * allowed <= sent


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(server_options(RouterConfig()), id="router"),
        pytest.param(WORKER_SERVER_OPTIONS, id="worker", marks=pytest.mark.thorough),
    ],
)
def test_of_thousands_of_calls_at_once_none_is_cancelled_before_it_is_seen(options):
    async def echo(request, context):
        return request

    async def scenario():
        server = grpc.aio.server(options=options)
        method = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test", {"Echo": method}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test/Echo")
            answers = await asyncio.gather(*(call(b"x") for _ in range(3500)))
        await server.stop(None)
        assert answers == [b"x"] * 3500

    asyncio.run(scenario())


def test_the_largest_limits_are_those_that_grpc_takes():
    names = ("max_active_requests", "max_connections", "max_prompt_chars")
    largest = {name: options_of(RouterConfig)[name].rule.at_most for name in names}

    async def scenario():
        server = make_server(RouterConfig(**largest), None, shares_port=False)
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await server.stop(None)

    asyncio.run(scenario())
    for name in names:
        with pytest.raises(WrongOptions, match=f"{name}: found {2**31 - 1}; allowed: an integer, "):
            RouterConfig(**{name: 2**31 - 1})


def test_connections_beyond_the_limit_are_closed_and_those_that_are_open_go_on():
    async def scenario():
        config = RouterConfig(max_connections=2)
        async with real_front(ScriptedWorker("decode-0"), config) as (_, address):
            options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each channel
            channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(3)]
            stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
            codes = [
                await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5).code()
                for stub in (*stubs, *stubs[:2])
            ]
            for channel in channels:
                await channel.close()
        ok, refused = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
        assert codes == [ok, ok, refused, ok, ok]

    asyncio.run(scenario())


def test_a_client_whose_idle_stream_was_ended_is_served_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_streams, "IDLE_S", 0.2)

    async def scenario() -> None:
        async with real_front(ScriptedWorker("decode-0"), RouterConfig()) as (_, address):
            channel = grpc.aio.insecure_channel(address)
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            others = [stub.GenerateMany() for _ in range(idle_streams.MOST_IDLE)]
            for each in others:
                await each.initial_metadata()
            async with AsyncClient(address) as client:
                for pause_s in (0.0, 0.5, *(0.195 + 0.001 * step for step in range(10))):
                    await asyncio.sleep(pause_s)
                    completion = await client.generate([5], max_tokens=1, timeout_s=10)
                    assert completion.usage.completion_tokens == 1
            assert not any(each.done() for each in others)
            await channel.close()

    asyncio.run(scenario())


def methods() -> Iterator[str]:
    """Yield every method that a router or a worker serves."""
    pool = descriptor_pool.Default()
    for file in ("pagewire/protos/inference.proto", "pagewire/protos/worker.proto"):
        for service in pool.FindFileByName(file).services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}"
    yield "/grpc.health.v1.Health/Check"
    yield "/grpc.health.v1.Health/Watch"


class Sink:
    def open_attempt(self, start: Any) -> None:
        raise AssertionError("garbage is no start")


def test_no_method_of_any_service_takes_garbage_for_a_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        router = Router(
            config=RouterConfig(),
            model_dir=None,
            connect_channel=grpc.aio.insecure_channel,
            random_id=lambda: "0" * 32,
        )
        front = make_server(RouterConfig())
        router.register(front)
        workers = grpc.aio.server(
            options=WORKER_SERVER_OPTIONS, interceptors=[CallGuard(max_calls=1000)]
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(ScriptedWorker("decode-0"), workers)
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(Sink()), workers)
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(
            PrefillServicer(Sink(), grant_s=5.0), workers
        )
        ports = [server.add_insecure_port("127.0.0.1:0") for server in (front, workers)]
        for server in (front, workers):
            await server.start()
        unknown: dict[str, int] = {}
        for port, method in itertools.product(ports, methods()):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                # At once: grpc.aio has INTERNAL for a write to a call that has just ended.
                code = await channel.unary_stream(method)(b"\xff\xff\xff").code()
            if code is grpc.StatusCode.UNIMPLEMENTED:
                unknown[method] = unknown.get(method, 0) + 1
            else:
                assert code is grpc.StatusCode.INVALID_ARGUMENT, (method, code)
        assert all(count == 1 for count in unknown.values()), "one of the two serves each"
        for server in (front, workers):
            await server.stop(None)
        await router.stop(0.0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(scenario(), 30))
    assert not records_of(caplog)


@contextmanager
def front_process() -> Iterator[tuple[psutil.Process, str]]:
    """Run real_front.py; yields it and its address."""
    command = [sys.executable, "-m", "tests.router.real_front"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield psutil.Process(process.pid), process.stdout.readline().strip()
        finally:
            process.communicate(timeout=20)


def test_thousands_of_silent_calls_take_little_memory_and_hold_up_no_stream() -> None:
    async def scenario(process: psutil.Process, address: str) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(grpc.aio.insecure_channel(address))
        sampling = common_pb2.SamplingParams(max_tokens=100)
        request = inference_pb2.GenerateRequest(token_ids=pack_token_ids([5]), sampling=sampling)
        canary = stub.Generate(request, wait_for_ready=True)
        streaming = asyncio.create_task(longest_gap(canary))
        channel = grpc.aio.insecure_channel(address)
        generate = channel.stream_stream("/pagewire.v1.InferenceService/Generate")
        calls: list[Any] = []
        resident: list[int] = []  # bytes
        for _ in range(6000 // WAVE):
            calls += [generate() for _ in range(WAVE)]
            while sum(call.done() for call in calls) < len(calls) - MAX_SILENT:
                await asyncio.sleep(0.01)
            resident.append(process.memory_info().rss)
            # Half of what the last 1,000 calls would take.
            is_settled = len(resident) > 4 and resident[-1] - resident[-5] < 10 * 2**20
            if is_settled and len(calls) >= 2000:
                break
        else:
            raise AssertionError(f"memory grows with each call: {resident}")
        codes = {await call.code() for call in calls if call.done()}
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert_within(await streaming, 1)
        await channel.close()

    with front_process() as (process, address):
        asyncio.run(asyncio.wait_for(scenario(process, address), 60))


async def longest_gap(stream: Any) -> float:
    """Read a stream to its end; return the longest time between two messages."""
    loop = asyncio.get_running_loop()
    longest_s, last_at = 0.0, math.inf
    async for _ in stream:
        longest_s = max(longest_s, loop.time() - last_at)
        last_at = loop.time()
    return longest_s
