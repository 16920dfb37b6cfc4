"""The addresses of this host, as the options that name a network interface determine them."""

import os
from dataclasses import replace

from cluster.config import LOOPBACK, ClusterConfig
from cluster.environment import NCCL_VARIABLE
from cluster.errors import ConfigError
from options.interfaces import NoAddress, address_on


def own_address(config: ClusterConfig) -> str:
    """Return the address at which other hosts of the cluster reach this one, which is in its Ray.

    Raises:
        NoAddress: There is none on network_interface.
    """
    if config.network_interface:
        return address_on(config.network_interface)
    if not config.ray_address:
        return LOOPBACK
    import ray  # takes a second, and what refuses a start does without

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def with_own_host(config: ClusterConfig) -> ClusterConfig:
    """Return a configuration whose `host` is an address even if an interface determines it.

    Raises:
        ConfigError: This host has no address on network_interface.
    """
    if config.host:
        return config
    return replace(config, host=_address_on(config.network_interface, "network_interface"))


def check_interfaces(config: ClusterConfig) -> None:
    """Refuse interfaces that this host, which runs controller and router, does not have.

    Raises:
        ConfigError: Names the option, what was found and what is allowed.
    """
    if config.network_interface:
        _address_on(config.network_interface, "network_interface")
    wanted = config.nccl_interface
    given = os.environ.get(NCCL_VARIABLE, "")  # which all workers are given
    if given and wanted and given.removeprefix("=") != wanted:
        raise ConfigError(
            f"nccl_interface: found {wanted!r}, and {NCCL_VARIABLE} is {given!r} in the "
            "environment; allowed: the same value in both, or only one of them"
        )
    if wanted and not config.ray_address:
        _address_on(wanted, "nccl_interface")


def _address_on(interface: str, option: str) -> str:
    try:
        return address_on(interface, option=option)
    except NoAddress as error:
        raise ConfigError(str(error)) from error
