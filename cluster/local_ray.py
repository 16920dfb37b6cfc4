"""Ray's own processes on this host, without which nothing is started again and nothing stops."""

from pathlib import Path

import psutil

from cluster.errors import RayLost
from cluster.private_folder import RayToken

NAMES = ("gcs_server", "raylet")


class LocalRay:
    """Those that this process has started; none where it is attached to a Ray that ran before.

    Make it when they run. Ray itself notices the end of one after a minute, or never.

    Args:
        token: Theirs; removed by `close`.
        logs: The folder of their logs.
    """

    def __init__(self, token: RayToken | None = None, logs: Path = Path()) -> None:
        self._token = token
        self._logs = logs
        children = psutil.Process().children()
        self._processes = {each.name(): each for each in children if each.name() in NAMES}

    @property
    def lost(self) -> list[str]:
        """The names of those that have ended."""
        return [name for name, each in self._processes.items() if not is_alive(each)]

    def check(self) -> None:
        """Raise RayLost if one has ended."""
        if self.lost:
            raise RayLost(
                f"Ray's {' and '.join(self.lost)} on this host has ended, perhaps killed for want "
                f"of memory; everything else was stopped; see {self._logs}"
            )

    def close(self) -> None:
        """Forget what they needed, when they have ended."""
        if self._token is not None:
            self._token.remove()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process has not ended; one that nobody has collected has."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
