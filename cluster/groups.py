"""Places that Ray reserves for workers: placement groups of one bundle, each on one host.

A group outlives the processes and the actor of its worker. So nobody else on this Ray gets the
place while Ray restarts the worker, and a worker of another pool can take it over. If its host
dies, Ray moves the group to another one. A worker in a group that is removed would wait for ever,
so a group goes after its worker: the controller removes those of workers that are gone, and whoever
ends the cluster removes all.
"""

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private import state as ray_state  # Ray has no public name for it
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.places import Place, is_limited
from cluster.ray_actors import is_cluster_worker, living_actors

PREFIX = "pagewire/"  # of the names of all groups
REMOVED = "REMOVED"  # Ray remembers such groups

# Ray warns of each restartable actor in a group, since whoever removes the group ends the actor for
# good. That is meant here, and the controller places a worker anew that loses its group otherwise.
_INTENDED = "Scheduling a restartable detached actor with a placement group is not recommended"
logging.getLogger("ray.actor").addFilter(lambda each: not each.getMessage().startswith(_INTENDED))


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """What Ray's tables say; a worker that is placed just then may be missing in one of them."""

    unused: frozenset[str]  # groups that no living actor has
    unready: frozenset[str]  # workers without a process, or which still load
    # Those of them whose group is gone, or on a host that Ray has closed: they would wait for ever,
    # or until the host has ended.
    stuck: frozenset[str]

    def __and__(self, other: "Groups") -> "Groups":
        """Return what two looks have in common."""
        return Groups(
            unused=self.unused & other.unused,
            unready=self.unready & other.unready,
            stuck=self.stuck & other.stuck,
        )


def reserve(worker_id: str, where: Place) -> Place:
    """Return a place with a group that Ray reserves at once, on its host if that still has room.

    Where no host has room, the group waits for it, and Ray's autoscaler sees its demand. Nothing is
    reserved for a worker that nothing limits, nor twice.
    """
    if where.group or not is_limited(where.resources):
        return where
    group = ray.util.placement_group(
        [dict(where.resources)],
        strategy="STRICT_PACK",
        name=f"{PREFIX}{worker_id}-{secrets.token_hex(4)}",
        lifetime="detached",
        _soft_target_node_id=where.node_id or None,
    )
    return replace(where, group=group.id.hex())


def inside(where: Place) -> PlacementGroupSchedulingStrategy:
    """Return Ray's option for the one worker of a group; a second one waits for its end."""
    bundles = [dict(where.resources)]
    return PlacementGroupSchedulingStrategy(_group(where.group, bundles), 0)


def group_of(worker_id: str) -> str:
    """Return the group of a worker; empty: it has none."""
    workers = (each for each in living_actors() if is_cluster_worker(each))
    return next((_hex(each) for each in workers if each.name == worker_id), "")


def look_at_groups() -> Groups:
    """Ask Ray for the groups and the living actors; it answers late while its head is away."""
    table: dict[str, Any] = ray.util.placement_group_table()
    node_of = {
        group: each["bundles_to_node_id"][0]
        for group, each in table.items()
        if each["name"].startswith(PREFIX) and each["state"] != REMOVED
    }
    closed = closed_hosts()
    actors = {each.actor_id: each for each in living_actors()}.values()
    group_of_unready = {
        each.name: _hex(each)
        for each in actors
        if is_cluster_worker(each) and each.state != ActorTableData.ALIVE
    }
    return Groups(
        unused=frozenset(node_of) - {_hex(each) for each in actors},
        unready=frozenset(group_of_unready),
        stuck=frozenset(
            name
            for name, group in group_of_unready.items()
            if group and (group not in node_of or node_of[group] in closed)
        ),
    )


def remove_groups(groups: Iterable[str]) -> None:
    """Have Ray give their resources to others. Their workers must have ended for good."""
    for each in groups:
        ray.util.remove_placement_group(_group(each))


def closed_hosts() -> frozenset[str]:
    """Return the hosts on which Ray starts nothing more, by node_id."""
    return frozenset(ray_state.state.get_draining_nodes())


def _hex(actor: Any) -> str:
    """Return the group of an actor; empty: it has none."""
    group: str = actor.placement_group_id.hex()
    return group


def _group(group: str, bundles: list[dict[str, float]] | None = None) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID.from_hex(group), bundles)
