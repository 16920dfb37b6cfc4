"""Worlds with somebody on the network who does not belong to the cluster."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import credentials.channel
import credentials.cluster
from credentials.cluster import ClusterCredentials
from pagewire.protos import worker_pb2, worker_pb2_grpc
from protos.contract import CONTRACT_VERSION
from tests.simulation.checked_requests import assert_right, request, tokens
from tests.support.fake_cluster import FakeCluster
from tests.support.history import RequestHistory
from tests.support.scenario import ClusterShape
from tests.support.simulator import in_cluster
from tests.support.stranger import Stranger
from worker.identity import WorkerIdentity

PREFIXES = [tokens(20, seed) for seed in range(3)]


async def generate_all(cluster: FakeCluster) -> list[RequestHistory]:
    """Twelve requests with three prefixes, spread over a second."""
    start = asyncio.get_running_loop().time()
    specs = [
        request(
            f"r{index}",
            prompt=PREFIXES[index % 3] + tokens(9, 100 + index),
            arrives_at=start + 0.2 + 0.07 * index,
        )
        for index in range(12)
    ]
    return await asyncio.gather(*(cluster.generate(spec) for spec in specs))


def test_a_stranger_that_calls_everything_changes_no_token_and_fails_nothing() -> None:
    async def body(cluster: FakeCluster) -> None:
        stranger = Stranger(cluster, PREFIXES)
        await stranger.pose_as(
            WorkerIdentity(worker_id="prefill-9", incarnation=99, address="prefill-9:1")
        )
        until_s = asyncio.get_running_loop().time() + 1.2
        bothering = asyncio.create_task(stranger.bother(until_s))

        histories = await generate_all(cluster)

        await bothering
        await stranger.leave()
        assert_right(*histories)
        assert sum(each.usage.stats.prefill_retries for each in histories) == 0
        assert sum(each.usage.stats.pages_moved for each in histories) > 0
        assert set(stranger.statuses) == {"UNAUTHENTICATED"}
        assert stranger.statuses["UNAUTHENTICATED"] > 500

    in_cluster(FakeCluster(shape=ClusterShape(num_prefill=2, num_decode=2)), body)


def test_a_stranger_on_a_dead_workers_address_is_not_believed() -> None:
    async def body(cluster: FakeCluster) -> None:
        await cluster.generate(request("warm", 20))  # the connections are made
        victim = cluster.workers["prefill-0"].identity
        cluster.kill("prefill-0")
        stranger = Stranger(cluster, PREFIXES)
        await stranger.pose_as(victim)

        histories = await generate_all(cluster)

        await stranger.leave()
        assert_right(*histories)
        assert sum(each.usage.stats.pages_moved for each in histories) == 0, "all computed at home"

    in_cluster(FakeCluster(shape=ClusterShape(num_prefill=1, num_decode=2)), body)


def test_a_prefill_worker_that_the_cluster_did_not_start_is_refused_whoever_names_it() -> None:
    async def body(cluster: FakeCluster) -> None:
        stranger = Stranger(cluster, PREFIXES)
        liar = WorkerIdentity(worker_id="prefill-9", incarnation=99, address="prefill-9:1")
        await stranger.pose_as(liar)
        decode = cluster.workers["decode-0"]
        call = worker_pb2_grpc.DecodeServiceStub(cluster.router_channel("decode-0")).Session()
        hello = worker_pb2.SessionHello(
            incarnation=decode.identity.incarnation, contract_version=CONTRACT_VERSION
        )
        await call.write(worker_pb2.SessionRequest(hello=hello))
        for message in stranger.submits():
            await call.write(message)

        last = []
        while len(last) < len(PREFIXES):
            message = await call.read()
            assert not message.failures
            last += [each.stats for each in message.deltas if each.finish_reason]
        call.cancel()

        assert [each.prefill_retries for each in last] == [1] * len(PREFIXES)
        computed = cluster.workers["prefill-0"].engine.num_computed_tokens
        assert computed == sum(map(len, PREFIXES)), "the genuine one was asked instead"
        assert [each.decode_computed_tokens for each in last] == [0] * len(PREFIXES)
        assert_right(*(await generate_all(cluster)))
        await stranger.leave()

    in_cluster(FakeCluster(), body)


def believes(module: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant: a module takes every proof for genuine."""
    blind = SimpleNamespace(compare_digest=lambda one, other: True)
    return lambda patch: patch.setattr(module, "hmac", blind)


def authentication_is_off(patch: pytest.MonkeyPatch) -> None:
    believes(credentials.cluster)(patch)
    believes(credentials.channel)(patch)
    patch.setattr(ClusterCredentials, "transfer_key", lambda self, *_, **__: bytes(32))


@pytest.mark.parametrize(
    ("plant", "scenario", "says"),
    [
        (
            authentication_is_off,
            test_a_stranger_that_calls_everything_changes_no_token_and_fails_nothing,
            "is wrong",
        ),
        (
            believes(credentials.cluster),
            test_a_stranger_that_calls_everything_changes_no_token_and_fails_nothing,
            "let in",
        ),
        (
            authentication_is_off,
            test_a_stranger_on_a_dead_workers_address_is_not_believed,
            "is wrong",
        ),
        (
            authentication_is_off,
            test_a_prefill_worker_that_the_cluster_did_not_start_is_refused_whoever_names_it,
            "0, 0, 0",
        ),
    ],
    ids=["all is off", "callers are not checked", "a dead worker", "a named worker"],
)
def test_the_worlds_find(
    plant: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[], None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)

    with pytest.raises(AssertionError, match=says):
        scenario()
