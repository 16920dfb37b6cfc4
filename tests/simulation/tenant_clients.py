"""Clients of tenants of a simulated cluster."""

from pagewire import AsyncClient, Completion
from tests.simulation.checked_completions import assert_right
from tests.simulation.checked_requests import GREEDY
from tests.support.fake_cluster import FakeCluster
from tests.support.oracle import RequestSpec


def client_of(cluster: FakeCluster, tenant: str, router: int = 0) -> AsyncClient:
    return AsyncClient(
        [f"router-{router}:1"], token=tenant, channel_factory=cluster.network.channel
    )


async def complete(cluster: FakeCluster, tenant: str, prompt: list[int]) -> Completion:
    async with client_of(cluster, tenant) as client:
        completion = await client.generate(
            prompt, temperature=0, max_tokens=GREEDY.max_tokens, ignore_eos=GREEDY.ignore_eos
        )
    assert_right(RequestSpec(name=tenant, prompt=tuple(prompt), params=GREEDY), completion)
    return completion
