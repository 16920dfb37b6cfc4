"""Calls that a second router gets as well: over real connections, to scripted ones."""

import asyncio
import socket
from contextlib import asynccontextmanager

import grpc
import pytest

import pagewire
from pagewire import AsyncClient, Client
from pagewire.protos import common_pb2
from tests.pagewire.scripted_service import abort, response, serving, usage

LENGTH = common_pb2.FINISH_REASON_LENGTH


def says(text, *, after_s=0.0, before_end_s=0.0):
    """A router that answers with two tokens."""

    async def script(request, context):
        await asyncio.sleep(after_s)
        yield response(text, [1])
        await asyncio.sleep(before_end_s)
        yield response(text, [2], first_index=1, finish_reason=LENGTH, usage=usage())

    return script


def refuses(code, *, after_s=0.0):
    async def script(request, context):
        await asyncio.sleep(after_s)
        await abort(context, code, "no")
        yield

    return script


def generate(first, second, *, hedge_after_s=0.2, **options):
    """The text of a client of these routers, and how many requests each has had."""

    async def scenario():
        async with (
            serving(first) as (one, one_service),
            serving(second) as (two, two_service),
            AsyncClient([one, two], hedge_after_s=hedge_after_s) as client,
        ):
            try:
                told = (await client.generate("p", **options)).text
            except pagewire.PagewireError as error:
                told = error
            return told, one_service, two_service

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def test_by_default_a_slow_router_is_waited_for():
    text, _, other = generate(says("a", after_s=0.5), says("b"), hedge_after_s=0.0)

    assert (text, len(other.requests)) == ("aa", 0)


def test_a_router_that_answers_in_time_is_the_only_one_asked():
    text, _, other = generate(says("a", before_end_s=1.3), says("b"), hedge_after_s=1.0)

    assert (text, len(other.requests)) == ("aa", 0)


def test_a_router_that_hangs_loses_the_call_to_the_next_one():
    async def scenario():
        async with (
            serving(says("a", after_s=60)) as (one, slow),
            serving(says("b")) as (two, fast),
            AsyncClient([one, two], hedge_after_s=0.2) as client,
        ):
            completion = await client.generate("p", n=1, max_tokens=2)
            await asyncio.wait_for(slow.cancelled.wait(), 5)
            return completion, slow.requests, fast.requests

    completion, slow, fast = asyncio.run(asyncio.wait_for(scenario(), 30))

    assert completion.choices[0].token_ids == (1, 2)
    assert completion.text == "bb"
    assert slow == fast, "both got the same request"


def test_a_hedge_goes_behind_the_router_that_the_client_has_moved_to():
    async def scenario():
        async with (
            serving(says("a", after_s=60)) as (two, _),
            serving(says("c")) as (three, _),
        ):
            with socket.create_server(("127.0.0.1", 0)) as unused:
                gone = f"127.0.0.1:{unused.getsockname()[1]}"
            async with AsyncClient([gone, two, three], hedge_after_s=1.0) as client:
                return (await client.generate("p", timeout_s=10)).text

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == "cc"


def test_a_hedge_goes_behind_the_router_of_its_call_though_others_have_moved():
    async def hangs_or_refuses(request, context):
        if request.text == "refuse":
            await abort(context, grpc.StatusCode.UNAVAILABLE, "no worker")
        await asyncio.sleep(60)
        yield

    async def scenario():
        async with (
            serving(hangs_or_refuses) as (one, _),
            serving(says("b")) as (two, _),
            AsyncClient([one, two], hedge_after_s=0.5) as client,
        ):
            hanging = asyncio.create_task(client.generate("hang", timeout_s=3))
            assert (await client.generate("refuse", timeout_s=3)).text == "bb"
            assert client.address == two
            return (await hanging).text

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == "bb"


def test_the_first_router_may_still_win_after_the_hedge_has_begun():
    text, one, other = generate(says("a", after_s=0.6), says("b", after_s=60))

    assert text == "aa"
    assert len(one.requests) == len(other.requests) == 1


def test_the_only_address_gets_the_call_once_more():
    answers = iter([says("a", after_s=60), says("b")])

    async def script(request, context):
        async for message in next(answers)(request, context):
            yield message

    async def scenario():
        async with (
            serving(script) as (one, service),
            AsyncClient(one, hedge_after_s=0.2) as client,
        ):
            return (await client.generate("p")).text, len(service.requests)

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == ("bb", 2)


def test_a_refusal_is_an_answer_and_a_hedge_that_fails_costs_nothing():
    refusal, _, other = generate(
        refuses(grpc.StatusCode.RESOURCE_EXHAUSTED), says("b"), hedge_after_s=5.0
    )
    assert isinstance(refusal, pagewire.OverloadedError)
    assert other.requests == []

    text, _, other = generate(says("a", after_s=0.8), refuses(grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert (text, len(other.requests)) == ("aa", 1)

    slow_refusal = refuses(grpc.StatusCode.RESOURCE_EXHAUSTED, after_s=0.5)
    both, _, other = generate(slow_refusal, slow_refusal)
    assert isinstance(both, pagewire.OverloadedError)
    assert len(other.requests) == 1


def test_a_call_whose_time_is_up_before_the_hedge_has_none():
    late, _, other = generate(says("a", after_s=60), says("b"), hedge_after_s=5.0, timeout_s=0.5)

    assert isinstance(late, pagewire.TimeoutError)
    assert other.requests == []


def test_a_call_that_is_late_at_both_routers_names_the_limit_that_it_was_given():
    late, _, other = generate(says("a", after_s=60), says("b", after_s=60), timeout_s=0.6)

    assert isinstance(late, pagewire.TimeoutError)
    assert "timeout_s = 0.6" in str(late)
    assert len(other.requests) == 1


@asynccontextmanager
async def two_silent_routers():
    """Serve a call at two routers that take a minute to answer; yields a client and both."""
    async with (
        serving(says("a", after_s=60)) as (one, first),
        serving(says("b", after_s=60)) as (two, second),
        AsyncClient([one, two], hedge_after_s=0.1) as client,
    ):
        yield client, first, second


def test_leaving_the_stream_cancels_both():
    async def scenario():
        async with two_silent_routers() as (client, first, second):
            async with client.stream("p"):
                while not second.requests:
                    await asyncio.sleep(0.02)
            await asyncio.wait_for(first.cancelled.wait(), 5)
            await asyncio.wait_for(second.cancelled.wait(), 5)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_cancelling_the_close_of_a_client_still_ends_both():
    async def scenario():
        async with two_silent_routers() as (client, first, second):
            first.ends_streams = second.ends_streams = False
            call = asyncio.create_task(client.generate("p"))
            while not second.requests:
                await asyncio.sleep(0.02)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):  # it waits for the routers
                    await client.aclose()
            with pytest.raises(pagewire.ClosedError):
                await asyncio.wait_for(call, 5)

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("value", [-1, "1", float("nan"), float("inf"), True])
def test_a_wrong_time_names_the_field(kind, value):
    with pytest.raises(
        pagewire.InvalidRequestError, match=r"^hedge_after_s: found .*allowed: seconds, 0 to "
    ):
        kind("localhost:1", hedge_after_s=value)
