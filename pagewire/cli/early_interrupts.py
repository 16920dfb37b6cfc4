"""Interrupts while modules are imported: small itself, because before it nothing catches one."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """While entered, let SIGINT end the process in silence; for imports, in the main thread.

    An exception would come out of whatever is being imported: as a traceback or, out of C++, as an
    abort. Enter it only where nothing is to be cleaned up. SIGINT stays ignored where it is.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
