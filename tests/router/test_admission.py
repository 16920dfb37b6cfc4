"""Requests that could not start in time are refused at once; those that have begun never are."""

import asyncio

import grpc
from google.rpc import error_details_pb2

from pagewire.protos import inference_pb2
from tests.router.error_details import details
from tests.router.scripted_worker import ScriptedWorker, running_router, tokens
from tests.support.virtual_time import run_virtual, wait_until

FULL = {"pages": inference_pb2.PageCounts(total=10, live=10), "running": 1}


def test_a_request_that_would_wait_too_long_is_refused_with_the_time_to_come_again() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", heartbeat=dict(FULL))
        async with running_router(worker, max_expected_wait_s=3.0) as tested:
            # Not even the prompt is looked at.
            refused = await tested.generate(request=inference_pb2.GenerateRequest())

            assert refused.error is not None
            assert refused.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "waits about 5 s" in (refused.error.details() or "")
            retry = details(refused.error, error_details_pb2.RetryInfo).retry_delay
            assert retry.ToMilliseconds() == 2000, "what it would wait too long"
            assert not worker.submits

            worker.heartbeat = {"pages": inference_pb2.PageCounts(total=10, cached=10)}
            await asyncio.sleep(0.6)
            assert (await tested.generate()).error is None, "cached pages are free pages"

    run_virtual(main())


def test_nobody_is_refused_on_the_word_of_an_old_heartbeat() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", heartbeat=dict(FULL))
        config = {"max_expected_wait_s": 3.0, "dead_after_s": 10.0}
        async with running_router(worker, **config) as tested:
            worker.is_silent = True
            await asyncio.sleep(2.5)
            assert (await tested.generate()).error is None

    run_virtual(main())


def test_a_worker_that_is_full_is_passed_over_for_one_that_is_not() -> None:
    async def main() -> None:
        full = ScriptedWorker("decode-0", heartbeat=dict(FULL))
        other = ScriptedWorker("decode-1")
        async with running_router(full, other, max_expected_wait_s=3.0) as tested:
            for _ in range(5):
                assert (await tested.generate()).error is None
            assert not full.submits

    run_virtual(main())


def test_a_resumed_request_is_not_refused_for_its_wait() -> None:
    async def main() -> None:
        first = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(first, max_expected_wait_s=3.0) as tested:
            running = asyncio.create_task(tested.generate())
            await wait_until(lambda: first.steps > 2)
            full = ScriptedWorker("decode-1", heartbeat=dict(FULL))
            await tested.add(full)
            tested.network.kill(first.address)
            answer = await running

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            assert full.submits[0].choices[0].emitted_token_ids
            refused = await tested.generate()
            assert refused.error is not None, "a new one is"

    run_virtual(main())
