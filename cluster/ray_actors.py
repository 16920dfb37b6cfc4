"""Ray's table of living actors, and which of them are workers of the cluster.

The table has the actors of all users of a Ray. Names are unique within a namespace only: an actor
of somebody else may have the name of a worker.
"""

from collections.abc import Iterator
from typing import Any

from ray._private import state as ray_state  # Ray has no public name for it
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

from cluster.scaling import is_worker

NAMESPACE = "pagewire"  # of a cluster's actors
# An actor that takes the next step meanwhile is seen in the next state; the first one comes twice.
LIVING = ("RESTARTING", "DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING")


def living_actors() -> Iterator[Any]:
    """Yield the ActorTableData of everybody's actors; one of them may come twice."""
    accessor: Any = ray_state.state._connect_and_get_accessor()
    for state in LIVING:
        for each in accessor.get_actor_table(None, state):
            yield ActorTableData.FromString(each)


def is_cluster_worker(actor: Any) -> bool:
    """Return whether an actor is a worker of the cluster."""
    return actor.ray_namespace == NAMESPACE and is_worker(actor.name)


def workers_on(node_id: str) -> frozenset[str]:
    """Return the names of the workers that have a process on a host, loading ones included."""
    return frozenset(
        each.name
        for each in living_actors()
        if is_cluster_worker(each) and each.address.node_id.hex() == node_id
    )
