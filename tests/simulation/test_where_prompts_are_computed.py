"""A decode worker computes no token of a prompt while there is a prefill worker to compute it."""

import asyncio

from llm_engine.sampling import SamplingParams
from tests.simulation.checked_requests import (
    GREEDY,
    TWO_AND_TWO,
    assert_disaggregated,
    assert_right,
    request,
    start_request,
)
from tests.support.fake_cluster import FakeCluster
from tests.support.scenario import ClusterShape
from tests.support.simulator import in_cluster
from tests.support.virtual_time import wait_until

CONNECT_S = 5.0  # router.connect_timeout_s
LATE_S = 0.5  # of a prefill worker's answer to a router


def hold(cluster: FakeCluster, worker_id: str, seconds: float) -> None:
    """Let a worker answer nobody for a while."""
    process = cluster.process(worker_id)
    process.pause()
    asyncio.get_running_loop().call_later(seconds, process.resume)


def test_requests_at_a_router_that_starts_wait_until_it_knows_the_prefill_workers() -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.kill("router-0")
        cluster.kill("decode-0")
        await cluster.start_worker("decode-0")  # to which no router has named a prefill worker
        hold(cluster, "prefill-0", LATE_S)
        await cluster.start_router("router-1")

        histories = await asyncio.gather(
            *(cluster.generate(request(f"r{index}", router=1)) for index in range(6))
        )

        assert_right(*histories)
        assert_disaggregated(histories)
        assert all(each.ended_at - each.arrived_at < LATE_S + 1 for each in histories)

    in_cluster(FakeCluster(), body)


def test_a_router_that_finds_the_new_prefill_worker_late_waits_when_the_other_drains() -> None:
    async def body(cluster: FakeCluster) -> None:
        await cluster.drain("prefill-0", grace_s=1.0)
        await cluster.start_worker("prefill-0")
        hold(cluster, "prefill-0", LATE_S)
        await cluster.drain("prefill-1", grace_s=1.0)

        history = await cluster.generate(request("r0"))

        assert_right(history)
        assert_disaggregated([history])

    in_cluster(FakeCluster(shape=TWO_AND_TWO), body)


def test_no_request_waits_long_for_a_prefill_worker_that_does_not_answer() -> None:
    async def body(cluster: FakeCluster) -> None:
        hold(cluster, "prefill-0", 60.0)
        await cluster.start_router("router-1")

        first = await cluster.generate(request("r0", router=1))
        second = await cluster.generate(request("r1", router=1))

        assert_right(first, second)
        assert first.usage.stats.decode_computed_tokens == 40
        assert first.ended_at - first.arrived_at < CONNECT_S + 1
        assert second.ended_at - second.arrived_at < 1, "it is known to be dead by then"
        await asyncio.sleep(60.0)

    in_cluster(FakeCluster(), body)


def test_a_request_whose_candidates_left_while_it_waited_asks_the_one_that_came() -> None:
    """It waits at a decode worker with room for one sequence."""
    shape = ClusterShape(num_prefill=1, max_running_sequences=1)
    longer = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)

    async def body(cluster: FakeCluster) -> None:
        running = await start_request(cluster, request("r0", params=longer))
        decode = cluster.workers["decode-0"].worker
        await wait_until(lambda: decode._scheduler.num_running == 1, timeout_s=1.0)
        waiting = await start_request(cluster, request("r1", params=GREEDY))
        await cluster.start_worker("prefill-1")
        await wait_until(cluster.all_are_ready, timeout_s=1.0)
        await cluster.drain("prefill-0", grace_s=1.0)
        assert not running.done(), "the other one still waits"

        histories = await asyncio.gather(running, waiting)

        assert_right(*histories)
        assert_disaggregated(histories)
        assert [each.usage.stats.prefill_retries for each in histories] == [0, 1]

    in_cluster(FakeCluster(shape=shape), body)
