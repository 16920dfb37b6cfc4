"""More clients than a cluster has pages, places or prefill for: who starts, and who hears of it."""

import asyncio
import random
from dataclasses import replace

import pytest

from llm_engine.sampling import SamplingParams
from tests.support.fake_cluster import MODEL, FakeCluster
from tests.support.history import RequestHistory, check_history
from tests.support.oracle import RequestSpec, expected_choices
from tests.support.scenario import MAX_CONTEXT_TOKENS, VOCAB_SIZE, ClusterShape
from tests.support.simulator import in_cluster

# 70 pages of four tokens hold eight of these requests at a time, for eight seconds each.
SHAPE = ClusterShape(
    decode_pages=70, page_size=4, pass_s=0.4, token_s=0.0, max_expected_wait_s=20.0
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
REFUSED = "RESOURCE_EXHAUSTED"


def request(index: int, num_tokens: int = 20, **fields: object) -> RequestSpec:
    rng = random.Random(index)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))
    return replace(RequestSpec(name=f"r{index}", prompt=prompt, params=GREEDY), **fields)


async def crowd(cluster: FakeCluster, *specs: RequestSpec) -> list[RequestHistory]:
    """Send requests at once; check every answer that is one."""
    histories = await asyncio.gather(*map(cluster.generate, specs))
    for history in histories:
        if history.ends == ["OK"]:
            expected = expected_choices(
                history.spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS
            )
            assert check_history(history, expected) == []
        else:
            assert history.ends == [REFUSED]
            assert history.ended_at - history.arrived_at < 0.01, "at once"
            assert not history.deltas
    return histories


def waits(histories: list[RequestHistory]) -> list[float]:
    """Return the times to the first token of the requests that got one."""
    return [each.deltas[0].at - each.arrived_at for each in histories if each.deltas]


def test_of_60_clients_on_70_pages_those_start_in_time_that_are_not_refused() -> None:
    async def body(cluster: FakeCluster) -> None:
        # How long requests take the router learns from a first crowd.
        first = await crowd(cluster, *(request(index) for index in range(14)))
        assert len(waits(first)) == 14
        started_at = asyncio.get_running_loop().time()

        histories = await crowd(cluster, *(request(100 + index) for index in range(60)))

        starts = waits(histories)
        # Expected are 20 s; on so few pages some requests lose theirs and are prefilled again.
        assert max(starts) < 2 * SHAPE.max_expected_wait_s
        assert len(starts) >= 12, "about as many as end in 20 seconds"
        took_s = asyncio.get_running_loop().time() - started_at
        assert len(starts) / took_s > 0.6, "requests per second, of 0.75 without a limit"

    in_cluster(FakeCluster(shape=SHAPE), body)


def test_clients_that_come_again_are_all_served() -> None:
    async def body(cluster: FakeCluster) -> None:
        loop = asyncio.get_running_loop()
        rng = random.Random(1)

        async def client(index: int) -> int:
            for attempt in range(100):
                [history] = await crowd(cluster, request(index))
                if history.ends == ["OK"]:
                    return attempt
                await asyncio.sleep(rng.uniform(1.0, 5.0))
            raise AssertionError("never served")

        attempts = await asyncio.gather(*(client(index) for index in range(30)))

        assert max(attempts) > 0
        assert loop.time() < 55.0, "not much longer than the 42 seconds without a limit"

    in_cluster(FakeCluster(shape=replace(SHAPE, max_expected_wait_s=8.0)), body)


def test_places_in_the_batch_are_waited_for_as_pages_are() -> None:
    shape = replace(SHAPE, decode_pages=1000, max_running_sequences=6)

    async def body(cluster: FakeCluster) -> None:
        await crowd(cluster, *(request(index) for index in range(12)))
        histories = await crowd(cluster, *(request(100 + index) for index in range(60)))

        assert max(waits(histories)) < 1.5 * SHAPE.max_expected_wait_s
        assert len(waits(histories)) >= 12

    in_cluster(FakeCluster(shape=shape), body)


def test_prefill_is_waited_for_as_pages_are() -> None:
    # 64 tokens a pass of 0.4 seconds: four prompts of 40 tokens take one second.
    shape = replace(SHAPE, decode_pages=1000, max_expected_wait_s=4.0)
    short = replace(GREEDY, max_tokens=1)

    async def body(cluster: FakeCluster) -> None:
        def crowd_from(first: int, num_requests: int) -> list[RequestSpec]:
            return [request(first + i, 40, params=short) for i in range(num_requests)]

        await crowd(cluster, *crowd_from(0, 20))
        histories = await crowd(cluster, *crowd_from(100, 100))

        assert 10 <= len(waits(histories)) <= 30
        assert max(waits(histories)) < 1.5 * shape.max_expected_wait_s

    in_cluster(FakeCluster(shape=shape), body)


def test_pages_that_are_merely_cached_refuse_nobody() -> None:
    shape = replace(SHAPE, max_expected_wait_s=0.001)

    async def body(cluster: FakeCluster) -> None:
        for index in range(10):
            spec = request(index, 40, params=replace(GREEDY, max_tokens=8))
            [history] = await crowd(cluster, spec)
            assert history.ends == ["OK"]
        assert cluster.workers["decode-0"].cache.pool.counts().free < 10, "it is full of them"

    in_cluster(FakeCluster(shape=shape), body)


@pytest.mark.parametrize("silently", [True, False])
def test_a_request_that_has_begun_is_never_refused(silently: bool) -> None:
    shape = replace(SHAPE, num_decode=2, max_expected_wait_s=5.0)

    async def body(cluster: FakeCluster) -> None:
        running = [asyncio.create_task(crowd(cluster, request(index))) for index in range(12)]
        await asyncio.sleep(4.0)
        cluster.kill("decode-0", silently=silently)

        histories = [history for task in running for history in await task]
        assert [history.ends for history in histories] == [["OK"]] * 12
        resumed = [each for each in histories if each.usage.stats.resumptions]
        assert len(resumed) >= 4
        # They waited for longer than a new request may.
        assert max(each.ended_at - each.arrived_at for each in resumed) > 8.0 + 5.0

    in_cluster(FakeCluster(shape=shape), body)
