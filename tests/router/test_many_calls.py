"""GenerateMany: many calls over one stream, each as Generate would answer it."""

import asyncio
import itertools
import weakref
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from pagewire.protos import common_pb2, inference_pb2, worker_pb2
from pagewire.protos.gathering import MAX_MORE, READS_MORE_KEY
from pagewire.protos.token_ids import unpack_token_ids
from router.dispatch import Dispatcher
from router.generation import Generation
from router.idle_streams import IDLE_S, MOST_IDLE
from router.pacing import TICK_S
from router.session import Stream
from tests.router.many_calls import Caller, asking, calling
from tests.router.scripted_worker import (
    ScriptedWorker,
    Session,
    delta,
    honest,
    running_router,
    tokens,
)
from tests.support.virtual_time import run_virtual, wait_until


async def silent(session: Session, submit: worker_pb2.SubmitRequest) -> None:
    """Never answer."""
    await asyncio.Event().wait()


def test_many_calls_share_messages_and_get_what_generate_gives() -> None:
    async def scenario() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            for call_id in range(20):
                await caller.start(call_id, asking(max_tokens=10))
            await caller.read_until_ended(*range(20))

            alone = await tested.generate(max_tokens=10)
            for call_id in range(20):
                assert caller.token_ids(call_id) == alone.token_ids() == tokens(0, 10)
                assert caller.responses[call_id][-1].usage.completion_tokens == 10
            assert caller.num_messages < 40, "20 x 10 tokens travel together"

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("reads_tokens", "fields", "num_in_columns"),
    [
        (True, {}, 8),  # all but the first and the last
        (False, {}, 0),
        (True, {"n": 2}, 0),
        (True, {"logprobs": 0}, 0),
    ],
)
def test_tokens_with_nothing_else_to_tell_are_in_columns_if_the_caller_reads_these(
    reads_tokens: bool, fields: dict[str, int], num_in_columns: int
) -> None:
    async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        logprobs = [common_pb2.TokenLogprobs(logprob=-1.0)] * submit.sampling.HasField("logprobs")
        for index in range(10):
            await asyncio.sleep(0.01)
            choices = range(len(submit.choices))
            session.send(*(delta(submit, each, index, logprobs=logprobs) for each in choices))

    async def scenario() -> None:
        worker = ScriptedWorker("decode-0", serve=serve)
        async with (
            running_router(worker, coalesce_ms=0.0) as tested,
            calling(tested, reads_tokens=reads_tokens) as caller,
        ):
            request = asking(max_tokens=10)
            request.sampling.MergeFrom(common_pb2.SamplingParams(**fields))
            await caller.start(1, request)
            await caller.read_until_ended(1)

            choice_0 = [each for each in caller.responses[1] if not each.choice]
            received = [unpack_token_ids(each.token_ids) for each in choice_0]
            assert received == [[token_id] for token_id in tokens(0, 10)]
            assert [each.first_index for each in choice_0] == [*range(10)]
            assert [len(each.logprobs) for each in choice_0] == ["logprobs" in fields] * 10
            assert caller.num_in_columns == num_in_columns

    run_virtual(scenario())


def test_the_first_calls_of_a_large_message_leave_before_the_last_ones_begin() -> None:
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0", serve=silent)
        async with running_router(worker) as tested, calling(tested) as caller:
            many = [
                inference_pb2.GenerateManyRequest(call_id=i, start=asking()) for i in range(100)
            ]
            many[0].more.extend(many[1:])
            await caller.start(100, asking())  # opens the session
            await wait_until(lambda: worker.num_messages == 1, timeout_s=1)
            await caller.call.write(many[0])
            await wait_until(lambda: len(worker.submits) == 101, timeout_s=1)

            assert worker.num_messages == 1 + 4, "32, 32, 32 and 4 of them"

    run_virtual(scenario())


def test_calls_that_wait_for_nothing_are_no_tasks() -> None:
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0", serve=silent)
        async with running_router(worker) as tested, calling(tested) as caller:
            await caller.start(0, asking())
            await wait_until(lambda: len(worker.submits) == 1, timeout_s=1)
            num_tasks = len(asyncio.all_tasks())
            for call_id in range(1, 20):
                await caller.start(call_id, asking())
            await wait_until(lambda: len(worker.submits) == 20, timeout_s=1)

            assert len(asyncio.all_tasks()) == num_tasks + 19, "one of the worker for each"

    run_virtual(scenario())


def test_tokens_within_the_interval_of_a_call_travel_together_and_its_end_is_not_late() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            took_s, num_messages = [], []
            for interval_ms in (0, 100, 60_000):
                began_at, caller.num_messages = loop.time(), 0
                await caller.start(interval_ms, asking(max_tokens=50), interval_ms=interval_ms)
                await caller.read_until_ended(interval_ms)
                took_s.append(loop.time() - began_at)
                num_messages.append(caller.num_messages)

                assert caller.token_ids(interval_ms) == tokens(0, 50)
            assert max(took_s) - min(took_s) < 0.01
            assert num_messages[0] >= 50 > 20 > num_messages[1] > num_messages[2] == 2

    run_virtual(scenario())


def test_single_tokens_gather_for_the_interval_of_their_call_too() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        worker = ScriptedWorker("decode-0", token_s=0.01)
        async with running_router(worker) as tested, calling(tested) as caller:
            await caller.start(1, asking(max_tokens=30), interval_ms=15)
            times = []
            while 1 not in caller.ends:
                await caller.read()
                times.append(loop.time())

            assert caller.num_in_columns > 5
            gaps = [after - at for at, after in itertools.pairwise(times[:-1])]
            assert min(gaps) > 0.015 - 2 * TICK_S

    run_virtual(scenario())


def test_a_refused_call_ends_with_its_status_and_leaves_the_others_alone() -> None:
    async def scenario() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            await caller.start(1, asking(max_tokens=10))
            await caller.start(2, asking(model="another"))
            await caller.start(3, inference_pb2.GenerateRequest())
            await caller.read_until_ended(1, 2, 3)

            assert caller.ends == {1: "OK", 2: "NOT_FOUND", 3: "INVALID_ARGUMENT"}
            assert caller.token_ids(1) == tokens(0, 10)

    run_virtual(scenario())


def test_calls_are_limited_as_single_ones_are() -> None:
    async def scenario() -> None:
        router = running_router(ScriptedWorker("decode-0"), max_active_requests=2)
        async with router as tested, calling(tested) as caller:
            for call_id in range(3):
                await caller.start(call_id, asking())
            await caller.read_until_ended(0, 1, 2)

            assert caller.ends == {0: "OK", 1: "OK", 2: "RESOURCE_EXHAUSTED"}

    run_virtual(scenario())


def test_a_cancelled_call_frees_the_worker_and_says_so() -> None:
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker) as tested, calling(tested) as caller:
            await caller.start(1, asking(max_tokens=400))
            await caller.start(2, asking(max_tokens=10))
            await caller.read()
            await caller.cancel(1)
            await caller.cancel(7)  # there is none
            await caller.read_until_ended(1, 2)

            assert caller.ends == {1: "CANCELLED", 2: "OK"}
            assert worker.cancels == [worker.submits[0].request_id]
            await caller.start(1, asking())  # its id is free again
            del caller.ends[1]
            await caller.read_until_ended(1)

    run_virtual(scenario())


def test_a_call_cancelled_while_its_tokens_gather_ends_once() -> None:
    async def scenario() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            await caller.start(1, asking(max_tokens=400), interval_ms=100)
            await caller.start(2, asking(max_tokens=50))
            await caller.read()
            await asyncio.sleep(0.05)
            await caller.cancel(1)
            await caller.read_until_ended(1, 2)

            assert caller.ends == {1: "CANCELLED", 2: "OK"}

    run_virtual(scenario())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_no_timer_of_a_call_holds_its_prompt_after_its_end(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Generation]] = []

    def noted(self: Dispatcher, generation: Generation, *rest: Any) -> Stream:
        made.append(weakref.ref(generation))
        return open_stream(self, generation, *rest)

    async def scenario() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            await caller.start(1, asking(400 if is_cancelled else 10), interval_ms=10_000)
            await caller.read()
            await asyncio.sleep(0.05)  # tokens gather
            if is_cancelled:
                await caller.cancel(1)
            await caller.read_until_ended(1)
            await asyncio.sleep(0.05)

            assert [each() for each in made] == [None]

    open_stream = Dispatcher.open
    monkeypatch.setattr(Dispatcher, "open", noted)
    run_virtual(scenario())


def test_a_call_cancelled_before_it_began_ends_too() -> None:
    async def scenario() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            await asyncio.gather(caller.start(1, asking()), caller.cancel(1))
            await caller.read_until_ended(1)

            assert caller.ends == {1: "CANCELLED"}

    run_virtual(scenario())


def test_one_message_may_start_and_cancel_many_calls() -> None:
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker) as tested, calling(tested) as caller:
            assert dict(await caller.call.initial_metadata()) == {READS_MORE_KEY: "1"}
            many = [inference_pb2.GenerateManyRequest(call_id=i, start=asking()) for i in range(5)]
            many[1].start.sampling.max_tokens = 400
            many[0].more.extend(many[1:])
            await caller.call.write(many[0])
            await caller.read_until_ended(0, 2, 3, 4)
            cancel = inference_pb2.GenerateManyRequest(call_id=7)
            cancel.more.add(call_id=1)
            cancel.more.add(call_id=8, start=asking(model="another"))
            await caller.call.write(cancel)
            await caller.read_until_ended(1, 8)

            assert caller.ends.pop(1) == "CANCELLED"
            assert caller.ends.pop(8) == "NOT_FOUND"
            assert {*caller.ends.values()} == {"OK"}
            assert [caller.token_ids(each) for each in (0, 2, 3, 4)] == [tokens(0, 5)] * 4

    run_virtual(scenario())


def test_a_message_of_too_many_calls_ends_the_stream() -> None:
    async def scenario() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            message = inference_pb2.GenerateManyRequest(call_id=1)
            message.more.extend([inference_pb2.GenerateManyRequest()] * (MAX_MORE + 1))
            await caller.call.write(message)
            with pytest.raises(grpc.aio.AioRpcError, match="more: found 256 of them") as caught:
                await caller.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run_virtual(scenario())


def test_the_end_of_the_stream_frees_all_its_calls() -> None:
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker) as tested:
            async with calling(tested) as caller:
                for call_id in range(3):
                    await caller.start(call_id, asking(max_tokens=400))
                await caller.read()
            await wait_until(lambda: len(worker.cancels) == 3, timeout_s=1)

    run_virtual(scenario())


def test_a_caller_that_has_closed_its_side_gets_the_rest() -> None:
    async def scenario() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            await caller.start(1, asking())
            await caller.call.done_writing()
            while await caller.read():
                pass

            assert caller.ends == {1: "OK"}
            assert await caller.call.code() is grpc.StatusCode.OK

    run_virtual(scenario())


def test_of_many_streams_without_calls_only_some_may_be_silent_for_long() -> None:
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0", token_s=1.0)
        async with running_router(worker) as tested, AsyncExitStack() as streams:

            async def opened() -> Caller:
                caller = await streams.enter_async_context(calling(tested))
                await caller.call.initial_metadata()
                return caller

            silent = [await opened() for _ in range(MOST_IDLE)]
            late, busy, served = [await opened() for _ in range(3)]
            await busy.start(1, asking(max_tokens=2 * int(IDLE_S)))
            await served.start(1, asking(max_tokens=1))
            await served.read_until_ended(1)
            await asyncio.sleep(IDLE_S - 0.5)
            assert not served.call.done(), "its time begins when it becomes idle"
            await asyncio.sleep(1.0)
            for each in (late, served):
                assert await each.call.code() is grpc.StatusCode.UNAVAILABLE
            await busy.read_until_ended(1)
            assert not any(each.call.done() for each in silent)

            silent.pop().call.cancel()
            await asyncio.sleep(0.1)
            newest = await opened()
            await asyncio.sleep(2 * IDLE_S)
            assert not newest.call.done(), "there is room for it"
            assert await busy.call.code() is grpc.StatusCode.UNAVAILABLE, "it has become idle"

    run_virtual(scenario())


def test_a_call_has_its_own_time_limit() -> None:
    async def scenario() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            await caller.start(1, asking(max_tokens=400), ms=100)
            await caller.start(2, asking(max_tokens=30))
            await caller.read_until_ended(1, 2)

            assert caller.ends == {1: "DEADLINE_EXCEEDED", 2: "OK"}

    run_virtual(scenario())


def test_a_call_that_waits_for_a_first_worker_ends_in_time_or_with_its_router() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with running_router(worker_wait_s=30.0) as tested, calling(tested) as caller:
            began_at = loop.time()
            await caller.start(1, asking(), ms=100)
            await caller.start(2, asking())
            await caller.read_until_ended(1)
            assert loop.time() - began_at == pytest.approx(0.1, abs=0.02)

            await tested.router.stop(0.1)
            await caller.read_until_ended(2)
            assert loop.time() - began_at < 1.0
            assert caller.ends == {1: "DEADLINE_EXCEEDED", 2: "UNAVAILABLE"}

    run_virtual(scenario())


def test_the_id_of_a_running_call_ends_the_stream() -> None:
    async def scenario() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested, calling(tested) as caller:
            await caller.start(1, asking(max_tokens=400))
            await caller.start(1, asking())

            with pytest.raises(grpc.aio.AioRpcError, match="call_id") as refused:
                await caller.read_until_ended(1)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run_virtual(scenario())


def test_a_caller_that_reads_late_gets_every_token_in_few_messages() -> None:
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0", serve=honest)
        async with running_router(worker, window_bytes=512) as tested, calling(tested) as caller:
            for call_id in range(8):
                await caller.start(call_id, asking(max_tokens=300))
            await asyncio.sleep(10)
            assert tested.router.admission.num_finished == 0
            await caller.read_until_ended(*range(8))

            assert all(caller.token_ids(each) == tokens(0, 300) for each in range(8))
            assert sum(len(each) for each in caller.responses.values()) < 8 * 300

    run_virtual(scenario())


def test_a_caller_that_starts_calls_and_reads_nothing_is_not_read_either() -> None:
    async def scenario() -> None:
        router = running_router(ScriptedWorker("decode-0"), window_bytes=512)
        async with router as tested, calling(tested) as caller:
            num_started = 0

            async def start_all() -> None:
                nonlocal num_started
                for call_id in range(4000):
                    await caller.start(call_id, inference_pb2.GenerateRequest())
                    num_started += 1

            starting = asyncio.create_task(start_all())
            await asyncio.sleep(10.0)
            assert 1024 < num_started < 2000, "each ends with a status, which the router keeps"
            await caller.read_until_ended(*range(4000))
            await starting

    run_virtual(scenario())


def test_a_caller_that_never_reads_loses_the_stream_and_holds_nothing() -> None:
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0")
        router = running_router(worker, window_bytes=512, slow_client_timeout_s=5.0)
        async with router as tested, calling(tested) as caller:
            for call_id in range(8):
                await caller.start(call_id, asking(max_tokens=400))
            await asyncio.sleep(20)

            assert tested.router.admission.num_active == 0

    run_virtual(scenario())
