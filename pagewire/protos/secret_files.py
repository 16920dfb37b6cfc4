"""Files with keys, secrets or tokens, which other users of a host should not read."""

import logging
import os
import stat
from typing import BinaryIO

log = logging.getLogger(__name__)


def told_if_public(path: object, mode: int) -> str:
    """Return what is wrong if all users of the host may read or change a file; else nothing.

    Args:
        path: Of the file.
        mode: Its `st_mode`.
    """
    mode = stat.S_IMODE(mode)
    may = [verb for verb, bit in (("read", stat.S_IROTH), ("change", stat.S_IWOTH)) if mode & bit]
    if not may:
        return ""
    return (
        f"{path} has mode {mode:04o}: all users of this host may {' and '.join(may)} it; use 0640"
    )


def warn_if_public(file: BinaryIO) -> None:
    """Log a warning if all users of the host may read or change an open file."""
    if told := told_if_public(file.name, os.fstat(file.fileno()).st_mode):
        log.warning("%s", told)
