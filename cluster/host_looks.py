"""Looks at hosts before processes start there: at their present code and their files of TLS.

Each host runs cluster.next_start, and this module says what its answers mean for the cluster.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.certificates import own_authority
from cluster.deployment import Deployment
from cluster.errors import ConfigError, StartError
from cluster.next_start import NextStart, next_start
from cluster.placement import GATEWAY_NAME, ROUTER_NAME, hosts_now
from cluster.places import Node, Place, is_limited
from credentials.config import TlsSettings

T = TypeVar("T")
Look = tuple[Node, NextStart]  # a host, and what it told

LOOK_TIMEOUT_S = 60.0  # for a process to start on each host


async def look_at(deployment: Deployment, nodes: Iterable[Node]) -> list[Look]:
    """Ask hosts what their next processes would start with.

    Raises:
        StartError: One does not answer.
    """
    config, home = deployment.config, deployment.home_resource
    nodes = list(nodes)
    authority = b""
    with suppress(ConfigError):  # this host tells it
        authority = await asyncio.to_thread(own_authority, config)
    calls = [
        _next_start_of(each, config.tls_settings, authority, is_home=home in each["Resources"])
        for each in nodes
    ]
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            found: list[NextStart] = await asyncio.gather(*calls)
    except (TimeoutError, ray.exceptions.RayError) as error:
        raise StartError(
            "a host did not tell what its next processes would start with "
            f"({type(error).__name__}); nothing has changed; see `ray status`"
        ) from error
    return list(zip(nodes, found, strict=True))


def file_problems(
    deployment: Deployment, places: Mapping[str, Place], looks: Collection[Look]
) -> dict[str, tuple[str, ...]]:
    """Return, by process, why those that restart could not use the files of TLS.

    Args:
        deployment: The settings of all processes.
        places: The place of each worker.
        looks: At the hosts that have processes.
    """
    by_node = {node["NodeID"]: found for node, found in looks}
    problems: dict[str, tuple[str, ...]] = {
        name: (by_node[where.node_id].wrong_files,)
        for name, where in places.items()
        if where.node_id in by_node
    }
    for node, found in looks:
        if deployment.home_resource in node["Resources"]:
            both = found.wrong_files, found.wrong_front_files
            # The gateway shows the cluster's certificate only to a router that asks for one.
            asks = bool(deployment.config.front_tls.client_authority_file)
            problems[ROUTER_NAME] = both
            problems[GATEWAY_NAME] = both if asks else both[1:]
    told = {name: tuple(filter(None, each)) for name, each in problems.items()}
    return {name: each for name, each in told.items() if each}


async def on_sound_hosts(
    deployment: Deployment, decide: Callable[[], tuple[T, dict[str, Place]]]
) -> tuple[T, dict[str, Place]]:
    """Return a decision and its new places, whose hosts can use their files of TLS now.

    Nothing awaits after the decision: while hosts look at their files, others may change the
    cluster, so it is made again.

    Args:
        deployment: The settings of all processes.
        decide: Returns a decision and the places of new workers; changes nothing.

    Raises:
        ClusterError: Raised by the decision, a host does not answer, or its files are wrong.
    """
    sound: set[str] = set()  # hosts, by node_id
    while True:
        decision, places = decide()
        if not deployment.config.tls.is_on:
            return decision, places
        new = {each["NodeID"]: each for each in _hosts_of(places) if each["NodeID"] not in sound}
        if not new:
            return decision, places
        looks = await look_at(deployment, new.values())
        if wrong := [found.wrong_files for _, found in looks if found.wrong_files]:
            told = (
                f"{', '.join(places)} could not start with these files; nothing has changed; "
                "mend the files, then try again"
            )
            raise StartError("\n".join([*wrong, told]))
        sound |= new.keys()


def _next_start_of(node: Node, settings: TlsSettings, authority: bytes, *, is_home: bool) -> Any:
    """Return a call that asks a host what its next processes would start with; see next_start."""
    # One call per process: a later call must not find this code still in the process's memory.
    one_call = ray.remote(num_cpus=0, max_retries=0, max_calls=1)
    task: Any = one_call(next_start)  # type: ignore[arg-type] # Ray's hints lack keywords
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    address = node["NodeManagerAddress"]
    return task.options(scheduling_strategy=where).remote(
        settings, address, authority, is_home=is_home
    )


def _hosts_of(places: Mapping[str, Place]) -> list[Node]:
    """Return the hosts on which Ray may start workers at these places now."""
    nodes, free = hosts_now()
    chosen = {each.node_id for each in places.values()}
    # Workers that nothing limits have no place: Ray starts them wherever it may.
    if any(not each.node_id and not is_limited(each.resources) for each in places.values()):
        chosen |= free.keys()
    return [each for each in nodes if each["Alive"] and each["NodeID"] in chosen]
