"""A cluster on three hosts of a Ray and one without: namespaces of this machine, real processes.

Hosts have addresses, processes and files of their own, and fail by themselves (benchmarks.hosts).
All of their addresses are of IPv6, if this kernel speaks it, and processes know each other by
certificates that each host has at a path of its own. tests/cluster/test_lost_head.py has such a
cluster on IPv4 and in clear.
"""

import http.client
import json
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest

from benchmarks.client_processes import ClientProcesses
from benchmarks.fault_cases import FAULTS
from benchmarks.faults import run_once
from benchmarks.hosted_cluster import hosted_cluster
from benchmarks.hosts import NETWORKS, why_no_hosts
from benchmarks.jumping_clock import why_no_clocks
from benchmarks.prompts import Seeds, token_ids, wave
from cluster.demo_model import demo_model_dir
from tests.cluster.oracle import GreedyOracle
from tests.support.certificates import Authority

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"no hosts: {why_no_hosts()}"),
]

IP_VERSION = 4 if why_no_hosts(6) else 6
TIMEOUT_S = 120.0
HTTP_PORT = 8000
RATE, WAVE_S = 20, 4  # requests a second, and the length of a wave of them
SHARE = 50  # one of so many answers is computed again: of all it would take minutes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    copy = shutil.copytree(demo_model_dir(), folder / "copy")
    hosts = [f"host{number}" for number in range(1, 5)]
    options = {
        "network_interface": "eth0",
        "model_paths": {"host3": str(copy)},
        "http_port": HTTP_PORT,
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

    for host in cluster.worker_hosts:
        there = {name.partition("-")[0] for name, at in hosts_of.items() if at == host.address}
        assert there == {"prefill", "decode"}
    assert status["cluster_tls"]["encrypted"]
    assert_tokens(cluster, specs, records)
    for record in records:
        assert record.usage.pages_moved == 7
        assert record.usage.decode_computed_tokens == 0


def test_a_host_without_ray_gets_an_answer_over_http(cluster):
    with cluster.edge.network():
        connection = http.client.HTTPConnection(cluster.head.address, HTTP_PORT, timeout=TIMEOUT_S)
        request = {
            "model": demo_model_dir().name,
            "prompt": [7] * 40,
            "max_tokens": 5,
            "ignore_eos": True,
        }
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(request), headers)
        answer = json.load(connection.getresponse())

    assert connection.host == f"{NETWORKS[IP_VERSION][0]}1"
    assert answer["usage"]["prompt_tokens"] == 40, answer
    assert answer["usage"]["completion_tokens"] == 5


def test_a_host_of_workers_that_loses_its_power_costs_no_token_and_comes_back(
    cluster, clients, seeds
):
    row = run_once(FAULTS["loss/workers"], cluster, clients, seeds, output_tokens=200)

    assert row["errors"] == []
    assert row["wrong_tokens"] == 0
    assert row["resumed"] > 0
    assert row["pages_moved"] > 0
    assert row["decode_prompt_tokens"] == 0


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
    oracle = GreedyOracle(demo_model_dir())
    for spec, record in zip(specs, records, strict=True):
        prompt = token_ids(spec.prompt, cluster.vocab_size)
        assert list(record.token_ids) == oracle.tokens(prompt, spec.max_tokens), record.error


def host_of(worker):
    return worker["address"].rpartition(":")[0].strip("[]")


def incarnations(cluster):
    """Return the incarnation of each worker that serves; the status remembers dead ones too."""
    return {
        each["worker_id"]: each["incarnation"]
        for each in cluster.workers()
        if each["state"] == "ready"
    }


def under_load(cluster, clients, seeds, work):
    """Let requests come until some work is done; returns specs, records, and its result."""
    specs, records = [], []
    with ThreadPoolExecutor(1) as thread:
        done = None
        while done is None or not done.done():
            told = [
                replace(each, offset_s=index / RATE, keeps_tokens=True)
                for index, each in enumerate(
                    wave(seeds, RATE * WAVE_S, unique=16, shared=16, max_tokens=8)
                )
            ]
            clients.begin(cluster.addresses, cluster.vocab_size, told, TIMEOUT_S, spreads=True)
            done = done or thread.submit(work)
            specs += told
            records += clients.finish()
        return specs, records, done.result()


def on_head(cluster, *arguments):
    return cluster.command(cluster.head, *arguments, "--ray-address", cluster.ray_address)


@pytest.mark.thorough
def test_a_host_that_goes_is_drained_under_load_without_a_failed_request(cluster, clients, seeds):
    going = cluster.worker_hosts[0]

    def work():
        there = {
            each["worker_id"]
            for each in cluster.workers()
            if host_of(each) == going.address and each["state"] == "ready"
        }
        return there, cluster.command(
            going, "drain", "--here", "--ray-address", cluster.ray_address
        )

    before = incarnations(cluster)
    specs, records, (there, told) = under_load(cluster, clients, seeds, work)
    # Only now there is room for its workers. Not in the thread of the work: a host ends with the
    # thread that has made it.
    going.power_off()
    going.power_on()
    cluster.start_ray(going)
    cluster.until_whole()

    assert told.splitlines() == [
        f"{', '.join(sorted(there))} take no new requests and leave; running requests have 10 s "
        "to end there",
        "this host has no worker, and gets no new ones",
    ]
    assert [each.error for each in records if each.error] == []
    assert sum(each.usage.pages_moved for each in records) > 0
    assert_tokens(cluster, specs, records)
    after = incarnations(cluster)
    assert {name for name, start in after.items() if before.get(name) != start} == there


@pytest.mark.thorough
def test_a_worker_moves_to_the_other_pool_and_back_under_load_without_a_failed_request(
    cluster, clients, seeds
):
    def places():
        """Return where the workers are, and how many are of each pool."""
        ready = [each for each in cluster.workers() if each["state"] == "ready"]
        return sorted(map(host_of, ready)), Counter(each["pool"] for each in ready)

    def work():
        there = on_head(cluster, "move", "prefill-1", "--to", "decode")
        moved = places()
        return there, moved, on_head(cluster, "move", "decode-2", "--to", "prefill")

    before = places()
    specs, records, (there, moved, back) = under_load(cluster, clients, seeds, work)

    assert [each.error for each in records if each.error] == []
    assert sum(each.usage.pages_moved for each in records) > 0
    assert sum(each.usage.decode_computed_tokens for each in records) == 0
    assert_tokens(cluster, specs, records)
    assert there.splitlines()[-1] == "the cluster has 1 prefill and 3 decode workers"
    assert moved == (before[0], {"prefill": 1, "decode": 3}), "in the place of the one that left"
    assert back.splitlines()[-1] == "the cluster has 2 prefill and 2 decode workers"
    assert places() == before


# The last one: it leaves a worker less.
def test_drains_scaling_and_restarts_under_load_fail_no_request(cluster, clients, seeds):
    def run(*commands):
        """Run commands, one after another; return what each says last, without times."""
        told = [on_head(cluster, *each.split()).splitlines()[-1] for each in commands]
        return [re.sub(r" after \d+ s", "", each) for each in told]

    def work():
        before = set(incarnations(cluster).values())
        with ThreadPoolExecutor() as pool:  # commands of two operators
            drains = [pool.submit(run, f"drain {name}") for name in ("prefill-1", "decode-1")]
            told = [each.result() for each in drains]
        told.append(run("scale --prefill 2 --decode 2"))
        num_outside = cluster.status()["finished_requests"]
        cluster.restart_router()
        told.append(run("restart prefill-0 decode-0 router-0", "scale --prefill 1"))
        return before, told, num_outside

    specs, records, (before, told, num_outside) = under_load(cluster, clients, seeds, work)

    assert [each.error for each in records if each.error] == []
    assert_tokens(cluster, specs[::SHARE], records[::SHARE])
    assert sum(each.usage.pages_moved for each in records) > 0
    assert [each for each in records if each.usage.decode_computed_tokens] == []
    assert told == [
        ["prefill-1 has left"],
        ["decode-1 has left"],
        ["the cluster has 2 prefill and 2 decode workers"],
        [
            "router-0 serves again, 3 of 3",
            "the cluster has 1 prefill and 2 decode workers",
        ],
    ]
    assert num_outside > 0, "requests came to the router outside Ray, too"
    assert not before & set(incarnations(cluster).values())
