"""Tenants in whole clusters: pages of one are of no use to another, a flood of one is its own."""

import asyncio
import random

import pytest

from pagewire import AsyncClient
from tests.router.tenants.known import rules, tenants
from tests.simulation.tenant_clients import complete
from tests.support.fake_cluster import FakeCluster
from tests.support.scenario import VOCAB_SIZE, ClusterShape
from tests.support.simulator import in_cluster
from tests.support.virtual_time import wait_until

KNOWN = (
    *(rules(name) for name in ("acme", "globex")),
    *(rules(name, cache="family") for name in ("mother", "daughter")),
)


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_a_prompt_of_another_tenant_is_computed_anew_and_takes_as_long(num_prefill: int) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        prompt = [random.Random(7).randrange(1, VOCAB_SIZE) for _ in range(40)]

        async def ask(tenant: str) -> tuple[int, float]:
            usage = (await complete(cluster, tenant, prompt)).usage
            assert usage is not None
            await asyncio.sleep(1.0)  # workers tell of their pages
            return usage.cached_tokens, usage.ttft_ms

        first = await ask("acme")
        assert first[0] == 0
        assert (await ask("acme"))[0] == 39, "its own prompt is found"
        other = await ask("globex")
        assert other[0] == 0
        assert other[1] == pytest.approx(first[1], rel=0.2), "time tells nothing"
        assert (await ask("mother"))[0] == 0
        assert (await ask("daughter"))[0] == 39, "both are configured to share"

    cluster = FakeCluster(
        shape=ClusterShape(num_prefill=num_prefill, num_decode=1), tenants=tenants(*KNOWN)
    )
    in_cluster(cluster, scenario)


def test_a_stream_goes_on_at_another_router_for_its_tenant() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        prompt = list(range(5, 25))
        async with AsyncClient(
            ["router-0:1", "router-1:1"],
            token="acme",
            channel_factory=cluster.network.channel,
        ) as client:
            call = client.stream(prompt, temperature=0, max_tokens=30, ignore_eos=True)
            deltas = []
            async with call:
                async for each in call:
                    deltas.append(each)
                    if len(deltas) == 5:
                        cluster.kill("router-0")
            assert len(call.completion.token_ids) == 30
            assert call.completion.usage is not None
            assert call.completion.usage.resumptions == 1

    shape = ClusterShape(num_prefill=1, num_decode=1, num_routers=2, pass_s=0.03)
    in_cluster(FakeCluster(shape=shape, tenants=tenants(*KNOWN)), scenario)


def test_a_flood_of_one_tenant_leaves_another_its_share_of_a_whole_cluster() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        loop = asyncio.get_running_loop()
        rng = random.Random(3)

        def prompt() -> list[int]:
            return [rng.randrange(1, VOCAB_SIZE) for _ in range(60)]

        alone = (await complete(cluster, "globex", prompt())).usage
        assert alone is not None
        started_at = loop.time()
        flood = [asyncio.create_task(complete(cluster, "acme", prompt())) for _ in range(90)]
        router = cluster.routers["router-0"].router
        await wait_until(lambda: router.admission.num_active > 80)
        await asyncio.sleep(2.0)
        waits = []
        for _ in range(10):
            usage = (await complete(cluster, "globex", prompt())).usage
            assert usage is not None
            waits.append(usage.ttft_ms)
        num_left = sum(not each.done() for each in flood)
        assert num_left > 30, "the flood went on all the time"
        await asyncio.gather(*flood)
        total_ms = 1000 * (loop.time() - started_at)
        assert max(waits) < total_ms / 8, (waits, total_ms)

    shape = ClusterShape(num_prefill=1, num_decode=1, max_running_sequences=4, pass_s=0.03)
    in_cluster(FakeCluster(shape=shape, tenants=tenants(*KNOWN)), scenario)
