"""The processes of a Ray that is started for one cluster: those it uses, without needless waits.

`ray.init` has no options for this. If a later Ray gives its node other methods, it starts and waits
as it does by itself, and tests/cluster/test_ray_doors.py fails.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import _raylet as raylet_ports  # Ray has no public name for these
from ray._private import node as ray_node

LOOK_PERIOD_S = 0.02
LOOKS_S = 30.0  # limit of all looks, and of one; Ray itself then waits as long again, and raises
# Names of ports on which a dashboard would ask this host
UNUSED_PORTS = (
    "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "METRICS_AGENT_PORT_NAME",
    "METRICS_EXPORT_PORT_NAME",
)
NO_PORT = -1  # what Ray's agent writes where nothing listens


class NodeOfOneCluster(ray_node.Node):
    """A node without dashboard and autoscaler, whose raylet does not wait for its agents."""

    def start_monitor(self) -> None:
        """Start no autoscaler: this cluster has one host."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start no server: without a dashboard it serves nothing, but Ray waits for its start."""
        assert not include_dashboard
        self._webui_url = ""  # what Ray tells its processes then

    def start_ray_processes(self) -> None:
        """Start the raylet, and return when it has registered: Ray looks only once a second."""
        self._tell_ports_of_agents()
        super().start_ray_processes()  # type: ignore[no-untyped-call]
        [raylet] = self.all_processes["raylet"]
        control_store: Any = self.get_gcs_client()  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + LOOKS_S
        while (
            not control_store.get_all_node_info(timeout=LOOKS_S)
            and raylet.process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(LOOK_PERIOD_S)

    def _tell_ports_of_agents(self) -> None:
        """Tell the raylet the ports of its two agents: it would wait until they have imported Ray.

        One agent makes environments for workers that do not inherit theirs; the other one serves a
        dashboard.
        """
        names = [getattr(raylet_ports, name, None) for name in UNUSED_PORTS]
        persist = getattr(raylet_ports, "persist_port", None)
        if persist is None or None in names:
            return  # another Ray, which learns them as it does by itself
        session: str = self.get_session_dir_path()  # type: ignore[no-untyped-call]
        for name in names:
            persist(session, self.node_id, name, NO_PORT)
        # It stays bound until this process ends, so that nobody gets the port but the agent, which
        # shares it.
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((self.node_ip_address, 0))
        self._ray_params.runtime_env_agent_port = bound.getsockname()[1]
        bound.detach()


@contextmanager
def only_what_a_cluster_uses() -> Iterator[None]:
    """Have `ray.init` start such a node while entered."""
    before = ray_node.Node
    ray_node.Node = NodeOfOneCluster  # type: ignore[misc]
    try:
        yield
    finally:
        ray_node.Node = before  # type: ignore[misc]
