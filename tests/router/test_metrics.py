"""What a router tells Prometheus: of its calls and workers, to operators, over its own port."""

import asyncio
import socket
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from credentials.secret import ClusterSecret
from observability.metrics_server import MetricsServer
from observability.token_gaps import BOUNDS_S, TokenGaps
from pagewire.protos import worker_pb2
from router.config import RouterConfig
from router.errors import ControllerGone, PortTaken
from router.process import RouterProcess
from router.router import Router
from router.settings import RouterSettings
from router.tenants.file import digest_of
from router.tenants.gate import is_operator
from router.tenants.registry import Tenants
from router.tenants.tenant import TenantRules
from tests.router.scripted_worker import ScriptedWorker, Session, delta, running_router
from tests.router.tokenizers_for_tests import byte_level
from tests.support.scrapes import samples
from tests.support.virtual_time import run_virtual


def sum_s(router: Router, name: str) -> float:
    """Return the sum of a histogram of the router's model, seconds."""
    found = samples(router.metrics.expose().decode())
    return found[f"pagewire_{name}_seconds_sum", router.model_name]


def test_a_router_counts_calls_and_times_by_names_that_users_of_vllm_know() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0", token_s=0.1)) as tested:
            router = tested.router
            status = router.cluster_status()
            router.metrics.tell_cluster(lambda: status, lambda: router.model_name)
            model = router.model_name
            running = asyncio.create_task(tested.generate(max_tokens=5))
            await asyncio.sleep(0.05)
            before = samples(router.metrics.expose().decode())
            await asyncio.sleep(0.1)
            between = samples(router.metrics.expose().decode())
            await running
            await tested.generate(max_tokens=5, n=2)
            refused = await tested.generate(prompt=())
            found = samples(router.metrics.expose().decode())

            assert refused.error is not None
            assert before["pagewire_num_requests_running",] == 1
            assert before["pagewire_num_requests_waiting",] == 1
            assert between["pagewire_num_requests_running",] == 1
            assert between["pagewire_num_requests_waiting",] == 0
            assert found["pagewire_num_requests_running",] == 0
            assert found["pagewire_num_requests_waiting",] == 0
            assert found["pagewire_request_success_total", *sorted((model, "length"))] == 3
            assert found["pagewire_prompt_tokens_total", model] == 6
            assert found["pagewire_generation_tokens_total", model] == 15
            assert found["pagewire_router_requests_total", "ok"] == 2
            assert found["pagewire_router_requests_total", "INVALID_ARGUMENT"] == 1
            ttft = "pagewire_time_to_first_token_seconds"
            assert found[f"{ttft}_count", model] == 2
            assert found[f"{ttft}_sum", model] == pytest.approx(0.2, abs=0.01)
            gaps = "pagewire_inter_token_latency_seconds"
            assert found[f"{gaps}_count", model] == 12, "of each choice 4"
            assert found[f"{gaps}_sum", model] == pytest.approx(1.2, abs=0.01)
            assert found["pagewire_e2e_request_latency_seconds_count", model] == 2
            assert found["pagewire_request_queue_time_seconds_count", model] == 2
            assert found["pagewire_request_params_n_sum", model] == 1 + 2
            assert found["pagewire_request_params_max_tokens_sum", model] == 5 + 5
            assert found["pagewire_request_params_max_tokens_count", model] == 2
            assert found["pagewire_router_queue_time_seconds_count", model] == 2
            assert found["pagewire_router_queue_time_seconds_sum", model] == 0, "a worker was free"
            assert found["pagewire_router_up",] == 1
            of_worker = sorted(("decode-0", "decode", "ready"))
            assert found["pagewire_worker_state", *of_worker] == 1

    run_virtual(main())


def test_the_time_of_a_call_is_its_queue_its_prefill_and_its_decode() -> None:
    async def queued(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        await asyncio.sleep(0.5)
        first = delta(submit, 0, 0)
        first.stats.queue_ms = 200
        session.send(first)
        await asyncio.sleep(0.4)
        session.send(delta(submit, 0, 1))

    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0", serve=queued)) as tested:
            await tested.generate(max_tokens=2)
            took = {
                part: sum_s(tested.router, f"request_{part}_time")
                for part in ("queue", "prefill", "decode", "inference")
            }

            assert took == pytest.approx(
                {"queue": 0.2, "prefill": 0.3, "decode": 0.4, "inference": 0.7}, abs=0.01
            )

    run_virtual(main())


def test_attempts_that_failed_before_the_first_token_count_as_prefill() -> None:
    async def lost_once(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        await asyncio.sleep(0.5)
        if submit.attempt == 0:
            session.fail(submit, grpc.StatusCode.ABORTED)
            return
        session.send(delta(submit, 0, 0))

    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0", serve=lost_once)) as tested:
            await tested.generate(max_tokens=1)
            prefill_s = sum_s(tested.router, "request_prefill_time")

            assert prefill_s == pytest.approx(sum_s(tested.router, "time_to_first_token"), abs=0.01)
            assert prefill_s > 1.0

    run_virtual(main())


def test_a_call_that_is_cancelled_before_its_first_token_waits_no_more() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0", token_s=10.0)) as tested:
            await tested.generate(timeout_s=1.0)
            await asyncio.sleep(1.0)
            found = samples(tested.router.metrics.expose().decode())

            assert found["pagewire_num_requests_waiting",] == 0
            assert found["pagewire_num_requests_running",] == 0
            assert not [key for key in found if key[0].endswith("first_token_seconds_count")]

    run_virtual(main())


def test_gaps_are_counted_by_length_and_tokens_that_come_together_share_theirs() -> None:
    gaps = TokenGaps()
    gaps.add(0.001, 1)  # a bound belongs to its bucket
    gaps.add(0.04, 2)
    gaps.add(100.0, 1)

    buckets = dict(gaps.buckets())

    assert len(buckets) == len(BOUNDS_S) + 1
    assert [buckets[each] for each in ("0.001", "0.015", "0.02", "10.0", "+Inf")] == [1, 1, 3, 3, 4]
    assert gaps.sum == pytest.approx(100.041)


def test_metrics_are_for_operators() -> None:
    def ask(**headers: str) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    registry = CollectorRegistry()
    Counter("pagewire_things", "Things.", registry=registry)
    tenants = Tenants(
        [
            TenantRules(name="ops", token_digests=frozenset({digest_of(b"one")}), operator=True),
            TenantRules(name="guest", token_digests=frozenset({digest_of(b"two")})),
        ]
    )
    server = MetricsServer(
        registry, "127.0.0.1", 0, is_operator=lambda given: is_operator(tenants, given)
    )
    with closing(server):
        assert "pagewire_things_total" in ask(authorization="Bearer one")
        for headers in ({}, {"authorization": "Bearer two"}, {"authorization": "Basic x"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(**headers)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))

    async def find_controller() -> str:
        raise ControllerGone("there is none")

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            settings = RouterSettings(
                config=RouterConfig(metrics_port=port),
                model_dir=tmp_path,
                host="127.0.0.1",
                port=0,
                keys=ClusterSecret.generate().router_keys("router-0"),
            )
            with pytest.raises(PortTaken) as refused:
                await RouterProcess(settings, find_controller).start()

        assert str(refused.value) == (
            f"router.metrics_port: found {port}, on which nothing can listen at 127.0.0.1: Address "
            "already in use; allowed: a free port, or 0 for no metrics"
        )

    asyncio.run(main())


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="metrics_port: found"):
        RouterConfig(metrics_port=port)
