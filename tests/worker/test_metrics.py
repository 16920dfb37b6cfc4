"""A worker's own metrics: the figures that routers have of it, for those who may read them."""

import asyncio
import socket
import ssl
import urllib.error
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from credentials.config import SERVER_NAME, TlsSettings
from observability.cluster_metrics import expose_cluster
from observability.metrics_server import DEADLINE_S, MAX_SCRAPES
from options.ports import FreePorts
from tests.cluster.in_process import HOST, in_process_cluster, start_worker
from tests.support.certificates import Authority, Pair
from tests.support.checkpoints import write_checkpoint
from tests.support.free_ports import free_range
from tests.support.scrapes import samples, scrape
from tests.support.wall_clock import assert_within


def of_workers(text: str) -> dict[tuple[str, ...], float]:
    names = ("pagewire_worker_", "pagewire_kv_cache_")
    return {key: value for key, value in samples(text).items() if key[0].startswith(names)}


def metrics_ports(num_ports: int) -> tuple[int, FreePorts]:
    first, text = free_range(num_ports)
    return first, FreePorts(text, option="worker_metrics_ports", is_in_order=True)


def as_client(authority: Authority, pair: Pair) -> ssl.SSLContext:
    """What Prometheus has as tls_config."""
    context = ssl.create_default_context(cafile=authority.file)
    context.check_hostname = False  # Prometheus expects server_name, not the address
    context.load_cert_chain(*pair)
    return context


def test_workers_of_both_pools_tell_what_a_router_tells_of_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    first, ports = metrics_ports(2)

    async def scenario() -> None:
        cluster = in_process_cluster(tmp_path, num_prefill=1, num_decode=1, metrics_ports=ports)
        async with cluster as client, asyncio.timeout(60):
            await client.generate([5] * 100, max_tokens=4, ignore_eos=True)
            told = {}
            for index, worker_id in enumerate(("prefill-0", "decode-0")):
                text = await asyncio.to_thread(scrape, f"{HOST}:{first + index}")
                assert samples(text)["process_resident_memory_bytes",] > 0
                of_this = of_workers(text)
                assert of_this
                assert all(worker_id in key for key in of_this)
                told |= of_this
            assert told["pagewire_worker_generated_tokens_total", "decode", "decode-0"] > 0
            assert told["pagewire_worker_computed_tokens_total", "prefill", "prefill-0"] > 0
            assert told["pagewire_worker_pages_moved_total", "decode", "decode-0"] > 0
            while of_workers(expose_cluster(await client.status()).decode()) != told:
                await asyncio.sleep(0.05)  # until the next heartbeat

    asyncio.run(scenario())


def test_where_nobody_asked_for_metrics_no_port_is_open(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)

    async def scenario() -> None:
        process = await start_worker(tmp_path, "decode-0", [])
        assert process._metrics is None
        await process.stop(0.0)

    asyncio.run(scenario())


def test_with_tls_only_who_has_a_certificate_of_the_cluster_reads_and_renewals_hold(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path)
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    own = authority.pair(SERVER_NAME)
    prometheus = as_client(authority, authority.pair("prometheus"))
    first, ports = metrics_ports(1)
    address = f"{HOST}:{first}"

    def shown() -> str:
        with (
            socket.create_connection((HOST, first), 10) as raw,
            prometheus.wrap_socket(raw) as secured,
        ):
            found: Any = secured.getpeercert()
        return str(found["serialNumber"])

    async def scenario() -> None:
        process = await start_worker(
            tmp_path,
            "prefill-0",
            [],
            tls=TlsSettings(inside=authority.inside(own)),
            metrics_ports=ports,
        )
        text = await asyncio.to_thread(scrape, address, prometheus)
        assert samples(text)["pagewire_worker_state", "prefill", "prefill-0", "ready"] == 1

        nameless = ssl.create_default_context(cafile=authority.file)
        nameless.check_hostname = False
        foreign = as_client(authority, other.pair("prometheus"))
        for stranger in (None, nameless, foreign):
            with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
                await asyncio.to_thread(scrape, address, stranger)

        before = await asyncio.to_thread(shown)
        authority.pair(SERVER_NAME, replaces=own)
        assert await asyncio.to_thread(shown) != before
        assert await asyncio.to_thread(scrape, address, prometheus)
        await process.stop(0.0)

    asyncio.run(scenario())


def test_strangers_who_hang_keep_no_worker_from_being_read_nor_from_its_end(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path)
    first, ports = metrics_ports(1)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        process = await start_worker(tmp_path, "decode-0", [], metrics_ports=ports)
        with ExitStack() as stack:
            for _ in range(2 * MAX_SCRAPES):
                stranger = socket.create_connection((HOST, first), timeout=10)
                stack.enter_context(stranger).send(b"GET /metrics")
            text = await asyncio.to_thread(scrape, f"{HOST}:{first}")
            assert samples(text)["pagewire_worker_state", "decode", "decode-0", "ready"] == 1
            began = loop.time()

            await process.stop(0.0)

            assert_within(loop.time() - began, DEADLINE_S / 2)
        with pytest.raises(urllib.error.URLError, match="refused"):
            await asyncio.to_thread(scrape, f"{HOST}:{first}")

    asyncio.run(scenario())
