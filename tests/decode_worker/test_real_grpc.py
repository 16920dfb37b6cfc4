"""The same workers over real gRPC, TCP and engine threads: what the pretended ones might hide."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.protos import common_pb2, worker_pb2, worker_pb2_grpc
from protos.contract import CONTRACT_VERSION
from tests.decode_worker.harness import MODEL, PAGE_SIZE, ScriptedRouter, prompt_of
from tests.support.cluster_keys import credentials_of, proven
from tests.support.fake_workers import FakeWorkers
from tests.support.virtual_executor import AcceleratorError
from worker.errors import EngineLost


@asynccontextmanager
async def real_session() -> AsyncIterator[tuple[FakeWorkers, ScriptedRouter, grpc.aio.Channel]]:
    cluster = FakeWorkers(MODEL, page_size=PAGE_SIZE)
    await cluster.start("prefill")
    await cluster.start("decode")
    decode = cluster.identities["decode"]
    channel = grpc.aio.insecure_channel(decode.address)
    channel = proven(channel, decode, credentials_of("router", "router-0"))
    call = worker_pb2_grpc.DecodeServiceStub(channel).Session()
    router = ScriptedRouter(call, cluster)  # type: ignore[arg-type]
    hello = worker_pb2.SessionHello(
        router_id="router-0",
        incarnation=cluster.identities["decode"].incarnation,
        contract_version=CONTRACT_VERSION,
    )
    await call.write(worker_pb2.SessionRequest(hello=hello))
    try:
        yield cluster, router, channel
    finally:
        router.reading.cancel()
        await asyncio.wait({router.reading})
        await channel.close()
        await cluster.stop()


async def wait_free(cluster: FakeWorkers) -> None:
    async with asyncio.timeout(10.0):
        for worker in cluster.workers.values():
            while True:
                counts = worker.cache.pool.counts()
                if counts.free + counts.cached == counts.total:
                    break
                await asyncio.sleep(0.01)


def test_requests_over_real_grpc_get_the_oracles_tokens_and_free_their_pages() -> None:
    async def main() -> None:
        async with real_session() as (cluster, router, _):
            prefix = prompt_of(40)
            streams = [
                await router.submit(prompt_of(50, seed=seed, prefix=prefix), n=1 + seed % 2)
                for seed in range(8)
            ]
            await router.finish(*streams, timeout_s=20.0)
            assert sum(each.stats.pages_moved for each in streams) == 10 + 8 * 3
            assert all(each.stats.decode_computed_tokens == 0 for each in streams)

            left = [
                await router.submit(prompt_of(200, seed=seed), max_tokens=300)
                for seed in range(20, 24)
            ]
            await asyncio.sleep(0.05)
            for stream in left[:2]:
                await router.cancel(stream)
            await left[2].has_tokens.wait()
            router.call.cancel()
            await wait_free(cluster)

    asyncio.run(main())


def test_a_worker_whose_engine_fails_tells_everybody_before_it_ends() -> None:
    async def main() -> None:
        async with real_session() as (cluster, router, _):
            streams = [await router.submit(prompt_of(20, seed=s), max_tokens=400) for s in range(4)]
            for each in streams:
                await each.has_tokens.wait()

            def fails(slices: Any) -> Any:
                raise AcceleratorError("injected: the device is gone")

            cluster.engines["decode"].forward = fails  # type: ignore[method-assign]
            async with asyncio.timeout(10):
                with pytest.raises(EngineLost, match="the device is gone"):
                    await cluster.workers["decode"].wait_failed()
                for each in streams:
                    await each.ended.wait()
                await router.reading  # the session has ended in order

            # One whose first token has just come may be in none of the steps in flight.
            told = {(each.failure.code, each.failure.failed_passes) for each in streams}
            aborted, unavailable = grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE
            assert (aborted.value[0], 1) in told
            assert told <= {(aborted.value[0], 1), (unavailable.value[0], 0)}
            async with grpc.aio.insecure_channel(cluster.identities["decode"].address) as anybody:
                check = await health_pb2_grpc.HealthStub(anybody).Check(
                    health_pb2.HealthCheckRequest(service="pagewire.v1.DecodeService"), timeout=5.0
                )
            assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING

    asyncio.run(main())


def test_a_worker_describes_itself_beats_and_publishes_its_cache() -> None:
    async def main() -> None:
        async with real_session() as (cluster, router, channel):
            await router.finish(await router.submit(prompt_of(50)), timeout_s=20.0)
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=5.0)
            assert info.worker.worker_id == "decode"
            assert info.pool == common_pb2.POOL_DECODE
            assert list(info.transports) == ["tcp"]
            assert info.model.max_context_tokens == 512

            beat = await anext(aiter(stub.Watch(worker_pb2.WatchRequest(), timeout=5.0)))
            assert beat.heartbeat.totals.pages_moved == 13
            assert beat.heartbeat.totals.generated_tokens == 7, "besides the prefill worker's"
            assert beat.heartbeat.steps > 0
            pages = beat.heartbeat.pages
            assert pages.free + pages.cached == pages.total

            events = stub.SubscribeCacheEvents(
                worker_pb2.SubscribeCacheEventsRequest(incarnation=1, after_sequence=99),
                timeout=5.0,
            )
            snapshot = await anext(aiter(events))
            assert snapshot.snapshot
            assert len(snapshot.stored) == 16 * pages.cached
            assert snapshot.incarnation == info.worker.incarnation

            async with grpc.aio.insecure_channel(cluster.identities["decode"].address) as anybody:
                for service in ("", "pagewire.v1.DecodeService", "pagewire.v1.WorkerService"):
                    check = await health_pb2_grpc.HealthStub(anybody).Check(
                        health_pb2.HealthCheckRequest(service=service), timeout=5.0
                    )
                    assert check.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(main())
