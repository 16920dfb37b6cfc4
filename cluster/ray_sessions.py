"""Folders of Ray's sessions on this host: one for each Ray that was started, with sockets and logs.

Ray never removes them. A folder's name ends with the id of the process that started the Ray.
"""

import shutil
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import ray

CLOCKS_S = 60.0  # by which the clocks of files and processes may differ
ANSWER_TIMEOUT_S = 0.5  # of a process of Ray that listens


def session_logs() -> Path:
    """Return the folder of the logs of the attached Ray, which has the same name on each host.

    `session_latest` would lead to the Ray that this user started last.
    """
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "logs"


def remove_ended_sessions(folder: Path) -> None:
    """Remove sessions that no process uses, except the last, for its logs.

    Args:
        folder: Ray's folder of sessions; it need not exist.
    """
    sessions = [each for each in folder.glob("session_*_*") if not each.is_symlink()]
    ended = sorted(each for each in sessions if not _is_used(each))  # their names begin with dates
    for each in ended[:-1]:
        shutil.rmtree(each, ignore_errors=True)  # another start may do the same
    latest = folder / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)  # Ray would leave it dangling


def _is_used(session: Path) -> bool:
    starter = session.name.rpartition("_")[2]
    if starter.isdigit() and _has_started(int(starter), session):
        return True  # perhaps nothing listens yet
    return any(_listens(each) for each in session.glob("sockets/*"))


def _has_started(pid: int, session: Path) -> bool:
    """Return whether a process runs that is old enough to have started a session.

    The system reuses process ids: in a container, each start may be process 1.
    """
    with suppress(psutil.Error, OSError):
        return psutil.Process(pid).create_time() <= session.stat().st_mtime + CLOCKS_S
    return False


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it is slow
            return True
    return True
