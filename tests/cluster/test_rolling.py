"""What `pagewire restart` waits for; Ray and the cluster are fakes."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from cluster import rolling as module
from cluster.config_file import load_config
from cluster.controller import Contracts
from cluster.errors import ConfigError, StartError
from cluster.rolling import restart_cluster
from cluster.scaling import ClusterWorkers

NAMES = frozenset({"prefill-0", "decode-0"})
FACTS = SimpleNamespace(
    config=load_config(None, {"model": "/models/tiny"}),
    workers=ClusterWorkers(staying=NAMES, leaving=frozenset(), answering=NAMES),
)


class Cluster:
    """The handle of a controller; a worker that was restarted is back, or has left."""

    def __init__(self, monkeypatch):
        self.starts = dict.fromkeys(NAMES, 1)  # as the router sees them
        self.listed = [*NAMES, "router-0"]
        self.looks = 0
        self.facts = SimpleNamespace(remote=lambda: FACTS)
        self.contracts = Contracts(running=(1,), to_start={"10.0.0.2": 1})
        self.contract_versions = SimpleNamespace(remote=lambda: self.contracts)
        self.restart = SimpleNamespace(remote=lambda name, grace_s: self.starts.pop(name))
        self.on_look = lambda: None
        self.misfits = {}
        router = SimpleNamespace(
            ready_workers=SimpleNamespace(remote=lambda: dict(self.starts)),
            misfits=SimpleNamespace(remote=lambda: dict(self.misfits)),
        )
        monkeypatch.setattr(ray, "get_actor", lambda name: router)
        monkeypatch.setattr(ray.util, "list_named_actors", self._list)
        monkeypatch.setattr(module, "check_log_room", lambda: None)
        monkeypatch.setattr(module, "ask", lambda answer, timeout_s=0: answer)
        monkeypatch.setattr(module, "named_actors", lambda: dict.fromkeys(self.listed))
        monkeypatch.setattr(module, "LOOK_PERIOD_S", 0.0)

    def _list(self):
        self.looks += 1
        if self.looks == 10:
            self.on_look()
        return self.listed


def test_a_worker_is_waited_for_until_another_start_of_it_serves(monkeypatch):
    cluster = Cluster(monkeypatch)
    cluster.on_look = lambda: cluster.starts.update({"decode-0": 2})
    said = []

    restart_cluster(cluster, ["decode-0"], 7.0, said.append)

    assert said == [
        "decode-0 takes no new requests; running ones have 7 s to end there",
        "decode-0 serves again after 0 s, 1 of 1",
    ]


def test_the_start_that_ends_is_not_taken_for_the_next_one(monkeypatch):
    """By a router that has just come back, and sees it before it hears that it is to end."""
    cluster = Cluster(monkeypatch)
    start = cluster.starts.pop("decode-0")

    def restart(name, grace_s):
        cluster.starts[name] = start
        return start

    cluster.restart = SimpleNamespace(remote=restart)
    cluster.on_look = lambda: cluster.starts.update({"decode-0": start + 1})

    restart_cluster(cluster, ["decode-0"], 7.0, lambda line: None)

    assert cluster.looks == 10


@pytest.mark.parametrize(
    ("running", "refused"), [((1,), True), ((1, 2), False), ((), False), ((2,), False)]
)
def test_code_that_no_running_worker_could_serve_with_is_refused(monkeypatch, running, refused):
    cluster = Cluster(monkeypatch)
    cluster.contracts = Contracts(running=running, to_start={"10.0.0.2": 2, "10.0.0.3": 2})
    cluster.on_look = lambda: cluster.starts.update({"decode-0": 2})
    said = []

    told = r"10.0.0.2: contract version: found 2; allowed: 1\n10.0.0.3: .*\n.*nothing has changed"
    with pytest.raises(StartError, match=told) if refused else nullcontext():
        restart_cluster(cluster, ["decode-0"], 7.0, said.append)

    assert bool(said) is not refused
    assert cluster.starts["decode-0"] == (1 if refused else 2)


BROKEN = "tls.certificate_file: on a (10.0.0.2), /a.crt has expired; allowed: a valid one"
FRONT = "front_tls.key_file: on a (10.0.0.2), /f.key cannot be read; allowed: a PEM file"
PROBLEMS = {"prefill-0": (BROKEN,), "router-0": (BROKEN, FRONT)}


@pytest.mark.parametrize(
    ("names", "lines", "affected"),
    [
        (["prefill-0"], [BROKEN], "prefill-0"),
        (["decode-0", "router-0"], [BROKEN, FRONT], "router-0"),
        ([], [BROKEN, FRONT], "prefill-0, router-0"),
    ],
)
def test_processes_that_could_not_use_their_tls_files_are_not_ended(
    monkeypatch, names, lines, affected
):
    cluster = Cluster(monkeypatch)
    cluster.contracts = replace(cluster.contracts, problems=PROBLEMS)
    said = []

    with pytest.raises(StartError) as refused:
        restart_cluster(cluster, names, 7.0, said.append)

    *found, last = str(refused.value).split("\n")
    assert found == lines
    assert last.startswith(
        f"{affected} could not start again with these files; nothing has changed"
    )
    assert said == []
    assert cluster.starts == dict.fromkeys(NAMES, 1)


def test_wrong_files_of_processes_that_stay_as_they_are_matter_to_no_restart(monkeypatch):
    cluster = Cluster(monkeypatch)
    cluster.contracts = replace(cluster.contracts, problems=PROBLEMS)
    cluster.on_look = lambda: cluster.starts.update({"decode-0": 2})

    restart_cluster(cluster, ["decode-0"], 7.0, lambda line: None)

    assert cluster.starts["decode-0"] == 2


def test_the_answer_of_a_controller_that_checks_no_files_is_read():
    answer = Contracts.__new__(Contracts)

    answer.__setstate__({"running": (1,), "to_start": {}})

    assert answer == Contracts(running=(1,), to_start={})


@pytest.mark.parametrize("left", [["decode-0"], ["decode-0", "prefill-0", "router-0"]])
def test_a_worker_that_leaves_by_another_command_is_not_waited_for(monkeypatch, left):
    """Drained, or with the whole cluster: it would be waited for until the start's deadline."""
    cluster = Cluster(monkeypatch)

    def leave():
        cluster.listed = [name for name in cluster.listed if name not in left]

    cluster.on_look = leave

    with pytest.raises(StartError, match="decode-0 has left the cluster meanwhile"):
        restart_cluster(cluster, ["decode-0"], 7.0, lambda line: None)
    assert cluster.looks == 10


def test_a_worker_that_the_router_cannot_use_is_not_waited_for(monkeypatch):
    cluster = Cluster(monkeypatch)
    difference = "contract version: found 2; allowed: 1"
    cluster.on_look = lambda: cluster.misfits.update({"decode-0": difference})

    with pytest.raises(StartError, match=f"no requests from this router: {difference}; "):
        restart_cluster(cluster, ["decode-0"], 7.0, lambda line: None)
    assert cluster.looks == 10


def test_a_gateway_is_named_without_its_number_and_replaced_by_the_controller(monkeypatch):
    cluster = Cluster(monkeypatch)
    cluster.listed += ["http-gateway-9", "http-gateway-10"]
    graces = []
    cluster.succeed_gateway = SimpleNamespace(remote=graces.append)
    said = []

    told = "NAME: found 'http-gateway-10'; allowed: prefill-0, decode-0, router-0, http-gateway$"
    with pytest.raises(ConfigError, match=told):
        restart_cluster(cluster, ["http-gateway-10"], 7.0, said.append)
    restart_cluster(cluster, ["http-gateway"], 7.0, said.append)

    assert graces == [7.0]
    assert said == [
        "another http-gateway starts; then requests of this one have 7 s to end",
        "http-gateway has been replaced after 0 s, 1 of 1",
    ]


def test_a_controller_of_older_code_is_told_of_before_anything_restarts(monkeypatch):
    cluster = Cluster(monkeypatch)
    cluster.listed.append("http-gateway-0")
    said = []

    with pytest.raises(StartError, match=r"^http-gateway: the cluster's controller runs older"):
        restart_cluster(cluster, [], 7.0, said.append)

    assert said == []


def test_a_name_given_twice_is_refused(monkeypatch):
    cluster = Cluster(monkeypatch)
    said = []

    with pytest.raises(
        ConfigError, match=r"^NAME: found 'decode-0' twice; allowed: each name once"
    ):
        restart_cluster(cluster, ["decode-0", "router-0", "decode-0"], 7.0, said.append)

    assert said == []


def test_a_router_that_left_before_its_turn_is_told(monkeypatch):
    cluster = Cluster(monkeypatch)

    def get_actor(name):
        raise ValueError(name)

    monkeypatch.setattr(ray, "get_actor", get_actor)

    with pytest.raises(StartError, match="router-0 has left the cluster meanwhile"):
        restart_cluster(cluster, ["router-0"], 7.0, lambda line: None)
