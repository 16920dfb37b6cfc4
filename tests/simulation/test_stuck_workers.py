"""A worker whose step hangs takes no request until the step has ended, and then soon."""

import asyncio

import pytest

from llm_engine.sampling import SamplingParams
from router.config import RouterConfig
from tests.simulation.checked_requests import assert_right, request, start_request
from tests.support.fake_cluster import FakeCluster
from tests.support.scenario import ClusterShape
from tests.support.simulator import in_cluster
from tests.support.virtual_time import wait_until

STUCK_AFTER_S = RouterConfig().stuck_after_s
SOON_S = 1.5  # three heartbeats
LONG = SamplingParams(temperature=0.9, seed=3, max_tokens=50, ignore_eos=True)


@pytest.mark.parametrize(("pool", "num_prefill"), [("decode", 2), ("decode", 0), ("prefill", 2)])
@pytest.mark.parametrize("how_it_ends", ["well", "with an error"])
@pytest.mark.parametrize("connection_breaks", ["never", "before it is dead", "after that"])
def test_a_worker_whose_step_hangs_takes_nothing_until_it_ends(
    pool: str, num_prefill: int, how_it_ends: str, connection_breaks: str
) -> None:
    """A step of decode workers computes sequences; where there are no others, first a prompt."""
    names = [f"{pool}-0", f"{pool}-1"]

    async def body(cluster: FakeCluster) -> None:
        loop = asyncio.get_running_loop()
        registry = cluster.routers["router-0"].router.registry
        first = await start_request(cluster, request("r0", 40, params=LONG))
        await wait_until(lambda: any(cluster.workers[each].executor.num_unread for each in names))
        [name] = [each for each in names if cluster.workers[each].executor.num_unread]
        executor = cluster.workers[name].executor
        executor.may_end.clear()
        hangs_since = loop.time()
        if connection_breaks == "before it is dead":
            await asyncio.sleep(STUCK_AFTER_S / 2)
            cluster.network.reset("router-0", name)
        await asyncio.sleep(hangs_since + STUCK_AFTER_S + SOON_S - loop.time())
        if connection_breaks == "after that":
            cluster.network.reset("router-0", name)

        others = [
            await start_request(cluster, request(f"r{index}", arrives_at=loop.time() + index))
            for index in range(1, 8)
        ]
        for _ in range(1000):
            assert registry.get(name).state == "DEAD", "its step hangs"
            await asyncio.sleep(0.01)
        assert registry.get(name).lost_because.startswith("no engine step for ")
        assert_right(first.result(), *(each.result() for each in others))
        assert not any(name in each.result().usage.decode_workers for each in others)
        num_passes = len(executor.passes)

        executor.num_failing_passes = how_it_ends == "with an error"
        executor.may_end.set()
        await wait_until(lambda: registry.get(name).state == "READY", timeout_s=SOON_S)
        late = [await start_request(cluster, request(f"late-{index}")) for index in range(8)]
        assert_right(*await asyncio.gather(*late))
        assert len(executor.passes) > num_passes + 1, "it serves again"

    in_cluster(FakeCluster(shape=ClusterShape(num_prefill=num_prefill, num_decode=2)), body)


@pytest.mark.parametrize("how_it_ends", ["the step ends", "the worker restarts"])
def test_requests_wait_for_the_only_worker_while_it_hangs_and_as_long_as_usual_after_that(
    how_it_ends: str,
) -> None:
    async def body(cluster: FakeCluster) -> None:
        wait_s = cluster.routers["router-0"].router.dispatcher._config.resume_wait_s
        worker = cluster.workers["decode-0"]
        begun = await start_request(cluster, request("begun", params=LONG))
        await wait_until(lambda: worker.worker.status().running > 0)
        worker.executor.may_end.clear()
        await asyncio.sleep(STUCK_AFTER_S + 1.5 * wait_s)
        if how_it_ends == "the step ends":
            worker.executor.may_end.set()
        else:
            cluster.kill("decode-0")
            await asyncio.sleep(0.9 * wait_s)
            await cluster.start_worker("decode-0")

        assert_right(await begun)

    in_cluster(FakeCluster(), body)


def test_requests_wait_no_longer_for_a_worker_that_is_gone_since_it_hung() -> None:
    async def body(cluster: FakeCluster) -> None:
        wait_s = cluster.routers["router-0"].router.dispatcher._config.resume_wait_s
        worker = cluster.workers["decode-0"]
        begun = await start_request(cluster, request("begun", params=LONG))
        await wait_until(lambda: worker.worker.status().running > 0)
        worker.executor.may_end.clear()
        await asyncio.sleep(STUCK_AFTER_S + 1.5 * wait_s)
        cluster.kill("decode-0")
        history = await asyncio.wait_for(begun, wait_s + SOON_S)

        assert history.ends == ["UNAVAILABLE"]
        await cluster.start_worker("decode-0")

    in_cluster(FakeCluster(), body)
