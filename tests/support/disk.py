"""A full disk, as far as this process can tell."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_limited(num_bytes: int) -> Iterator[None]:
    """Let this process, and what it starts, write no file beyond a size while entered.

    The write fails as on a full disk, with EFBIG in place of ENOSPC.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
