from contextlib import suppress
from types import SimpleNamespace

import pytest
from ray._private import node as ray_node
from ray._raylet import Config

from cluster import ray_node as own_node
from cluster.ray_node import NodeOfOneCluster, only_what_a_cluster_uses


class Raylet:
    """A raylet that registers with Ray's control store after some looks, or ends."""

    def __init__(self, looks, ends=False):
        self.looks_left = looks
        self.ends = ends

    def get_all_node_info(self, timeout):
        self.looks_left -= 1
        return {} if self.looks_left else {"node": "alive"}

    def poll(self):
        return 1 if self.ends else None


@pytest.mark.parametrize(
    ("raylet", "looks_left"),
    [(Raylet(looks=1), 0), (Raylet(looks=3), 0), (Raylet(looks=3, ends=True), 2)],
    ids=["at once", "later", "never"],
)
def test_a_node_waits_until_its_raylet_is_registered_or_has_ended(monkeypatch, raylet, looks_left):
    def start(node):
        node.all_processes = {"raylet": [SimpleNamespace(process=raylet)]}

    monkeypatch.setattr(ray_node.Node, "start_ray_processes", start)
    monkeypatch.setattr(ray_node.Node, "get_gcs_client", lambda node: raylet)
    monkeypatch.setattr(NodeOfOneCluster, "_tell_ports_of_agents", lambda node: None)
    monkeypatch.setattr(own_node, "LOOK_PERIOD_S", 0.0)

    NodeOfOneCluster.__new__(NodeOfOneCluster).start_ray_processes()

    assert raylet.looks_left == looks_left


def test_other_nodes_of_this_process_stay_rays_own():
    before = ray_node.Node
    with suppress(RuntimeError), only_what_a_cluster_uses():
        assert ray_node.Node is NodeOfOneCluster
        raise RuntimeError("a node that starts too slowly")

    assert ray_node.Node is before


def test_ray_knows_the_variables_for_shorter_pauses():
    pause_ms = Config.raylet_client_connect_timeout_milliseconds()

    assert pause_ms == 20  # by default 1,000
    assert pause_ms * Config.raylet_client_num_connect_attempts() == 10_000
