"""A range of ports for servers, for hosts behind a firewall."""

import random
import re
import socket
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOWEST = 1024  # lower ports need privileges
_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")


class NoPortFree(Exception):
    """All ports of a range are taken."""


def is_port_range(value: object) -> bool:
    """Return whether a value is the text of a range, FIRST-LAST, or empty for any free port."""
    if value == "":
        return True
    found = _RANGE.fullmatch(value) if isinstance(value, str) else None
    return found is not None and LOWEST <= int(found[1]) <= int(found[2]) <= 65535


def num_ports(port_range: str) -> int:
    """Return how many ports a range has that is not empty."""
    first, last = map(int, port_range.split("-"))
    return last - first + 1


def listen_within(port_range: str, host: str, listen: Callable[[int], T]) -> T:
    """Return the result of `listen` for the first free port of a range.

    The search begins at a random port, because processes of a host start at the same time.

    Args:
        port_range: As for `is_port_range`. Empty: `listen` is called once, with 0.
        host: Where it listens.
        listen: Listens on a port; raises OSError or RuntimeError if that is taken.

    Raises:
        NoPortFree: All are taken.
    """
    if not port_range:
        return listen(0)
    first = int(port_range.partition("-")[0])
    count = num_ports(port_range)
    begin = random.randrange(count)  # noqa: S311 - not a secret
    for index in range(count):
        port = first + (begin + index) % count
        if _is_taken(host, port):  # gRPC would write an error to the log
            continue
        try:
            return listen(port)
        except (OSError, RuntimeError):  # another process was faster
            continue
    raise NoPortFree(
        f"port_range: found {port_range!r}, of which all ports are taken on {host}; allowed: a "
        "range with a free one"
    )


def _is_taken(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError:
        return True
    return False
