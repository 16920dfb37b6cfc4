"""A worker that is drained under load costs nothing: no request fails, no token is lost."""

import asyncio
import random

import pytest

from llm_engine.sampling import SamplingParams
from tests.simulation.checked_requests import (
    PAGE,
    TWO_AND_TWO,
    assert_disaggregated,
    assert_right,
    request,
    tokens,
)
from tests.support.fake_cluster import MODEL, FakeCluster, FakeWorker
from tests.support.history import check_history
from tests.support.oracle import RequestSpec, expected_choices
from tests.support.scenario import MAX_CONTEXT_TOKENS, ClusterShape
from tests.support.simulator import in_cluster
from tests.support.virtual_time import wait_until


def load(count: int, seconds: float, max_tokens: int = 60) -> list[RequestSpec]:
    """Requests that arrive all the while, with prompts of up to 20 pages, greedy and seeded."""
    rng = random.Random(count)
    specs = []
    for index in range(count):
        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        # One that ends with its first token does so before its pages arrive.
        seeded = SamplingParams(temperature=0.9, seed=index, max_tokens=max_tokens, min_tokens=2)
        prompt = tokens(rng.randint(1, 20 * PAGE), seed=1000 + index)
        specs.append(
            request(
                f"r{index}",
                prompt=prompt,
                params=rng.choice((greedy, seeded)),
                arrives_at=seconds * index / count,
            )
        )
    return specs


def assert_empty(worker: FakeWorker) -> None:
    counts = worker.cache.pool.counts()
    assert (counts.live, counts.leased, counts.incoming, counts.quarantine) == (0, 0, 0, 0)
    worker.cache.check_integrity()


@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-0"])
def test_a_worker_that_is_drained_in_time_costs_no_retry_and_gets_nothing_new(
    worker_id: str,
) -> None:
    async def body(cluster: FakeCluster) -> None:
        clients = [asyncio.create_task(cluster.generate(spec)) for spec in load(40, 2.0)]
        leaving = cluster.workers[worker_id]
        await wait_until(lambda: leaving.engine.num_computed_tokens > 100, timeout_s=5.0)
        began_at = asyncio.get_running_loop().time()

        drained = await cluster.drain(worker_id, grace_s=30.0)

        took_s = asyncio.get_running_loop().time() - began_at
        histories = await asyncio.gather(*clients)
        assert_right(*histories)
        assert_disaggregated(histories)
        assert_empty(drained)
        assert 0.0 < took_s < 5.0, "it had work, and did not wait for the grace to pass"
        for history in histories:
            assert history.usage.stats.resumptions == 0
            if history.arrived_at > began_at:
                assert worker_id not in history.usage.decode_workers
        assert cluster.routers["router-0"].router.dispatcher.num_resumed == 0
        assert {each for h in histories for each in h.usage.decode_workers} >= {"decode-1"}

    in_cluster(FakeCluster(shape=TWO_AND_TWO), body)


def test_what_a_drained_decode_worker_cannot_finish_goes_on_elsewhere() -> None:
    async def body(cluster: FakeCluster) -> None:
        specs = load(12, 0.1, max_tokens=400)
        clients = [asyncio.create_task(cluster.generate(spec)) for spec in specs]
        leaving = cluster.workers["decode-0"]
        await wait_until(lambda: leaving.engine.num_computed_tokens > 100, timeout_s=5.0)

        drained = await cluster.drain("decode-0", grace_s=0.2)

        histories = await asyncio.gather(*clients)
        assert_right(*histories)
        assert_disaggregated(histories)
        assert_empty(drained)
        resumptions = [history.usage.stats.resumptions for history in histories]
        assert set(resumptions) == {0, 1}, "once each, at the end of the grace"
        resumed = [history for history in histories if history.usage.stats.resumptions]
        assert {tuple(h.usage.decode_workers) for h in resumed} == {("decode-0", "decode-1")}

    in_cluster(FakeCluster(shape=TWO_AND_TWO), body)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.thorough if seed >= 1 else ()) for seed in range(12)],
)
def test_workers_that_leave_and_come_back_under_load_fail_no_request(seed: int) -> None:
    rng = random.Random(seed)

    async def body(cluster: FakeCluster) -> None:
        clients = [asyncio.create_task(cluster.generate(spec)) for spec in load(40, 3.0)]
        drained = []
        for _ in range(4):
            worker_id = rng.choice(["prefill-0", "prefill-1", "decode-0", "decode-1"])
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            drained.append(await cluster.drain(worker_id, rng.choice((0.0, 0.02, 0.2, 5.0))))
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            await cluster.start_worker(worker_id)
            # As for `pagewire drain`, another one must answer.
            await wait_until(cluster.all_are_ready)

        histories = await asyncio.gather(*clients)
        assert_right(*histories)
        assert_disaggregated(histories)
        for each in drained:
            assert_empty(each)

    in_cluster(FakeCluster(shape=TWO_AND_TWO, seed=seed), body)


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("is_announced", [True, False])
def test_a_stream_outlasts_any_number_of_workers_that_stop_in_order(
    comes_back: bool, is_announced: bool
) -> None:
    """Each time it is on the worker that stops next."""
    num_stops = 6
    shape = ClusterShape(num_decode=2 if comes_back else num_stops + 1, pass_s=0.05)
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=70, ignore_eos=True)
    spec = request("r0", 20, params=params)

    async def body(cluster: FakeCluster) -> None:
        def serving() -> list[str]:
            decode_workers = [name for name in cluster.workers if name.startswith("decode")]
            return [
                name for name in decode_workers if cluster.workers[name].worker.status().running
            ]

        client = asyncio.create_task(cluster.generate(spec))
        for _ in range(num_stops):
            await wait_until(lambda: serving() or client.done())
            assert not client.done(), client.result().details
            [worker_id] = serving()
            assert_empty(await cluster.drain(worker_id, 0.1, is_announced=is_announced))
            if comes_back:
                await cluster.start_worker(worker_id)
                await wait_until(cluster.all_are_ready)

        history = await client
        expected = expected_choices(spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS)
        assert check_history(history, expected, max_resumptions=num_stops) == []
        assert history.usage.stats.resumptions == num_stops

    in_cluster(FakeCluster(shape=shape), body)
