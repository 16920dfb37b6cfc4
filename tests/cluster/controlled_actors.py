"""A controller among fake actors and hosts, which note what it does."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import ray

from cluster import controller as module
from cluster import host_looks
from cluster.config_file import load_config
from cluster.controller import ControllerActor
from cluster.deployment import Deployment
from cluster.errors import PlacementError
from cluster.groups import Groups
from cluster.membership import HEARD_S
from cluster.placement import needs_of
from cluster.places import is_limited
from cluster.scaling import worker_ids
from credentials.secret import ClusterSecret

NODES = [
    {
        "NodeID": f"n{number}",
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": "ab"[number - 1],
        "Alive": True,
        "Resources": {"GPU": 4.0},
    }
    for number in (1, 2)
]


class World:
    """A controller among fake actors; `told` are the calls that it made, in order."""

    def __init__(self, monkeypatch, device="cpu"):
        self.told = []
        self.placed = {}  # worker |-> its place
        self.available = {"n1": {}, "n2": {"GPU": 1.0}}  # all workers are on n1
        self.now = 100.0
        self.names = [*worker_ids({"prefill": 2, "decode": 2}), "router-0"]
        self.ended = set()  # names of actors that Ray still lists
        self.context = SimpleNamespace(was_current_actor_reconstructed=False)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: self.context)
        monkeypatch.setattr(ray.util, "list_named_actors", lambda: self.names)
        monkeypatch.setattr(ray, "get_actor", self._actor)
        monkeypatch.setattr(
            ray, "kill", lambda actor, no_restart: self.told.append(("kill", actor.name))
        )
        self.on_host = {}  # node |-> names of workers there, as Ray knows them
        monkeypatch.setattr(
            module, "workers_on", lambda node: frozenset(self.on_host.get(node, ()))
        )
        monkeypatch.setattr(module, "close_host", lambda node: self.told.append(("close", node)))
        for each in (module, host_looks):
            monkeypatch.setattr(each, "hosts_now", lambda: (NODES, self.available))
        monkeypatch.setattr(module, "_now", lambda: self.now)
        monkeypatch.setattr(module, "place_worker", self._place)
        self.groups = {}  # group |-> workers that have had it
        self.unready = self.stuck = frozenset()
        monkeypatch.setattr(module, "reserve", self._reserve)
        monkeypatch.setattr(module, "group_of", self._group_of)
        monkeypatch.setattr(module, "look_at_groups", self._look_at_groups)
        monkeypatch.setattr(
            module, "remove_groups", lambda groups: [self.groups.pop(each) for each in groups]
        )
        self.most_workers = 99  # that the host can hold
        monkeypatch.setattr(module, "check_growth", self._check_growth)
        monkeypatch.setattr(module, "MemberServer", lambda *_, ports: RouterThatHears(self.told))
        self.deployment = Deployment(
            config=load_config(None, {"model": "/models/tiny", "prefill": 2, "decode": 2}),
            device=device,
            secret=ClusterSecret.generate(),
            home_resource="node:h",
            environment={},
            visible_gpus=None,
        )
        self.controller = ControllerActor.__new__(ControllerActor)

    async def start(self):
        await self.controller.__init__(self.deployment)
        self.now += 2 * HEARD_S
        for name in self.names:
            if name != "router-0":
                await self.announce(name)
        self.told.clear()

    async def announce(self, worker_id, incarnation=1, is_leaving=False):
        pool = worker_id.partition("-")[0]
        where = "n1", needs_of(self.deployment, worker_id)
        await self.controller.announce_worker(
            worker_id, incarnation, "h:1", pool, is_leaving, *where, 7
        )

    def _reserve(self, worker_id, where):
        if where.group or not is_limited(where.resources):
            return where
        self.groups[f"of {worker_id}"] = {worker_id}
        return replace(where, group=f"of {worker_id}")

    def _group_of(self, worker_id):
        return next((group for group, names in self.groups.items() if worker_id in names), "")

    def _look_at_groups(self):
        unused = {group for group, names in self.groups.items() if names.isdisjoint(self.names)}
        return Groups(unused=frozenset(unused), unready=self.unready, stuck=self.stuck)

    def _check_growth(self, config, device, workers):
        if sum(workers.values()) > self.most_workers:
            raise PlacementError(f"too many: {sorted(workers.items())}")

    def _place(self, deployment, worker_id, where):
        self.placed[worker_id] = where
        if where.group:
            self.groups[where.group].add(worker_id)
        self.told.append(("place", worker_id))
        return worker_id

    def _actor(self, name):
        if name not in self.names or name in self.ended:
            raise ValueError(name)

        def drain(grace_s):
            self.told.append(("drain", name, grace_s))

        def restart(grace_s):
            self.told.append(("restart", name, grace_s))

        return SimpleNamespace(
            name=name,
            drain=SimpleNamespace(remote=drain),
            restart=SimpleNamespace(remote=restart),
        )


class RouterThatHears:
    """A MemberServer with one router, which goes by what it hears when the controller waits."""

    def __init__(self, told):
        self.told = told
        self.latest = None

    async def start(self):
        return "127.0.0.1:1"

    def publish(self, members):
        draining = [each.worker_id for each in members if each.is_draining]
        assert {each.contract_version for each in members} <= {7}
        told = ("router-0", [each.worker_id for each in members], draining)
        if told != self.latest:
            self.latest = told
            self.told.append(told)

    async def wait_applied(self, timeout_s):
        await asyncio.sleep(0)
        self.told.append(("applied",))
