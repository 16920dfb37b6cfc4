"""A decode worker computes no token of a prompt while there is a prefill worker to compute it."""

import asyncio

from llm_engine.sampling import SamplingParams
from tests.simulation.test_drain import assert_disaggregated
from tests.simulation.test_scenarios import GREEDY, assert_right, request, start_request
from tests.support.fake_cluster import FakeCluster
from tests.support.scenario import ClusterShape
from tests.support.simulator import in_cluster
from tests.support.virtual_time import wait_until


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
