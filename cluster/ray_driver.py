"""What `ray.init` does to the process that calls it, beyond attaching it to a Ray."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import utils as ray_utils  # Ray has no public name for this

JOB = "pagewire"


@contextmanager
def unobtrusive_driver() -> Iterator[None]:
    """Have `ray.init` note no command line, and leave SIGTERM alone, while entered.

    Ray shows the command line of each process that has attached to it, and a prompt may stand
    there. Its handler of SIGTERM prints a stack. SIGTERM waits until `ray.init` is done.
    """
    describe = ray_utils.get_entrypoint_name
    ray_utils.get_entrypoint_name = lambda: JOB
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        ray_utils.get_entrypoint_name = describe
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
