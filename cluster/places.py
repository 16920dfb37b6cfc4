"""The places of workers on Ray's hosts, and the choice of hosts for new ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from cluster.assignment import Room, Wish, assign
from cluster.errors import PlacementError
from cluster.pool_config import role_of
from options.kept_by_name import kept_by_name

Node = Mapping[str, Any]  # as ray.nodes() describes it
Amounts = Mapping[str, float]  # resource |-> amount

# A smaller amount only marks hosts of a kind and limits nothing: then Ray spreads workers.
LEAST_ROOM = 0.01


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The resources that a worker takes of a host."""

    node_id: str = ""  # empty: wherever Ray finds room
    resources: Amounts = field(default_factory=dict)  # of Ray
    group: str = ""  # that reserves them; see cluster.groups


def choose_places(
    needs: Mapping[str, Amounts],
    taken: Mapping[str, Place],
    nodes: Sequence[Node],
    available: Mapping[str, Amounts],
) -> dict[str, Place]:
    """Return the place of each new worker, without a host where none has room.

    Args:
        needs: The needs of the new workers, by name.
        taken: Places of existing workers, including those that still wait for theirs.
        nodes: The nodes of Ray.
        available: Free resources of each, by node_id.
    """
    limited = {name: each for name, each in needs.items() if is_limited(each)}
    node_of = assign(_rooms(taken, nodes, available), _wishes(limited)) if limited else {}
    return {
        name: Place(node_id=node_of.get(name, ""), resources=each) for name, each in needs.items()
    }


def check_room(places: Mapping[str, Place]) -> None:
    """Refuse new workers for which no host has room.

    Raises:
        PlacementError: Names the workers, their needs, and the remedy.
    """
    _refuse(_without_room(places))


def told_waiting(places: Mapping[str, Place]) -> str:
    """Say which new workers wait until a host has room for them; empty: none does."""
    if not (homeless := _without_room(places)):
        return ""
    return f"{_told_homeless(homeless)}; waiting for a host that has"


def check_pool(needs: Mapping[str, Amounts], nodes: Sequence[Node]) -> None:
    """Refuse a pool whose workers would not fit even on empty hosts.

    Args:
        needs: The needs of its workers, by name.
        nodes: The nodes of Ray.

    Raises:
        PlacementError: Says who has no host, what they need, and what to do.
    """
    all_free = {each["NodeID"]: each["Resources"] for each in nodes}
    needs = {name: each for name, each in needs.items() if each}
    found = assign(_rooms({}, nodes, all_free), _wishes(needs))
    _refuse({name: each for name, each in needs.items() if name not in found})


def check_move(worker_id: str, place: Place, needs: Amounts, nodes: Sequence[Node]) -> None:
    """Refuse to replace a worker by one of another pool that cannot use its host.

    Args:
        worker_id: The worker that has the place.
        place: Its place.
        needs: Resources that workers of the other pool take besides GPUs.
        nodes: The nodes of Ray.

    Raises:
        PlacementError: Names the host and the resources that it lacks.
    """
    host = next((each for each in nodes if each["NodeID"] == place.node_id), None)
    if host is None:
        raise PlacementError(f"the host of {worker_id} is gone; nothing has changed")
    if lacking := [name for name in needs if name not in host["Resources"]]:
        where = f"{host['NodeManagerHostname']} ({host['NodeManagerAddress']})"
        raise PlacementError(
            f"{worker_id} is on {where}, which does not have {', '.join(lacking)}, as workers of "
            "the other pool must; nothing has changed"
        )


def _without_room(places: Mapping[str, Place]) -> dict[str, Amounts]:
    """Return the needs of workers for which no host has room."""
    return {
        name: each.resources
        for name, each in places.items()
        if not each.node_id and is_limited(each.resources)
    }


def _refuse(homeless: Mapping[str, Amounts]) -> None:
    if homeless:
        remedy = "add hosts to the Ray cluster, or ask for fewer"
        raise PlacementError(f"{_told_homeless(homeless)}; {remedy}")


def _told_homeless(homeless: Mapping[str, Amounts]) -> str:
    needed = " or ".join(dict.fromkeys(map(told_amounts, homeless.values())))
    return f"no host has room for {', '.join(homeless)}: each needs {needed}"


def told_amounts(amounts: Amounts) -> str:
    """Return amounts as people read them: 1 GPU and 1 pagewire-decode."""
    return " and ".join(f"{amount:g} {name}" for name, amount in sorted(amounts.items()))


def is_limited(amounts: Amounts) -> bool:
    """Return whether a host has room for some workers with these needs only."""
    return max(amounts.values(), default=0.0) >= LEAST_ROOM


def _rooms(
    taken: Mapping[str, Place], nodes: Sequence[Node], available: Mapping[str, Amounts]
) -> list[Room]:
    living = [each for each in nodes if each["Alive"]]
    rooms = []
    for node in sorted(living, key=lambda each: (each["NodeManagerAddress"], each["NodeID"])):
        node_id = node["NodeID"]
        there = {name: each for name, each in taken.items() if each.node_id == node_id}
        free = {}
        for name, total in node["Resources"].items():
            # What was reserved just now may still look free, and others of this Ray may have taken
            # what no worker has.
            promised = sum(each.resources.get(name, 0.0) for each in there.values())
            left = min(available.get(node_id, {}).get(name, 0.0), total - promised)
            free[name] = max(0.0, left)  # while one moves, its place is promised twice
        num_prefill = sum(role_of(name) == "prefill" for name in there)
        room = Room(
            node_id=node_id,
            free=free,
            num_prefill=num_prefill,
            num_decode=len(there) - num_prefill,
        )
        rooms.append(room)
    return rooms


def _wishes(needs: Mapping[str, Amounts]) -> list[Wish]:
    """Group workers with equal needs."""

    def kind(name: str) -> tuple[Any, ...]:
        return role_of(name), sorted(needs[name].items())

    return [
        Wish(role=role_of(alike[0]), needs=needs[alike[0]], worker_ids=alike)
        for _, group in groupby(sorted(needs, key=kind), key=kind)
        for alike in [list(group)]
    ]
