"""A range of ports for servers, for hosts behind a firewall."""

import random
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from options.kept_by_name import kept_by_name

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


@kept_by_name
@dataclass(frozen=True, slots=True)
class FreePorts:
    """The ports that servers without a fixed one may take; by default any.

    Args:
        port_range: As for `is_port_range`.
        fixed: Ports that options give to one server each; no other server takes them.
        option: The option that gives the range, for errors.
        is_in_order: Whether the lowest free port is taken, so that the first n ports are those of n
            servers; otherwise any free port is.
    """

    port_range: str = ""
    fixed: frozenset[int] = frozenset()
    option: str = "port_range"
    is_in_order: bool = False

    @property
    def of_range(self) -> list[int]:
        """All ports of the range that are not fixed; none without a range."""
        if not self.port_range:
            return []
        first, last = map(int, self.port_range.split("-"))
        return [port for port in range(first, last + 1) if port not in self.fixed]

    def listen(self, host: str, listen: Callable[[int], T], port: int = 0) -> T:
        """Return the result of `listen` for the first free port.

        Unless they are taken in order, the search begins at a random port, because processes of a
        host start at the same time.

        Args:
            host: Where it listens.
            listen: Listens on a port; raises OSError or RuntimeError if the port is taken. Without
                a range it is called once, with 0.
            port: The server's own port, the only one to try; 0: it has none.

        Raises:
            NoPortFree: All ports of the range are taken.
        """
        if port or not self.port_range:
            return listen(port)
        ports = self.of_range
        is_random = ports and not self.is_in_order
        begin = random.randrange(len(ports)) if is_random else 0  # noqa: S311 - not a secret
        for port in [*ports[begin:], *ports[:begin]]:
            if _is_taken(host, port):  # gRPC would write an error to the log
                continue
            try:
                return listen(port)
            except (OSError, RuntimeError):  # another process was faster
                continue
        raise NoPortFree(
            f"{self.option}: found {self.port_range!r}, of which all ports are taken on {host}; "
            "allowed: a range with a free one"
        )


ANY_PORT = FreePorts()


def _is_taken(host: str, port: int) -> bool:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        socket.create_server(address, family=family).close()
    except OSError:
        return True
    return False
