"""Gives this host other network interfaces."""

import socket
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace

import psutil
import pytest


def have_interfaces(
    monkeypatch: pytest.MonkeyPatch,
    addresses: Mapping[str, Sequence[str]],
    *,
    down: Collection[str] = (),
    host: str = "gpu-a",
) -> None:
    """Give this host a name and interfaces.

    Args:
        addresses: interface |-> its addresses, as psutil writes them.
        down: The interfaces that are down.
    """
    found = {
        name: [SimpleNamespace(family=_family(each), address=each) for each in of_one]
        for name, of_one in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    stats = {name: SimpleNamespace(isup=name not in down) for name in addresses}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(socket, "gethostname", lambda: host)


def _family(address: str) -> int:
    if address.count(":") == 5 and "%" not in address:  # of hardware
        return psutil.AF_LINK
    return socket.AF_INET6 if ":" in address else socket.AF_INET
