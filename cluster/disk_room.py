"""Room on the disk for what the processes of a cluster write: sockets, logs, and Ray's token.

Ray ends at a full disk, or loses a process, and mostly cannot say why: its log is on that disk.
"""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import StartError

ROOM_MIB = 16  # a start writes less than one; logs grow to what RAY_ROTATION_MAX_BYTES says
# A disk, a user's quota, and the limit of a process for its files.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_room(folder: Path) -> None:
    """Refuse to start processes whose folder is on a full disk.

    It writes what it asks for, since a quota shows only then.

    Args:
        folder: Where they log.

    Raises:
        StartError: There is no room for ROOM_MIB.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(ROOM_MIB):
                file.write(bytes(2**20))
            file.flush()
    except OSError as error:
        if error.errno in _FULL:  # whoever writes there meets all other errors, too
            raise StartError(
                f"{folder}: found a full disk ({error.strerror}); allowed: one with room for "
                f"{ROOM_MIB} MiB of sockets and logs; {_REMEDY}"
            ) from error


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Have errors of files that are written while entered name their folder.

    Raises:
        StartError: A file could not be written.
    """
    try:
        yield
    except OSError as error:
        raise StartError(f"{folder} cannot be written: {error.strerror}; {_REMEDY}") from error


_REMEDY = (
    "free some space on its disk, or set RAY_TMPDIR to a folder on another one and start the "
    "cluster there"
)
