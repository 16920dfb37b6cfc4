"""A cluster on three hosts of a Ray and one without: namespaces of this machine, real processes.

Hosts have addresses, processes and files of their own, and fail by themselves (benchmarks.hosts).
All of their addresses are of IPv6, if this kernel speaks it, and processes know each other by
certificates that each host has at a path of its own. tests/cluster/test_lost_head.py has such a
cluster on IPv4 and in clear.
"""

import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.client_processes import ClientProcesses
from benchmarks.fault_cases import FAULTS
from benchmarks.faults import run_once
from benchmarks.hosted_cluster import CommandFailed, hosted_cluster, until
from benchmarks.hosts import NETWORKS, why_no_hosts
from benchmarks.jumping_clock import why_no_clocks
from benchmarks.prompts import Seeds, token_ids, wave
from cluster.config_file import load_config
from cluster.demo_model import demo_model_dir
from credentials.config import HOST
from router.tokenizer import Tokenizer
from tests.cluster.oracle import GreedyOracle
from tests.cluster.steady_load import HTTP_PORT, LONG, SHORT, complete, under_load
from tests.support.certificates import Authority

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"no hosts: {why_no_hosts()}"),
]

IP_VERSION = 4 if why_no_hosts(6) else 6
TIMEOUT_S = 120.0
MIN_RATE, MAX_LATE_S = 19.0, 3.0  # of requests; they come at 20 a second
GRACE = "--grace-s 0.5"  # which some answers outlast
WORKERS = ["decode-0", "decode-1", "prefill-0", "prefill-1"]
IDLE_S = 30.0  # until what a load has left is gone


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    copy = shutil.copytree(demo_model_dir(), folder / "copy")
    hosts = [f"host{number}" for number in range(1, 5)]
    options = {
        "network_interface": "eth0",
        "model_paths": {"host3": str(copy)},
        "http_port": HTTP_PORT,
        # Where other work keeps the cores busy, requests rather wait than are refused.
        "router": {"max_expected_wait_s": TIMEOUT_S},
        "tls": asdict(Authority(folder).inside_by_host(*hosts)),
    }
    with hosted_cluster(
        demo_model_dir(),
        folder,
        has_redis=False,
        has_clocks=not why_no_clocks(),
        ip_version=IP_VERSION,
        options=options,
    ) as cluster:
        cluster.start_gateway(HTTP_PORT)
        yield cluster


@pytest.fixture(scope="module")
def clients(cluster):
    with cluster.edge.network():
        clients = ClientProcesses(2)
    with clients:
        yield clients


@pytest.fixture(scope="module")
def seeds():
    return Seeds(1)


def test_pages_move_between_hosts_and_the_tokens_are_those_of_one_process(cluster, clients, seeds):
    specs = [replace(each, keeps_tokens=True) for each in wave(seeds, 8, unique=100, max_tokens=12)]
    status = cluster.status()
    hosts_of = {each["worker_id"]: host_of(each) for each in status["workers"]}

    records = clients.run(cluster.addresses, cluster.vocab_size, specs, TIMEOUT_S)

    assert cluster.places() == WORKERS
    for host in cluster.worker_hosts:
        there = {name.partition("-")[0] for name, at in hosts_of.items() if at == host.address}
        assert there == {"prefill", "decode"}
    assert status["cluster_tls"]["encrypted"]
    assert_tokens(cluster, specs, records)
    for record in records:
        assert record.usage.pages_moved == 7
        assert record.usage.decode_computed_tokens == 0


def test_a_host_without_ray_gets_an_answer_over_http(cluster):
    answer = complete(cluster, cluster.head.address, [7] * 40, num_tokens=5)

    assert cluster.head.address == f"{NETWORKS[IP_VERSION][0]}1"
    assert answer["usage"]["prompt_tokens"] == 40, answer
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.thorough
def test_a_worker_whose_host_has_lost_its_certificate_is_neither_restarted_nor_moved(cluster):
    [address] = {host_of(each) for each in cluster.workers() if each["worker_id"] == "prefill-0"}
    [name] = [each.name for each in cluster.worker_hosts if each.address == address]
    path = Path(load_config(cluster.config, {}).tls.certificate_file.replace(HOST, name))
    before = incarnations(cluster)

    away = path.rename(path.with_suffix(".away"))
    try:
        with pytest.raises(CommandFailed) as refused:
            on_head(cluster, "restart", "router-0", "prefill-0")
        with pytest.raises(CommandFailed) as not_moved:
            on_head(cluster, "move", "prefill-0", "--to", "decode")
    finally:
        away.rename(path)

    told = f"tls.certificate_file: on {name} ({address}), {path} cannot be read: No such file"
    assert told in str(refused.value)
    assert "prefill-0 could not start again with these files; nothing has changed" in str(
        refused.value
    )
    assert told in str(not_moved.value)
    assert "decode-2 could not start with these files; nothing has changed" in str(not_moved.value)
    assert incarnations(cluster) == before


def test_a_host_of_workers_that_loses_its_power_costs_no_token_and_comes_back(
    cluster, clients, seeds
):
    row = run_once(FAULTS["loss/workers"], cluster, clients, seeds, output_tokens=200)

    assert row["errors"] == []
    assert row["wrong_tokens"] == 0
    assert row["resumed"] > 0
    assert row["pages_moved"] > 0
    assert row["decode_prompt_tokens"] == 0
    assert cluster.places() == WORKERS


# Not before tests that restart workers of the same cluster: after it Ray may start none again.
@pytest.mark.thorough
@pytest.mark.skipif(bool(why_no_clocks()), reason=why_no_clocks() or "they can jump")
@pytest.mark.parametrize("name", ["clock/workers", "clock/head"])
def test_a_wall_clock_that_jumps_costs_no_token_and_no_worker(cluster, clients, seeds, name):
    before = incarnations(cluster)

    row = run_once(FAULTS[name], cluster, clients, seeds)

    assert (row["errors"], row["wrong_tokens"]) == ([], 0)
    assert row["pages_moved"] > 0
    assert incarnations(cluster) == before


def assert_tokens(cluster, specs, records):
    """Compare all answers with those of one process, which are returned by prompt and length."""
    oracle = GreedyOracle(demo_model_dir())
    expected = {}
    for spec, record in zip(specs, records, strict=True):
        asked = spec.prompt, spec.max_tokens
        if asked not in expected:
            prompt = token_ids(spec.prompt, cluster.vocab_size)
            expected[asked] = oracle.tokens(prompt, spec.max_tokens)
        assert list(record.token_ids) == expected[asked], record.error
    return expected


def assert_served(cluster, load):
    """Check that a load came in time and got all its tokens, and that no page of it is left."""
    assert load.num_sent / load.seconds >= MIN_RATE
    assert load.latest_s < MAX_LATE_S
    assert [each.error for each in (*load.records, *load.over_http) if each.error] == []
    until(lambda: is_idle(cluster), IDLE_S, "no page in use")
    expected = assert_tokens(cluster, load.specs, load.records)
    tokenizer = Tokenizer((demo_model_dir() / "tokenizer.json").read_text())
    for each in load.over_http:
        assert each.text == tokenizer.decode(expected[each.prompt, SHORT])
    usages = [each.usage for each in load.records]
    assert sum(each.pages_moved for each in usages) > 0
    assert [each for each in usages if each.decode_computed_tokens] == []
    return usages


def is_idle(cluster):
    """Return whether the pages of all workers are free or only cached."""
    ready = [each for each in cluster.status()["workers"] if each["state"] == "ready"]
    used = ("live", "leased", "incoming", "quarantine")
    return ready != [] and not any(each["pages"][name] for each in ready for name in used)


def host_of(worker):
    return worker["address"].rpartition(":")[0].strip("[]")


def incarnations(cluster):
    """Return the incarnation of each worker that serves; the status remembers dead ones too."""
    return {
        each["worker_id"]: each["incarnation"]
        for each in cluster.workers()
        if each["state"] == "ready"
    }


def on_head(cluster, *arguments):
    return cluster.command(cluster.head, *arguments, "--ray-address", cluster.ray_address)


@pytest.mark.thorough
def test_a_host_that_goes_is_drained_under_load_without_a_failed_request(cluster, clients):
    going = cluster.worker_hosts[0]
    before = incarnations(cluster)
    there = {
        each["worker_id"]
        for each in cluster.workers()
        if host_of(each) == going.address and each["state"] == "ready"
    }

    load, told = under_load(
        cluster,
        clients,
        lambda: cluster.command(going, "drain", "--here", "--ray-address", cluster.ray_address),
    )
    # Only now there is room for its workers.
    going.power_off()
    going.power_on()
    cluster.start_ray(going)
    cluster.until_whole()

    assert told.splitlines() == [
        f"{', '.join(sorted(there))} take no new requests and leave; running requests have 10 s "
        "to end there",
        "this host has no worker, and gets no new ones",
    ]
    assert_served(cluster, load)
    assert cluster.places() == WORKERS
    after = incarnations(cluster)
    assert {name for name, start in after.items() if before.get(name) != start} == there


@pytest.mark.thorough
def test_a_worker_moves_to_the_other_pool_and_back_under_load_without_a_failed_request(
    cluster, clients
):
    def places():
        """Return where the workers are, and how many are of each pool."""
        ready = [each for each in cluster.workers() if each["state"] == "ready"]
        return sorted(map(host_of, ready)), Counter(each["pool"] for each in ready)

    def work():
        there = on_head(cluster, "move", "prefill-1", "--to", "decode")
        moved = *places(), cluster.places()
        return there, moved, on_head(cluster, "move", "decode-2", "--to", "prefill")

    before = places()
    load, (there, moved, back) = under_load(cluster, clients, work)

    assert_served(cluster, load)
    assert there.splitlines()[-1] == "the cluster has 1 prefill and 3 decode workers"
    assert moved == (before[0], {"prefill": 1, "decode": 3}, WORKERS), "in the place that was left"
    assert back.splitlines()[-1] == "the cluster has 2 prefill and 2 decode workers"
    assert places() == before


# Then it leaves a worker less. prefill-0 and decode-0 restart before others leave, so that
# pages of those that leave would be missed there in the end.
def test_drains_scaling_and_restarts_under_load_fail_no_request(cluster, clients):
    def run(*commands):
        """Run commands, one after another; return what each says last, without times."""
        told = [on_head(cluster, *each.split()).splitlines()[-1] for each in commands]
        return [re.sub(r" after \d+ s", "", each) for each in told]

    def work():
        with ThreadPoolExecutor() as pool:  # three operators
            restarts = [f"restart {name} {GRACE}" for name in ("prefill-0", "decode-0", "router-0")]
            restarted = [told for [told] in pool.map(run, restarts)]
            num_outside = cluster.status()["finished_requests"]
            update = pool.submit(cluster.restart_router)
            drains = [
                pool.submit(run, f"drain {name} {GRACE}") for name in ("prefill-1", "decode-1")
            ]
            left = [each.result() for each in drains]
            scaled = run("scale --prefill 2 --decode 2", f"scale --prefill 1 {GRACE}")
            update.result()
        return [restarted, *left, scaled], num_outside

    before = set(incarnations(cluster).values())
    load, (told, num_outside) = under_load(cluster, clients, work)

    usages = assert_served(cluster, load)
    assert told == [
        [
            "prefill-0 serves again, 1 of 1",
            "decode-0 serves again, 1 of 1",
            "router-0 serves again, 1 of 1",
        ],
        ["prefill-1 has left"],
        ["decode-1 has left"],
        [
            "the cluster has 2 prefill and 2 decode workers",
            "the cluster has 1 prefill and 2 decode workers",
        ],
    ]
    assert num_outside > 0, "requests came to the router outside Ray, too"
    assert not before & set(incarnations(cluster).values())
    resumed = [each for each in usages if each.resumptions and each.completion_tokens == LONG]
    assert any(len(set(each.decode_workers)) > 1 for each in resumed), "some ended elsewhere"
    until(lambda: len(cluster.places()) == 3, IDLE_S, "one place less")


def test_a_cluster_that_ends_or_does_not_start_leaves_nothing_reserved(cluster):
    cluster.end()
    assert cluster.places() == []

    with pytest.raises(CommandFailed, match="not ready after 1 s"):
        cluster.bring_up("--start-timeout-s", "1")
    assert cluster.places() == []

    starting = cluster.begin(cluster.head, "up", "--config", str(cluster.config))
    until(lambda: cluster.places() == WORKERS, TIMEOUT_S, "all places")
    for process in cluster.head.processes("cli up"):
        process.kill()
    starting.wait(TIMEOUT_S)
    cluster.end()
    assert cluster.places() == []
