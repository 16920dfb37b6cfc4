"""Quotas of cached pages in whole clusters: a flood of new prefixes costs its own tenant."""

import asyncio
import random
from collections.abc import Callable

import pytest

from decode_worker.request import Request
from prefill_worker.request import Prompt
from router.tenants.tenant import TenantRules
from tests.router.tenants.known import rules, tenants
from tests.simulation.tenant_clients import complete
from tests.support.fake_cluster import FakeCluster
from tests.support.planted_bugs import (
    Plant,
    quotas_bound_nothing,
    who_used_it_longest_ago_goes_first,
)
from tests.support.rarely import rarely
from tests.support.scenario import VOCAB_SIZE, ClusterShape
from tests.support.simulator import in_cluster

NUM_PAGES = 64  # of each worker
HOT = tuple(range(1, 41))  # a prefix of ten pages
NUM_ASKED = 5
SHAPE = ClusterShape(
    num_prefill=1,
    num_decode=1,
    prefill_pages=NUM_PAGES,
    decode_pages=NUM_PAGES,
    max_running_sequences=2,
)
FLOODER = rules("acme", cache_share=0.4)
Found = list[tuple[int, int]]  # tokens at decode and prefill worker, by request


def found_beside_a_flood(
    flooder: TenantRules = FLOODER, at_end: Callable[[FakeCluster], None] = lambda cluster: None
) -> Found:
    """Return what prompts with a hot prefix find while another tenant floods the cluster.

    The flood takes 15 new pages of each worker, or more, with each of its requests, two at a time.
    """
    found: Found = []

    async def scenario(cluster: FakeCluster) -> None:
        rng = random.Random(5)

        async def flood() -> None:
            while len(found) < NUM_ASKED:
                await complete(cluster, "acme", [rng.randrange(1, VOCAB_SIZE) for _ in range(60)])

        await complete(cluster, "globex", [*HOT, 1])
        floods = [asyncio.create_task(flood()) for _ in range(2)]
        for index in range(NUM_ASKED):
            await asyncio.sleep(1.0)
            usage = (await complete(cluster, "globex", [*HOT, 2 + index])).usage
            assert usage is not None
            found.append((usage.decode_cached_tokens, usage.prefill_cached_tokens))
        await asyncio.gather(*floods)
        at_end(cluster)

    in_cluster(FakeCluster(shape=SHAPE, tenants=tenants(flooder, rules("globex"))), scenario)
    return found


ALL_FOUND = [(len(HOT), len(HOT))] * NUM_ASKED


def test_a_flood_of_new_prefixes_does_not_push_out_another_tenants_hot_one() -> None:
    def check_quotas(cluster: FakeCluster) -> None:
        for worker in cluster.workers.values():
            assert 20 < worker.cache.pool.num_held(FLOODER.cache_salt) <= 0.4 * NUM_PAGES
            assert worker.cache.num_over_quota > NUM_PAGES, "the flood went on all the time"

    assert found_beside_a_flood(at_end=check_quotas) == ALL_FOUND


def test_without_a_quota_the_flood_pushes_it_out() -> None:
    found = found_beside_a_flood(rules("acme"))

    for at_worker in zip(*found, strict=True):
        assert sum(at_worker) < 0.5 * NUM_ASKED * len(HOT)


def decode_workers_hear_of_no_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "cache_share", property(lambda self: 1.0, lambda self, share: None))


def prefill_workers_hear_of_no_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prompt, "cache_share", property(lambda self: 1.0, lambda self, share: None))


@pytest.mark.parametrize(
    "plant",
    [
        prefill_workers_hear_of_no_share,
        *rarely(
            quotas_bound_nothing,
            who_used_it_longest_ago_goes_first,
            decode_workers_hear_of_no_share,
        ),
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_bugs_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with pytest.raises(AssertionError):
        assert found_beside_a_flood() == ALL_FOUND


def test_a_request_larger_than_its_tenants_quota_is_served_and_leaves_no_more_than_that() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        prompt = [random.Random(9).randrange(1, VOCAB_SIZE) for _ in range(80)]
        await complete(cluster, "acme", prompt)  # 24 pages; it may keep 6
        await asyncio.sleep(1.0)
        for worker in cluster.workers.values():
            counts = worker.cache.pool.counts()
            assert (counts.cached, counts.free) == (6, NUM_PAGES - 6)
        usage = (await complete(cluster, "acme", prompt)).usage
        assert usage is not None
        assert usage.cached_tokens == 24, "its beginning stayed"

    small = rules("acme", cache_share=0.1)
    in_cluster(FakeCluster(shape=SHAPE, tenants=tenants(small, rules("globex"))), scenario)
