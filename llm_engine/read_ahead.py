"""Has the kernel read the weights into its cache while the processes that need them start."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PIECE_BYTES = 64 * 2**20  # between two looks whether anybody still needs them


@contextmanager
def reading_ahead(paths: Sequence[Path], most_bytes: int) -> Iterator[None]:
    """Read files ahead while entered; a file that cannot be read is left to its reader.

    Args:
        paths: The files, in the order in which they are needed.
        most_bytes: To read of them together; more than memory holds would displace the beginning.
    """
    has_ended = threading.Event()
    reader = threading.Thread(
        target=_read_ahead, args=(paths, most_bytes, has_ended), name="read-ahead", daemon=True
    )
    reader.start()
    try:
        yield
    finally:
        has_ended.set()
        reader.join()


def _read_ahead(paths: Sequence[Path], most_bytes: int, has_ended: threading.Event) -> None:
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            num_bytes = min(os.fstat(file.fileno()).st_size, most_bytes)
            most_bytes -= num_bytes
            for begin in range(0, num_bytes, PIECE_BYTES):
                if has_ended.is_set():
                    return
                # This only asks the disk, but has to wait where its queue is full.
                wanted = min(PIECE_BYTES, num_bytes - begin)
                os.posix_fadvise(file.fileno(), begin, wanted, os.POSIX_FADV_WILLNEED)
