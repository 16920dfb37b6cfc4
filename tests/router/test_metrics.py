"""What a router tells Prometheus: of its calls, of its workers, and over its own port."""

import asyncio
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from credentials.door import front_door
from observability.token_gaps import BOUNDS_S, TokenGaps
from router import metrics_server
from router.config import RouterConfig
from router.errors import PortTaken
from router.metrics_server import MAX_SCRAPES, MetricsServer, Places
from router.tenants.file import digest_of
from router.tenants.gate import is_operator
from router.tenants.registry import Tenants
from router.tenants.tenant import TenantRules
from tests.router.scripted_worker import ScriptedWorker, running_router
from tests.support.certificates import Authority
from tests.support.virtual_time import run_virtual
from tests.support.wall_clock import assert_within


def samples(text: str) -> dict[tuple[str, ...], float]:
    """All samples: (name, labels) |-> value."""
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


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
            assert found["pagewire_router_queue_time_seconds_count", model] == 2
            assert found["pagewire_router_queue_time_seconds_sum", model] == 0, "a worker was free"
            assert found["pagewire_router_up",] == 1
            of_worker = sorted(("decode-0", "decode", "ready"))
            assert found["pagewire_worker_state", *of_worker] == 1

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
    assert gaps.sum_s == pytest.approx(100.041)


@contextmanager
def serving(registry: CollectorRegistry, **options: Any) -> Iterator[MetricsServer]:
    server = MetricsServer(registry, "127.0.0.1", 0, **options)
    try:
        yield server
    finally:
        server.close()


def read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_a_port_of_its_own_tells_what_the_registry_holds_until_it_is_closed() -> None:
    registry = CollectorRegistry()
    counter = Counter("pagewire_things", "Things.", registry=registry)
    with serving(registry) as server:
        counter.inc(3)
        assert samples(read(server.address))["pagewire_things_total",] == 3
    with pytest.raises(urllib.error.URLError, match="refused"):
        read(server.address)


def test_metrics_are_for_operators() -> None:
    def ask(**headers: str) -> str:
        request = urllib.request.Request(f"http://{server.address}/metrics", headers=headers)
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
    with serving(registry, is_operator=lambda given: is_operator(tenants, given)) as server:
        assert "pagewire_things_total" in ask(authorization="Bearer one")
        for headers in ({}, {"authorization": "Bearer two"}, {"authorization": "Basic x"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(**headers)


def test_metrics_travel_encrypted_where_the_router_does(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = front_door(authority.settings()).ssl_context("127.0.0.1")
    trusting = ssl.create_default_context(cafile=authority.file)
    with serving(CollectorRegistry(), tls=tls) as server:
        url = f"https://{server.address}/metrics"
        with urllib.request.urlopen(url, timeout=10, context=trusting) as answer:
            assert answer.status == 200
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            read(server.address)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken) as refused:
            MetricsServer(CollectorRegistry(), "127.0.0.1", port)

    assert str(refused.value) == (
        f"router.metrics_port is {port}, on which nothing can listen at 127.0.0.1: Address already "
        "in use; choose another, or 0 for no metrics"
    )


@pytest.mark.parametrize("home", ["127.0.0.1", "127.0.0.2"])
def test_strangers_who_say_nothing_keep_nobody_from_reading_metrics(home: str) -> None:
    with serving(CollectorRegistry()) as server, ExitStack() as stack:
        host, _, port = server.address.rpartition(":")
        silent = [
            stack.enter_context(
                socket.create_connection((host, int(port)), source_address=(home, 0))
            )
            for _ in range(50)
        ]
        began = time.monotonic()

        assert read(server.address) == ""

        assert_within(time.monotonic() - began, 3.0)  # without giving way it takes ten
        assert silent[-MAX_SCRAPES - 1].recv(1) == b"", "more than there are places"
        silent[-1].settimeout(0)
        with pytest.raises(BlockingIOError):  # of those that stay
            silent[-1].recv(1)


@pytest.mark.parametrize(("others", "has_place"), [("10.0.0.1", False), ("10.0.0.2", True)])
def test_who_is_answered_gives_way_to_other_addresses_only(others: str, has_place: bool) -> None:
    places = Places()
    ours = [socket.socketpair() for _ in range(MAX_SCRAPES)]
    for connection, _ in ours:
        place = places.take(connection, "10.0.0.1")
        assert place is not None
        place.is_proven = True

    def give_way() -> None:
        assert ours[0][0].recv(1) == b""  # the oldest was cut off
        places.give_back(places.of(ours[0][0]))

    with ThreadPoolExecutor(1) as pool, socket.socket() as newcomer:
        leaving = pool.submit(give_way) if has_place else None
        assert (places.take(newcomer, others) is not None) == has_place
        if leaving:
            leaving.result()
    for connection in chain.from_iterable(ours):
        connection.close()


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_stranger_who_says_little_is_cut_off(
    has_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE_S", 0.05)
    settings = Authority(tmp_path).settings()
    tls = front_door(settings).ssl_context("127.0.0.1") if has_tls else None
    with serving(CollectorRegistry(), tls=tls) as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.send(b"\x16" if has_tls else b"G")
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""


def test_a_collector_that_fails_costs_one_scrape() -> None:
    class Failing(Collector):
        is_broken = True

        def collect(self) -> Iterable[Metric]:
            if self.is_broken:
                raise TimeoutError
            return ()

    failing = Failing()
    registry = CollectorRegistry()
    registry.register(failing)
    with serving(registry) as server:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            read(server.address)
        failing.is_broken = False
        assert read(server.address) == ""


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="metrics_port: found"):
        RouterConfig(metrics_port=port)
