"""The ports that a cluster's processes need of `port_range`."""

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from options.ports import num_ports


def check_port_range(
    config: ClusterConfig, device: str, num_prefill: int, num_decode: int, num_hosts: int = 1
) -> None:
    """Refuse a range with fewer ports than the workers and the controller need.

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
    needed = num_prefill + (2 if receives else 1) * num_decode + (not config.controller_port)
    on_each = -(-needed // num_hosts)
    if (found := num_ports(config.port_range)) < on_each:
        ports = "1 port" if found == 1 else f"{found} ports"
        raise ConfigError(
            f"port_range: found {config.port_range!r}, which has {ports}; allowed: {on_each} or "
            f"more, because {num_prefill} prefill and {num_decode} decode workers with their "
            f"controller need {needed} on {num_hosts} host{'' if num_hosts == 1 else 's'}"
        )
