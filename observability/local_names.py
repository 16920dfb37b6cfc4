"""The names by which clients may address a server that only its own host can reach.

A web page can make its own host name resolve to the loopback address (DNS rebinding). To a browser,
the server then has the page's origin, so the page may call it and read its answers. Only the Host
header distinguishes such calls from those of programs on this host.
"""

import ipaddress
from collections.abc import Collection

LOCAL = "localhost"


def is_local_name(value: str, names: Collection[str] = ()) -> bool:
    """Return whether a Host header may come from a program on this host.

    Args:
        value: The header's value, NAME or NAME:PORT; empty: none, so the caller is no browser.
        names: Allowed names, in lower case, beside addresses and localhost.
    """
    name = _name(value)
    return (
        not name
        or name == LOCAL
        or name.endswith(f".{LOCAL}")
        or name in names
        or _is_address(name)
    )


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
