"""The Ray of `pagewire up` on this host: its process and its address.

That process (cli/local_head.py) locks a file that only its user can read. This prevents a second
one, and an unlocked file shows that the process is gone, however it ended.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from cluster.disk_room import writing_in
from cluster.errors import StartError
from cluster.private_folder import is_locked, private_folder, remove_left_behind

NAME = "head"  # of the file, in the private folder
LOG_NAME = "head.log"  # beside it: the output of the process
LOOK_S = 0.01  # more than a look for a head takes
ERROR = "error: "  # begins the line there that says why it ended


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalHead:
    """A Ray that runs."""

    pid: int  # of its process
    ray_address: str  # host:port
    token_path: str  # of Ray's token, which only this user reads


class HeadFile:
    """The locked file of a running head, as its process holds it."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def publish(self, head: LocalHead) -> None:
        """Publish its address; StartError: it cannot be written."""
        with writing_in(private_folder()):
            self._file.write(json.dumps(asdict(head)))
            self._file.flush()


@contextmanager
def holding_head_file() -> Iterator[HeadFile]:
    """Hold the file while entered, and remove it then.

    Raises:
        StartError: Another process holds it, or it cannot be written.
    """
    path = private_folder() / NAME
    while True:
        with writing_in(path.parent):
            file = os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "r+")
        if not _lock(file):
            file.close()
            raise StartError("another `pagewire up` has started a Ray on this host")
        if _is_at(path, file):
            break
        file.close()  # its last holder removed it before it was locked here
    try:
        file.truncate()  # a killed holder has left its text
        yield HeadFile(file)
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # of what a full disk has kept it from writing
            file.close()


def find_head() -> LocalHead | None:
    """Return the head that runs; None: there is none, or it has not published itself yet."""
    try:
        file = (private_folder() / NAME).open(encoding="utf-8")
    except FileNotFoundError:
        return None
    with file:
        return _published(file) if is_locked(file) else None


def how_head_ended() -> str:
    """Return how the last head ended, if nobody stopped it; empty: none has ended like that."""
    folder = private_folder()
    with suppress(FileNotFoundError), (folder / NAME).open(encoding="utf-8") as file:
        if is_locked(file):
            return ""
        if killed := _published(file):
            return f"process {killed.pid}, which ran it, was killed"
    with suppress(FileNotFoundError), head_log().open(encoding="utf-8", errors="replace") as log:
        ended_at = datetime.fromtimestamp(os.fstat(log.fileno()).st_mtime, UTC)
        for line in reversed(log.read().splitlines()):
            if line.startswith(ERROR):
                return f"it ended at {ended_at:%Y-%m-%d %H:%M} UTC: {line.removeprefix(ERROR)}"
    return ""


def remove_head_left_behind() -> None:
    """Remove file and token of a head that was killed, if nobody holds them."""
    folder = private_folder()
    remove_left_behind(folder, "token")
    path = folder / NAME
    with suppress(OSError), path.open(encoding="utf-8") as file:  # it is held, or not there
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, file):
            path.unlink()


def head_log() -> Path:
    """Return the file with the log of the process."""
    return private_folder() / LOG_NAME


def _lock(file: IO[str]) -> bool:
    """Lock a file for its process; False: another process holds it.

    Whoever looks for a head locks its file, too, for a moment: `pagewire up` does so while this
    starts.
    """
    while True:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if is_locked(file):
            return False
        time.sleep(LOOK_S)


def _published(file: IO[str]) -> LocalHead | None:
    """Return what a head has published in its file; None: it is being written."""
    try:
        return LocalHead(**json.loads(file.read()))
    except ValueError:
        return None


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
