"""What `pagewire up` does where something runs already; Ray and what runs there are fakes."""

import os
import signal
import socket
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from cli import bring_up as module
from cli.bring_up import bring_up
from cli.stop_signals import StopSignals
from cluster.config_file import load_config
from cluster.controller import ClusterFacts
from cluster.demo_model import demo_model_dir
from cluster.errors import ClusterError, ConfigError, Interrupted, RayLost, StartError, Stopping
from cluster.local_head import LocalHead
from cluster.scaling import ClusterWorkers

CONFIG = load_config(None, {"model": "/models/tiny", "prefill": 1, "decode": 1})
SERVABLE = replace(CONFIG, model=demo_model_dir())
WORKERS = ClusterWorkers(
    staying=frozenset({"prefill-0", "decode-0"}), leaving=frozenset(), answering=frozenset()
)


@pytest.fixture
def running(monkeypatch):
    """The facts of the cluster that runs, to be changed."""
    facts = {"config": CONFIG, "device": "cpu", "workers": WORKERS}
    controller = SimpleNamespace(
        facts=SimpleNamespace(remote=lambda: ClusterFacts(**facts)),
    )
    head = LocalHead(pid=1, ray_address="127.0.0.1:1", token_path="/nowhere")
    monkeypatch.setattr(module, "find_head", lambda: head)
    monkeypatch.setattr(module, "attach_head", lambda head: None)
    monkeypatch.setattr(module, "find_controller", lambda: controller)
    monkeypatch.setattr(module, "ask_starting", lambda answer, say, check: answer)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return facts


def test_a_cluster_that_is_being_stopped_does_not_run_already(running):
    running["is_stopping"] = True
    said = []

    with StopSignals() as signals, pytest.raises(Stopping, match="run `pagewire down` again"):
        bring_up(CONFIG, signals, said.append)

    assert said == []


@pytest.mark.parametrize("has_failed", [False, True], ids=["waits", "has failed"])
def test_a_signal_to_a_second_up_ends_that_and_not_the_cluster(running, monkeypatch, has_failed):
    def find_cluster(facts, deadline, watch):  # of which one process is not ready yet
        os.kill(os.getpid(), signal.SIGINT)
        while not signals.stopped.wait(0.01):
            assert time.monotonic() < deadline
        if has_failed:
            raise StartError("the cluster does not answer")
        watch.check()

    monkeypatch.setattr(module, "find_cluster", find_cluster)
    said = []

    with StopSignals() as signals, pytest.raises(Interrupted) as interruption:
        bring_up(CONFIG, signals, said.append)

    goes_on = "the cluster still runs; `pagewire status` shows it"
    assert str(interruption.value) == f"stopped by SIGINT before it was done; {goes_on}"
    assert interruption.value.exit_code == 130
    assert said == [
        "a cluster with this configuration is already running: prefill-0, decode-0 on cpu"
    ]


def test_a_second_up_tells_that_the_cluster_was_scaled(running, monkeypatch):
    running["workers"] = replace(WORKERS, staying=WORKERS.staying | {"decode-1"})
    monkeypatch.setattr(module, "find_cluster", lambda facts, deadline, watch: "the cluster")
    said = []

    with StopSignals() as signals:
        assert bring_up(CONFIG, signals, said.append) == "the cluster"

    assert said == [
        "a cluster with this configuration is already running: prefill-0, decode-0, decode-1 on "
        "cpu",
        "decode: running 2; wanted 1; the cluster was scaled since its start; "
        "`pagewire scale --decode 1` changes that",
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"router.tenants_file": "/nope"},
            "router.tenants_file: found '/nope', which",
        ),
        ({"secret_file": "/nope"}, "secret_file: found '/nope', which cannot be read"),
        ({"network_interface": "eth9"}, "network_interface: found 'eth9', which does not exist"),
        ({"port_range": "20000-20001"}, "port_range: found '20000-20001', which has 2 ports"),
        ({"host": "0.0.0.0"}, "other hosts can connect to 0.0.0.0"),
        ({"host": "0.0.0.0"}, "router.tenants_file: found none; allowed: a tenants file, or"),
        ({"model": "/nope"}, "model: found '/nope'; allowed: an existing folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_configuration_that_could_not_be_started_is_not_only_told_to_differ(
    running, options, told
):
    options = {"model": str(demo_model_dir()), "device": "cpu", "cpu_pages_mib": 2**30} | options
    asked = load_config(None, options)

    with StopSignals() as signals, pytest.raises(ClusterError) as refusal:
        bring_up(asked, signals, lambda line: None)

    assert told in str(refusal.value)
    assert "running" not in str(refusal.value)


def test_ports_and_memory_that_the_running_cluster_holds_do_not_hide_what_differs(running):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = {"port": taken.getsockname()[1], "cpu_pages_mib": 2**30, "device": "cpu"}
        asked = load_config(None, {"model": str(demo_model_dir())} | options)
        with StopSignals() as signals, pytest.raises(ConfigError, match="`pagewire down` ends it"):
            bring_up(asked, signals, lambda line: None)


def test_the_end_of_the_head_ends_the_wait_for_its_cluster(running, monkeypatch):
    def find_cluster(facts, deadline, watch):
        watch.check()
        monkeypatch.setattr(module, "find_head", lambda: None)  # as `pagewire down` does elsewhere
        while time.monotonic() < deadline:
            watch.check()

    monkeypatch.setattr(module, "find_cluster", find_cluster)

    with StopSignals() as signals, pytest.raises(RayLost, match=r"has ended, .*pagewire down"):
        bring_up(CONFIG, signals, lambda line: None)


def test_a_signal_to_an_up_on_a_ray_that_was_left_tells_of_that_ray(running, monkeypatch):
    def deploy(config, device, deadline, watch, *, is_own_ray):
        assert not is_own_ray
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.stopped.wait(10)
        watch.check()

    monkeypatch.setattr(module, "find_controller", lambda: None)
    monkeypatch.setattr(module, "check_start", lambda config, say: "cpu")
    monkeypatch.setattr(module, "deploy", deploy)

    with StopSignals() as signals, pytest.raises(Interrupted, match="what ran before still runs"):
        bring_up(SERVABLE, signals, lambda line: None)


def test_the_ray_of_an_up_inherits_what_its_workers_need(monkeypatch, tmp_path):
    given = {}

    def start(command, *, env, **_):
        given.update(env)
        raise OSError("it is enough to have been asked")

    monkeypatch.setattr(module.subprocess, "Popen", start)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("SOME_PATH", "/kept")
    config = load_config(None, {"model": str(demo_model_dir()), "cpu_threads": 3})

    with pytest.raises(OSError, match="enough"):
        module._start_head(config, "cpu", lambda: None)

    assert (given["OMP_NUM_THREADS"], given["CUDA_VISIBLE_DEVICES"]) == ("3", "")
    assert given["SOME_PATH"] == "/kept"


def test_a_signal_to_the_first_up_leaves_nothing(running, monkeypatch):
    def start_head(config, device, check):
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.stopped.wait(10)
        check()

    monkeypatch.setattr(module, "find_head", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(module, "check_start", lambda config, say: "cpu")
    monkeypatch.setattr(module, "_start_head", start_head)
    said = []

    with (
        StopSignals() as signals,
        pytest.raises(Interrupted, match="nothing that it started is left"),
    ):
        bring_up(SERVABLE, signals, said.append)

    assert said[0] == "starting 1 prefill and 1 decode worker on cpu"


def test_this_host_reads_the_weights_while_the_ray_of_an_up_starts(running, monkeypatch):
    class Reading(BaseException):
        """The start is to go no further."""

    @contextmanager
    def weights_read_ahead(config):
        asked.append(config.model)
        yield
        asked.clear()

    def start_head(*_):
        raise Reading(*asked)

    asked = []
    monkeypatch.setattr(module, "find_head", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(module, "check_start", lambda config, say: "cpu")
    monkeypatch.setattr(module, "weights_read_ahead", weights_read_ahead)
    monkeypatch.setattr(module, "_start_head", start_head)

    with StopSignals() as signals, pytest.raises(Reading) as reached:
        bring_up(SERVABLE, signals, lambda line: None)

    assert reached.value.args == (SERVABLE.model,)
