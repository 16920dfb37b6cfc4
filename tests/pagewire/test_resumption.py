"""What a client does by itself when it loses a router: over real connections, to scripted ones."""

import asyncio
import threading
import time

import grpc
import pytest
from google.rpc import error_details_pb2

import pagewire
from cluster.config import ClusterConfig
from pagewire import AsyncClient, Client
from pagewire.failures import CallFailure
from pagewire.protos import common_pb2
from pagewire.protos.token_ids import unpack_token_ids
from pagewire.routers import RESTART_S, Routers, no_better
from tests.pagewire.scripted_service import (
    abort,
    response,
    retry_after,
    serving,
    serving_in_thread,
    usage,
    violation,
)
from tests.support.free_ports import free_port
from tests.support.wall_clock import assert_within

LENGTH = common_pb2.FINISH_REASON_LENGTH
STOPS = error_details_pb2.ErrorInfo(reason="ROUTER_STOPS", domain="pagewire")


def begins(*, token=b"t0", dies):
    """A router that sends two choices' beginnings, and then does what `dies` does."""

    async def script(request, context):
        yield response("äb", [1, 2], resume_token=token)
        yield response("x", [7], choice=1, finish_reason=LENGTH)
        yield response("c", [3], first_index=2)
        await dies(context)

    return script


async def stops(context):
    await abort(context, grpc.StatusCode.UNAVAILABLE, "the router stopped", STOPS)


async def hangs(context):
    await asyncio.sleep(60)


async def goes_on(request, context):
    yield response("d", [4], first_index=3, resume_token=b"t1")
    yield response("e", [5], first_index=4, finish_reason=LENGTH, usage=usage())


def generate(scripts, *, resume_s=30.0, **options):
    """The completion of a client of these routers, and the services."""

    async def scenario():
        async with (
            serving(scripts[0]) as (one, first),
            serving(scripts[1]) as (two, second),
            AsyncClient([one, two], resume_s=resume_s) as client,
        ):
            return await client.generate("p", n=2, **options), first, second

    return asyncio.run(scenario())


def test_the_next_router_gets_request_token_and_what_was_received():
    completion, first, second = generate([begins(dies=stops), goes_on])

    assert [each.text for each in completion.choices] == ["äbcde", "x"]
    assert [each.token_ids for each in completion.choices] == [(1, 2, 3, 4, 5), (7,)]
    assert completion.usage.prompt_tokens == 40
    [request], [again] = first.requests, second.requests
    resume = again.resume
    assert resume.token == b"t0"
    got = [
        (each.choice, unpack_token_ids(each.token_ids), each.text_chars, each.finished)
        for each in resume.choices
    ]
    assert got == [(0, [1, 2, 3], 3, False), (1, [7], 1, True)]
    again.ClearField("resume")
    assert again == request


def test_a_connection_that_breaks_is_a_lost_router():
    async def scenario():
        async with (
            serving(goes_on) as (last, service),
            AsyncClient(["127.0.0.1:1", last]) as client,
        ):
            lost = []

            def dying(token):
                async def dies(context):
                    lost.append(token)
                    await asyncio.sleep(60)

                return begins(token=token, dies=dies)

            async with serving(dying(b"t0")) as (one, _):
                client._routers.addresses = (one, last)
                stream = client.stream("p", n=2)
                for _ in range(3):
                    await anext(stream)
            deltas = [delta async for delta in stream]
            return lost, deltas, stream.completion, service.requests

    lost, deltas, completion, requests = asyncio.run(scenario())

    assert lost == [b"t0"]
    assert [each.text for each in deltas] == ["d", "e"]
    assert completion.choices[0].text == "äbcde"
    assert requests[0].resume.token == b"t0"


def test_each_router_that_is_lost_hands_on_the_newest_token():
    async def half(request, context):
        yield response("d", [4], first_index=3, resume_token=b"t1")
        await stops(context)

    async def end(request, context):
        yield response("e", [5], first_index=4, finish_reason=LENGTH, usage=usage())

    async def first(request, context):  # serves the beginning and, when its turn comes, the end
        script = end if request.HasField("resume") else begins(dies=stops)
        async for each in script(request, context):
            yield each

    completion, one, _ = generate([first, half])

    assert completion.choices[0].text == "äbcde"
    assert one.requests[1].resume.token == b"t1"
    assert unpack_token_ids(one.requests[1].resume.choices[0].token_ids) == [1, 2, 3, 4]


def test_a_call_that_has_received_nothing_is_made_anew():
    async def dies_at_once(request, context):
        await stops(context)
        yield

    completion, _, second = generate([dies_at_once, goes_on])

    assert completion.choices[0].text == "de"
    assert not second.requests[0].HasField("resume")


def test_what_a_router_without_tokens_has_begun_ends_with_its_loss():
    with pytest.raises(pagewire.UnavailableError, match="the router stopped"):
        generate([begins(token=b"", dies=stops), goes_on])


def test_resumption_can_be_switched_off():
    with pytest.raises(pagewire.UnavailableError, match="the router stopped"):
        generate([begins(dies=stops), goes_on], resume_s=0)


NO_WORKER = error_details_pb2.ErrorInfo(reason="NO_WORKER", domain="pagewire")


def unready(times, details, seen):
    """A router that has no worker for its first `times` calls."""

    async def script(request, context):
        seen.append(time.monotonic())
        if len(seen) <= times:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "no decode worker", *details)
        yield response("a", [1], finish_reason=LENGTH, usage=usage())

    return script


def test_a_call_that_a_router_cannot_serve_yet_is_made_again_after_growing_pauses():
    seen = []
    with (
        serving_in_thread(unready(2, (NO_WORKER,), seen)) as (address, _),
        Client(address) as client,
    ):
        assert client.generate("p").text == "a"
    assert len(seen) == 3
    assert seen[1] - seen[0] >= 0.09
    assert seen[2] - seen[1] >= 0.19


def test_the_last_call_is_made_at_the_end_of_the_second():
    seen = []

    async def script(request, context):
        seen.append(time.monotonic())
        if seen[-1] < seen[0] + 0.85:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "no decode worker", NO_WORKER)
        yield response("a", [1], finish_reason=LENGTH, usage=usage())

    with serving_in_thread(script) as (address, _), Client(address) as client:
        assert client.generate("p").text == "a"


def test_a_router_that_stops_is_waited_for_until_its_next_start():
    stopping = CallFailure(pagewire.UnavailableError("", code=""), is_stopping=True)
    known = Routers(["a:1"], lambda _: None, no_better)

    grace_s = ClusterConfig().stop_grace_s
    assert known.begin_s(stopping) >= grace_s + RESTART_S


@pytest.mark.parametrize(("advice", "calls"), [((), range(3, 6)), ((retry_after(2),), [1])])
def test_no_call_is_made_again_beyond_a_second_or_before_the_router_says(advice, calls):
    seen = []
    with (
        serving_in_thread(unready(99, (NO_WORKER, *advice), seen)) as (address, _),
        Client(address) as client,
        pytest.raises(pagewire.UnavailableError, match=r"^no decode worker$"),
    ):
        client.generate("p")
    assert len(seen) in calls


@pytest.mark.parametrize(("away_s", "succeeds"), [(0.25, True), (5.0, False)])
def test_a_call_other_than_a_generation_is_made_again_for_a_second_as_well(away_s, succeeds):
    with serving_in_thread(goes_on) as (address, service), Client(address) as client:
        service.is_away = True
        back = threading.Timer(away_s, setattr, (service, "is_away", False))
        back.start()
        started = time.monotonic()
        if succeeds:
            assert len(client.status().workers) == 1
        else:
            with pytest.raises(pagewire.UnavailableError, match=r"^away$"):
                client.status()
            # Had it tried until the router came back, it would have succeeded.
            assert time.monotonic() - started > 0.5
        back.cancel()


def test_other_ends_than_the_loss_of_a_router_are_told_at_once():
    async def no_worker(context):
        await abort(context, grpc.StatusCode.UNAVAILABLE, "no decode worker", retry_after(1))

    async def lost(context):
        await abort(context, grpc.StatusCode.ABORTED, "gave up", retry_after(1))

    for dies, words in ((no_worker, "no decode worker"), (lost, "gave up")):
        with pytest.raises(pagewire.UnavailableError, match=words):
            generate([begins(dies=dies), goes_on])


@pytest.mark.parametrize(
    ("field", "found", "why"),
    [
        ("resume.token", "one that expired 5 s ago", "its call began too long ago, or"),
        ("resume.token", "one that does not fit the request", "that served it is gone"),
        ("resume", "a resumption", "that served it is gone"),
        ("prompt", "8 tokens", "serves otherwise: prompt: found 8 tokens"),
    ],
)
def test_an_answer_that_no_router_can_continue_is_told_without_words_of_tokens(field, found, why):
    async def refuses(request, context):
        detail = violation(field, f"found {found}")
        told = f"{field}: found {found}"
        await abort(context, grpc.StatusCode.INVALID_ARGUMENT, told, detail)
        yield

    with pytest.raises(pagewire.UnavailableError, match=f"stopped; .*{why}.* again") as caught:
        generate([begins(dies=stops), refuses])
    assert "resume" not in str(caught.value)


def test_a_crowd_at_the_router_that_is_left_is_waited_out():
    calls = []

    async def crowded(request, context):
        calls.append(request)
        if len(calls) < 2:
            await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after(1))
        async for each in goes_on(request, context):
            yield each

    async def scenario():
        async with (
            serving(begins(dies=stops)) as (one, _),
            serving(crowded) as (two, _),
            AsyncClient([one, two, two]) as client,
        ):
            return await client.generate("p", n=2)

    assert asyncio.run(scenario()).choices[0].text == "äbcde"


def test_a_bug_in_the_search_for_a_reason_does_not_hold_a_call_back(monkeypatch):
    async def crash(*_):
        raise RuntimeError("planted")

    async def scenario():
        async with AsyncClient(f"127.0.0.1:{free_port()}") as client:
            async with asyncio.timeout(20.0):
                with pytest.raises(pagewire.ConnectionFailedError):
                    await client.generate("p", timeout_s=60.0)

    monkeypatch.setattr("pagewire.routers.why_no_connection", crash)
    asyncio.run(scenario())


def test_a_client_gives_up_after_resume_s_with_the_loss():
    async def scenario():
        async with serving(begins(dies=stops)) as (one, _):
            client = AsyncClient(one, resume_s=1.0)
            stream = client.stream("p", n=2)
            for _ in range(3):
                await anext(stream)
        began_at = time.monotonic()
        with pytest.raises(pagewire.TransportError):
            await anext(stream)
        await client.aclose()
        return time.monotonic() - began_at

    assert_within(asyncio.run(scenario()), 2.0)


def test_a_router_that_begins_anew_instead_of_going_on_is_found_out():
    async def begins_anew(request, context):
        yield response("a", [1], resume_token=b"t1")

    with pytest.raises(pagewire.ServerError, match="token 0 of choice 0 arrived instead of 3"):
        generate([begins(dies=stops), begins_anew])


def test_cancelling_a_stream_that_looks_for_a_router_ends_it_at_once():
    async def scenario():
        async with serving(begins(dies=stops)) as (one, _):
            client = AsyncClient([one, "127.0.0.1:1"])
            stream = client.stream("p", n=2)
            for _ in range(3):
                await anext(stream)
        reader = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(1.0)
        assert not reader.done()
        stream.cancel()
        assert await asyncio.wait_for(reader, 1.0) is None
        await client.aclose()

    asyncio.run(scenario())


def test_calls_other_than_generations_go_to_the_next_router_once():
    async def scenario():
        async with serving(goes_on) as (two, service), AsyncClient(["127.0.0.1:1", two]) as client:
            assert (await client.list_models())[0].name == "tiny"
            assert client.address == two
            assert (await client.status()).active_requests == 2
            assert service.num_statuses == 1
        async with AsyncClient(["127.0.0.1:1", "127.0.0.1:2"]) as client:
            with pytest.raises(pagewire.ConnectionFailedError, match=r"127\.0\.0\.1:2"):
                await client.status()

    asyncio.run(scenario())


def test_what_a_callback_raises_is_logged_and_holds_no_call_back(caplog):
    def crash(address, patience_s):
        raise RuntimeError("planted")

    async def scenario():
        async with (
            serving(begins(dies=stops)) as (one, _),
            serving(goes_on) as (two, _),
            AsyncClient([one, two], on_router_lost=crash) as client,
        ):
            return await client.generate("p", n=2, timeout_s=20.0)

    assert asyncio.run(scenario()).choices[0].text == "äbcde"
    [logged] = [each for each in caplog.records if each.exc_info]
    assert str(logged.exc_info[1]) == "planted"


def test_the_sync_client_goes_on_too():
    with (
        serving_in_thread(begins(dies=stops)) as (one, _),
        serving_in_thread(goes_on) as (two, _),
        Client((one, two)) as client,
    ):
        with client.stream("p", n=2) as stream:
            assert "".join(each.text for each in stream if each.choice == 0) == "äbcde"
        assert stream.completion.choices[1].finish_reason == "length"


def test_a_callback_that_calls_a_sync_client_is_refused_instead_of_waiting_for_itself():
    told = []

    def ask(address, patience_s):
        with pytest.raises(RuntimeError, match="found the background thread") as refused:
            client.list_models()
        told.append(refused)

    with (
        serving_in_thread(begins(dies=stops)) as (one, _),
        serving_in_thread(goes_on) as (two, _),
        Client((one, two), on_router_lost=ask) as client,
    ):
        assert client.generate("p", n=2, timeout_s=20.0).text == "äbcde"
    assert len(told) == 1


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"address": []}, "address"),
        ({"address": ["localhost:1", "localhost"]}, r"address\[1\]"),
        ({"address": ["localhost:1", 5]}, r"address\[1\]"),
        ({"resume_s": -1}, "resume_s"),
        ({"resume_s": "30"}, "resume_s"),
        ({"resume_s": float("nan")}, "resume_s"),
    ],
)
def test_wrong_addresses_and_times_name_the_field(kind, options, field):
    with pytest.raises(pagewire.InvalidRequestError, match=rf"^{field}: found .*allowed: "):
        kind(**options)
