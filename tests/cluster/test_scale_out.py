"""What Ctrl-C of `pagewire scale` and `drain` says; Ray and the cluster are fakes."""

from types import SimpleNamespace

import pytest
import ray

from cluster import scale_out as module
from cluster.config_file import load_config
from cluster.errors import Interrupted, StartError
from cluster.scale_out import drain_host, drain_worker, move_worker, scale_cluster
from cluster.scaling import ClusterWorkers, ScalePlan

NAMES = frozenset({"prefill-0", "prefill-1", "decode-0", "decode-1"})
FACTS = SimpleNamespace(
    config=load_config(None, {"model": "/models/tiny"}),
    workers=ClusterWorkers(staying=NAMES, leaving=frozenset(), answering=NAMES),
)
LEAVES = "decode-1 takes no new requests and leaves; running requests have 7 s to end there"


class Cluster:
    """The handle of a controller that starts and drains as planned; `killed` are Ray's victims."""

    def __init__(self, monkeypatch, *, interrupted_at, starts=(), drains=()):
        self.killed = []
        self.forgotten = []
        self.interrupted_at = interrupted_at
        plan = ScalePlan(starts=starts, drains=drains)
        self.facts = self._answering("facts", FACTS)
        self.scale = self._answering("scale", ({name: name for name in starts}, plan))
        self.drain = self._answering("drain", None)
        self.move = self._answering("move", (starts[0], starts[0]) if starts else None)
        self.forget = SimpleNamespace(remote=self.forgotten.extend)
        self.disk_is_full = False
        monkeypatch.setattr(module, "check_log_room", self._check_log_room)
        monkeypatch.setattr(ray, "get", lambda call, timeout: call)
        monkeypatch.setattr(module, "ask", lambda call, timeout_s=0: call)
        monkeypatch.setattr(module, "router_address", lambda: "h:1")
        monkeypatch.setattr(module, "wait_ready", lambda *_: self._reach("wait_ready"))
        monkeypatch.setattr(module, "wait_until_served", lambda *_: None)
        monkeypatch.setattr(ray, "get_actor", lambda name: name)
        monkeypatch.setattr(ray, "kill", lambda actor, no_restart: self.killed.append(actor))
        monkeypatch.setattr(ray.util, "list_named_actors", lambda: self._reach("gone", drains))

    def _answering(self, name, answer):
        return SimpleNamespace(remote=lambda *_: self._reach(name, answer))

    def _check_log_room(self):
        if self.disk_is_full:
            raise StartError("the disk is full")

    def _reach(self, name, answer=None):
        if name == self.interrupted_at:
            raise KeyboardInterrupt
        return answer


@pytest.mark.parametrize(
    ("interrupted_at", "goes_on", "killed"),
    [
        ("facts", "nothing has changed", []),
        ("scale", "what has begun continues; `pagewire status` shows it", []),
        (
            "wait_ready",
            "decode-2 is ended again; prefill-0, decode-1 are still leaving; "
            "`pagewire status` shows it",
            ["decode-2"],
        ),
        ("gone", "prefill-0, decode-1 are still leaving; `pagewire status` shows it", []),
    ],
)
def test_an_interrupted_scale_says_what_goes_on_by_itself(
    monkeypatch, interrupted_at, goes_on, killed
):
    cluster = Cluster(
        monkeypatch,
        interrupted_at=interrupted_at,
        starts=("decode-2",),
        drains=("prefill-0", "decode-1"),
    )

    with pytest.raises(Interrupted) as interruption:
        scale_cluster(cluster, {"prefill": 1}, 7.0, lambda line: None)

    assert str(interruption.value) == f"stopped by SIGINT before it was done; {goes_on}"
    assert interruption.value.exit_code == 130
    assert cluster.killed == cluster.forgotten == killed


def test_workers_that_do_not_start_are_ended_and_told(monkeypatch):
    def fail(*_):
        raise StartError("decode-2 cannot serve beside the others")

    cluster = Cluster(monkeypatch, interrupted_at=None, starts=("decode-2",), drains=("prefill-0",))
    monkeypatch.setattr(module, "wait_ready", fail)

    with pytest.raises(StartError) as failure:
        scale_cluster(cluster, {"decode": 3}, 7.0, lambda line: None)

    assert str(failure.value).splitlines() == [
        "decode-2 cannot serve beside the others",
        "decode-2 is ended again; prefill-0 is still leaving; `pagewire status` shows it",
    ]
    assert cluster.killed == cluster.forgotten == ["decode-2"]


def test_scale_says_which_workers_wait_for_a_host(monkeypatch):
    cluster = Cluster(monkeypatch, interrupted_at="wait_ready", starts=("decode-2",))
    waiting = "no host has room for decode-2: each needs 1 GPU; waiting for a host that has"
    plan = ScalePlan(starts=("decode-2",), drains=(), waiting=waiting)
    cluster.scale = SimpleNamespace(remote=lambda *_: ({"decode-2": "decode-2"}, plan))
    said = []

    with pytest.raises(Interrupted):
        scale_cluster(cluster, {"decode": 3}, 7.0, said.append)

    assert said == ["starting decode-2", waiting]


def test_an_interrupted_drain_says_that_the_worker_leaves_nevertheless(monkeypatch):
    cluster = Cluster(monkeypatch, interrupted_at="gone", drains=("decode-1",))
    said = []

    with pytest.raises(Interrupted, match="decode-1 is still leaving; `pagewire status` shows it"):
        drain_worker(cluster, "decode-1", 7.0, said.append)

    assert said == [LEAVES]


@pytest.mark.parametrize("in_time", [True, False])
def test_a_host_is_drained_when_the_processes_of_its_workers_are_gone(monkeypatch, in_time):
    """Only the first ones count; Ray may not have their names on another host yet."""
    cluster = Cluster(monkeypatch, interrupted_at=None)
    asked = []
    cluster.evacuate = SimpleNamespace(
        remote=lambda *words: asked.append(words) or frozenset({"prefill-0", "decode-1"})
    )
    looks = [{"prefill-0", "decode-1"}, {"decode-1"}, {"decode-5"} if in_time else {"decode-1"}]
    monkeypatch.setattr(
        module, "workers_on", lambda node: looks.pop(0) if len(looks) > 1 else looks[0]
    )
    context = SimpleNamespace(get_node_id=lambda: "n1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "LOOK_PERIOD_S", 0.0)
    monkeypatch.setattr(module, "LEAVE_MARGIN_S", 60.0 if in_time else -6.9)
    said = []

    if in_time:
        drain_host(cluster, 7.0, said.append)
    else:
        with pytest.raises(StartError, match="decode-1 did not leave within 0 s"):
            drain_host(cluster, 7.0, said.append)

    told = (
        "decode-1, prefill-0 take no new requests and leave; running requests have 7 s to end there"
    )
    end = ["this host has no worker, and gets no new ones"] if in_time else []
    assert (asked, said) == ([("n1", 7.0)], [told, *end])


@pytest.mark.parametrize(
    ("interrupted_at", "goes_on"),
    [
        ("facts", "nothing has changed"),
        ("move", "what has begun continues; `pagewire status` shows it"),
        (
            "gone",
            "decode-1 is still leaving, and prefill-2 then starts; `pagewire status` shows it",
        ),
        (
            "wait_ready",
            "decode-1 is still leaving, and prefill-2 then starts; `pagewire status` shows it",
        ),
    ],
)
def test_an_interrupted_move_goes_on_by_itself(monkeypatch, interrupted_at, goes_on):
    cluster = Cluster(monkeypatch, interrupted_at=interrupted_at, starts=("prefill-2",))

    with pytest.raises(Interrupted) as interruption:
        move_worker(cluster, "decode-1", "prefill", 7.0, lambda line: None)

    assert str(interruption.value) == f"stopped by SIGINT before it was done; {goes_on}"
    assert cluster.killed == []


def test_a_successor_that_does_not_start_is_ended_and_told(monkeypatch):
    def fail(*_):
        raise StartError("prefill-2 did not start: no memory")

    cluster = Cluster(monkeypatch, interrupted_at=None, starts=("prefill-2",))
    monkeypatch.setattr(module, "wait_ready", fail)
    said = []

    with pytest.raises(StartError) as failure:
        move_worker(cluster, "decode-1", "prefill", 7.0, said.append)

    told = "prefill-2 has not taken its place: prefill-2 did not start: no memory"
    assert str(failure.value) == f"decode-1 has left, but {told}"
    assert said == [LEAVES, "starting prefill-2 in its place"]
    assert cluster.killed == cluster.forgotten == ["prefill-2"]


@pytest.mark.parametrize("wanted", [{"decode": 3}, {"decode": 1, "prefill": 3}])
def test_a_scale_that_starts_workers_needs_room_for_their_logs(monkeypatch, wanted):
    cluster = Cluster(monkeypatch, interrupted_at="scale")
    cluster.disk_is_full = True

    with pytest.raises(StartError, match="the disk is full"):
        scale_cluster(cluster, wanted, 7.0, lambda line: None)


def test_workers_leave_though_the_disk_is_full(monkeypatch):
    cluster = Cluster(monkeypatch, interrupted_at="gone", drains=("decode-1",))
    cluster.disk_is_full = True

    with pytest.raises(Interrupted, match="decode-1 is still leaving"):
        scale_cluster(cluster, {"decode": 1}, 7.0, lambda line: None)


def test_a_move_needs_room_for_the_log_of_what_it_starts(monkeypatch):
    cluster = Cluster(monkeypatch, interrupted_at="move")
    cluster.disk_is_full = True

    with pytest.raises(StartError, match="the disk is full"):
        move_worker(cluster, "decode-1", "prefill", 7.0, lambda line: None)
