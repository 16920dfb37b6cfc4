"""Ray's own processes on this host, which restart and stop everything else."""

from pathlib import Path

import psutil

from cluster.errors import RayLost
from cluster.private_folder import RayToken

NAMES = ("gcs_server", "raylet")


class LocalRay:
    """The processes of the Ray that this process started; none if it attached to a running one.

    Construct it when they run. Ray notices the end of one after a minute, or never.

    Args:
        token: Their token; `close` removes it.
        logs: The folder of their logs.
    """

    def __init__(self, token: RayToken | None = None, logs: Path = Path()) -> None:
        self._token = token
        self.logs = logs
        children = psutil.Process().children()
        self._processes = {each.name(): each for each in children if each.name() in NAMES}

    @property
    def lost(self) -> list[str]:
        """The names of ended processes."""
        return [name for name, each in self._processes.items() if not is_alive(each)]

    def check(self) -> None:
        """Raise RayLost if one has ended."""
        if self.lost:
            raise RayLost(
                f"Ray's {' and '.join(self.lost)} on this host has ended, perhaps killed for lack "
                f"of memory; everything else was stopped; see {self.logs}"
            )

    def close(self) -> None:
        """Remove their token, once they have ended."""
        if self._token is not None:
            self._token.remove()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
