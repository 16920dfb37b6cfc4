"""Processes of two contract versions in one cluster: each serves with those of its own version."""

import asyncio
import logging

import pytest

import decode_worker.prefill_peers
import router.worker_watch
import worker.context
from observability.logs import ATTRIBUTE
from protos.contract import CONTRACT_VERSION
from tests.simulation.checked_requests import assert_right, request, start_request
from tests.support.fake_cluster import FakeCluster
from tests.support.history import RequestHistory
from tests.support.simulator import in_cluster
from tests.support.virtual_time import wait_until

OLD, NEW = CONTRACT_VERSION, CONTRACT_VERSION + 1
DIFFERENCE = f"contract version: found {NEW}; allowed: {OLD}"


def connections(cluster: FakeCluster, worker_id: str) -> set[str]:
    made = cluster.workers[worker_id].transport._connections
    return {each.connection_id for each in made}


def served_by(history: RequestHistory) -> list[str]:
    return list(history.usage.decode_workers)


async def update(cluster: FakeCluster) -> None:
    """Add a decode worker, a router and a prefill worker of the next version, under load."""
    old = [
        await start_request(cluster, request(f"old-{index}", arrives_at=0.15 * index))
        for index in range(16)
    ]
    await asyncio.sleep(0.5)
    await cluster.start_worker("decode-1", NEW)
    await asyncio.sleep(0.5)
    await cluster.start_router("router-1", NEW)
    registry = cluster.routers["router-1"].router.registry
    await wait_until(lambda: registry.ready("decode") != [], timeout_s=5.0)
    alone = [await start_request(cluster, request(f"alone-{i}", router=1)) for i in range(4)]
    await asyncio.gather(*alone)
    await cluster.start_worker("prefill-1", NEW)
    await wait_until(lambda: registry.ready("prefill") != [], timeout_s=5.0)
    new = [await start_request(cluster, request(f"new-{i}", router=1)) for i in range(8)]

    histories = await asyncio.gather(*old, *alone, *new)
    assert_right(*histories)
    for each in histories:
        stats = each.usage.stats
        assert (served_by(each), stats.resumptions, stats.prefill_retries) == (
            [f"decode-{each.spec.router}"],
            0,
            0,
        ), "a worker of another version was asked"
        is_alone = each.spec.name.startswith("alone")
        assert (stats.pages_moved == 0) == is_alone
    for prefill, decode in (("prefill-0", "decode-1"), ("prefill-1", "decode-0")):
        assert not connections(cluster, prefill) & connections(cluster, decode)
    assert connections(cluster, "prefill-1") & connections(cluster, "decode-1")


def test_a_rolling_update_fails_no_request_and_mixes_no_versions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def body(cluster: FakeCluster) -> None:
        await update(cluster)

        old = cluster.routers["router-0"].router
        assert old.registry.misfits() == {"decode-1": DIFFERENCE, "prefill-1": DIFFERENCE}
        told = {each.worker_id: each.misfit for each in old.cluster_status().workers}
        assert told == {"prefill-0": "", "decode-0": ""} | old.registry.misfits()
        refused = {
            vars(each)[ATTRIBUTE]["worker_id"]
            for each in caplog.records
            if each.msg == "worker_unreachable" and DIFFERENCE in str(vars(each))
        }
        assert refused == {"decode-1", "prefill-1"}

        # With its last worker the old version ends, and says why.
        cluster.kill("decode-0")
        last = await cluster.generate(request("last"))
        assert last.ends == ["UNAVAILABLE"]
        assert f"({DIFFERENCE})" in last.details
        assert_right(await cluster.generate(request("next", router=1)))

    in_cluster(FakeCluster(), body)


def test_the_scenario_finds_a_missing_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (router.worker_watch, decode_worker.prefill_peers, worker.context):
        monkeypatch.setattr(module, "contract_difference", lambda found, allowed: "")

    with pytest.raises(AssertionError, match="another version was asked"):
        in_cluster(FakeCluster(), update)
