"""Checks the hosts of the attached Ray, before anything is started there."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.certificates import own_authority
from cluster.config import ClusterConfig
from cluster.environment import own_variables
from cluster.errors import ConfigError, PlacementError
from cluster.placement import host_options
from cluster.places import Node
from llm_engine.errors import EngineError
from llm_engine.model_identity import ModelIdentity, read_identity
from observability.last_line import last_line
from worker.own_host import HostFound, HostOptions, host_names, look

LOOK_TIMEOUT_S = 120.0  # for a process to start on each host and read some bytes of each tensor
CHECK_PERIOD_S = 0.2  # between two checks whether the start was given up


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One check of one host; see worker.own_host.look."""

    node: Node
    options: HostOptions


def check_hosts(
    config: ClusterConfig,
    device: str,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    check: Callable[[], None],
) -> list[str]:
    """Refuse hosts on which the router or a worker could not start.

    The check covers this process's host, where the router will be, and all hosts that Ray may give
    workers: it may move them at any time.

    Args:
        config, device: Configuration and device of the cluster.
        environment: The environment of its processes.
        say: Gets warnings and progress.
        check: Called repeatedly; an error that it raises ends the wait.

    Returns:
        The addresses on which the cluster will listen.

    Raises:
        ConfigError: The model or a file of TLS cannot be used here, or model_paths names a host
            that is not there.
        PlacementError: Has a line for each problem on a host.
    """
    assert config.model is not None
    try:
        expected = read_identity(config.model)
    except (EngineError, OSError) as error:
        raise ConfigError(f"model is {str(config.model)!r}: {error}") from error
    own_id = ray.get_runtime_context().get_node_id()
    nodes: list[Node] = [each for each in ray.nodes() if each["Alive"]]  # type: ignore[no-untyped-call]
    _check_names(config, nodes, say)
    looks = _looks(config, device, nodes, own_id)
    num_hosts = len({each.node["NodeID"] for each in looks})
    say(f"waiting until {num_hosts} host{'' if num_hosts == 1 else 's'} can be looked at")
    found = _look_at(looks, config, expected, environment, check)
    if problems := sorted({problem for each in found for problem in each.problems}):
        raise PlacementError("\n".join(problems))
    address_of = {
        each.node["NodeManagerAddress"]: one.address for each, one in zip(looks, found, strict=True)
    }
    if config.network_interface:
        _check_addresses(config.network_interface, address_of)
    return sorted(set(address_of.values()))


def _looks(config: ClusterConfig, device: str, nodes: Sequence[Node], own_id: str) -> list[Look]:
    """Return the checks that decide whether a cluster can start on these hosts."""
    options = host_options(config, device)
    workers = [Look(node=each, options=options) for each in nodes if _takes(each, config, device)]
    # The router takes the plain path, and has nothing to do with NCCL.
    fronts = [
        Look(node=each, options=replace(options, model_paths={}, nccl_interface=""))
        for each in nodes
        if each["NodeID"] == own_id
    ]
    return fronts + [each for each in workers if each not in fronts]


def _takes(node: Node, config: ClusterConfig, device: str) -> bool:
    """Return whether Ray may place a worker on a host."""
    resources = node["Resources"]
    if config.pool_resources:
        pools = [*(["prefill"] if config.prefill else []), "decode", *config.further_pools]
        return any(f"pagewire-{pool}" in resources for pool in pools)
    return device != "cuda" or "GPU" in resources


def _check_names(config: ClusterConfig, nodes: Sequence[Node], say: Callable[[str], None]) -> None:
    """Refuse paths for unknown hosts; if hosts may join later, only say so."""
    known = frozenset[str]().union(*map(host_names, nodes))
    unknown = [name for name in config.model_paths or {} if name not in known]
    if not unknown:
        return
    hosts = ", ".join(f"{n['NodeManagerAddress']} ({n['NodeManagerHostname']})" for n in nodes)
    told = f"model_paths: found {', '.join(map(repr, unknown))}"
    if config.pool_resources:
        say(
            f"note: {told}, which no host of the Ray cluster has as address, name or custom "
            f"resource yet; its hosts are {hosts}"
        )
        return
    raise ConfigError(
        f"{told}; allowed: the address, the name or a custom resource of a host of the Ray "
        f"cluster, which has {hosts}"
    )


def _check_addresses(interface: str, address_of: Mapping[str, str]) -> None:
    """Refuse an interface on which hosts would not find each other.

    Args:
        address_of: A host's address in Ray |-> its address on the interface.
    """
    told = ", ".join(f"{found} on {host}" for host, found in address_of.items())
    found = set(address_of.values())
    if len(found) < len(address_of):  # as of a bridge for containers
        raise PlacementError(
            f"network_interface is {interface!r}, where hosts have the same address ({told}); each "
            "must have its own"
        )
    if 0 < sum(":" in each for each in found) < len(found):
        raise PlacementError(
            f"network_interface is {interface!r}, where some hosts have an IPv4 address and others "
            f"only one of IPv6 ({told}); all must have the same kind"
        )


def _look_at(
    looks: Sequence[Look],
    config: ClusterConfig,
    expected: ModelIdentity,
    environment: Mapping[str, str],
    check: Callable[[], None],
) -> list[HostFound]:
    """Run all checks at the same time; a host that does not answer is a problem, too."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(look)
    authority = own_authority(config)
    calls = {}
    for each in looks:
        where = NodeAffinitySchedulingStrategy(each.node["NodeID"], soft=False)
        placed = task.options(scheduling_strategy=where, **own_variables(environment))
        names, address = host_names(each.node), each.node["NodeManagerAddress"]
        call = placed.remote(
            each.options, config.model, names, address, expected, config.tls, authority
        )
        calls[call] = each
    deadline = time.monotonic() + LOOK_TIMEOUT_S
    waiting = list(calls)
    try:
        while waiting and time.monotonic() < deadline:
            check()
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=CHECK_PERIOD_S)
        return [_found(call, each) for call, each in calls.items()]
    finally:
        for call in waiting:
            ray.cancel(call, force=True)


def _found(call: Any, taken: Look) -> HostFound:
    node = taken.node
    host = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    try:
        found: HostFound = ray.get(call, timeout=0)
        return found
    except ray.exceptions.GetTimeoutError:
        problem = f"{host} has not answered within {LOOK_TIMEOUT_S:.0f} s; its disk may hang"
    except ray.exceptions.RayError as error:
        problem = f"{host} cannot be checked: {last_line(error)}"
    return HostFound(address="", model=Path(), problems=(problem,))
