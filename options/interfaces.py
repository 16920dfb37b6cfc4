"""Finds a host's address on a network interface, whose name is the same on all hosts."""

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

_NAME = re.compile(r"[^\s/,=^:]{1,15}")  # Linux's rules; other characters are syntax of NCCL


class NoAddress(Exception):
    """This host has no interface of that name, or it has no address that other hosts can use."""


def is_interface(value: object) -> bool:
    """Return whether a value can be the name of an interface, or is empty for none."""
    return isinstance(value, str) and (value == "" or _NAME.fullmatch(value) is not None)


def address_on(interface: str, *, option: str = "network_interface") -> str:
    """Return the address of this host on an interface: the first IPv4 one, else the first IPv6 one.

    Link-local IPv6 addresses are ignored: they need a zone, which differs by host.

    Args:
        interface: The name of the interface.
        option: The option that names it, for the error.

    Raises:
        NoAddress: Names the option, this host, the fault and the usable interfaces.
    """
    import psutil  # needed only if an interface is chosen

    # interface |-> its addresses
    addresses: Mapping[str, list[str]] = {
        name: [each.address for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
    }
    down = {name for name, each in psutil.net_if_stats().items() if not each.isup}
    usable = {
        name: best
        for name, found in addresses.items()
        if name not in down and (best := _best(found))
    }
    if interface in usable:
        return usable[interface]
    if interface not in addresses:
        reason = "which does not exist"
    elif interface in down:
        reason = "which is down"
    else:
        reason = "which has neither an IPv4 address nor an IPv6 address that is not link-local"
    where = f"{option}: found {interface!r}, {reason} on {socket.gethostname()}"
    if not usable:
        raise NoAddress(f"{where}, where no interface has an address")
    allowed = ", ".join(f"{name} ({address})" for name, address in usable.items())
    raise NoAddress(f"{where}; allowed: {allowed}")


def _best(addresses: Iterable[str]) -> str:
    """Return the address to use; empty: none."""
    parsed = [ipaddress.ip_address(each.partition("%")[0]) for each in addresses]
    good = [each for each in parsed if each.version == 4 or not each.is_link_local]
    return str(min(good, key=lambda each: each.version, default=""))
