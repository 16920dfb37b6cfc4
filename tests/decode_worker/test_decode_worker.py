"""A decode worker with prefill workers: whole requests, in virtual time, against the oracle."""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from decode_worker.config import DecodeConfig
from decode_worker.prefill_client import PrefillClient
from kv_transfer.deadlines import TransferDeadlines
from llm_engine.engine_step import EngineStep
from llm_engine.sampling import SampledToken, SamplingParams
from pagewire.protos import worker_pb2, worker_pb2_grpc
from pagewire.protos.gathering import MAX_MORE
from prefill_worker import attempt as prefill_attempt
from prefill_worker.attempt import Attempt
from prefill_worker.request import FinishedPrompt, Progress
from prefill_worker.wire import PrefillResult
from protos.contract import CONTRACT_VERSION
from tests.decode_worker.harness import (
    LENGTH,
    MAX_CONTEXT_TOKENS,
    MODEL,
    PAGE_SIZE,
    STOP,
    ScriptedRouter,
    WorkerCluster,
    prompt_of,
    run,
)
from tests.support.fake_engine import fake_tokens
from tests.support.loopback import FaultKind, LoopbackFault, LoopbackNetwork, planned
from tests.support.memory_grpc import MemoryNetwork
from tests.support.virtual_time import run_virtual, wait_until
from worker.identity import WorkerIdentity
from worker.wire import worker_to_proto

DEADLINES = TransferDeadlines(
    connect_s=1.0, grant_s=1.0, chunk_s=3.0, slot_s=3.0, post_s=0.5, transfer_s=0.5, ack_s=3.0
)


def decode_config(**changes: Any) -> DecodeConfig:
    return replace(WorkerCluster().decode_config, **changes)


def test_tokens_equal_the_oracle_and_the_decode_worker_computes_no_prompt_token() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(30))
        await router.finish(stream)

        assert stream.finish_reasons == {0: LENGTH}
        assert stream.stats.pages_moved == 8
        assert stream.stats.bytes_moved == 8 * cluster.decode.engine.storage.page_bytes
        assert stream.stats.decode_computed_tokens == 0
        assert stream.stats.prefill_computed_tokens == 30
        # The engine agrees: one token per step after the first.
        assert cluster.decode.engine.num_computed_tokens == 7

    run(scenario)


def test_the_account_is_told_with_the_first_tokens_with_the_pages_and_at_the_end() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(30), n=2)
        await router.finish(stream)

        # Whoever leaves after the first tokens would never hear of it.
        at_first, with_pages, at_end = stream.all_stats
        assert at_first.pages_moved < 8
        assert at_first.prefill_computed_tokens == 30
        assert with_pages.pages_moved == 8
        assert at_end == with_pages

    run(scenario)


SLOW_PAGES = 0.02  # s, for each chunk of two pages


def slow_pages(*faults: LoopbackFault, **changes: Any) -> WorkerCluster:
    """Workers whose pages arrive long after the prompt's last token is computed."""
    return WorkerCluster(
        page_network=LoopbackNetwork(
            latency_s=SLOW_PAGES, fault_policy=planned(list(faults)), hang_on_peer_death=True
        ),
        decode_config=decode_config(transfer_deadlines=DEADLINES),
        **changes,
    )


def test_first_tokens_do_not_wait_for_pages() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(60), n=2, temperature=1.0)
        await stream.has_tokens.wait()

        assert [len(tokens) for tokens in stream.tokens.values()] == [1, 1]
        assert stream.stats.pages_moved <= 4
        await router.finish(stream)
        assert stream.stats.pages_moved == 15
        assert stream.stats.decode_computed_tokens == 0
        assert cluster.decode.engine.num_computed_tokens == 2 * 7

    run(scenario, slow_pages())


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "presence_penalty": 0.5, "seed": 9}])
@pytest.mark.parametrize("what", ["pages", "worker", "only worker"])
def test_when_a_transfer_fails_after_the_first_tokens_the_rest_follows_from_them(
    what: str, params: dict[str, float]
) -> None:
    """None is repeated, changed or lost."""

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(60), n=3, **params)
        await stream.has_tokens.wait()
        if what != "pages":
            cluster.kill(cluster.prefills[0])
        await router.finish(stream)

        assert stream.all_stats[0].prefill_retries == 0, "they were told before"
        # Choices that began with different tokens are prefilled one by one from then on.
        num_groups = len({tokens[0] for tokens in stream.tokens.values()})
        assert stream.stats.prefill_retries == 1
        is_remote = what != "only worker"
        assert (stream.stats.decode_computed_tokens == 0) == is_remote
        assert num_groups == (3 if params else 1)
        await cluster.wait_free(timeout_s=10.0)

    faults = [LoopbackFault()] * 6
    if what == "pages":
        faults.append(LoopbackFault(kind=FaultKind.FLIP))
    run(scenario, slow_pages(*faults, num_prefill=1 if what == "only worker" else 2))


def test_a_client_that_leaves_after_the_first_token_stops_the_transfer() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(60), n=2)
        await stream.has_tokens.wait()
        await router.cancel(stream)
        await cluster.wait_free(timeout_s=3 * SLOW_PAGES)

        assert cluster.decode.worker.cache.pool.counts().cached < 15

    run(scenario, slow_pages())


def test_pages_of_a_request_that_ends_with_its_first_token_arrive_for_the_next() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(60), max_tokens=1)
        await router.finish(stream)
        assert cluster.decode.held_pages == 15

        longer = await router.submit(prompt_of(62, seed=1, prefix=stream.prompt))
        await router.finish(longer)

        assert longer.stats.decode_cached_tokens == 60
        assert longer.stats.pages_moved == 1

    run(scenario, slow_pages())


def test_a_worker_that_stops_does_not_wait_for_pages_that_nobody_wants() -> None:
    async def main() -> None:
        cluster = await slow_pages().start()
        router = await cluster.session()
        await router.finish(await router.submit(prompt_of(60), max_tokens=1))

        async with asyncio.timeout(3 * SLOW_PAGES):
            await cluster.decode.process.spawn(cluster.decode.worker.stop(60.0))

        assert cluster.decode.held_pages == 0
        assert cluster.decode.worker.cache.pool.counts().cached < 15
        router.call.cancel()

    run_virtual(main())


def test_a_prefill_worker_that_tells_its_result_twice_repeats_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        told = Attempt.progressed

        def twice(attempt: Attempt, progress: Progress) -> None:
            told(attempt, progress)
            if isinstance(progress, FinishedPrompt):
                told(attempt, progress)

        monkeypatch.setattr(Attempt, "progressed", twice)
        await router.finish(await router.submit(prompt_of(60), n=2))

    run(scenario, slow_pages())


@pytest.mark.parametrize(
    "wrong_fields",
    [{"token_id": 2**32 - 1}, {"top_logprobs": ((2**32 - 1, -1.0),)}],
    ids=["drawn", "probable"],
)
def test_a_token_that_does_not_exist_is_taken_from_no_prefill_worker(
    monkeypatch: pytest.MonkeyPatch, wrong_fields: dict[str, Any]
) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        told = Attempt.progressed

        def wrong(attempt: Attempt, progress: Progress) -> None:
            if isinstance(progress, FinishedPrompt):
                drawn = [replace(each, **wrong_fields) for each in progress.tokens]
                progress = replace(progress, tokens=tuple(drawn))
            told(attempt, progress)

        monkeypatch.setattr(Attempt, "progressed", wrong)
        stream = await router.submit(prompt_of(60), logprobs=1)
        await router.finish(stream)
        assert stream.stats.prefill_retries == len(cluster.candidates())

    run(scenario)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda told: replace(told, num_cached_tokens=1), "1 cached and 30 computed tokens; allow"),
        (lambda told: replace(told, num_computed_tokens=2**32 - 1), "allowed: 30 in all"),
        (
            lambda told: replace(told, tokens=tuple(map(without_logprobs, told.tokens))),
            "logprobs: found 0; allowed: 2",
        ),
        (
            lambda told: replace(told, tokens=tuple(map(with_many_logprobs, told.tokens))),
            "logprobs.top_token_ids: found 3; allowed: at most 2",
        ),
    ],
    ids=["more than it was asked for", "overflow", "no log probabilities", "too many of them"],
)
def test_a_result_that_contradicts_what_was_asked_costs_its_attempt_alone(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrong: Callable[[PrefillResult], PrefillResult],
    words: str,
) -> None:
    """A wrong sum would overflow a field of the answer, which other requests share."""

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        other = await router.submit(prompt_of(20), max_tokens=40)
        await wait_until(lambda: len(other.tokens[0]) > 1, what="its run")

        monkeypatch.setattr(
            prefill_attempt, "PrefillResult", lambda **told: wrong(PrefillResult(**told))
        )
        stream = await router.submit(prompt_of(30, seed=1), n=2, logprobs=2, max_tokens=3)
        await router.finish(stream, other)

        assert stream.stats.prefill_retries == len(cluster.candidates())
        assert len(stream.logprobs) == 2 * 3

    caplog.set_level(logging.INFO)
    run(scenario)
    assert any(words in str(vars(record)) for record in caplog.records)


def without_logprobs(token: SampledToken) -> SampledToken:
    return SampledToken(token_id=token.token_id)


def with_many_logprobs(token: SampledToken) -> SampledToken:
    return replace(token, top_logprobs=((1, -1.0), (2, -1.0), (3, -1.0)))


def test_an_account_that_grew_by_a_preemption_is_told_when_the_tokens_go_on() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = [
            await router.submit(prompt_of(12, seed=seed), max_tokens=40, seed=seed)
            for seed in range(4)
        ]
        await router.finish(*streams)

        assert any(each.stats.preemptions for each in streams)
        for each in streams:
            # Told at least once after each preemption.
            told = [stats.preemptions for stats in each.all_stats]
            assert sorted(set(told)) == [*range(told[-1] + 1)]

    run(scenario, WorkerCluster(decode_pages=24))


def test_sixteen_requests_with_one_new_prefix_move_and_compute_it_once() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        prefix = prompt_of(40)
        streams = [
            await router.submit(prompt_of(46, seed=seed, prefix=prefix)) for seed in range(16)
        ]
        await router.finish(*streams)

        assert sum(each.stats.prefill_computed_tokens for each in streams) == 40 + 16 * 6
        assert cluster.prefills[0].engine.num_computed_tokens == 40 + 16 * 6
        suffix_pages = 2  # 6 tokens
        assert sum(each.stats.pages_moved for each in streams) == 10 + 16 * suffix_pages
        assert all(each.stats.decode_computed_tokens == 0 for each in streams)

    run(scenario)


def test_a_second_request_moves_only_the_pages_that_are_missing() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        prompt = prompt_of(40)
        await router.finish(await router.submit(prompt))
        longer = await router.submit(prompt_of(50, seed=1, prefix=prompt))
        await router.finish(longer)

        assert longer.stats.decode_cached_tokens == 40
        assert longer.stats.pages_moved == 3
        assert longer.stats.prefill_cached_tokens == 40
        assert longer.stats.prefill_computed_tokens == 10
        for worker in (cluster.decode, cluster.prefills[0]):
            channel = cluster.router_channel(worker)
            beats = worker_pb2_grpc.WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest())
            totals = (await anext(aiter(beats))).heartbeat.totals
            beats.cancel()
            assert totals.looked_up_tokens == 40 + 50, "what arrives was looked up, too"
            assert totals.cached_tokens == 40
            num_drawn = 7 if worker is cluster.decode else 1
            assert totals.generated_tokens == 2 * num_drawn, "each token is counted once"
            needed_pages = 10 + 13 if worker is cluster.decode else 0
            assert totals.needed_bytes == needed_pages * cluster.decode.engine.storage.page_bytes

    run(scenario)


def test_the_account_tells_how_long_a_request_waited_to_begin() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        began_at = asyncio.get_running_loop().time()
        first = await router.submit(prompt_of(30))
        second = await router.submit(prompt_of(30, seed=1))
        await router.finish(first)
        first_s = asyncio.get_running_loop().time() - began_at
        await router.finish(second)

        assert first.stats.queue_ms == 0
        assert second.stats.queue_ms == pytest.approx(1000 * first_s, rel=0.1), "there was no room"

    run(scenario, WorkerCluster(decode_pages=12))


def test_generated_pages_are_found_by_the_next_turn() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        first = await router.submit(prompt_of(20), max_tokens=13)
        await router.finish(first)
        turn = (*first.prompt, *first.tokens[0], *prompt_of(5, seed=2))
        second = await router.submit(turn)
        await router.finish(second)

        # K and V of the last token were never computed: 20 + 12 tokens fill 8 pages.
        assert second.stats.decode_cached_tokens == 8 * PAGE_SIZE

    run(scenario)


def test_a_short_suffix_is_prefilled_locally() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        prompt = prompt_of(40)
        await router.finish(await router.submit(prompt))
        longer = await router.submit(prompt_of(46, seed=1, prefix=prompt))
        await router.finish(longer)

        assert longer.stats.pages_moved == 0
        assert longer.stats.decode_computed_tokens == 6
        assert cluster.decode.worker._scheduler.totals.generated_tokens == 7 + 8

    run(scenario, WorkerCluster(decode_config=decode_config(local_prefill_max_tokens=6)))


def test_without_candidates_a_prompt_is_prefilled_locally_in_chunks() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        busy = await router.submit(prompt_of(10), max_tokens=30)
        await wait_until(lambda: len(busy.tokens[0]) > 1, what="its run")
        stream = await router.submit(prompt_of(200, seed=1), candidates=[])
        await router.finish(stream, busy)

        assert stream.stats.decode_computed_tokens == 200
        # Decoding went on while the prompt was computed.
        shared = [num_tokens for num_tokens in cluster.decode.executor.passes if num_tokens > 2]
        assert shared == [64, 64, 64, 11 + 1]  # one token of each pass is a decode

    run(scenario, WorkerCluster(decode_config=decode_config(step_budget_ms=0)))


def test_tokens_keep_coming_within_the_budget_while_prompts_are_computed_here() -> None:
    budget_s = 0.03

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        loop = asyncio.get_running_loop()
        alone = await router.submit(prompt_of(200, seed=3), candidates=[], max_tokens=1)
        await router.finish(alone)
        assert max(cluster.decode.executor.passes) == 64, "nobody waits for it"

        busy = await router.submit(prompt_of(10), candidates=[], max_tokens=200)
        await wait_until(lambda: len(busy.tokens[0]) > 1, what="its run")
        cluster.decode.executor.passes.clear()
        prompts = [await router.submit(prompt_of(200, seed=seed), candidates=[]) for seed in (1, 2)]
        times = []
        while not all(each.ended.is_set() for each in prompts):
            num_tokens = len(busy.tokens[0])
            await wait_until(lambda n=num_tokens: len(busy.tokens[0]) > n, what="a token")
            times.append(loop.time())
        assert not busy.ended.is_set()
        await router.finish(busy, *prompts)

        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert max(gaps) < 1.25 * budget_s, "what prefill alone has taught is not exact"
        assert max(gaps[3:]) < budget_s + 0.002, "one look and one launch more"
        # A pass of the fake engine takes 10 ms, and one more for each token.
        shared = [num_tokens for num_tokens in cluster.decode.executor.passes if num_tokens > 3]
        assert sum(shared) / len(shared) > 15, "the budget is used"

    config = decode_config(step_budget_ms=1000 * budget_s)
    run(scenario, WorkerCluster(decode_config=config))


@pytest.mark.parametrize("num_tokens", [PAGE_SIZE, 40])
def test_of_a_prompt_that_is_wholly_cached_one_token_is_computed(num_tokens: int) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        prompt = prompt_of(num_tokens)
        here = await router.submit(prompt, candidates=[])
        await router.finish(here)
        there = await router.submit(prompt_of(num_tokens, seed=1))
        await router.finish(there)
        cluster.decode.engine.num_computed_tokens = cluster.prefills[0].engine.num_passes = 0

        again = await router.submit(prompt, candidates=[], n=3, temperature=1.0, max_tokens=2)
        await router.finish(again)

        assert again.stats.decode_cached_tokens == num_tokens - 1
        assert again.stats.decode_computed_tokens == 1
        assert cluster.decode.engine.num_computed_tokens == 1 + 3
        # As much where the prefill worker has all pages and the decode worker lacks the last one.
        again = await router.submit(there.prompt)
        await router.finish(again)
        assert again.stats.pages_moved == 1
        assert again.stats.prefill_computed_tokens == 1
        assert cluster.prefills[0].engine.num_passes == 1

    run(scenario)


def test_choices_share_the_pages_of_their_prompt() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(42), n=3, temperature=1.0, seed=5, max_tokens=4)
        await router.finish(stream)

        assert len({tuple(tokens) for tokens in stream.tokens.values()}) == 3
        assert stream.stats.pages_moved == 11
        assert stream.stats.prefill_computed_tokens == 42
        # 10 full pages are shared; the partial one and its successor are each choice's own.
        assert peak == [10 + 3 * 2]

    peak = [0]

    async def watching(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        launch = cluster.decode.executor.launch

        async def watched(step: EngineStep) -> None:
            peak[0] = max(peak[0], cluster.decode.worker.cache.pool.counts().live)
            await launch(step)

        cluster.decode.executor.launch = watched  # type: ignore[method-assign]
        await scenario(cluster, router)

    run(watching)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "presence_penalty": 0.5, "seed": 9}])
@pytest.mark.parametrize("num_emitted", [1, 3, 4, 11])
def test_a_resumed_request_gets_the_tokens_that_it_would_have_got(
    num_emitted: int, params: dict[str, float]
) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        whole = await router.submit(prompt_of(21), n=2, max_tokens=12, **params)
        await router.finish(whole)
        emitted = {choice: tokens[:num_emitted] for choice, tokens in whole.tokens.items()}
        emitted[1] = emitted[1][:-1]
        resumed = await router.submit(
            whole.prompt, attempt=1, emitted=emitted, max_tokens=12, **params
        )
        await router.finish(resumed)

        assert resumed.tokens == whole.tokens

    run(scenario)


def test_end_tokens_end_a_choice_but_not_before_min_tokens() -> None:
    prompt = prompt_of(9)
    free = fake_tokens(
        prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), model=MODEL
    )

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stopped = await router.submit(prompt, stop_token_ids=(free[3],))
        at_first = await router.submit(prompt, stop_token_ids=(free[0],))
        held_back = await router.submit(prompt, stop_token_ids=(free[3],), min_tokens=6)
        by_length = await router.submit(prompt, max_tokens=1)
        # The step that is launched behind its stop draws the last token of its length.
        by_both = await router.submit(prompt, stop_token_ids=(free[3],), max_tokens=5)
        await router.finish(stopped, at_first, held_back, by_length, by_both)

        assert (stopped.tokens[0], stopped.finish_reasons[0]) == (free[:4], STOP)
        assert (at_first.tokens[0], at_first.finish_reasons[0]) == (free[:1], STOP)
        assert len(held_back.tokens[0]) >= 6
        assert (by_length.tokens[0], by_length.finish_reasons[0]) == (free[:1], LENGTH)
        assert (by_both.tokens[0], by_both.finish_reasons[0]) == (free[:4], STOP)

    run(scenario)


def test_the_models_end_token_ends_a_choice_unless_it_is_ignored() -> None:
    prompts = [prompt_of(9, seed=seed) for seed in range(1000)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    prompt = next(p for p in prompts if 1 < len(fake_tokens(p, greedy, model=MODEL)) < 8)

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        ended = await router.submit(prompt, ignore_eos=False)
        ignored = await router.submit(prompt, ignore_eos=True)
        await router.finish(ended, ignored)

        assert ended.finish_reasons[0] == STOP
        assert ended.tokens[0][-1] == 0
        assert len(ignored.tokens[0]) == 8

    run(scenario)


def test_generation_ends_where_the_context_does() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(MAX_CONTEXT_TOKENS - 5), max_tokens=100)
        await router.finish(stream)

        assert len(stream.tokens[0]) == 5
        assert stream.finish_reasons[0] == LENGTH

    run(scenario)


def test_logprobs_come_with_each_token_when_they_are_asked_for() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(9), logprobs=2, max_tokens=5)
        plain = await router.submit(prompt_of(9), max_tokens=5)
        await router.finish(stream, plain)

        assert len(stream.logprobs) == 5
        assert all(len(each.top_logprobs) == 2 for each in stream.logprobs)
        assert plain.logprobs == []

    run(scenario)


def test_a_pool_that_is_too_small_for_all_preempts_and_finishes_everyone() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = [
            await router.submit(
                prompt_of(12, seed=seed),
                max_tokens=40,
                n=1 + seed % 3,
                temperature=1.0,
                seed=seed,
            )
            for seed in range(8)
        ]
        await router.finish(*streams)

        assert sum(each.stats.preemptions for each in streams) > 0
        assert streams[0].stats.preemptions == 0, "the oldest always goes on"

    run(scenario, WorkerCluster(decode_pages=24))


def test_pages_that_ran_short_for_a_local_prefill_are_found_again() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = [
            await router.submit(prompt_of(20, seed=seed), max_tokens=40, candidates=[])
            for seed in range(6)
        ]
        await router.finish(*streams)

        assert sum(each.stats.preemptions for each in streams) > 0

    run(scenario, WorkerCluster(decode_pages=20))


@pytest.mark.parametrize("after_s", [0.0005, 0.002, 0.01, 0.03, 0.045, 0.06, 0.1, 0.15])
@pytest.mark.parametrize("is_silent", [False, True])
def test_killing_a_prefill_worker_at_any_time_costs_only_time(
    after_s: float, is_silent: bool
) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        victim = cluster.prefills[0]
        prompt = prompt_of(100)
        streams = [
            await router.submit(prompt),
            await router.submit(prompt_of(120, seed=1, prefix=prompt)),
        ]
        await asyncio.sleep(after_s)
        cluster.grpc_network.kill(victim.identity.address, silently=is_silent)
        victim.transport.kill()
        await router.finish(*streams)

        assert all(each.stats.decode_computed_tokens == 0 for each in streams)
        # Nothing that had arrived was moved again. A first token that was told before its pages
        # were there belongs to the prompt from then on, and begins a page.
        assert 30 <= sum(each.stats.pages_moved for each in streams) <= 30 + len(streams)
        # A receive whose sender is silent ends with its deadline.
        await cluster.wait_free(timeout_s=5.0)

    # The slow network spreads the transfer over the times above.
    cluster = WorkerCluster(
        num_prefill=2,
        page_network=LoopbackNetwork(latency_s=0.005, hang_on_peer_death=True),
        decode_config=decode_config(transfer_deadlines=DEADLINES),
    )
    run(scenario, cluster)


async def meet(cluster: WorkerCluster, *workers: WorkerIdentity) -> None:
    """Name prefill workers to the decode worker, as routers do."""
    stub = worker_pb2_grpc.DecodeServiceStub(cluster.router_channel(cluster.decode))
    refs = [worker_to_proto(each) for each in workers]
    await stub.Meet(worker_pb2.MeetRequest(prefill_workers=refs), timeout=1.0)


def test_connections_to_prefill_workers_are_there_before_the_first_request() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        loop = asyncio.get_running_loop()
        await meet(cluster, *cluster.candidates())
        await meet(cluster, *cluster.candidates())
        await wait_until(lambda: cluster.decode.num_connections == 2, what="two connections")

        took = []
        for seed in range(2):
            began_at = loop.time()
            stream = await router.submit(prompt_of(30, seed=seed))
            await stream.has_tokens.wait()
            took.append(loop.time() - began_at)
            await router.finish(stream)
            assert stream.stats.pages_moved == 8

        assert took[0] < took[1] + 0.0001, "the first waited for nothing more"
        assert cluster.decode.num_connections == 2

    run(scenario, WorkerCluster(num_prefill=2))


def test_a_router_that_names_too_many_prefill_workers_is_refused() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        many = [
            WorkerIdentity(worker_id=f"prefill-{number}", incarnation=1, address="h:1")
            for number in range(4097)
        ]
        with pytest.raises(grpc.aio.AioRpcError, match="found 4097 items; allowed: at most 4096"):
            await meet(cluster, *many)
        await asyncio.sleep(0.1)
        assert cluster.decode.num_connections == 0

    run(scenario, WorkerCluster(num_prefill=1))


def test_a_request_without_candidates_asks_whom_a_router_named_last() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        computed = []
        for named in ([], cluster.candidates(), []):
            await meet(cluster, *named)
            stream = await router.submit(prompt_of(30, seed=len(computed)), candidates=[])
            await router.finish(stream)
            computed.append(stream.stats.decode_computed_tokens)

        assert computed == [30, 0, 30]

    run(scenario)


@pytest.mark.parametrize("by", ["a router that meets", "a request"])
def test_who_is_named_with_an_old_start_breaks_nothing_off(by: str) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        old = replace(cluster.candidates()[0], incarnation=1)
        stream = await router.submit(prompt_of(60))
        await wait_until(lambda: bool(cluster.prefills[0].engine.num_computed_tokens))
        if by == "a request":
            await router.finish(await router.submit(prompt_of(8, seed=1), candidates=[old]), stream)
        else:
            await meet(cluster, old)
            await router.finish(stream)

        assert stream.stats.prefill_retries == 0

    run(scenario)


def test_of_two_starts_of_one_worker_the_one_named_first_is_met_and_not_broken_off() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        [present] = cluster.candidates()
        await meet(cluster, present, replace(present, incarnation=1))
        await wait_until(lambda: cluster.decode.num_connections == 1, timeout_s=5.0)
        await meet(cluster, replace(present, incarnation=1))
        await asyncio.sleep(1.0)

        assert cluster.decode.num_connections == 1

    run(scenario)


def test_requests_that_waited_while_a_prefill_worker_restarted_ask_its_new_start() -> None:
    """Each would ask the one that is gone first, in vain."""

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        running = [
            await router.submit(prompt_of(4, seed=lasts), candidates=[], max_tokens=lasts)
            for lasts in (100, 110)
        ]
        waiting = [await router.submit(prompt_of(200, seed=seed)) for seed in range(2)]
        await wait_until(lambda: all(each.has_tokens.is_set() for each in running))
        cluster.kill(cluster.prefills[0])
        await cluster.restart(0)
        await meet(cluster, *cluster.candidates())
        await router.finish(*running, *waiting)

        assert [each.stats.decode_computed_tokens for each in waiting] == [0, 0]
        assert [each.stats.prefill_retries for each in waiting] == [0, 0]

    config = decode_config(max_running_sequences=2, distrust_s=0.01)
    run(scenario, WorkerCluster(decode_config=config))


def test_an_attempt_whose_channel_is_closed_goes_on_elsewhere() -> None:
    """The prefill worker falls silent, and its new start is connected to."""

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        victim = cluster.prefills[0]
        stream = await router.submit(prompt_of(60))
        await wait_until(lambda: bool(victim.engine.num_computed_tokens))
        cluster.grpc_network.kill(victim.identity.address, silently=True)
        victim.transport.kill()
        await cluster.restart(0)
        killed_at = asyncio.get_running_loop().time()
        other = await router.submit(prompt_of(30, seed=1))
        await router.finish(stream, other)

        assert stream.stats.prefill_retries == 1
        assert other.stats.prefill_retries == 0
        assert cluster.channels[0].is_closed
        assert asyncio.get_running_loop().time() - killed_at < 1.0, "it waited for a deadline"

    run(scenario)


def test_prefill_workers_that_cannot_be_met_harm_nobody() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        dead, alive = cluster.candidates()
        cluster.kill(cluster.prefills[0])
        await meet(cluster, dead, replace(alive, incarnation=1), alive)

        stream = await router.submit(prompt_of(30), candidates=[dead, alive])
        await router.finish(stream)

        assert stream.stats.prefill_retries == 1
        assert stream.stats.decode_computed_tokens == 0

    run(scenario, WorkerCluster(num_prefill=2))


def test_a_request_has_its_own_time_for_a_connection_that_was_begun_ahead_of_it() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        connect_s = cluster.decode_config.transfer_deadlines.connect_s
        address = cluster.prefills[0].identity.address
        cluster.grpc_network.pause(address)
        await meet(cluster, *cluster.candidates())
        await asyncio.sleep(0.9 * connect_s)
        stream = await router.submit(prompt_of(30))
        await asyncio.sleep(0.2 * connect_s)
        cluster.grpc_network.resume(address)
        await router.finish(stream)

        assert stream.stats.prefill_retries == 0
        assert stream.stats.pages_moved == 8

    run(scenario)


def test_a_worker_that_is_stopped_again_still_waits_for_its_step() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        decode = cluster.decode
        stream = await router.submit(prompt_of(20), max_tokens=400)
        await stream.has_tokens.wait()
        decode.executor.slowdown = 100.0
        await asyncio.sleep(0.1)
        first = decode.process.spawn(decode.worker.stop(0.0))
        await asyncio.sleep(0.1)
        await decode.process.spawn(decode.worker.stop(0.0))
        assert decode.executor.num_unread == 0
        assert decode.held_pages == 0
        await first

    run(scenario)


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
def test_a_worker_that_stops_waits_for_nobody_whom_it_was_to_meet(grace_s: float) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        loop = asyncio.get_running_loop()
        cluster.grpc_network.kill(cluster.prefills[0].identity.address, silently=True)
        await meet(cluster, *cluster.candidates())
        await router.close()
        began_at = loop.time()
        await cluster.decode.process.spawn(cluster.decode.worker.stop(grace_s))

        assert loop.time() - began_at < cluster.decode_config.transfer_deadlines.connect_s / 2

    run(scenario)


def test_a_worker_that_died_idle_leaves_no_connection_behind() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        await router.finish(await router.submit(prompt_of(30)))
        cluster.kill(cluster.prefills[0])
        assert cluster.decode.num_connections == 1, "nothing tells that an idle peer is gone"

        await cluster.restart(0)
        stream = await router.submit(prompt_of(30, seed=1))
        await router.finish(stream)

        assert stream.stats.pages_moved > 0
        assert stream.stats.decode_computed_tokens == 0
        assert cluster.decode.num_connections == 1

    run(scenario, WorkerCluster())


def test_what_is_kept_for_prefill_workers_that_left_stays_bounded() -> None:
    """Fifty come under new names and leave without a word, each once it has sent pages."""
    idle_s = 20.0
    deadlines = TransferDeadlines(idle_s=idle_s)

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        most_kept = 0
        for number in range(50):
            present = await cluster.join(f"prefill-{number}")
            stream = await router.submit(prompt_of(8, seed=number), candidates=[present.identity])
            await router.finish(stream)
            assert stream.stats.pages_moved == 2
            cluster.kill(present)
            await asyncio.sleep(idle_s / 4)
            num_channels = sum(not each.is_closed for each in cluster.channels)
            most_kept = max(most_kept, num_channels, cluster.decode.num_connections)

        assert most_kept <= 5
        await asyncio.sleep(idle_s)
        assert all(each.is_closed for each in cluster.channels)
        assert cluster.decode.num_connections == 0

    cluster = WorkerCluster(num_prefill=0, prefill_pages=16)
    cluster.decode_config = replace(cluster.decode_config, transfer_deadlines=deadlines)
    run(scenario, cluster)


def test_a_worker_that_stops_closes_all_channels_though_some_close_late_and_others_are_due(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it waits for one, the time of others may be over, and one may fail."""
    idle_s = 20.0
    close = PrefillClient.close

    async def closes_late(client: PrefillClient) -> None:
        await asyncio.sleep(idle_s)
        await close(client)
        raise RuntimeError("planted")

    async def main() -> None:
        config = decode_config(transfer_deadlines=TransferDeadlines(idle_s=idle_s))
        cluster = await WorkerCluster(num_prefill=3, decode_config=config).start()
        router = await cluster.session()
        for seed, each in enumerate(cluster.candidates()):
            await router.finish(await router.submit(prompt_of(30, seed=seed), candidates=[each]))
        await router.close()

        monkeypatch.setattr(PrefillClient, "close", closes_late)
        await cluster.decode.process.spawn(cluster.decode.worker.stop(0.0))

        assert len(cluster.channels) == 3
        assert all(each.is_closed for each in cluster.channels)

    run_virtual(main())
    assert [each.msg for each in caplog.records].count("client_close_failed") == 3


def test_no_request_meets_a_closed_connection_even_with_the_least_time_and_a_slow_network() -> None:
    deadlines = replace(DEADLINES, idle_s=DEADLINES.grant_s + 0.01)
    cluster = WorkerCluster(grpc_network=MemoryNetwork(latency_s=0.2))
    cluster.prefill_config = replace(cluster.prefill_config, transfer_deadlines=deadlines)
    cluster.decode_config = decode_config(transfer_deadlines=deadlines)

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        for number in range(8):
            stream = await router.submit(prompt_of(30, seed=number), max_tokens=1)
            await router.finish(stream)
            await asyncio.sleep(0.2 * number)

            assert stream.stats.prefill_retries == 0

    run(scenario, cluster)


def test_no_request_meets_a_closed_connection_of_a_worker_that_routers_name_again_and_again() -> (
    None
):
    idle_s = 20.0
    deadlines = TransferDeadlines(idle_s=idle_s)
    cluster = WorkerCluster(decode_config=decode_config(transfer_deadlines=deadlines))
    cluster.prefill_config = replace(cluster.prefill_config, transfer_deadlines=deadlines)

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        for _ in range(5):  # other workers come and go, each time with a call
            await meet(cluster, *cluster.candidates())
            await asyncio.sleep(0.5 * idle_s)
        stream = await router.submit(prompt_of(30))
        await router.finish(stream)

        assert stream.stats.prefill_retries == 0
        assert stream.stats.pages_moved == 8

    run(scenario, cluster)


def test_when_no_candidate_is_left_the_prompt_is_prefilled_locally() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        cluster.kill(cluster.prefills[0])
        stale = replace(cluster.prefills[1].identity, incarnation=1)
        stream = await router.submit(
            prompt_of(30), candidates=[cluster.prefills[0].identity, stale]
        )
        await router.finish(stream)

        assert stream.stats.prefill_retries == 2
        assert stream.stats.decode_computed_tokens == 30

    run(scenario, WorkerCluster(num_prefill=2))


@pytest.mark.parametrize(
    "kind", [kind for kind in FaultKind if kind not in (FaultKind.NONE, FaultKind.SWAP)]
)
def test_a_damaged_transfer_never_changes_a_token(kind: FaultKind) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(60))
        await router.finish(stream)
        assert stream.stats.prefill_retries == 1
        assert stream.stats.decode_computed_tokens == 0
        await cluster.wait_free(timeout_s=10.0)

        assert cluster.page_network.num_faults == 1

    faults = planned([LoopbackFault(), LoopbackFault(kind=kind, abort_s=0.5)])
    cluster = WorkerCluster(
        num_prefill=2,
        page_network=LoopbackNetwork(fault_policy=faults),
        decode_config=decode_config(transfer_deadlines=DEADLINES),
    )
    run(scenario, cluster)


def test_pages_of_an_overdue_abort_are_free_when_it_returns_after_all() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        began_at = asyncio.get_running_loop().time()
        stream = await router.submit(prompt_of(60))
        await router.finish(stream)
        await asyncio.sleep(DEADLINES.abort_s + 5.0)
        assert cluster.decode.worker.cache.pool.counts().quarantine > 0
        assert cluster.prefills[0].held_pages > 0

        await cluster.wait_free(timeout_s=30.0)

        assert asyncio.get_running_loop().time() - began_at > 30.0

    cluster = WorkerCluster(
        num_prefill=2,
        page_network=LoopbackNetwork(
            fault_policy=planned([LoopbackFault(kind=FaultKind.HANG, abort_s=30.0)])
        ),
        decode_config=decode_config(transfer_deadlines=DEADLINES),
    )
    run(scenario, cluster)


def test_a_worker_stops_though_an_abort_never_returns() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        await router.finish(await router.submit(prompt_of(60)))
        await asyncio.sleep(20.0)
        began_at = asyncio.get_running_loop().time()
        for each in (cluster.decode, *cluster.prefills):
            await each.process.spawn(each.worker.stop(0.0))
        assert asyncio.get_running_loop().time() - began_at < 60.0

    async def main() -> None:
        running = await WorkerCluster(
            num_prefill=2,
            page_network=LoopbackNetwork(
                fault_policy=planned([LoopbackFault(kind=FaultKind.HANG, abort_s=1e6)])
            ),
            decode_config=decode_config(transfer_deadlines=DEADLINES),
        ).start()
        await scenario(running, await running.session())

    run_virtual(main())


@pytest.mark.parametrize("after_s", [0.0, 0.0006, 0.002, 0.01, 0.03, 0.045, 0.06, 0.1, 0.15, 0.3])
@pytest.mark.parametrize("closes_session", [False, True])
def test_a_client_that_leaves_frees_all_pages_on_both_sides_within_a_second(
    after_s: float, closes_session: bool
) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        leaving = router if not closes_session else await cluster.session()
        prompt = prompt_of(100)
        streams = [
            await leaving.submit(prompt, n=2, max_tokens=50),
            await leaving.submit(prompt_of(120, seed=1, prefix=prompt), max_tokens=50),
            await leaving.submit(prompt_of(90, seed=2), max_tokens=50, candidates=[]),
        ]
        staying = await router.submit(prompt_of(110, seed=3, prefix=prompt))
        await asyncio.sleep(after_s)
        if closes_session:
            leaving.call.cancel()
        else:
            for stream in streams:
                await router.cancel(stream)
        await router.finish(staying)
        await cluster.wait_free(timeout_s=1.0)
        num_steps = len(cluster.decode.executor.passes)
        await asyncio.sleep(1.0)

        assert len(cluster.decode.executor.passes) == num_steps, "steps for nobody"

    run(
        scenario,
        WorkerCluster(page_network=LoopbackNetwork(latency_s=0.005, hang_on_peer_death=True)),
    )


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_for_which_nothing_can_be_drawn_fails_and_others_go_on(n: int) -> None:
    poison = 999

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        workers = [cluster.decode, *cluster.prefills]
        good = await router.submit(prompt_of(50), max_tokens=60)
        victim = await router.submit((*prompt_of(50), poison), n=n, max_tokens=60)
        await good.has_tokens.wait()
        await victim.has_tokens.wait()
        for worker in workers:
            worker.executor.poison = poison
        await victim.ended.wait()
        late = await router.submit((*prompt_of(51), poison), n=n)  # fails where it is prefilled
        await late.ended.wait()
        await router.finish(good)

        for each in (victim, late):
            assert each.failure.code == grpc.StatusCode.INTERNAL.value[0]
            assert "no token can be drawn" in each.failure.message
        for worker in workers:
            worker.executor.poison = None
        again = await router.submit((*prompt_of(51), poison), n=n)
        await router.finish(again)

    run(scenario)


def test_a_failed_pass_of_a_prefill_worker_is_made_again_elsewhere() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        cluster.prefills[0].executor.num_failing_passes = 1
        stream = await router.submit(prompt_of(50))
        await router.finish(stream)

        assert stream.stats.prefill_retries == 1
        assert stream.stats.decode_computed_tokens == 0

    run(scenario, WorkerCluster(num_prefill=2))


def test_a_second_failure_renews_the_distrust_of_a_prefill_worker() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        first, second = cluster.prefills
        distrust_s = cluster.decode_config.distrust_s
        for seed in range(2):
            first.executor.num_failing_passes = 1
            only_first = [first.identity]
            await router.finish(
                await router.submit(prompt_of(30, seed=seed), candidates=only_first)
            )
            await asyncio.sleep(0.6 * distrust_s)

        await router.finish(await router.submit(prompt_of(30, seed=2)))
        assert first.engine.num_computed_tokens < 30 == second.engine.num_computed_tokens

        await asyncio.sleep(distrust_s)
        await router.finish(await router.submit(prompt_of(30, seed=3)))
        assert first.engine.num_computed_tokens >= 30 == second.engine.num_computed_tokens

    run(scenario, WorkerCluster(num_prefill=2))


BAD_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "share above 1": ({"prompt": (1,), "cache_share": 1.5}, "cache_share: found 1.5; allowed: "),
    "share that is no number": (
        {"prompt": (1,), "cache_share": float("nan")},
        "cache_share: found nan",
    ),
    "empty prompt": ({"prompt": ()}, "prompt_token_ids: found none"),
    "foreign token": ({"prompt": (1, 1000)}, "prompt_token_ids: found 1000; allowed: 0 to 999"),
    "too long": ({"prompt": (1,) * 512}, "found 512 tokens before it; allowed: fewer than 512"),
    "no choice": ({"prompt": (1,), "emitted": {}}, "choices: found 0 entries; allowed: 1 to 32"),
    "too many choices": ({"prompt": (1,), "n": 33}, "choices: found 33 entries; allowed: 1 to 32"),
    "foreign choice": ({"prompt": (1,), "emitted": {64: []}}, "choices: found choice 64; allowed"),
    "nothing to draw": (
        {"prompt": (1,), "max_tokens": 0},
        "sampling.max_tokens: found 0; allowed:",
    ),
    "no number": ({"prompt": (1,), "temperature": math.nan}, "sampling.temperature: found nan"),
    "foreign stop": (
        {"prompt": (1,), "stop_token_ids": (1000,)},
        "sampling.stop_token_ids: found 1000",
    ),
    "too many stops": (
        {"prompt": (1,), "stop_token_ids": (1,) * 257},
        "sampling.stop_token_ids: found 257 items; allowed: at most 256",
    ),
    "all drawn": (
        {"prompt": (1,), "emitted": {0: [1] * 8}},
        "8 emitted tokens; allowed: fewer than 8",
    ),
    "numbers of streams that do not fit": (
        {"prompt": (1,), "first_stream": 2**64 - 63},
        f"first_stream: found {2**64 - 63}; allowed: 0 to {2**64 - 64}",
    ),
    "failed passes that do not fit": (
        {"prompt": (1,), "failed_passes": 2**32 - 1},
        "failed_passes: found 4294967295; allowed: 0 to 4294967294",
    ),
    "foreign emitted": ({"prompt": (1,), "emitted": {0: [4000]}}, "emitted_token_ids of choice 0"),
    "too long a name": (
        {
            "prompt": (1,),
            "candidates": [WorkerIdentity(worker_id="x" * 65, incarnation=1, address="h:1")],
        },
        "prefill_candidates[0].worker_id: found 65 characters; allowed: at most 64",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_others_go_on(name: str) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        good = await router.submit(prompt_of(20))
        request, words = BAD_REQUESTS[name]
        bad = await router.submit(**request)
        await bad.ended.wait()
        assert bad.failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert words in bad.failure.message
        await router.finish(good)

    run(scenario)


def test_more_waiting_requests_than_allowed_are_refused() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = [await router.submit(prompt_of(20, seed=seed)) for seed in range(5)]
        await streams[-1].ended.wait()
        assert streams[-1].failure.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        await router.finish(*streams[:3])

    run(scenario, WorkerCluster(decode_config=decode_config(max_waiting_requests=3)))


def test_a_request_that_takes_too_long_fails_with_its_deadline() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(20), max_tokens=400, timeout_ms=300)
        await stream.ended.wait()
        assert stream.failure.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert len(stream.tokens[0]) > 3

    run(scenario)


def test_a_session_for_another_incarnation_is_refused() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stale = await cluster.session(incarnation=12345)
        with pytest.raises(grpc.aio.AioRpcError, match="incarnation 12345") as refusal:
            await stale.reading
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    run(scenario)


@pytest.mark.parametrize("version", [0, CONTRACT_VERSION + 1])
def test_a_router_and_a_prefill_worker_of_another_contract_version_are_refused(
    version: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    difference = f"contract version: found {version}; allowed: {CONTRACT_VERSION}"

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        other = await cluster.session(contract_version=version)
        with pytest.raises(grpc.aio.AioRpcError, match=difference) as refusal:
            await other.reading
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION

        [prefill] = cluster.candidates()
        prefill = replace(prefill, contract_version=version)
        await meet(cluster, prefill)
        stream = await router.submit(prompt_of(30), candidates=[prefill])
        await router.finish(stream)
        assert stream.stats.prefill_retries == 1
        assert stream.stats.decode_computed_tokens == 30
        assert cluster.decode.num_connections == 0
        assert cluster.prefills[0].engine.num_computed_tokens == 0
        assert difference in str([vars(each) for each in caplog.records])

    run(scenario)


def test_cancelled_choices_leave_batch_and_pages_and_the_others_go_on() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(42), n=3, temperature=1.0, max_tokens=60)
        await stream.has_tokens.wait()
        await asyncio.sleep(0.05)
        cache, passes = cluster.decode.worker.cache, cluster.decode.executor.passes
        assert passes[-1] == 3
        live_before = cache.pool.counts().live

        await router.cancel_choices(stream, 0, 2)
        await asyncio.sleep(0.05)

        assert passes[-1] == 1
        # The full pages of the prompt are shared; each choice has at least one of its own.
        assert cache.pool.counts().live <= live_before - 2
        await router.cancel_choices(stream, 0, 7)  # ended, never there
        await router.finish(stream)
        assert len(stream.tokens[1]) == 60
        assert max(len(stream.tokens[0]), len(stream.tokens[2])) < 59

    run(scenario)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.03, 0.045, 0.06, 0.1, 0.15])
@pytest.mark.parametrize("is_local", [False, True])
def test_cancelling_the_choices_one_by_one_at_any_time_ends_the_request(
    after_s: float, is_local: bool
) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        prompt = prompt_of(100)
        # Two groups: choices 0 and 1 are prefilled together, 2 has tokens of its own.
        leaving = await router.submit(
            prompt,
            emitted={0: [], 1: [], 2: [5]},
            max_tokens=50,
            candidates=[] if is_local else None,
        )
        staying = await router.submit(prompt_of(120, seed=1, prefix=prompt))
        await asyncio.sleep(after_s)
        for choice in (0, 2, 1):
            await router.cancel_choices(leaving, choice)
            await asyncio.sleep(0.005)
        await router.finish(staying)
        await cluster.wait_free(timeout_s=1.0)
        num_steps = len(cluster.decode.executor.passes)
        await asyncio.sleep(1.0)

        assert len(cluster.decode.executor.passes) == num_steps, "steps for nobody"
        assert leaving.failure is None

    run(scenario)


def test_a_resumption_replaces_the_attempt_that_came_before_it() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        first = await router.submit(prompt_of(20), request_id="a", max_tokens=30)
        await first.has_tokens.wait()
        emitted = {0: list(first.tokens[0])}
        second = await router.submit(
            first.prompt, request_id="a", attempt=1, emitted=emitted, max_tokens=30
        )
        await router.finish(second)

    # The stream checks that no delta of attempt 0 follows.
    run(scenario)


def test_one_message_per_step_carries_the_tokens_of_all_requests() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        prompt = prompt_of(20)
        streams = [await router.submit(prompt, seed=seed, max_tokens=50) for seed in range(10)]
        await router.finish(*streams)

        assert sum(each.num_messages for each in streams) == 10 * 50
        assert router.num_messages < 80

    run(scenario)


def test_a_router_that_does_not_read_delays_nobody_and_gets_merged_messages() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        slow = await cluster.session(reads=False)
        await slow.submit(prompt_of(20, seed=1), max_tokens=400)
        quick = await router.submit(prompt_of(20), max_tokens=400)
        began_at = asyncio.get_running_loop().time()
        await router.finish(quick)
        assert asyncio.get_running_loop().time() - began_at < 400 * 0.02
        slow.call.cancel()

    run(scenario)


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def test_a_router_that_never_reads_loses_its_requests_and_holds_no_pages() -> None:
    config = DecodeConfig(
        max_running_sequences=32,
        max_step_tokens=64,
        local_prefill_max_tokens=0,
        max_outbox_tokens=50,
    )
    network = MemoryNetwork(latency_s=0.0005, window_bytes=1000)

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        slow = await cluster.session(reads=False)
        for seed in range(3):
            await slow.submit(prompt_of(20, seed=seed), max_tokens=400)
        quick = await router.submit(prompt_of(20), max_tokens=300)
        await router.finish(quick)
        await cluster.wait_free(timeout_s=0.05)  # long before its own requests would have ended
        # What it asks for now would only be lost, too.
        await slow.submit(prompt_of(20, seed=9), max_tokens=400)
        await asyncio.sleep(0.1)
        await cluster.wait_free(timeout_s=0.01)
        with pytest.raises(grpc.aio.AioRpcError, match="more than 50 tokens wait") as caught:
            await read_to_end(slow.call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(scenario, WorkerCluster(decode_config=config, grpc_network=network))


def test_a_message_with_too_many_others_ends_its_session_and_no_other() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        other = await router.submit(prompt_of(20))
        wrong = await cluster.session(reads=False)
        await wrong.submit(prompt_of(20, seed=1), max_tokens=400)
        cancel = worker_pb2.SessionRequest(cancel=worker_pb2.CancelRequest(request_id="nobody's"))
        await wrong.call.write(worker_pb2.SessionRequest(more=[cancel] * (MAX_MORE + 1)))
        with pytest.raises(grpc.aio.AioRpcError, match="more: found 256") as caught:
            await read_to_end(wrong.call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await router.finish(other)
        await cluster.wait_free(timeout_s=0.05)

    run(scenario)


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(20), max_tokens=30)
        await stream.has_tokens.wait()
        stopping = cluster.decode.process.spawn(cluster.decode.worker.stop(grace_s=60.0))
        await asyncio.sleep(0.01)
        late = await router.submit(prompt_of(20, seed=1))
        await late.ended.wait()
        assert late.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert late.failure.leaving
        await router.finish(stream)
        await stopping

    run(scenario)


def test_a_worker_that_stops_hands_its_requests_back() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        stream = await router.submit(prompt_of(20), max_tokens=400)
        await stream.has_tokens.wait()
        await cluster.decode.process.spawn(cluster.decode.worker.stop(grace_s=0.1))
        await stream.ended.wait()
        assert stream.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert stream.failure.leaving

    run(scenario)
