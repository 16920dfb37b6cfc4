"""PrefillService at its edges: what is refused, and what a decode worker leaves that vanishes."""

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest

import prefill_worker.server
import prefill_worker.worker
from llm_engine.sampling import SamplingParams
from observability.logs import ATTRIBUTE
from pagewire.protos import worker_pb2, worker_pb2_grpc
from pagewire.protos.token_ids import pack_token_ids
from prefill_worker.config import PrefillConfig
from protos.contract import CONTRACT_VERSION
from tests.decode_worker.harness import PAGE_SIZE, WorkerCluster, prompt_of
from tests.support.cluster_keys import credentials_of, proven
from tests.support.loopback import LoopbackNetwork
from tests.support.virtual_time import run_virtual
from worker.wire import sampling_to_proto, worker_to_proto

CODES = {each.value[0]: each.name for each in grpc.StatusCode}
Scenario = Callable[[WorkerCluster, Any], Awaitable[None]]


def run(scenario: Scenario, cluster: WorkerCluster | None = None) -> None:
    """Run a scenario with a stub of the one prefill worker; no page may be held afterwards."""

    async def main() -> None:
        running = await (cluster or WorkerCluster()).start()
        channel = running.decode_channel(running.prefills[0])
        await scenario(running, worker_pb2_grpc.PrefillServiceStub(channel))
        await running.wait_free()
        await running.stop()

    run_virtual(main())


def transfer_key(cluster: WorkerCluster) -> bytes:
    prefill = cluster.prefills[0].identity.as_party("prefill")
    decode = cluster.decode.credentials
    return decode.transfer_key("connection-0", sender=prefill, receiver=decode.party)


def connect_request(cluster: WorkerCluster, **changes: Any) -> worker_pb2.ConnectRequest:
    decode, prefill = cluster.decode, cluster.prefills[0]
    fields = {
        "receiver": worker_to_proto(decode.identity),
        "sender_incarnation": prefill.identity.incarnation,
        "connection_id": "connection-0",
        "transport": "loopback",
        "offer": decode.transport.offer("connection-0", transfer_key(cluster)),
        "layout": prefill.engine.layout.describe(),
        **changes,
    }
    return worker_pb2.ConnectRequest(**fields)


async def connect(cluster: WorkerCluster, stub: Any) -> Any:
    request = connect_request(cluster)
    accepting = asyncio.create_task(cluster.decode.transport.accept("connection-0", 10.0))
    await stub.Connect(request)
    return await accepting


def start_of(
    cluster: WorkerCluster, prompt: tuple[int, ...], attempt_id: int = 1, **changes: Any
) -> Any:
    ticket = worker_pb2.TransferTicket(
        transfer_id=bytes(16),
        sender_incarnation=cluster.prefills[0].identity.incarnation,
        receiver_incarnation=cluster.decode.identity.incarnation,
    )
    fields = {
        "request_id": "r",
        "ticket": ticket,
        "connection_id": "connection-0",
        "token_ids": pack_token_ids(prompt),
        "prompt_len": len(prompt),
        "sampling": sampling_to_proto(SamplingParams(max_tokens=8)),
        "choices": [0],
        "contract_version": CONTRACT_VERSION,
        **changes,
    }
    start = worker_pb2.PrefillStart(**fields)
    return worker_pb2.PrefillRequest(attempt_id=attempt_id, start=start)


async def num_failures(cluster: WorkerCluster) -> int:
    """Return the transfer failures that the prefill worker tells in its next heartbeat."""
    channel = cluster.router_channel(cluster.prefills[0])
    beats = worker_pb2_grpc.WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest())
    beat = await anext(aiter(beats))
    beats.cancel()
    return int(beat.heartbeat.totals.transfer_failures)


async def responses(call: Any) -> AsyncIterator[Any]:
    """Yield what a stream brings, each response by itself."""
    async for response in call:
        for each in (response, *response.more):
            yield each


async def end_of(call: Any, attempt_id: int = 1) -> tuple[str, str]:
    """Return the code and the text with which an attempt ends."""
    async for each in responses(call):
        if each.attempt_id == attempt_id and each.HasField("end"):
            return CODES[each.end.code], each.end.message
    raise AssertionError("the stream ended before the attempt")


async def end_of_stream(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code().name, str(caught.value.details())


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"sender_incarnation": 1}, "FAILED_PRECONDITION", "is for incarnation 1, this"),
        ({"layout": "pages-v0"}, "FAILED_PRECONDITION", "layout 'pages-v0' is not"),
        ({"transport": "nccl"}, "UNIMPLEMENTED", "transport 'nccl' is not offered"),
        ({"offer": b"nowhere"}, "UNAVAILABLE", "no receiver offers"),
    ],
)
def test_a_connection_that_cannot_work_is_refused(
    changes: dict[str, Any], code: str, words: str
) -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await stub.Connect(connect_request(cluster, **changes))
        assert caught.value.code().name == code

    run(scenario)


@pytest.mark.parametrize("version", [0, CONTRACT_VERSION + 1])
def test_a_decode_worker_of_another_contract_version_is_refused(version: int) -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        difference = f"contract version: found {version}; allowed: {CONTRACT_VERSION}"
        receiver = worker_to_proto(replace(cluster.decode.identity, contract_version=version))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Connect(connect_request(cluster, receiver=receiver))
        assert (caught.value.code().name, caught.value.details()) == (
            "FAILED_PRECONDITION",
            difference,
        )
        await connect(cluster, stub)
        call = stub.Prefill()
        await call.write(start_of(cluster, (1, 2, 3), contract_version=version))
        assert await end_of(call) == ("FAILED_PRECONDITION", difference)

    run(scenario)


OTHER_DECODE = credentials_of("decode", "decode-1", 9)


def other_stub(cluster: WorkerCluster) -> Any:
    """Return the stub of another, genuine decode worker."""
    identity = cluster.prefills[0].identity
    channel = cluster.grpc_network.channel(identity.address)
    return worker_pb2_grpc.PrefillServiceStub(proven(channel, identity, OTHER_DECODE))


def test_a_decode_worker_connects_under_no_name_but_its_own() -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        connection = await connect(cluster, stub)
        genuine = cluster.decode.identity
        for receiver in (genuine, replace(genuine, worker_id="decode-1")):
            request = connect_request(cluster, receiver=worker_to_proto(receiver))
            with pytest.raises(grpc.aio.AioRpcError, match="receiver is not decode-1") as caught:
                await other_stub(cluster).Connect(request)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED

        stale = replace(genuine, incarnation=genuine.incarnation + 1)
        with pytest.raises(grpc.aio.AioRpcError, match="receiver is not decode-0") as caught:
            await stub.Connect(connect_request(cluster, receiver=worker_to_proto(stale)))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert not connection.is_broken, "the genuine connection stays"

    run(scenario)


def test_an_attempt_uses_no_connection_and_no_ticket_of_another_worker() -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        connection = await connect(cluster, stub)

        foreign = other_stub(cluster).Prefill()
        await foreign.write(start_of(cluster, prompt_of(30)))
        code, text = await end_of(foreign)
        assert code == "PERMISSION_DENIED"
        assert "the ticket's receiver has incarnation" in text

        ticket = start_of(cluster, prompt_of(30)).start.ticket
        ticket.receiver_incarnation = OTHER_DECODE.party.incarnation
        foreign = other_stub(cluster).Prefill()
        await foreign.write(start_of(cluster, prompt_of(30), ticket=ticket))
        code, text = await end_of(foreign)
        assert code == "ABORTED"
        assert "no connection 'connection-0'" in text
        assert not connection.is_broken

    run(scenario)


BAD_STARTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty": ({"token_ids": b"", "prompt_len": 0}, "INVALID_ARGUMENT", "prompt_len: found 0"),
    "cut off": ({"token_ids": b"abc"}, "INVALID_ARGUMENT", "not a multiple of 4"),
    "no number": (
        {"sampling": sampling_to_proto(SamplingParams(top_p=math.nan))},
        "INVALID_ARGUMENT",
        "sampling.top_p: found nan; allowed: above 0, up to 1",
    ),
    "too many logprobs": (
        {"sampling": sampling_to_proto(SamplingParams(logprobs=21))},
        "INVALID_ARGUMENT",
        "sampling.logprobs: found 21; allowed: 0 to 20",
    ),
    "foreign choice": (
        {"choices": [0, 64]},
        "INVALID_ARGUMENT",
        "choices: found 0, 64; allowed: 0 to 63",
    ),
    "a choice twice": (
        {"choices": [1, 1]},
        "INVALID_ARGUMENT",
        "choices: found 1, 1; allowed: .*, each once",
    ),
    "foreign token": (
        {"token_ids": pack_token_ids([1] * 29 + [1000])},
        "INVALID_ARGUMENT",
        "token_ids: found 1000; allowed: 0 to 999",
    ),
    "prompt_len": (
        {"prompt_len": 31},
        "INVALID_ARGUMENT",
        "prompt_len: found 31; allowed: 1 to 30",
    ),
    "first_page": ({"first_page": 8}, "INVALID_ARGUMENT", "first_page: found 8; allowed: 0 to 7"),
    "share below 0": (
        {"cache_share": -0.5},
        "INVALID_ARGUMENT",
        "cache_share: found -0.5; allowed",
    ),
    "no choice": ({"choices": []}, "INVALID_ARGUMENT", "choices: found none"),
    "too long a salt": (
        {"cache_salt": bytes(257)},
        "INVALID_ARGUMENT",
        "cache_salt: found 257 bytes; allowed: at most 256",
    ),
    "ticket": ({"ticket": worker_pb2.TransferTicket()}, "INVALID_ARGUMENT", "transfer_id"),
    "connection": ({"connection_id": "lost"}, "ABORTED", "no connection 'lost'"),
    "stale": (
        {"ticket": worker_pb2.TransferTicket(transfer_id=bytes(16), sender_incarnation=7)},
        "FAILED_PRECONDITION",
        "is for incarnation 7, this",
    ),
    "too long for the context": (
        {"token_ids": pack_token_ids([1] * 512), "prompt_len": 512},
        "INVALID_ARGUMENT",
        "fewer than 512, what the context holds",
    ),
}


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_bad_start_is_refused(name: str) -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        changes, code, words = BAD_STARTS[name]
        await connect(cluster, stub)
        call = stub.Prefill()
        await call.write(start_of(cluster, prompt_of(30), **changes))
        found, text = await end_of(call)
        assert found == code
        assert re.search(words, text)

    run(scenario)


def test_a_small_pool_shortens_the_context_that_is_offered() -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        channel = cluster.router_channel(cluster.prefills[0])
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        info = await worker.GetInfo(worker_pb2.GetInfoRequest())
        assert info.model.max_context_tokens == 50 * PAGE_SIZE
        await connect(cluster, stub)
        call = stub.Prefill()
        await call.write(start_of(cluster, prompt_of(50 * PAGE_SIZE)))
        code, text = await end_of(call)
        assert code == "INVALID_ARGUMENT"
        assert "fewer than 200, what the context holds" in text

    run(scenario, WorkerCluster(prefill_pages=50))


def test_a_stream_must_begin_with_a_start_and_in_time() -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        silent = stub.Prefill()
        assert (await end_of_stream(silent))[0] == "DEADLINE_EXCEEDED"
        wrong = stub.Prefill()
        await wrong.write(worker_pb2.PrefillRequest(attempt_id=1))
        assert (await end_of_stream(wrong))[0] == "INVALID_ARGUMENT"

    run(scenario)


def test_more_prompts_than_the_queue_holds_are_refused() -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        await connect(cluster, stub)
        call = stub.Prefill()
        first, *more = (start_of(cluster, prompt_of(100, seed=seed), 1 + seed) for seed in range(4))
        first.more.extend(more)
        await call.write(first)
        code, _ = await end_of(call, 4)
        assert code == "RESOURCE_EXHAUSTED"
        call.cancel()

    config = PrefillConfig(max_computing_prompts=1, max_queued_prompts=2)
    run(scenario, WorkerCluster(prefill_config=config))


def test_more_attempts_than_a_worker_has_places_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        monkeypatch.setattr(prefill_worker.worker, "MAX_ATTEMPTS", 2)
        await connect(cluster, stub)
        call = stub.Prefill()
        for seed in range(3):
            await call.write(start_of(cluster, prompt_of(100, seed=seed), 1 + seed))
        code, text = await end_of(call, 3)
        assert (code, text[:10]) == ("RESOURCE_EXHAUSTED", "2 attempts")
        call.cancel()

    run(scenario)


def leave(attempt_id: int) -> Any:
    return worker_pb2.PrefillRequest(attempt_id=attempt_id, leave=worker_pb2.PrefillLeave())


def transfer(cluster: WorkerCluster, attempt_id: int, **kind: Any) -> Any:
    ticket = start_of(cluster, ()).start.ticket
    message = worker_pb2.TransferMessage(ticket=ticket, **kind)
    return worker_pb2.PrefillRequest(attempt_id=attempt_id, transfer=message)


OUTCOMES: dict[str, tuple[Callable[[WorkerCluster], list[Any]], str]] = {
    "refused": (lambda cluster: [start_of(cluster, (), 2, prompt_len=0)], "INVALID_ARGUMENT"),
    "unreadable": (
        lambda cluster: [start_of(cluster, prompt_of(60), 2, token_ids=b"abc")],
        "INVALID_ARGUMENT",
    ),
    "left": (lambda cluster: [start_of(cluster, prompt_of(60, seed=1), 2), leave(2)], "OK"),
    "a message of no kind": (
        lambda cluster: [start_of(cluster, prompt_of(60, seed=1), 2), transfer(cluster, 2)],
        "OK",
    ),
    "aborted": (
        lambda cluster: [
            start_of(cluster, prompt_of(60, seed=1), 2),
            transfer(cluster, 2, abort=worker_pb2.Abort(reason="enough")),
        ],
        "OK",
    ),
}


@pytest.mark.parametrize("how", OUTCOMES)
def test_an_attempt_ends_for_itself_and_others_of_its_stream_go_on(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        messages, code = OUTCOMES[how]
        await connect(cluster, stub)
        call = stub.Prefill()
        await call.write(start_of(cluster, prompt_of(40)))
        for each in messages(cluster):
            await call.write(each)
        found: dict[int, list[str]] = {1: [], 2: []}
        async for each in responses(call):
            found[each.attempt_id].append(each.WhichOneof("message"))
            if each.HasField("end"):
                assert (each.attempt_id, CODES[each.end.code]) == (2, code)
            if "end" in found[2] and "result" in found[1]:
                break
        assert "result" not in found[2]
        # What comes too late is ignored.
        for late in (
            leave(2),
            transfer(cluster, 2, chunk_go=worker_pb2.ChunkGo()),
            transfer(cluster, 2),
        ):
            await call.write(late)
        await call.write(start_of(cluster, prompt_of(20, seed=2), 3))
        async for each in responses(call):
            if each.attempt_id == 3 and each.HasField("result"):
                break
        await call.write(leave(1))
        assert await end_of(call) == ("OK", "")
        call.cancel()

    with caplog.at_level(logging.INFO):
        run(scenario)
    told = {each.msg: getattr(each, ATTRIBUTE) for each in caplog.records if "prefill_" in each.msg}
    assert ("prefill_attempt_broken" in told) == (how == "a message of no kind")
    assert all(each["request_id"] == "r" for each in told.values())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda cluster: leave(3),
        lambda cluster: transfer(cluster, 3, chunk_go=worker_pb2.ChunkGo()),
        lambda cluster: leave(0),
        lambda cluster: start_of(cluster, prompt_of(30, seed=1), 2),
        lambda cluster: start_of(cluster, prompt_of(30, seed=1), 1),
        lambda cluster: worker_pb2.PrefillRequest(attempt_id=2, more=[leave(2)] * 256),
    ],
    ids=["leave", "transfer", "no id", "started again", "started late", "too many at once"],
)
def test_a_message_that_no_attempt_can_have_ends_the_stream_and_frees_its_pages(wrong: Any) -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        await connect(cluster, stub)
        call, other = stub.Prefill(), stub.Prefill()
        await other.write(start_of(cluster, prompt_of(50, seed=3)))
        await call.write(start_of(cluster, prompt_of(40), 2))
        await asyncio.sleep(0.1)
        assert cluster.prefills[0].held_pages
        await call.write(wrong(cluster))
        code, text = await end_of_stream(call)
        assert code == "INVALID_ARGUMENT"
        assert "found" in text
        async for each in responses(other):
            if each.HasField("result"):
                break
        other.cancel()

    run(scenario)


def test_messages_that_are_ready_at_once_come_in_one() -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        await connect(cluster, stub)
        call = stub.Prefill()
        first, *more = (start_of(cluster, prompt_of(20, seed=seed), 1 + seed) for seed in range(8))
        first.more.extend(more)
        await call.write(first)
        granted = await call.read()
        ids = [each.attempt_id for each in (granted, *granted.more)]
        assert ids == list(range(1, 9))
        assert all(each.transfer.HasField("granted") for each in (granted, *granted.more))
        call.cancel()

    run(scenario)


def test_a_receiver_that_reads_nothing_starts_no_more_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        monkeypatch.setattr(prefill_worker.server, "MOST_WAITING", 4)
        call = stub.Prefill()
        for attempt_id in range(1, 2000):  # each is refused: there is no connection
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await call.write(start_of(cluster, prompt_of(400), attempt_id))
                    continue
            break
        else:
            raise AssertionError("all were taken")

    run(scenario)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("how", ["cancel", "leave", "half close", "kill"])
def test_pages_are_free_within_a_second_after_the_decode_worker_left(
    after_s: float, how: str
) -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        router = await cluster.session()
        await router.submit(prompt_of(100))
        await connect(cluster, stub)
        call = stub.Prefill()
        await call.write(start_of(cluster, prompt_of(100, seed=1)))
        await asyncio.sleep(after_s)
        if how == "cancel":
            call.cancel()
        elif how == "leave":
            await call.write(leave(1))
        elif how == "half close":
            await call.done_writing()
        else:
            call.cancel()
            cluster.kill(cluster.decode)
            router.reading.cancel()
        await cluster.wait_free(timeout_s=1.0)
        router.call.cancel()

    # A slow network: transfers are under way at most of the times above. TCP notices a death.
    network = LoopbackNetwork(latency_s=0.005, hang_on_peer_death=False)
    run(scenario, WorkerCluster(page_network=network))


def test_a_receiver_that_never_takes_its_pages_loses_them_at_the_deadline() -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        await connect(cluster, stub)
        call = stub.Prefill()
        await call.write(start_of(cluster, prompt_of(40)))
        messages = []
        async for each in responses(call):
            messages.append(each.transfer.WhichOneof("kind") or each.WhichOneof("message"))
            if each.HasField("end"):
                break
        call.cancel()
        chunks = 40 // PAGE_SIZE // cluster.prefill_config.chunk_pages
        assert sorted(messages) == [
            "abort",
            *["chunk_ready"] * chunks,
            "end",
            "granted",
            "result",
        ]
        deadlines = cluster.prefill_config.transfer_deadlines
        assert asyncio.get_running_loop().time() == pytest.approx(deadlines.ack_s, abs=1.0)
        assert await num_failures(cluster) == 1

    run(scenario)


def test_nothing_follows_the_end_of_an_attempt_whose_pages_are_still_read() -> None:
    async def scenario(cluster: WorkerCluster, stub: Any) -> None:
        await connect(cluster, stub)
        call = stub.Prefill()
        await call.write(start_of(cluster, prompt_of(40)))
        await call.write(start_of(cluster, prompt_of(40, seed=1), 2))
        messages = []
        async for each in responses(call):
            messages.append((each.attempt_id, each.WhichOneof("message")))
            if each.transfer.HasField("chunk_ready") and each.attempt_id == 1:
                await call.write(transfer(cluster, 1, chunk_go=worker_pb2.ChunkGo()))
            if each.transfer.HasField("chunk_posted"):
                await call.write(leave(1))
            if messages[-1] == (1, "end"):
                break
        [prefill] = cluster.prefills
        stopping = prefill.process.spawn(prefill.worker.stop(0.0))
        async for each in responses(call):
            messages.append((each.attempt_id, each.WhichOneof("message")))
            if messages[-1] == (2, "end"):
                break
        call.cancel()
        await stopping

        assert [kind for attempt_id, kind in messages if attempt_id == 1][-1] == "end"
        assert (2, "failure") in messages

    run(scenario)


def test_a_transfer_that_is_cancelled_is_no_failure() -> None:
    async def scenario(cluster: WorkerCluster, _: Any) -> None:
        router = await cluster.session()
        stream = await router.submit(prompt_of(200))
        await asyncio.sleep(0.1)
        assert cluster.prefills[0].held_pages, "the transfer is under way"
        await router.cancel(stream)
        await cluster.wait_free()
        assert await num_failures(cluster) == 0
        router.call.cancel()

    run(scenario)
