"""The names by which clients may address a gateway that only its own host can reach.

A web page can make its own host name resolve to the loopback address (DNS rebinding). To a browser,
the gateway then has the page's origin, so the page may call it and read its answers. Only the Host
header distinguishes such calls from those of programs on this host.
"""

import ipaddress
from collections.abc import Collection

from http_gateway.errors import HttpError
from pagewire.arguments import shown

LOCAL = "localhost"


def check_host(value: str, names: Collection[str]) -> None:
    """Check a Host header.

    Args:
        value: The header's value, NAME or NAME:PORT; empty: none, so the caller is no browser.
        names: Allowed names, in lower case, beside addresses and localhost.

    Raises:
        HttpError: The name is another one.
    """
    name = _name(value)
    if (
        not name
        or name == LOCAL
        or name.endswith(f".{LOCAL}")
        or name in names
        or _is_address(name)
    ):
        return
    allowed = "an address, localhost, or a name of http_gateway.allow_hosts"
    message = f"host: found {shown(value)}; allowed: {allowed}"
    raise HttpError(403, message, param="host", code="unknown_host")


def _name(value: str) -> str:
    """Return the name or address, in lower case and without port."""
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
