"""The address that a host has on a network interface, which has the same name on all hosts."""

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

_NAME = re.compile(r"[^\s/,=^:]{1,15}")  # as Linux has them; the rest means something to NCCL


class NoAddress(Exception):
    """This host has no interface of that name, or none with an address that others can use."""


def is_interface(value: object) -> bool:
    """Tell whether a value can be the name of an interface, or is empty: none is chosen."""
    return isinstance(value, str) and (value == "" or _NAME.fullmatch(value) is not None)


def address_on(interface: str, *, option: str = "network_interface") -> str:
    """Return the address of this host on an interface: the first IPv4 one, else the first IPv6 one.

    Link-local addresses of IPv6 are left out: they mean nothing without a zone, which is another
    one on each host.

    Args:
        interface: Its name.
        option: That names it, for the error.

    Raises:
        NoAddress: Names the option, this host, what is wrong and the interfaces that could do.
    """
    import psutil  # only who has chosen an interface needs it

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
        reason = "which has no IPv4 address, and no IPv6 address but link-local ones"
    where = f"{option} is {interface!r}, {reason} on {socket.gethostname()}"
    if not usable:
        raise NoAddress(f"{where}, where no interface has an address")
    allowed = ", ".join(f"{name} ({address})" for name, address in usable.items())
    raise NoAddress(f"{where}; it must be one of {allowed}")


def _best(addresses: Iterable[str]) -> str:
    """Return the address to use; empty: there is none."""
    parsed = [ipaddress.ip_address(each.partition("%")[0]) for each in addresses]
    good = [each for each in parsed if each.version == 4 or not each.is_link_local]
    return str(min(good, key=lambda each: each.version, default=""))
