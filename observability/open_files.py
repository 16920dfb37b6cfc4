"""How many files, and so connections, a serving process may open."""

import logging
import resource
from contextlib import suppress

from observability.logs import fields

log = logging.getLogger(__name__)

FILES_BESIDE = 200  # libraries, children, and connections to other processes of the cluster


def raise_file_limit(max_connections: int) -> None:
    """Let this process open all files that the system allows, and warn if those are too few.

    Shells usually set 1024, below the hard limit, because of programs that call select(). A server
    that has reached its limit accepts no further connection, whoever opened the others.

    Args:
        max_connections: Connections that the process accepts.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # the hard limit is above the kernel's own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    needed = max_connections + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < needed:
        reason = (
            f"open files (ulimit -n): found {soft}; allowed: at least {needed}, for "
            f"{max_connections} connections"
        )
        log.warning("few_open_files", extra=fields(reason=reason))
