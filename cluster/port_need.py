"""The ports that a cluster's processes need of `port_range`."""

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from options.ports import FreePorts


def check_port_range(
    config: ClusterConfig, device: str, num_prefill: int, num_decode: int, num_hosts: int = 1
) -> None:
    """Refuse a range with fewer ports than the workers, the controller and the router need.

    On several hosts, of which each has all ports of the range, only what no choice of hosts could
    satisfy is refused.

    Args:
        config: The cluster.
        device: "cpu" or "cuda".
        num_prefill, num_decode: Its workers.
        num_hosts: The hosts that may have them.

    Raises:
        ConfigError: Says how many ports are needed.
    """
    if not config.port_range:
        return
    receives = num_prefill > 0 and not (device == "cuda" and config.page_transport == "nccl")
    others = {"controller": config.controller_port, "router": config.port}
    choosing = [name for name, port in others.items() if not port]
    needed = num_prefill + (2 if receives else 1) * num_decode + len(choosing)
    on_each = -(-needed // num_hosts)
    free = len(config.free_ports.of_range)
    found = len(FreePorts(config.port_range).of_range)
    if free < on_each:
        ports = "1 port" if found == 1 else f"{found} ports"
        on_each += found - free
        if free < found:
            ports += f", {found - free} of them for servers with a port of their own"
        beside = f" with {' and '.join(choosing)}" if choosing else ""
        raise ConfigError(
            f"port_range: found {config.port_range!r}, which has {ports}; allowed: {on_each} or "
            f"more, because {num_prefill} prefill and {num_decode} decode "
            f"workers{beside} need {needed} on {num_hosts} host{'' if num_hosts == 1 else 's'}"
        )
