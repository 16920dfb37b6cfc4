"""The host of Ray's head, the controller and a router loses its power for a minute."""

import shutil

import pytest

from benchmarks.client_processes import ClientProcesses
from benchmarks.fault_cases import FAULTS
from benchmarks.faults import run_once
from benchmarks.hosted_cluster import hosted_cluster
from benchmarks.hosts import why_no_hosts
from benchmarks.prompts import Seeds
from cluster.demo_model import demo_model_dir

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"no hosts: {why_no_hosts()}"),
    pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is missing"),
]


def test_no_request_fails_and_the_next_controller_learns_all_from_the_workers(tmp_path):
    with hosted_cluster(demo_model_dir(), tmp_path, has_redis=True) as cluster:
        with cluster.edge.network():
            clients = ClientProcesses(2)
        with clients:
            before = {each["worker_id"]: each["incarnation"] for each in cluster.workers()}

            row = run_once(FAULTS["loss/head"], cluster, clients, Seeds(1))

            after = {each["worker_id"]: each["incarnation"] for each in cluster.workers(router=0)}

    assert (row["errors"], row["wrong_tokens"]) == ([], 0)
    assert row["resumed"] > 0
    assert row["decode_prompt_tokens"] == 0
    assert after == before, "no worker was started again; the router that was learns of them"
