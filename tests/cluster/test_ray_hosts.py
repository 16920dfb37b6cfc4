"""What is looked at before a cluster starts on a Ray of several hosts; Ray is a fake."""

import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from cluster import ray_hosts as module
from cluster.config_file import load_config
from cluster.demo_model import write_demo_model
from cluster.errors import ConfigError, Interrupted, PlacementError
from cluster.ray_hosts import LOOK_TIMEOUT_S, check_hosts
from credentials.config import SERVER_NAME
from tests.support.certificates import Authority
from tests.support.interfaces import have_interfaces

ON_CPUS = {"ray_address": "auto", "device": "cpu"}
BY_POOL = {**ON_CPUS, "pool_resources": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_demo_model(folder)
    return folder


class FakeRay:
    """A Ray of some hosts; a task runs where it should, or never ends.

    Args:
        resources: host |-> those that it has beside CPUs.
    """

    def __init__(self, monkeypatch, **resources):
        self.monkeypatch = monkeypatch
        self.nodes = [
            {
                "NodeID": f"{number:056x}",
                "NodeManagerAddress": f"10.0.0.{number}",
                "NodeManagerHostname": name,
                "Resources": {"CPU": 8.0, **dict.fromkeys(own, 1.0)},
                "Alive": True,
            }
            for number, (name, own) in enumerate(resources.items(), 1)
        ]
        self.interfaces = {}  # host |-> interface |-> addresses
        self.hung = set()
        self.lost = set()
        self.looked_at = []  # hosts with the path of the model that was looked for
        self.environments = []
        self.cancelled = []
        self.now = 0.0
        own = SimpleNamespace(get_node_id=lambda: self.nodes[0]["NodeID"])
        monkeypatch.setattr(ray, "nodes", lambda: self.nodes)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: own)
        monkeypatch.setattr(ray, "remote", lambda **_: lambda work: FakeTask(self, work))
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "cancel", lambda call, force: self.cancelled.append(call.host))
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _wait(self, calls, num_returns, timeout):
        assert num_returns == len(calls)
        waiting = [each for each in calls if each.host in self.hung]
        self.now += timeout if waiting else 0.0
        return [each for each in calls if each not in waiting], waiting

    def _get(self, call, timeout):
        assert timeout == 0
        if call.host in self.hung:
            raise ray.exceptions.GetTimeoutError("not yet")
        if call.host in self.lost:
            raise ray.exceptions.TaskUnschedulableError(f"no node {call.host}")
        [node] = [each for each in self.nodes if each["NodeManagerHostname"] == call.host]
        interfaces = self.interfaces.get(call.host, {"eth0": [node["NodeManagerAddress"]]})
        with self.monkeypatch.context() as patch:
            have_interfaces(patch, interfaces, host=call.host)
            found = call.work(*call.arguments)
        self.looked_at.append((call.host, str(found.model)))
        return found


class FakeTask:
    """A remote function, and what `options` of it returns."""

    def __init__(self, world, work, host=""):
        self.world, self.work, self.host = world, work, host

    def options(self, *, scheduling_strategy, runtime_env):
        self.world.environments.append(runtime_env["env_vars"])
        [host] = [
            each["NodeManagerHostname"]
            for each in self.world.nodes
            if each["NodeID"] == scheduling_strategy.node_id
        ]
        assert not scheduling_strategy.soft, "nowhere else"
        return FakeTask(self.world, self.work, host)

    def remote(self, *arguments):
        return SimpleCall(host=self.host, work=self.work, arguments=arguments)


class SimpleCall(SimpleNamespace):
    """A reference to a result."""

    __hash__ = object.__hash__


def check(model, said=None, interrupt=lambda: None, **options):
    config = load_config(None, {"model": str(model), **options})
    say = [].append if said is None else said.append
    return check_hosts(config, config.device, {"NCCL_DEBUG": "INFO"}, say, interrupt)


def refused(model, error=PlacementError, **options):
    with pytest.raises(error) as caught:
        check(model, **options)
    return str(caught.value).splitlines()


def test_hosts_that_have_the_model_are_fit_wherever_it_lies(monkeypatch, model, tmp_path):
    world = FakeRay(monkeypatch, head=(), a=(), b=("big-disk",))
    copy = shutil.copytree(model, tmp_path / "copy")
    other = shutil.copytree(model, tmp_path / "other")

    addresses = check(model, **ON_CPUS, model_paths={"10.0.0.2": str(copy), "big-disk": str(other)})

    assert addresses == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert set(world.looked_at) == {("head", str(model)), ("a", str(copy)), ("b", str(other))}
    assert world.environments[0] == {"NCCL_DEBUG": "INFO"}, "as the workers'"
    assert world.cancelled == []


def test_one_error_names_all_hosts_that_are_not_fit(monkeypatch, model, tmp_path):
    world = FakeRay(monkeypatch, head=(), a=(), b=(), c=())
    world.interfaces = {"c": {"eth1": ["10.0.0.4"]}}
    other = shutil.copytree(model, tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    paths = {"a": "/nothing", "b": str(other)}

    lines = refused(model, **ON_CPUS, model_paths=paths, network_interface="eth0")

    assert [line.partition(";")[0] for line in lines] == [
        "a (10.0.0.2) has nothing at /nothing",
        f"b (10.0.0.3) has another tokenizer.json at {other} than the router's host",
        "network_interface: found 'eth0', which does not exist on c",
    ]
    assert lines[2].endswith("allowed: eth1 (10.0.0.4)")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (ON_CPUS, {"head", "gpus", "prefill", "decode"}),
        ({**ON_CPUS, "device": "cuda"}, {"head", "gpus", "decode"}),
        (BY_POOL, {"head", "prefill", "decode"}),
        ({**BY_POOL, "prefill": 0}, {"head", "decode"}),
    ],
    ids=["any host", "hosts with GPUs", "hosts of the pools", "hosts of the pool"],
)
def test_looked_at_are_the_routers_host_and_those_that_may_get_workers(
    monkeypatch, model, options, wanted
):
    world = FakeRay(
        monkeypatch,
        head=(),
        gpus=("GPU",),
        prefill=("pagewire-prefill",),
        decode=("pagewire-decode", "GPU"),
        dead=("GPU", "pagewire-decode"),
    )
    world.nodes[-1]["Alive"] = False

    check(model, **options)

    assert {host for host, _ in world.looked_at} == wanted


def test_the_router_takes_the_plain_path_and_a_worker_beside_it_the_hosts(
    monkeypatch, model, tmp_path
):
    world = FakeRay(monkeypatch, head=())
    copy = shutil.copytree(model, tmp_path / "copy")

    check(model, **ON_CPUS, model_paths={"head": str(copy)})

    assert world.looked_at == [("head", str(model)), ("head", str(copy))]


def test_nccls_interface_matters_where_nccl_moves_pages(monkeypatch, model):
    world = FakeRay(monkeypatch, head=(), a=("GPU",), b=("GPU",))
    world.interfaces = {"a": {"ib0": ["10.1.0.2"], "eth0": ["10.0.0.2"]}}
    options = {"ray_address": "auto", "nccl_interface": "ib0", "device": "cuda"}

    [line] = refused(model, **options)
    check(model, **options, prefill=0)

    assert line == (
        "nccl_interface: found 'ib0', which does not exist on b; allowed: eth0 (10.0.0.3)"
    )


def test_hosts_without_their_certificate_are_named_together(monkeypatch, model, tmp_path):
    FakeRay(monkeypatch, head=(), a=(), b=(), c=())
    mine, other = Authority(tmp_path), Authority(tmp_path, "other")
    tls = mine.inside_by_host("head", "a")
    for path in map(Path, other.pair(SERVER_NAME)):
        path.rename(tmp_path / f"authority-c{path.suffix}")
    files = {
        "tls.certificate_file": tls.certificate_file,
        "tls.key_file": tls.key_file,
        "tls.authority_file": tls.authority_file,
    }
    monkeypatch.setattr(socket, "gethostname", lambda: "head")

    no_file, of_another_cluster = refused(model, **ON_CPUS, **files)

    assert no_file.startswith(
        f"tls.certificate_file: on b (10.0.0.3), {tmp_path}/authority-b.crt cannot be read: "
    )
    assert of_another_cluster.startswith(
        f"tls.certificate_file: on c (10.0.0.4), {tmp_path}/authority-c.crt is not from "
    )
    mine.inside_by_host("b", "c")
    assert check(model, **ON_CPUS, **files) == [f"10.0.0.{number}" for number in range(1, 5)]


def test_a_path_of_a_host_that_is_not_there_is_refused(monkeypatch, model):
    FakeRay(monkeypatch, head=(), a=())
    paths = {"a": str(model), "gpu-b": "/x"}
    said = []

    [line] = refused(model, ConfigError, **ON_CPUS, model_paths=paths)

    hosts = "10.0.0.1 (head), 10.0.0.2 (a)"
    assert line == (
        "model_paths: found 'gpu-b'; allowed: the address, the name or a custom resource of a host "
        f"of the Ray cluster, which has {hosts}"
    )
    check(model, said, **BY_POOL, model_paths=paths)
    assert said == [
        "note: model_paths: found 'gpu-b', which no host of the Ray cluster has as address, name "
        f"or custom resource yet; its hosts are {hosts}",
        "waiting until 1 host can be looked at",
    ]


@pytest.mark.parametrize(
    ("of_a", "told"),
    [
        (["172.17.0.1"], "where hosts have the same address (172.17.0.1 on 10.0.0.1, 172.17.0.1"),
        (["fd00::2"], "where some hosts have an IPv4 address and others only one of IPv6 (172.17"),
    ],
)
def test_hosts_that_would_not_find_each_other_are_refused(monkeypatch, model, of_a, told):
    world = FakeRay(monkeypatch, head=(), a=())
    world.interfaces = {"head": {"net": ["172.17.0.1"]}, "a": {"net": of_a}}

    [line] = refused(model, **ON_CPUS, network_interface="net")

    assert line.startswith(f"network_interface is 'net', {told}")


def test_several_nodes_of_one_host_share_its_address(monkeypatch, model):
    world = FakeRay(monkeypatch, head=(), a=())
    world.nodes[1]["NodeManagerAddress"] = "10.0.0.1"
    world.interfaces = {name: {"net": ["10.1.0.1"]} for name in ("head", "a")}

    assert check(model, **ON_CPUS, network_interface="net") == ["10.1.0.1"]


def test_a_host_that_does_not_answer_is_named_and_not_waited_for_for_ever(monkeypatch, model):
    world = FakeRay(monkeypatch, head=(), a=(), b=())
    world.hung, world.lost = {"a"}, {"b"}

    hung, lost = refused(model, **ON_CPUS)

    assert hung == "a (10.0.0.2) has not answered within 120 s; its disk may hang"
    assert lost.startswith("b (10.0.0.3) cannot be checked: ")
    assert LOOK_TIMEOUT_S <= world.now < LOOK_TIMEOUT_S + 1
    assert world.cancelled == ["a"]


def test_a_signal_ends_the_wait_and_what_was_begun(monkeypatch, model):
    world = FakeRay(monkeypatch, head=(), a=())
    world.hung = {"a"}

    def interrupt():
        if world.now > 1.0:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        check(model, interrupt=interrupt, **ON_CPUS)

    assert world.cancelled == ["a"]
    assert world.now < 2.0


def test_a_model_that_the_router_cannot_read_is_a_wrong_option(monkeypatch, tmp_path):
    FakeRay(monkeypatch, head=())

    [line] = refused(tmp_path, ConfigError, **ON_CPUS)

    assert line.startswith(f"model is '{tmp_path}': {Path(tmp_path) / 'config.json'}")
