"""Passes that fail, of decode and prefill workers: who pays, and when a worker ends."""

import asyncio
from typing import Any

import grpc
import pytest

from pagewire.protos import worker_pb2, worker_pb2_grpc
from tests.decode_worker.harness import (
    RunningWorker,
    ScriptedRouter,
    Stream,
    WorkerCluster,
    prompt_of,
    run,
)
from tests.support.log_records import logged
from worker.errors import EngineLost, Failing

TOXIN = 999


def code_of(stream: Stream) -> str:
    number = stream.failure.code
    return next(each.name for each in grpc.StatusCode if each.value[0] == number)


async def ended(*streams: Stream, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        for each in streams:
            await each.ended.wait()


async def resumed(router: ScriptedRouter, stream: Stream, **changes: Any) -> Stream:
    """Do what a router does with a request that failed."""
    return await router.submit(
        stream.prompt,
        request_id=stream.request_id,
        attempt=stream.attempt + 1,
        emitted={choice: list(tokens) for choice, tokens in stream.tokens.items()},
        failed_passes=stream.failure.failed_passes,
        max_tokens=stream.params.max_tokens,
        **changes,
    )


async def running(router: ScriptedRouter, number: int, *more: tuple[int, ...]) -> list[Stream]:
    """Return so many requests, and some of certain prompts, in the middle of decoding."""
    prompts = [prompt_of(20, seed=seed) for seed in range(number)] + list(more)
    streams = [await router.submit(prompt, max_tokens=40) for prompt in prompts]
    for each in streams:
        await each.has_tokens.wait()
    await asyncio.sleep(0.05)
    return streams


def test_a_failed_pass_of_many_costs_nobody_anything() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = await running(router, 5)
        cluster.decode.executor.num_failing_passes = 1

        await router.finish(*streams)

        assert sum(each.stats.preemptions for each in streams) == 0
        assert cluster.decode.executor.num_failing_passes == 0

    run(scenario)


def test_a_failed_pass_of_one_request_hands_it_back_to_go_on_elsewhere() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        [stream] = await running(router, 1)
        cluster.decode.executor.num_failing_passes = 1
        await ended(stream)
        assert (code_of(stream), stream.failure.failed_passes) == ("ABORTED", 1)

        await router.finish(await resumed(router, stream))

    run(scenario)


def test_a_request_that_makes_passes_fail_is_found_among_many_and_fails_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        *others, toxic = await running(router, 7, (*prompt_of(20, seed=9), TOXIN))
        executor = cluster.decode.executor
        executor.toxin = TOXIN
        await ended(toxic)
        assert (code_of(toxic), toxic.failure.failed_passes) == ("ABORTED", 1)
        first, *_, last = logged("pass_failed", caplog)
        assert set(str(first["request_ids"]).split(",")) == {
            each.request_id for each in (*others, toxic)
        }
        assert last["request_ids"] == toxic.request_id

        again = await resumed(router, toxic, candidates=[])
        await ended(again)
        assert (code_of(again), again.failure.failed_passes) == ("INTERNAL", 2)
        assert "2 passes failed" in again.failure.message

        await router.finish(*others)

    run(scenario)


def test_a_request_whose_pass_failed_computes_alone_until_a_pass_has_succeeded() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        others = await running(router, 3)
        executor = cluster.decode.executor
        before = len(executor.passes)
        suspect = await router.submit(
            prompt_of(20, seed=9), max_tokens=10, failed_passes=1, candidates=[]
        )
        await router.finish(suspect, *others)

        shared = [suspect.prompt in each and len(each) > 1 for each in executor.computed_for]
        alone = [each == {suspect.prompt} for each in executor.computed_for]
        # Its prompt and the first decode, alone; then it shares the passes of the others.
        assert sum(alone) == 2
        assert (await heartbeat(cluster, cluster.decode)).totals.steps_alone == 2
        assert sum(shared) == 8
        assert shared.index(True) > max(i for i, is_alone in enumerate(alone) if is_alone) > before

    run(scenario)


async def heartbeat(cluster: WorkerCluster, worker: RunningWorker) -> Any:
    channel = cluster.router_channel(worker)
    beats = worker_pb2_grpc.WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest())
    beat = await anext(aiter(beats))
    beats.cancel()
    return beat.heartbeat


async def lose(cluster: WorkerCluster, worker: RunningWorker) -> None:
    """Wait until a worker has given up, and end its process as its actor does."""
    async with asyncio.timeout(5.0):
        with pytest.raises(EngineLost):
            await worker.worker.wait_failed()
    cluster.kill(worker)


def test_a_decode_worker_whose_engine_always_fails_sends_all_requests_away_and_ends() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = await running(router, 5)
        queued = await router.submit(prompt_of(100, seed=9))
        steps = (await heartbeat(cluster, cluster.decode)).steps
        cluster.decode.executor.is_broken = True
        await ended(*streams, queued)

        # Nobody is to blame, so nobody counts a failed pass.
        assert {code_of(each) for each in (*streams, queued)} == {"UNAVAILABLE"}
        assert not any(each.failure.leaving for each in (*streams, queued)), "not as planned"
        with pytest.raises(Failing):
            cluster.decode.worker._context.check_open()
        assert {each.failure.failed_passes for each in (*streams, queued)} == {0}
        async with asyncio.timeout(5.0):
            await router.reading  # the session has ended
        beat = await heartbeat(cluster, cluster.decode)
        assert beat.draining
        assert beat.steps <= steps + 1, "passes that fail are no progress"
        await lose(cluster, cluster.decode)

    run(scenario)


def test_an_idle_decode_worker_whose_engine_fails_ends_with_its_first_request() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        cluster.decode.executor.is_broken = True
        stream = await router.submit(prompt_of(20), candidates=[])
        await ended(stream)
        assert code_of(stream) == "UNAVAILABLE"
        await lose(cluster, cluster.decode)

    run(scenario)


def test_a_pass_that_costs_the_device_is_told_to_those_who_took_part() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = await running(router, 3, (*prompt_of(20, seed=9), TOXIN))
        queued = await router.submit(prompt_of(200, seed=8))  # still prefilled elsewhere
        executor = cluster.decode.executor
        executor.toxin, executor.is_deadly = TOXIN, True
        await ended(*streams, queued)

        assert {(code_of(each), each.failure.failed_passes) for each in streams} == {("ABORTED", 1)}
        assert (code_of(queued), queued.failure.failed_passes) == ("UNAVAILABLE", 0)
        await lose(cluster, cluster.decode)

    run(scenario)


def test_a_prompt_that_makes_passes_fail_harms_two_prefill_workers_and_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        for each in cluster.prefills:
            each.executor.toxin = TOXIN
        toxic = await router.submit((*prompt_of(60), TOXIN))
        others = [await router.submit(prompt_of(60, seed=seed)) for seed in range(1, 6)]
        await ended(toxic)
        assert (code_of(toxic), toxic.failure.failed_passes) == ("INTERNAL", 2)
        await router.finish(*others)
        assert sum(each.stats.prefill_retries for each in others) == 0
        assert all(each.stats.decode_computed_tokens == 0 for each in others)
        assert logged("pass_failed", caplog)[-1]["request_ids"] == toxic.request_id

    run(scenario, WorkerCluster(num_prefill=3))


def test_a_prompt_that_costs_devices_costs_two_and_is_then_refused() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        for each in cluster.prefills:
            each.executor.toxin, each.executor.is_deadly = TOXIN, True
        toxic = await router.submit((*prompt_of(59), TOXIN))
        others = [await router.submit(prompt_of(60, seed=seed)) for seed in range(1, 4)]
        await ended(toxic)
        assert code_of(toxic) == "INTERNAL"
        for each in cluster.prefills[:2]:
            await lose(cluster, each)
        await router.finish(*others)
        assert cluster.prefills[2].engine.num_computed_tokens > 60

    run(scenario, WorkerCluster(num_prefill=3))


def test_a_prefill_worker_whose_engine_always_fails_sends_its_prompts_on_and_ends() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        broken = cluster.prefills[0]
        broken.executor.is_broken = True
        streams = [await router.submit(prompt_of(60, seed=seed)) for seed in range(4)]
        await router.finish(*streams)

        assert all(each.stats.prefill_retries == 1 for each in streams)
        assert all(each.stats.decode_computed_tokens == 0 for each in streams)
        await lose(cluster, broken)

    run(scenario, WorkerCluster(num_prefill=2))


def test_pages_of_a_failed_pass_are_computed_again_before_anybody_reads_them() -> None:
    """A pass that fails has written some of its pages, or none."""

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        executor = cluster.prefills[0].executor
        forward = executor.fake_engine.forward
        failing = iter([True])

        def writes_half(slices: Any) -> Any:
            drawn = forward(slices)
            if next(failing, False):
                for each in slices:
                    executor.storage.slots[list(each.page_ids)] = 0xEE
                raise RuntimeError("injected: after it had written")
            return drawn

        executor.fake_engine.forward = writes_half  # type: ignore[method-assign]
        prefix = prompt_of(40)
        streams = [
            await router.submit(prompt_of(48, seed=seed, prefix=prefix)) for seed in range(4)
        ]
        await router.finish(*streams)

    run(scenario)
