"""Interrupts during imports. This module is small, because nothing catches one before it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Let SIGINT end the process silently meanwhile; for imports, in the main thread.

    An exception would leave an import as a traceback or, from C++, as an abort. Use it only where
    there is nothing to clean up. If SIGINT is ignored, it stays ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
