"""How many ports a cluster's processes need of the ranges that its options give them."""

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from options.ports import FreePorts


def check_port_ranges(
    config: ClusterConfig, device: str, num_prefill: int, num_decode: int, num_hosts: int = 1
) -> None:
    """Refuse ranges with fewer ports than the workers, the controller and the router need.

    Each host has all ports of a range. With several hosts, a range is refused only if it would be
    too small however the workers were placed.

    Args:
        config: The cluster.
        device: "cpu" or "cuda".
        num_prefill, num_decode: The numbers of its workers.
        num_hosts: The number of hosts that may have them.

    Raises:
        ConfigError: Says how many ports are needed.
    """
    workers = f"{num_prefill} prefill and {num_decode} decode workers"
    if config.metrics_ports is not None:
        _check_range(config.metrics_ports, num_prefill + num_decode, workers, num_hosts)
    if config.port_range:
        receives = num_prefill > 0 and not (device == "cuda" and config.page_transport == "nccl")
        others = {"controller": config.controller_port, "router": config.port}
        choosing = [name for name, port in others.items() if not port]
        needed = num_prefill + (2 if receives else 1) * num_decode + len(choosing)
        beside = f" with {' and '.join(choosing)}" if choosing else ""
        _check_range(config.free_ports, needed, workers + beside, num_hosts)


def _check_range(ports: FreePorts, needed: int, who: str, num_hosts: int) -> None:
    on_each = -(-needed // num_hosts)
    free = len(ports.of_range)
    found = len(FreePorts(ports.port_range).of_range)
    if free < on_each:
        has = "1 port" if found == 1 else f"{found} ports"
        on_each += found - free
        if free < found:
            has += f", {found - free} of them for servers with a port of their own"
        raise ConfigError(
            f"{ports.option}: found {ports.port_range!r}, which has {has}; allowed: {on_each} or "
            f"more, because {who} need {needed} on {num_hosts} host{'' if num_hosts == 1 else 's'}"
        )
