"""The Rays on this host that other hosts can reach, by the sockets of their servers."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from cluster.local_ray import NAMES
from protos.addresses import is_loopback, join_address


@dataclass(frozen=True, kw_only=True, slots=True)
class RayListener:
    """A socket on which a server of Ray takes calls from other hosts."""

    process: str  # "gcs_server (pid 17)"
    address: str  # "[::]:6379"
    auth_mode: str  # RAY_AUTH_MODE of the process; empty: unset


def open_sockets(process: psutil.Process) -> list[str]:
    """Return the addresses, other than the loopback's, on which a process listens."""
    return [
        join_address(each.laddr.ip, each.laddr.port)
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and not is_loopback(each.laddr.ip)
    ]


def find_listeners(processes: Iterable[psutil.Process] | None = None) -> tuple[RayListener, ...]:
    """Search processes, by default all; leave out those that this user may not inspect."""
    found = []
    for process in psutil.process_iter() if processes is None else processes:
        with suppress(psutil.Error):
            if process.name() not in NAMES:
                continue
            found += [
                RayListener(
                    process=f"{process.name()} (pid {process.pid})",
                    address=address,
                    auth_mode=process.environ().get("RAY_AUTH_MODE", "").lower(),
                )
                for address in open_sockets(process)
            ]
    return tuple(found)
