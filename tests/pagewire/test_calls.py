"""Calls of a client share one stream, and nothing that one of them does reaches the others."""

import asyncio
import gc
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from pagewire import (
    AsyncClient,
    ClosedError,
    ConnectionFailedError,
    InvalidRequestError,
    ServerError,
    TimeoutError,  # noqa: A004 - like asyncio's
)
from pagewire import calls as calls_module
from pagewire.protos import common_pb2, inference_pb2_grpc
from pagewire.protos.grpc_options import LARGE_REQUEST_BYTES
from pagewire.protos.token_ids import unpack_token_ids
from tests.pagewire.scripted_service import ScriptedService, response, serving, usage
from tests.support.memory_grpc import MemoryChannel, MemoryNetwork
from tests.support.virtual_time import run_virtual, wait_until

LENGTH = common_pb2.FINISH_REASON_LENGTH
ADDRESSES = ("router-0:1", "router-1:1")


async def echo(request, context):
    """Answer with the prompt, in two messages."""
    yield response(request.text, [1], resume_token=b"t")
    await asyncio.sleep(1.0)
    yield response("!", [2], first_index=1, finish_reason=LENGTH, usage=usage())


async def never_ends(request, context):
    yield response(request.text, [1], resume_token=b"t")
    await asyncio.sleep(3600)


async def goes_on(request, context):
    """Send what follows the first token."""
    assert request.resume.choices[0].text_chars == len(request.text)
    yield response("!", [2], first_index=1, finish_reason=LENGTH, usage=usage())


@asynccontextmanager
async def client_of(*scripts, **options):
    """A client of routers that play scripts, in virtual time; yields it, them and their network."""
    network = MemoryNetwork(latency_s=0.001)
    services = [ScriptedService(script) for script in scripts]
    addresses = ADDRESSES[: len(scripts)]
    for address, service in zip(addresses, services, strict=True):
        server = network.server(address)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        await server.start()
    async with AsyncClient(addresses, channel_factory=network.channel, **options) as client:
        yield client, services, network


async def begun(*streams):
    """Read the first delta of each."""
    for each in streams:
        await anext(each)


async def rest_of(stream):
    async for _ in stream:
        pass
    return stream.completion


def test_calls_that_start_at_once_share_a_stream_and_its_messages():
    async def scenario():
        async with client_of(echo) as (client, [service], _):
            answers = await asyncio.gather(*(client.generate(f"p{i}") for i in range(300)))
            assert [each.text for each in answers] == [f"p{i}!" for i in range(300)]
            assert service.message_sizes == [256, 44]
            await asyncio.gather(*(client.generate("x") for _ in range(300)))
            assert service.message_sizes == [256, 44] * 2
            assert service.num_streams == 1

    run_virtual(scenario())


def test_tokens_in_columns_are_the_deltas_that_messages_would_be():
    async def tells(request, context):
        yield response("a", [1], resume_token=b"t")
        yield response("", [2], first_index=1)
        yield response("b", [3], first_index=2)
        yield response("c", [4, 5], first_index=3)
        yield response("d", [6], first_index=5, finish_reason=LENGTH, usage=usage())

    async def scenario():
        async with client_of(tells) as (client, [service], _):
            streams = [client.stream("p") for _ in range(3)]
            for stream in streams:
                deltas = [each async for each in stream]
                assert [each.token_ids for each in deltas] == [(1,), (2,), (3,), (4, 5), (6,)]
                assert [each.first_index for each in deltas] == [0, 1, 2, 3, 5]
                assert [each.text for each in deltas] == ["a", "", "b", "c", "d"]
                assert {each.request_id for each in deltas} == {"r1"}
                assert deltas[2] == replace(deltas[0], text="b", token_ids=(3,), first_index=2)
                assert stream.completion.choices[0].text == "abcd"
            assert service.num_in_columns == 3 * 2

    run_virtual(scenario())


def test_a_router_that_goes_on_elsewhere_than_asked_is_found_out_in_columns_too():
    async def repeats(request, context):
        yield response("", [], resume_token=b"t")
        yield response("x", [1])

    async def scenario():
        async with client_of(never_ends, repeats) as (client, [_, second], network):
            stream = client.stream("p")
            await begun(stream)
            network.kill(ADDRESSES[0])
            with pytest.raises(ServerError, match="token 0 of choice 0 arrived instead of 1"):
                await rest_of(stream)
            assert second.num_in_columns == 1

    run_virtual(scenario())


def test_what_arrived_in_columns_is_not_generated_again():
    async def sends_three(request, context):
        yield response("a", [1], resume_token=b"t")
        yield response("b", [2], first_index=1)
        yield response("c", [3], first_index=2)
        await asyncio.sleep(3600)

    async def ends(request, context):
        [choice] = request.resume.choices
        assert (unpack_token_ids(choice.token_ids), choice.text_chars) == ([1, 2, 3], 3)
        yield response("d", [4], first_index=3, finish_reason=LENGTH, usage=usage())

    async def scenario():
        async with client_of(sends_three, ends) as (client, _, network):
            stream = client.stream("p")
            for _ in range(3):
                await anext(stream)
            network.kill(ADDRESSES[0])
            completion = await rest_of(stream)
            assert completion.choices[0].token_ids == (1, 2, 3, 4)
            assert completion.text == "abcd"

    run_virtual(scenario())


def test_a_router_that_reads_one_call_at_a_time_gets_them_so():
    async def scenario():
        async with client_of(echo) as (client, [service], _):
            service.reads_more = False
            for _ in range(2):
                await asyncio.gather(*(client.generate("x") for _ in range(20)))
            assert service.message_sizes == [1] * 40

    run_virtual(scenario())


@pytest.mark.parametrize(("num_calls", "seconds"), [(1, 0.0), (3, calls_module.HEADERS_S)])
def test_calls_wait_for_what_a_late_router_tells_of_itself_only_for_a_moment(num_calls, seconds):
    async def scenario():
        async with client_of(echo) as (client, [service], _):
            service.headers_s = 2 * calls_module.HEADERS_S
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            calls = [asyncio.create_task(client.generate("x")) for _ in range(num_calls)]
            while len(service.requests) < num_calls:
                await asyncio.sleep(0.001)
            assert loop.time() - began_at == pytest.approx(seconds, abs=0.005)
            await asyncio.gather(*calls)
            assert service.message_sizes == [1] * num_calls

    run_virtual(scenario())


def test_all_calls_of_a_stream_that_breaks_go_on_at_the_next_router():
    async def scenario():
        async with client_of(never_ends, goes_on) as (client, [_, second], network):
            streams = [client.stream(f"p{i}") for i in range(100)]
            await begun(*streams)

            network.kill(ADDRESSES[0])

            for i, each in enumerate(streams):
                completion = await rest_of(each)
                assert (completion.text, completion.token_ids) == (f"p{i}!", (1, 2))
            assert second.num_streams == 1

    run_virtual(scenario())


def test_resumptions_are_those_of_all_routers_together():
    async def goes_on_and_dies(request, context):
        count = sum(len(each.token_ids) // 4 for each in request.resume.choices)
        yield response("x", [count], first_index=count, resume_token=b"t")
        if count < 3:
            await asyncio.sleep(3600)
        told = usage()
        told.completion_tokens = 5
        told.stats.resumptions = 1 if request.HasField("resume") else 0
        yield response("", [9], first_index=count + 1, finish_reason=LENGTH, usage=told)

    async def scenario():
        async with client_of(goes_on_and_dies, goes_on_and_dies) as (client, _, network):
            stream = client.stream("p")
            await begun(stream)
            for number in range(3):  # each router again and again, on connections that break
                network.reset("outside", ADDRESSES[number % 2])
                await begun(stream)
            completion = await rest_of(stream)
            assert completion.token_ids == (0, 1, 2, 3, 9)
            assert completion.usage.completion_tokens == 5
            assert completion.usage.resumptions == 3

    run_virtual(scenario())


def test_a_call_that_is_cancelled_disturbs_no_other():
    async def scenario():
        async with client_of(never_ends) as (client, [service], network):
            streams = [client.stream(f"p{i}") for i in range(10)]
            await begun(*streams)
            for each in streams[::2]:
                each.cancel()
            await wait_until(service.cancelled.is_set)
            service.script = echo
            assert (await client.generate("new")).text == "new!"
            assert service.num_streams == network.num_open_calls == 1
            for each in streams[1::2]:
                waiting = asyncio.create_task(anext(each))
                await asyncio.sleep(1)
                assert not waiting.done()
                waiting.cancel()

    run_virtual(scenario())


def test_a_stream_that_nobody_reads_holds_up_no_other_and_loses_nothing():
    async def floods(request, context):
        for index in range(2000):
            last = {"finish_reason": LENGTH, "usage": usage()} if index == 1999 else {}
            yield response("x" * 100, [index], first_index=index, **last)

    async def scenario():
        async with client_of(floods) as (client, [service], _):
            unread = client.stream("p")
            await wait_until(lambda: service.requests)
            service.script = echo
            assert (await client.generate("q")).text == "q!"
            assert (await rest_of(unread)).token_ids == tuple(range(2000))

    run_virtual(scenario())


def test_a_large_request_travels_by_itself():
    large = "x" * LARGE_REQUEST_BYTES

    async def scenario():
        async with client_of(echo) as (client, [service], _):
            stream = client.stream("p")
            assert (await client.generate(large)).text == f"{large}!"
            assert (await rest_of(stream)).text == "p!"
            assert service.message_sizes == [1]

    run_virtual(scenario())


def test_a_large_request_that_grows_by_what_was_received_is_resumed_by_itself():
    prompt = "x" * (LARGE_REQUEST_BYTES - 1000)

    async def begins(request, context):
        yield response(request.text, range(1000), resume_token=b"t")
        await asyncio.sleep(3600)

    async def ends(request, context):
        yield response("!", [7], first_index=1000, finish_reason=LENGTH, usage=usage())

    async def scenario():
        async with client_of(begins, ends) as (client, [first, second], network):
            stream = client.stream(prompt)
            await begun(stream)
            network.kill(ADDRESSES[0])
            assert (await rest_of(stream)).token_ids == (*range(1000), 7)
            assert (first.num_streams, second.num_streams) == (1, 0)

    run_virtual(scenario())


def test_a_request_that_the_router_does_not_read_ends_alone():
    async def scenario():
        async with serving(never_ends) as (address, service), AsyncClient(address) as client:
            stream = client.stream("p")
            await begun(stream)
            with pytest.raises(InvalidRequestError, match="at most 4194304 bytes"):  # gRPC's own
                await client.generate("x" * (5 * 2**20))
            service.script = echo
            assert (await client.generate("q")).text == "q!"
            assert service.num_streams == 1

    asyncio.run(scenario())


class _EndedCall:
    """A stream that has ended, as grpc.aio shows it to whoever wrote at that moment."""

    def __init__(self, **options):
        pass

    async def initial_metadata(self):
        return ()

    async def read(self):
        metadata = grpc.aio.Metadata()
        details = "Internal error from Core"
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, details)

    async def write(self, message):
        raise asyncio.InvalidStateError

    def cancel(self):
        pass


def test_a_stream_that_ends_while_it_is_written_to_is_a_lost_one(monkeypatch):
    async def scenario():
        async with client_of(echo) as (client, [service], _):
            monkeypatch.setattr(MemoryChannel, "stream_stream", lambda *_, **__: _EndedCall)
            stream = client.stream("p")
            await asyncio.sleep(0.05)
            monkeypatch.undo()
            client._routers._connections.clear()  # whose stub has the method still
            assert (await rest_of(stream)).text == "p!"
            assert service.num_streams == 1

    run_virtual(scenario())


def test_a_router_without_the_method_is_told_as_what_it_is():
    async def scenario():
        network = MemoryNetwork()
        server = network.server("router-0:1")
        await server.start()
        async with AsyncClient("router-0:1", channel_factory=network.channel) as client:
            with pytest.raises(ConnectionFailedError, match="older than this client") as caught:
                await client.generate("p")
            assert caught.value.code == "UNIMPLEMENTED"

    run_virtual(scenario())


def test_an_old_stream_ends_with_its_last_call_and_new_calls_have_another(monkeypatch):
    monkeypatch.setattr(calls_module, "MAX_STREAM_AGE_S", 300.0)

    async def scenario():
        async with client_of(never_ends) as (client, [service], network):
            old = client.stream("old")
            await begun(old)
            await asyncio.sleep(301)
            service.script = echo
            assert (await client.generate("new")).text == "new!"
            assert service.num_streams == network.num_open_calls == 2
            old.cancel()
            assert network.num_open_calls == 1
            await asyncio.sleep(301)
            assert network.num_open_calls == 0, "nor does an idle one live longer"
            assert (await client.generate("last")).text == "last!"
            assert service.num_streams == 3

    run_virtual(scenario())


def test_each_call_keeps_its_own_time_limit():
    async def scenario():
        async with client_of(never_ends) as (client, [service], _):
            loop = asyncio.get_running_loop()
            stream = client.stream("long", timeout_s=100)
            began_at = loop.time()
            with pytest.raises(TimeoutError, match=r"within timeout_s = 0.5$"):
                await client.generate("short", timeout_s=0.5)
            assert loop.time() - began_at < 0.6
            await wait_until(service.cancelled.is_set)
            await begun(stream)
            with pytest.raises(TimeoutError, match=r"within timeout_s = 100$"):
                await anext(stream)
            assert 100 <= loop.time() - began_at < 100.1

    run_virtual(scenario())


def test_a_stream_that_is_dropped_unread_is_cancelled():
    async def scenario():
        async with client_of(never_ends) as (client, [service], _):
            stream = client.stream("p")
            await wait_until(lambda: service.requests)
            del stream
            gc.collect()
            await wait_until(service.cancelled.is_set)

    run_virtual(scenario())


def test_closing_ends_what_runs_what_waits_unread_and_what_looks_for_a_router():
    async def scenario():
        async with client_of(never_ends) as (client, _, network):
            large = client.stream("x" * LARGE_REQUEST_BYTES)
            lost = client.stream("p")
            await begun(large, lost)
            network.kill(ADDRESSES[0])
            await asyncio.sleep(1)
            await client.aclose()
            for each in (large, lost):
                with pytest.raises(ClosedError):
                    await asyncio.wait_for(anext(each), 10)

    run_virtual(scenario())
