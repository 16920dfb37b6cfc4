"""Random ids of requests."""

import secrets
from collections.abc import Callable, Iterator

ID_BYTES = 16
_AT_ONCE = 64  # ids of one system call, which costs more than they do


def random_ids() -> Callable[[], str]:
    """Return a source of ids, each 32 random hexadecimal digits."""
    return _ids().__next__


def _ids() -> Iterator[str]:
    while True:
        digits = secrets.token_hex(_AT_ONCE * ID_BYTES)
        for start in range(0, len(digits), 2 * ID_BYTES):
            yield digits[start : start + 2 * ID_BYTES]
