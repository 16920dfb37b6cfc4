"""A folder that only this user can enter, with Ray's token in it, on a host that others share.

Ray makes the folder of its sockets and logs writable for everybody; within a folder that only its
owner can enter, that is harmless. The token, which every call to a Ray started here needs, lies
beside it, and so does what clients need to find the clusters of this user.
"""

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

from cluster.disk_room import writing_in
from cluster.errors import StartError

DEFAULT_PARENT = "/tmp"  # noqa: S108 - the folder in it is checked; Ray's sockets need short paths
TOKEN_BYTES = 32
NEW = "new"  # kind of a file until it is written
TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - a variable of Ray, which names a file


def private_folder() -> Path:
    """Return the folder of this user's clusters on this host; make it if it is not there.

    Raises:
        StartError: Somebody else could read or change what is in it, or Ray takes no such path.
    """
    parent = os.environ.get("RAY_TMPDIR") or DEFAULT_PARENT
    if not (parent.startswith("/") and parent.isascii()):
        raise StartError(f"RAY_TMPDIR: found {parent!r}; allowed: an absolute path in ASCII")
    folder = Path(parent) / f"pagewire-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # not what a link leads to
    except OSError as error:
        raise StartError(f"cannot make {folder} for Ray's sockets and logs: {error}") from error
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        raise StartError(
            f"{folder} must be a folder that only user {os.geteuid()} can enter, since Ray's token "
            "and sockets lie in it; remove it, or set RAY_TMPDIR to another folder"
        )
    return folder


class LockedFile:
    """A file that only this user can read; its maker locks it until it removes it, or ends.

    Removes those of the same kind whose makers have ended.

    Args:
        folder: As private_folder returns it.
        kind: Its name begins with it.
        text: What it holds.

    Raises:
        StartError: It cannot be written.
    """

    def __init__(self, folder: Path, kind: str, text: str) -> None:
        for each in (kind, NEW):
            remove_left_behind(folder, each)
        name = secrets.token_hex(8)
        new, self.path = folder / f"{NEW}-{name}", folder / f"{kind}-{name}"
        with writing_in(folder):
            # Open, and with it locked, until it is removed.
            self._file = os.fdopen(_locked(new), "w")
            try:
                self._file.write(text)
                self._file.flush()
                new.rename(self.path)  # it is never there without its lock
            except OSError:
                new.unlink()
                with suppress(OSError):  # of what it still wants to write
                    self._file.close()
                raise

    def remove(self) -> None:
        """Remove it; a second call does nothing."""
        self.path.unlink(missing_ok=True)
        self._file.close()


class RayToken:
    """A separate token for each Ray that is started here: in a file, until it is removed.

    Ray's processes find the file through the environment. It is locked while its maker lives, so a
    later start recognizes and removes abandoned ones.

    Args:
        folder: As private_folder returns it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = LockedFile(folder, "token", secrets.token_hex(TOKEN_BYTES))
        os.environ[TOKEN_PATH_VARIABLE] = str(self._file.path)
        os.environ.pop("RAY_AUTH_TOKEN", None)  # another cluster's; Ray would prefer it

    def remove(self) -> None:
        """Remove the file; call it when Ray has ended. A second call does nothing."""
        self._file.remove()
        os.environ.pop(TOKEN_PATH_VARIABLE, None)


def remove_left_behind(folder: Path, kind: str) -> None:
    """Remove the files of a kind whose makers have ended without doing so."""
    for path in folder.glob(f"{kind}-*"):
        with suppress(OSError), path.open("rb") as file:  # locked, or just removed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _locked(path: Path) -> int:
    """Make a file that only this user can read, and lock it; return its descriptor."""
    while True:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # before it was locked, another process took it for one left behind


def is_locked(file: IO[str]) -> bool:
    """Return whether the maker of a file still runs."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
