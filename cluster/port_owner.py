"""Who listens on a port of this host that a start needs, as far as this user may know."""

import shlex
from contextlib import suppress

import psutil

from cluster.certificates import ANY_HOST
from cluster.local_head import find_head
from cluster.served import served_clusters
from pagewire import AuthenticationError, Client, PagewireError, Tls
from protos.addresses import join_address

ROUTER_TIMEOUT_S = 2.0  # of a call to the router's port
MOST_SHOWN_CHARS = 60  # of a command line


def port_owner(host: str, port: int) -> str:
    """Return who listens, in words that follow "in use by"; empty: unknown.

    Args:
        host: An IP address of this host.
        port: A port of that host.
    """
    with suppress(psutil.Error):  # it has just ended, or this user may not look
        if process := _listener(host, port):
            return _told(process)
    if is_router(join_address(host, port), None):
        return "a Pagewire router of another user or container"
    return ""


def is_own_cluster(host: str, port: int) -> bool:
    """Return whether a cluster that this user started on this host listens.

    Args:
        host: An IP address of this host.
        port: A port of that host.
    """
    with suppress(psutil.Error):
        if process := _listener(host, port):
            return bool(_cluster_of(process))
    return False


def is_router(address: str, tls: Tls | None) -> bool:
    """Return whether a router answers; it does so even while it waits for workers.

    Args:
        address: Where to ask, host:port.
        tls: How to connect; None: in clear.
    """
    try:
        with Client(address, default_timeout_s=ROUTER_TIMEOUT_S, tls=tls) as client:
            client.status()
    except AuthenticationError:
        return True  # which wants to know for whom it is asked
    except PagewireError:
        return False
    return True


def _listener(host: str, port: int) -> psutil.Process | None:
    """Return the process that listens; None: nobody does, or the process is not shown."""
    for each in psutil.net_connections("tcp"):
        local = each.laddr
        if local and local.port == port and each.pid and each.status == psutil.CONN_LISTEN:
            found = local.ip.removeprefix("::ffff:")  # IPv4 on a socket of IPv6, as gRPC has it
            if found in (host, *ANY_HOST) or host in ANY_HOST:
                return psutil.Process(each.pid)
    return None


def _told(process: psutil.Process) -> str:
    if cluster := _cluster_of(process):
        return cluster
    words = filter(None, process.cmdline())  # those of Ray's processes have many empty ones
    command = " ".join(shlex.join(words).split()) or process.name()  # in one line
    if len(command) > MOST_SHOWN_CHARS:
        command = f"{command[:MOST_SHOWN_CHARS]}..."
    return f"process {process.pid} ({command})"


def _cluster_of(process: psutil.Process) -> str:
    """Return the cluster of this user to which a process belongs, and what ends it."""
    pids = {process.pid, *(each.pid for each in process.parents())}
    head = find_head()
    if head is not None and head.pid in pids:
        return "the cluster of `pagewire up`, which `pagewire down` ends"
    for served in served_clusters():
        if served.pid in pids:
            which = f"process {served.pid}, router at {served.address}"
            return f"`pagewire serve` ({which}), which Ctrl-C ends"
    return ""
