import asyncio
import inspect
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from cluster import controller as controller_module
from cluster import launch, placement, readiness
from cluster.attach import AT_ONCE_S
from cluster.config_file import load_config
from cluster.controller import ControllerActor
from cluster.demo_model import demo_model_dir
from cluster.deployment import Deployment
from cluster.errors import ConfigError, PlacementError, RayLost, StartError
from cluster.groups import Groups
from cluster.launch import StartWatch, device_of_ray, start_cluster, start_local_ray
from cluster.placement import (
    CONTROLLER_NAME,
    FIRST_GATEWAY,
    ROUTER_NAME,
    _config_of,
    _resources,
    _settings,
    needs_of,
    variables_of_workers,
)
from cluster.private_folder import private_folder
from cluster.readiness import _refuse_misfits
from cluster.scaling import worker_ids
from credentials.config import TlsSettings
from credentials.secret import ClusterSecret
from decode_worker.actor import DecodeActor
from prefill_worker.actor import PrefillActor
from tests.cluster.controlled_actors import RouterThatHears
from tests.pagewire.scripted_service import serving_in_thread
from tests.support.interfaces import have_interfaces

ERRORS_ONLY = {"GRPC_VERBOSITY": "ERROR"}


def deployment(options, device="cpu"):
    return Deployment(
        config=load_config(None, {"model": "/models/tiny", **options}),
        device=device,
        secret=ClusterSecret.generate(),
        home_resource="node:h",
        environment=ERRORS_ONLY,
        visible_gpus=None,
    )


@pytest.fixture(autouse=True)
def log_disk(monkeypatch):
    """The disk of the logs of the Ray that is a fake here."""
    disk = SimpleNamespace(is_full=False)

    def check_log_room():
        if disk.is_full:
            raise StartError("the disk is full")

    monkeypatch.setattr(launch, "check_log_room", check_log_room)
    return disk


def test_what_a_user_sets_about_the_engine_reaches_the_workers(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("page_size: 32\nmodel: /models/tiny", encoding="utf-8")
    config = load_config(path, {"dtype": "float16"})

    settings = _settings(replace(deployment({}, "cuda"), config=config), "decode-0")

    assert settings.page_size == 32
    assert settings.dtype == "float16"
    assert settings.served_model_name == "tiny"


def test_a_workers_address_is_fixed_only_where_there_is_one_host():
    def address(**options):
        return _settings(deployment(options), "decode-0").host

    assert address() == "127.0.0.1"
    assert address(network_interface="eth0") == address(ray_address="auto") == ""


def test_workers_have_ports_for_metrics_only_where_an_option_gives_some():
    def settings(**options):
        return _settings(deployment(options), "decode-0")

    options = {"worker_metrics_ports": "20001-20004", "router.metrics_port": 20003}
    given = settings(port_range="20000-20009", **options)

    assert settings().metrics_ports is None
    assert given.metrics_ports.of_range == [20001, 20002, 20004]
    assert given.ports.of_range == [20000, *range(20005, 20010)]


def test_interfaces_and_paths_of_hosts_reach_the_workers():
    options = {
        "ray_address": "auto",
        "network_interface": "eth0",
        "nccl_interface": "ib0",
        "model_paths": {"gpu-a": "/data/tiny"},
    }
    started = deployment(options, "cuda")

    by_host = _settings(started, "prefill-0").by_host

    assert (by_host.network_interface, by_host.nccl_interface) == ("eth0", "ib0")
    assert by_host.model_paths == {"gpu-a": "/data/tiny"}
    assert nccl_of(started) == "=ib0"
    assert nccl_of(deployment({**options, "nccl_interface": ""}, "cuda")) == "=eth0"


def nccl_of(started):
    variables = _resources(started, "prefill-0")["runtime_env"]["env_vars"]
    return variables["NCCL_SOCKET_IFNAME"]


def gpus_of_workers(options, visible_gpus=None):
    started = replace(deployment(options, "cuda"), visible_gpus=visible_gpus)
    names = worker_ids(started.config.workers_of_pools)
    resources = {name: _resources(started, name) for name in names}
    return {
        name: each["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"]
        for name, each in resources.items()
        if each["num_gpus"] == 0
    }


def test_workers_that_share_gpus_have_a_fixed_one():
    three = {"prefill": 3, "decode": 2, "workers_per_gpu": 2}

    assert gpus_of_workers({"prefill": 2, "decode": 2}) == {}  # Ray gives each one its own
    assert gpus_of_workers(three) == {
        "prefill-0": "0",
        "prefill-1": "0",
        "prefill-2": "1",
        "decode-0": "2",
        "decode-1": "2",
    }
    assert set(gpus_of_workers(three, "5, 3,GPU-1f").values()) == {"5", "3", "GPU-1f"}
    assert set(gpus_of_workers({"prefill": 2, "decode": 2, "workers_per_gpu": 4}).values()) == {"0"}


def test_workers_take_hosts_of_their_pool_where_the_hosts_are_marked():
    options = {"ray_address": "auto", "device": "cuda"}

    def asked(**more):
        started = deployment({**options, **more}, "cuda")
        return [_resources(started, name) for name in ("prefill-0", "decode-0")]

    assert [each["resources"] for each in asked()] == [{}, {}]
    marked = asked(pool_resources=True)
    assert [each["resources"] for each in marked] == [
        {"pagewire-prefill": 1},
        {"pagewire-decode": 1},
    ]
    assert [each["num_gpus"] for each in marked] == [1, 1]


def test_what_a_pool_has_otherwise_reaches_its_workers_and_no_others():
    options = {
        "ray_address": "auto",
        "pools.prefill.max_step_tokens": 300,
        "pools.decode.accelerator_type": "H100",
        "pools.small.role": "decode",
        "pools.small.resources": {"rack-a": 2},
        "pools.small.num_pages": 8,
        "pools.small.gpu_memory_fraction": 0.5,
        "pools.small.cpu_pages_mib": 3,
        "pools.small.max_step_tokens": 400,
    }
    started = deployment(options, "cuda")
    found = {}
    for name in ("prefill-0", "decode-0", "decode-small-0"):
        own = _settings(started, name)
        found[name] = (
            needs_of(started, name),
            (own.num_pages, own.gpu_memory_fraction, own.cpu_pages_bytes, own.num_seats),
            own.max_step_tokens,
        )
        assert _config_of(started.config, name).max_step_tokens == own.max_step_tokens

    assert found == {
        "prefill-0": ({"GPU": 1.0}, (0, 0.85, 256 * 2**20, 0), 300),
        "decode-0": (
            {"GPU": 1.0, "accelerator_type:H100": 0.001},
            (0, 0.85, 256 * 2**20, 256),
            2048,
        ),
        "decode-small-0": ({"GPU": 1.0, "rack-a": 2.0}, (8, 0.5, 3 * 2**20, 256), 400),
    }


def test_a_pool_for_which_no_host_would_do_is_refused_before_anything_is_placed(monkeypatch):
    resources = {"CPU": 8.0, "rack-a": 1.0}
    node = {"NodeID": "n", "NodeManagerAddress": "h", "Alive": True, "Resources": resources}
    monkeypatch.setattr(launch, "hosts_now", lambda: ([node], {}))

    def start(rack, **more):
        asked = {"pools.small.role": "decode", "pools.small.resources": {rack: 0.001}, **more}
        return start_on(monkeypatch, ray_address="auto", **asked)

    with pytest.raises(
        PlacementError, match=r"no host has room for decode-small-0: .* 0\.001 rack-b"
    ):
        start("rack-b")
    assert start("rack-a") == CONTROLLER_NAME
    assert start("rack-b", pool_resources=True, device="cpu") == CONTROLLER_NAME, (
        "it may join later"
    )


def test_marked_hosts_may_join_after_the_start(monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.0})
    options = {"ray_address": "auto", "device": "cuda", "prefill": 1, "decode": 3}

    with pytest.raises(PlacementError, match="need 4 GPUs"):
        device_of_ray(load_config(None, options))
    assert device_of_ray(load_config(None, {**options, "pool_resources": True})) == "cuda"


def start_on(monkeypatch, refusal=None, addresses=(), **options):
    """Deploy where hosts look like this; return what is placed before anything else."""

    def check_hosts(config, device, environment, say, check):
        if refusal:
            raise refusal
        return list(addresses)

    class Placed(Exception):
        pass

    def place(actor, name, *_):
        raise Placed(name)

    monkeypatch.setattr(launch, "check_hosts", check_hosts)
    monkeypatch.setattr(launch, "home_resource", lambda: "node:h")
    monkeypatch.setattr(launch, "place", place)
    monkeypatch.setattr(launch, "kill_cluster", lambda *_: pytest.fail("it may be another's"))
    config = load_config(None, {"model": "/models/tiny", **options})
    try:
        launch.deploy(config, "cpu", time.monotonic() + 5.0, StartWatch(), is_own_ray=False)
    except Placed as first:
        return str(first)


def test_nothing_is_placed_before_all_hosts_have_been_looked_at(monkeypatch):
    refusal = PlacementError("gpu-b has nothing at /models/tiny")

    with pytest.raises(PlacementError, match="gpu-b has nothing"):
        start_on(monkeypatch, refusal, ray_address="auto")
    # A Ray of our own has one host, which the preflight has looked at.
    assert start_on(monkeypatch, refusal) == CONTROLLER_NAME


def test_the_addresses_of_the_interface_are_those_that_must_not_be_in_clear(monkeypatch):
    have_interfaces(monkeypatch, {"eth0": ["10.0.0.2"], "lo": ["127.0.0.1"]})
    in_clear = r"tls.certificate_file: found none; .* connect to 10.0.0.2"

    for options in ({"ray_address": "auto", "addresses": ["10.0.0.2"]}, {}):
        with pytest.raises(ConfigError, match=in_clear):
            start_on(monkeypatch, network_interface="eth0", **options)
    assert start_on(monkeypatch, network_interface="eth0", insecure=True) == CONTROLLER_NAME
    assert start_on(monkeypatch, network_interface="lo") == CONTROLLER_NAME


@pytest.fixture
def placed(monkeypatch):
    """What each actor, by name, is placed with: its options, and what its start gets."""
    placed = {}
    monkeypatch.setattr(
        placement,
        "place",
        lambda actor, name, options, start: placed.update({name: (options, start)}),
    )
    monkeypatch.setattr(controller_module, "MemberServer", lambda *_, ports: RouterThatHears([]))
    monkeypatch.setattr(ray.util, "list_named_actors", list)
    monkeypatch.setattr(controller_module, "hosts_now", lambda: ([], {}))
    monkeypatch.setattr(controller_module, "has_come_back", lambda: False)
    monkeypatch.setattr(controller_module, "reserve", lambda name, where: where)
    return placed


def controller_of(started):
    controller = ControllerActor.__new__(ControllerActor)
    asyncio.run(controller.__init__(started))
    return controller


def deploy(started):
    asyncio.run(controller_of(started).deploy())


def test_what_a_user_sets_about_grpc_reaches_all_that_use_it(placed):
    deploy(deployment({}))

    assert set(placed) == {"prefill-0", "decode-0", ROUTER_NAME, FIRST_GATEWAY}
    for options, _ in placed.values():
        assert options["runtime_env"]["env_vars"]["GRPC_VERBOSITY"] == "ERROR"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_all_processes_of_a_ray_inherit_is_set_for_none_of_them_again(placed, device):
    started = deployment({"nccl_interface": "ib0"}, device)

    deploy(replace(started, inherited=variables_of_workers(started.config, device, ERRORS_ONLY)))

    assert len(placed) == 4
    assert not [name for name, (options, _) in placed.items() if "runtime_env" in options]


def test_what_a_worker_has_of_its_own_is_set_for_it_alone(placed):
    started = deployment({"workers_per_gpu": 2}, "cuda")

    deploy(replace(started, inherited=variables_of_workers(started.config, "cuda", ERRORS_ONLY)))

    own = {name: options.get("runtime_env") for name, (options, _) in placed.items()}
    on_first = {"env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}
    alone = {ROUTER_NAME: None, FIRST_GATEWAY: None}
    assert own == {"prefill-0": on_first, "decode-0": on_first, **alone}


def test_a_gateway_is_placed_beside_the_router_unless_there_is_none(placed):
    options = {"host": "0.0.0.0", "http_gateway.max_prompts": 3}

    deploy(deployment({**options, "http_port": 0}))
    assert FIRST_GATEWAY not in placed
    deploy(deployment({**options, "http_port": 8123}))
    start = placed[FIRST_GATEWAY][1]
    assert (start.config.max_prompts, start.host, start.port) == (3, "0.0.0.0", 8123)
    assert (start.network_interface, start.router_name) == ("", ROUTER_NAME)
    assert (start.tls, start.router_tls) == (TlsSettings(), None)
    for name in (FIRST_GATEWAY, ROUTER_NAME):
        assert list(placed[name][0]["resources"]) == ["node:h"], "at the host of who started it"


def test_a_gateway_that_has_taken_over_is_found_and_none_is_placed_beside_it(placed, monkeypatch):
    names = ["http-gateway-10", "http-gateway-9", ROUTER_NAME]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: names)

    deploy(deployment({}))

    assert set(placed) == {"prefill-0", "decode-0", ROUTER_NAME, "http-gateway-10"}


def test_each_process_gets_the_keys_of_its_own_part_which_nothing_prints(placed, caplog):
    started = deployment({"prefill": 2, "decode": 2})
    deploy(started)

    starts = {name: start for name, (_, start) in placed.items()}
    router = starts.pop(ROUTER_NAME).settings
    assert not hasattr(starts.pop(FIRST_GATEWAY), "keys")
    keys = {name: start.keys for name, start in starts.items()}
    keys[ROUTER_NAME] = router.keys.party
    assert {(each.role, each.name) for each in keys.values()} == {
        ("prefill", "prefill-0"),
        ("prefill", "prefill-1"),
        ("decode", "decode-0"),
        ("decode", "decode-1"),
        ("router", "router-0"),
    }
    assert keys["decode-0"].calling != keys["decode-1"].calling
    held = {key for each in keys.values() for key in (each.accepting, *each.calling.values())}
    held |= {router.keys.page_hashes, router.keys.resume_tokens}
    assert router.keys.page_hashes == started.secret.page_hash_key
    printed = f"{placed} {keys} {started} {caplog.text}"
    assert not [key for key in held if key.hex() in printed or repr(key) in printed]


def test_workers_with_different_models_fail_the_start_with_the_difference():
    _refuse_misfits({})
    reason = "a model other than that of decode-0: page_size is 16, not 64"
    with pytest.raises(StartError, match=f"cannot serve beside the others: decode-1: {reason}"):
        _refuse_misfits({"decode-1": reason})


def groups_without_workers(*groups):
    return Groups(unused=frozenset(groups), unready=frozenset(), stuck=frozenset())


def failing_start(monkeypatch, error, **options):
    """Start a cluster whose deployment fails; return killed actors, and then removed groups."""
    actors = {CONTROLLER_NAME: "own controller", ROUTER_NAME: "own router"}
    killed = []

    def kill(actor, no_restart):
        killed.append(actor)
        for name in [name for name, each in actors.items() if each == actor]:
            del actors[name]

    def fail(controller, watch, places):
        if isinstance(error, BaseException):
            raise error
        actors.update(error)  # others have ended this cluster, and started another one
        raise StartError("router-0 did not start: it was killed")

    monkeypatch.setattr(launch, "check_hosts", lambda *_: [])
    monkeypatch.setattr(launch, "home_resource", lambda: "node:h")
    monkeypatch.setattr(launch, "place", lambda *_: "own controller")
    monkeypatch.setattr(launch, "_place_workers", lambda deployment: {})
    monkeypatch.setattr(launch, "_deployed", fail)
    monkeypatch.setattr(launch, "named_actors", lambda: dict(actors))
    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(launch, "look_at_groups", lambda: groups_without_workers("group"))
    monkeypatch.setattr(launch, "remove_groups", killed.extend)
    config = load_config(None, {"model": "/models/tiny", "ray_address": "auto", "device": "cpu"})
    with pytest.raises(type(error) if isinstance(error, BaseException) else StartError):
        launch.deploy(config, "cpu", time.monotonic() + 5.0, StartWatch(), is_own_ray=False)
    return killed


def test_nothing_is_placed_on_a_ray_whose_disk_is_full(monkeypatch, log_disk):
    log_disk.is_full = True

    with pytest.raises(StartError, match="the disk is full"):
        start_on(monkeypatch)


def test_a_start_that_fails_ends_its_own_cluster_and_no_other(monkeypatch):
    ended = ["own router", "own controller", "group"]
    assert failing_start(monkeypatch, StartError("late")) == ended
    other = {CONTROLLER_NAME: "other controller", ROUTER_NAME: "other router"}
    assert failing_start(monkeypatch, other) == []
    assert failing_start(monkeypatch, RayLost("it would not answer")) == []


def test_workers_start_beside_the_controller_which_learns_where_they_are(monkeypatch, placed):
    def deployed(controller, watch, places):
        asked.append(places)
        raise StartError("it is enough to have been asked")

    def reserve(name, where):
        events.append(("reserve", name, where.node_id))
        return replace(where, group=36 * "2")

    events = []
    left_over = groups_without_workers("of before")
    monkeypatch.setattr(launch, "look_at_groups", lambda: left_over)
    monkeypatch.setattr(launch, "remove_groups", lambda groups: events.append({*groups}))
    monkeypatch.setattr(launch, "reserve", reserve)
    asked, node = [], 56 * "1"
    nodes = [{"NodeID": node, "NodeManagerAddress": "10.0.0.1", "Alive": True}]
    nodes[0]["Resources"] = {"GPU": 2.0}
    monkeypatch.setattr(launch, "home_resource", lambda: "node:h")
    monkeypatch.setattr(launch, "place", placement.place)
    monkeypatch.setattr(launch, "hosts_now", lambda: (nodes, {node: {"GPU": 2.0}}))
    monkeypatch.setattr(launch, "_deployed", deployed)
    config = load_config(None, {"model": str(demo_model_dir()), "prefill": 1, "decode": 1})

    with pytest.raises(StartError, match="enough"):
        launch.deploy(config, "cuda", time.monotonic() + 5.0, StartWatch(), is_own_ray=True)

    assert list(placed) == [CONTROLLER_NAME, "prefill-0", "decode-0"]
    assert events == [{"of before"}, ("reserve", "prefill-0", node), ("reserve", "decode-0", node)]
    for name in ("prefill-0", "decode-0"):
        where = placed[name][0]["scheduling_strategy"]
        assert where.placement_group.id.hex() == 36 * "2"
    [places] = asked
    assert {name: each.node_id for name, each in places.items()} == {
        "prefill-0": node,
        "decode-0": node,
    }
    controller = controller_of(deployment({}, "cuda"))
    asyncio.run(controller.deploy(places))
    assert controller._membership.places == places


def test_a_start_ends_with_its_ray(monkeypatch):
    calls = []
    local_ray = SimpleNamespace(lost=[], check=None, close=lambda: calls.append("close"))

    def check():
        if local_ray.lost:
            raise RayLost("Ray's raylet on this host has ended")

    def deploy(config, device, deadline, watch, *, is_own_ray):
        watch.check()
        local_ray.lost = ["raylet"]
        while time.monotonic() < deadline:
            watch.check()

    local_ray.check = check
    monkeypatch.setattr(launch, "start_local_ray", lambda *_, shows_worker_logs: local_ray)
    monkeypatch.setattr(launch, "deploy", deploy)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    config = load_config(None, {"model": str(demo_model_dir())})

    with pytest.raises(RayLost, match="raylet on this host has ended"):
        start_cluster(config, "cpu", shows_worker_logs=False)

    assert calls == ["close"], "a Ray that is lost is asked nothing"


def test_a_ray_that_does_not_start_is_explained_and_leaves_no_token(monkeypatch, tmp_path):
    def init(**_):  # as Ray does where the processors are busy
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    config = load_config(None, {"model": str(demo_model_dir()), "port": 0, "http_port": 0})
    said = []

    with pytest.raises(StartError, match=r"cannot start Ray on this host: .* timed out"):
        start_cluster(config, "cpu", shows_worker_logs=False, watch=StartWatch(say=said.append))

    assert said == ["starting 1 prefill and 1 decode worker on cpu"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_ray_inherits_what_workers_need_and_this_process_does_not_keep_it(monkeypatch, tmp_path):
    seen = {}

    def init(**_):
        seen.update(os.environ)
        raise Exception("it is enough to have been asked")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = load_config(None, {"model": str(demo_model_dir()), "cpu_threads": 3})

    with pytest.raises(StartError, match="cannot start Ray"):
        start_cluster(config, "cpu", shows_worker_logs=False)

    assert (seen["OMP_NUM_THREADS"], seen["CUDA_VISIBLE_DEVICES"]) == ("3", "")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize("device", ["cpu", None], ids=["own", "attached"])
def test_this_host_reads_the_weights_while_its_own_ray_starts(monkeypatch, device):
    class Reading(BaseException):
        """The start is to go no further."""

    @contextmanager
    def reading_ahead(paths, most_bytes):
        assert most_bytes > 0
        asked.extend(paths)
        yield
        asked.clear()

    def start(*_, **__):
        raise Reading(*asked)

    asked = []
    monkeypatch.setattr(launch, "reading_ahead", reading_ahead)
    monkeypatch.setattr(launch, "start_local_ray", start)
    monkeypatch.setattr(launch, "attach_ray", start)
    config = load_config(None, {"model": str(demo_model_dir())})

    with pytest.raises(Reading) as reached:
        start_cluster(config, device, shows_worker_logs=False)

    own = (demo_model_dir() / "model.safetensors",)
    assert reached.value.args == (own if device else ())


def test_a_start_removes_what_earlier_rays_have_left_but_the_last_logs(monkeypatch, tmp_path):
    def init(**_):
        raise Exception("it is enough to have been asked")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = private_folder() / "ray"
    no_process = 2**22 + 1  # more than any process id
    ended = [folder / f"session_2026-01-0{day}_12-00-00_000000_{no_process}" for day in (1, 2, 3)]
    for each in ended:
        (each / "logs").mkdir(parents=True)

    with pytest.raises(StartError, match="cannot start Ray"):
        start_local_ray(0, shows_worker_logs=False)

    assert list(folder.iterdir()) == ended[-1:]


def blocked_signals():
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_ray_that_others_reach_is_not_kept(monkeypatch, tmp_path):
    ended, masks = [], []
    monkeypatch.setattr(ray, "init", lambda **_: masks.append(blocked_signals()))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("ray"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))

    with pytest.raises(StartError, match=r"Ray listens on 10\.0\.0\.7, which others reach"):
        start_local_ray(0, shows_worker_logs=False)

    assert ended == ["ray"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    # What Ray starts would otherwise end of a signal to all, before the requests that run.
    assert signal.SIGTERM in masks[0]
    assert signal.SIGTERM not in blocked_signals()


class FakeActor:
    """Its handle: `actor.wait_ready.remote()` returns the actor for a reference."""

    def __init__(self, address=None):
        self.address = address  # None: it is never ready
        self.wait_ready = self

    def remote(self):
        return self


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [({}, ""), ({"GPU": 4.0}, " 1 of 4 GPUs are free;")],
    ids=["cpu", "gpu"],
)
def test_a_start_that_takes_too_long_names_who_is_missing_and_what_to_do(
    monkeypatch, resources, gpus
):
    def wait(calls, num_returns, timeout):
        done = [each for each in calls if each.address]
        return done[:num_returns], calls

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda call: call.address)
    session = SimpleNamespace(get_temp_dir=lambda: "/tmp/a", get_session_name=lambda: "session_b")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: session)
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": 1.0} if resources else {})
    actors = {"router-0": FakeActor("h:1"), "prefill-0": FakeActor(), "decode-0": FakeActor()}

    said = []
    with pytest.raises(StartError) as caught:
        readiness.wait_ready(actors, time.monotonic() + 0.1, 90.0, said.append, lambda: None)

    assert said == ["router-0 is ready, 1 of 3"]
    assert str(caught.value) == (
        f"prefill-0, decode-0 not ready after 90 s;{gpus} see the logs of the Ray session "
        "(/tmp/a/session_b/logs on each host), or raise --start-timeout-s"
    )


def test_a_start_tells_of_the_gateway_by_the_name_that_restart_takes(monkeypatch):
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: (calls[:1], calls[1:]))
    monkeypatch.setattr(ray, "get", lambda call: call.address)
    said = []

    addresses = readiness.wait_ready(
        {FIRST_GATEWAY: FakeActor("h:1")}, time.monotonic() + 5.0, 90.0, said.append, lambda: None
    )

    assert addresses == {FIRST_GATEWAY: "h:1"}
    assert said == ["http-gateway is ready, 1 of 1"]


@pytest.mark.parametrize(
    ("late", "words"),
    [
        ((), []),
        (("decode-0",), ["Ray runs; waiting for 1 process to load and connect"]),
        (("prefill-0", "decode-0"), ["Ray runs; waiting for 2 processes to load and connect"]),
    ],
    ids=["all serve", "one is late", "two are late"],
)
def test_only_what_is_waited_for_is_told(monkeypatch, late, words):
    actors = {name: FakeActor("h:1") for name in ("router-0", "prefill-0", "decode-0")}
    slow = [actors[name] for name in late]

    def wait(calls, num_returns, timeout):
        missing = [each for each in calls if timeout == AT_ONCE_S and each in slow]
        done = [each for each in calls if each not in missing]
        return done[:num_returns], missing

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda call: call.address)
    monkeypatch.setattr(launch, "LoadWatch", lambda *_: SimpleNamespace(look=lambda: None))
    monkeypatch.setattr(launch, "wait_until_served", lambda *_: 576)
    said = []
    watch = StartWatch(say=said.append)
    config = load_config(None, {"model": "/models/tiny"})

    cluster = launch.wait_for_cluster(
        {**actors, CONTROLLER_NAME: object()}, config, "cpu", time.monotonic() + 5.0, watch
    )

    assert (cluster.address, cluster.context_tokens) == ("h:1", 576)
    ready = [f"{name} is ready, {i} of 3" for i, name in enumerate(actors, 1)]
    assert said == (words + ready if late else [])


def test_the_http_address_is_that_of_the_gateway_that_stays(monkeypatch):
    actors = {f"http-gateway-{number}": FakeActor(f"h:{number}") for number in (10, 9)}
    actors |= {ROUTER_NAME: FakeActor("h:1"), CONTROLLER_NAME: object()}
    facts = SimpleNamespace(
        workers=SimpleNamespace(leaving=frozenset()), config=load_config(None, {}), device="cpu"
    )
    monkeypatch.setattr(launch, "named_actors", lambda: actors)
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: (calls[:num_returns], []))
    monkeypatch.setattr(ray, "get", lambda call: call.address)
    monkeypatch.setattr(launch, "LoadWatch", lambda *_: SimpleNamespace(look=lambda: None))
    monkeypatch.setattr(launch, "wait_until_served", lambda *_: 576)

    found = launch.find_cluster(facts, time.monotonic() + 5.0, StartWatch())

    assert found.http_address == "h:10"
    assert "http-gateway-9" not in found.actors, "it may end at any moment"


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (ray.exceptions.ActorDiedError(), []),
        (ray.exceptions.ActorUnavailableError("it is restarting", None), []),
        (ray.exceptions.GetTimeoutError("late"), ["stop_incomplete"]),
    ],
    ids=["by another command", "of which one restarts", "of which one is late"],
)
@pytest.mark.parametrize("name", [CONTROLLER_NAME, ROUTER_NAME, "decode-0"])
def test_the_end_of_a_cluster(monkeypatch, caplog, name, error, logged):
    ended = []

    def get(call, timeout):
        assert 0.0 < timeout <= 1.0 + launch.STOP_MARGIN_S
        if call == name:
            raise error
        ended.append(call)

    ends = "http-gateway-9"  # and another one has taken over
    names = [CONTROLLER_NAME, ROUTER_NAME, ends, "http-gateway-10", "decode-0", "prefill-0"]
    listed = [CONTROLLER_NAME]  # which places the rest before it closes
    monkeypatch.setattr(launch, "named_actors", lambda: {each: Stopping(each) for each in listed})
    monkeypatch.setattr(launch, "kill_cluster", lambda: ended.append("all"))
    monkeypatch.setattr(ray, "get", get)

    launch.end_cluster(1.0, lambda: listed.extend(names[1:]))

    assert [each.getMessage() for each in caplog.records] == logged
    assert ended == [*(each for each in names if each != name), "all"], "each is waited for"


class Stopping:
    """An actor's handle, whose calls are its name."""

    def __init__(self, name):
        self.close = self.stop = SimpleNamespace(remote=lambda *_: name)


class FakeController:
    """Its handle; `called` are the calls of the controller's methods, which must take them."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.called = []

    def __getattr__(self, name):
        def remote(*arguments):
            inspect.signature(getattr(ControllerActor, name)).bind(self, *arguments)
            self.called.append((name, *arguments))
            return self.answers.pop(0) if self.answers else None

        return SimpleNamespace(remote=remote)


def test_the_weights_of_all_workers_are_shown_as_answers_come(monkeypatch):
    def get(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    shown = []
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: ([c for c in calls if c], calls))
    monkeypatch.setattr(ray, "get", get)
    lost = ray.exceptions.RayActorError()
    watch = readiness.LoadWatch(
        FakeController((0, 0), (1, 4), lost, (3, 4)), lambda *loaded: shown.append(loaded)
    )

    for _ in range(6):  # the fifth call has no answer
        watch.look()

    assert shown == [(0, 0), (1, 4), (3, 4)]


@pytest.mark.parametrize("actor", [PrefillActor, DecodeActor])
def test_workers_tell_the_controller_how_far_their_weights_are(actor):
    worker = actor.__new__(actor)
    worker._controller = FakeController()
    worker._settings = SimpleNamespace(worker_id="w-0")

    worker._report_loaded(1, 4)

    assert worker._controller.called == [("report_loaded", "w-0", 1, 4)]


def test_a_router_that_dies_while_workers_start_is_told_as_an_error_of_the_cluster(monkeypatch):
    def get(call, timeout):
        raise ray.exceptions.ActorUnavailableError("it is restarting", None)

    monkeypatch.setattr(ray, "get", get)
    router = SimpleNamespace(cluster_token=SimpleNamespace(remote=str))
    with pytest.raises(StartError, match="the cluster does not answer"):
        readiness.wait_until_served("h:1", None, router, [], time.monotonic() + 1, lambda: None)


def test_a_start_that_takes_too_long_for_the_router_says_what_it_sees(monkeypatch):
    async def never(request, context):
        yield

    router = SimpleNamespace(
        misfits=SimpleNamespace(remote=dict), cluster_token=SimpleNamespace(remote=str)
    )
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    with serving_in_thread(never) as (address, service):
        deadline = time.monotonic() + 1.0
        with pytest.raises(StartError) as caught:
            readiness.wait_until_served(
                address, None, router, ["prefill-0", "decode-0"], deadline, lambda: None
            )

    assert service.num_statuses > 1
    assert str(caught.value) == (
        "the router does not see all workers ready: prefill-0 is unknown, decode-0 is ready"
    )
