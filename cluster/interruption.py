"""Ctrl-C of a command for a running cluster, which completes the request without the command."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import Interrupted

NOTHING_CHANGED = "nothing has changed"


@contextmanager
def told_at_interrupt(goes_on: str) -> Iterator[None]:
    """While entered, Ctrl-C raises Interrupted, which says what continues without the command."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, goes_on) from None
