"""Groups of workers on a Ray of several hosts of this machine; the workers do nothing."""

import logging
import os
import signal
from functools import partial
from itertools import count
from secrets import token_hex

import pytest
import ray
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from cluster.groups import (
    REMOVED,
    closed_hosts,
    group_of,
    look_at_groups,
    remove_groups,
    reserve,
)
from cluster.placement import _scheduling, close_host, hosts_now, place
from cluster.places import Place
from cluster.ray_actors import NAMESPACE, workers_on
from tests.support.local_ray import forget_token
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("ray"),
]

NEEDS = {"GPU": 1.0, "rack-a": 0.001}
TIMEOUT_S = 60.0
until = partial(wait_until, within_s=TIMEOUT_S)
numbers = count()


class Idle:
    """Tells its process and its host."""

    def __init__(self, start):
        pass

    def where(self):
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def takes(self):
        return ray.get_runtime_context().get_assigned_resources()


class Hosts:
    """A Ray; its head has no room for workers, and each other host for one."""

    def __init__(self):
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})

    def add(self):
        node = self.cluster.add_node(num_cpus=2, num_gpus=1, resources={"rack-a": 1})
        until(lambda: node.node_id in hosts_now()[1])
        return node


@pytest.fixture(scope="module")
def hosts():
    with pytest.MonkeyPatch.context() as patch:
        # Tests before may have told this process that Rays ask for a token.
        patch.setenv("RAY_AUTH_TOKEN", token_hex(32))
        forget_token()
        found = Hosts()
        ray.init(address=found.cluster.address, namespace=NAMESPACE, log_to_driver=False)
        yield found
        ray.shutdown()
        found.cluster.shutdown()
    forget_token()


@pytest.fixture
def host(hosts):
    """A host with one free GPU, which goes after the test with all that it has."""
    node = hosts.add()
    yield node
    for name in ray.util.list_named_actors():
        ray.kill(ray.get_actor(name), no_restart=True)
    remove_groups(look_at_groups().unused)
    assert living_groups() == []
    for each in [each for each in hosts.cluster.list_all_nodes() if not each.head]:
        hosts.cluster.remove_node(each)
    until(lambda: not any(each["Alive"] and "rack-a" in each["Resources"] for each in ray.nodes()))


def living_groups():
    table = ray.util.placement_group_table().values()
    return [each["name"] for each in table if each["state"] != REMOVED]


def start(worker_id, where):
    """Place a worker; return its actor."""
    return place(Idle, worker_id, _scheduling(where), None)


def answer(actor):
    return ray.get(actor.where.remote(), timeout=TIMEOUT_S)


def ends(actor):
    """Kill a worker's process; return where it comes back."""
    pid, _ = answer(actor)
    os.kill(pid, signal.SIGKILL)
    return until(lambda: came_back(actor, pid))


def came_back(actor, pid):
    try:
        found = ray.get(actor.where.remote(), timeout=TIMEOUT_S)
    except ray.exceptions.RayError:
        return None
    return found if found[0] != pid else None


def demand():
    """Return the resources of which Ray tells its autoscaler that groups wait for them."""
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    return [
        dict(each.resources_bundle)
        for group in get_cluster_resource_state(client).pending_gang_resource_requests
        for selector in group.bundle_selectors
        for each in selector.resource_requests
    ]


def competitor(node_id):
    """Start an actor of somebody else that wants the GPU of a host, and waits for it."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_gpus": 1, "scheduling_strategy": where}
    actor = place(Idle, f"other-{next(numbers)}", options, None)
    assert ray.wait([actor.where.remote()], timeout=1.0)[0] == []
    return actor


def test_ray_warns_nobody_of_a_group_that_is_meant(host):
    lines = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ray.actor").addHandler(listener)
    try:
        start("decode-0", reserve("decode-0", Place(node_id=host.node_id, resources=NEEDS)))
    finally:
        logging.getLogger("ray.actor").removeHandler(listener)

    assert lines == []


def test_a_place_is_kept_while_ray_restarts_its_worker_whoever_else_waits_for_it(host):
    where = reserve("decode-0", Place(node_id=host.node_id, resources=NEEDS))
    worker = start("decode-0", where)
    assert answer(worker)[1] == host.node_id
    assert ray.get(worker.takes.remote()) == NEEDS
    assert group_of("decode-0") == where.group
    other = competitor(host.node_id)

    assert [ends(worker)[1] for _ in range(2)] == [host.node_id] * 2
    assert look_at_groups().unused == look_at_groups().stuck == frozenset()

    ray.kill(worker, no_restart=True)
    assert look_at_groups().unused == {where.group}
    remove_groups([where.group])
    assert answer(other)[1] == host.node_id


def test_a_place_is_handed_over_whoever_else_waits_for_it(host):
    where = reserve("prefill-1", Place(node_id=host.node_id, resources=NEEDS))
    leaving = start("prefill-1", where)
    answer(leaving)
    other = competitor(host.node_id)
    successor = start("decode-2", where)

    ray.kill(leaving, no_restart=True)

    assert answer(successor)[1] == host.node_id
    assert ray.wait([other.where.remote()], timeout=1.0)[0] == []
    assert (look_at_groups().unused, group_of("decode-2")) == (frozenset(), where.group)
    assert group_of("prefill-1") == ""


def test_a_worker_without_room_waits_as_demand_and_takes_the_host_that_comes(hosts, host):
    taken = start("decode-0", reserve("decode-0", Place(node_id=host.node_id, resources=NEEDS)))
    answer(taken)
    waiting = start("decode-1", reserve("decode-1", Place(node_id=host.node_id, resources=NEEDS)))
    assert ray.wait([waiting.where.remote()], timeout=1.0)[0] == []
    found = look_at_groups()
    assert (found.unused, found.unready, found.stuck) == (set(), {"decode-1"}, set())
    assert until(demand) == [NEEDS]

    other = hosts.add()

    assert answer(waiting)[1] == other.node_id


def test_a_worker_and_its_place_go_elsewhere_when_their_host_is_gone(hosts, host):
    worker = start("decode-0", reserve("decode-0", Place(node_id=host.node_id, resources=NEEDS)))
    pid, _ = answer(worker)
    other = hosts.add()

    hosts.cluster.remove_node(host, allow_graceful=False)

    assert until(lambda: came_back(worker, pid))[1] == other.node_id
    assert look_at_groups() & look_at_groups() == look_at_groups()
    assert len(living_groups()) == 1


def test_a_worker_that_ends_on_a_closed_host_is_found_as_is_one_without_its_group(hosts, host):
    first = start("decode-0", reserve("decode-0", Place(node_id=host.node_id, resources=NEEDS)))
    other = hosts.add()
    second = start("decode-1", reserve("decode-1", Place(node_id=other.node_id, resources=NEEDS)))
    pids = [answer(each)[0] for each in (first, second)]
    close_host(host.node_id)
    until(lambda: host.node_id in closed_hosts())
    assert host.node_id not in hosts_now()[1]
    assert look_at_groups().stuck == frozenset()

    os.kill(pids[0], signal.SIGKILL)
    remove_groups([group_of("decode-1")])

    until(lambda: look_at_groups().stuck == {"decode-0", "decode-1"})
    assert look_at_groups().unready == {"decode-0", "decode-1"}


def test_nothing_is_reserved_twice_nor_for_a_worker_that_nothing_limits(hosts):
    for where in (Place(resources={"rack-a": 0.001}), Place(), Place(resources=NEEDS, group="1")):
        assert reserve("decode-0", where) is where
    assert living_groups() == []


def test_actors_of_others_that_have_the_names_of_workers_are_none(host):
    where = reserve("decode-0", Place(node_id=host.node_id, resources=NEEDS))
    answer(start("decode-0", where))
    group = ray.util.placement_group([{"GPU": 1.0}])  # for which there is no room
    others = ray.remote(num_cpus=0)(Idle)
    waiting = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group), "num_gpus": 1}
    waits = others.options(name="decode-0", namespace="other", **waiting).remote(None)
    on_host = {"scheduling_strategy": NodeAffinitySchedulingStrategy(host.node_id, soft=False)}
    runs = others.options(name="prefill-0", namespace="other", **on_host).remote(None)
    assert answer(runs)[1] == host.node_id
    assert ray.wait([waits.where.remote()], timeout=1.0)[0] == []

    found = look_at_groups()

    assert (found.unused, found.unready, found.stuck) == (set(), set(), set())
    assert group_of("decode-0") == where.group
    assert workers_on(host.node_id) == {"decode-0"}
    ray.util.remove_placement_group(group)
