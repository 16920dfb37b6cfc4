"""A process that serves: its age, its garbage collection, its thread switching, and its end."""

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from observability.logs import fields

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 15.0  # beyond the grace, for everything that then ends
YOUNG_OBJECTS = 20_000  # more than a step of many streams makes; a collection takes below 1 ms
SWITCH_S = 0.0005


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the collector of cyclic garbage from what is made while entered, for imports.

    Imports make hundreds of thousands of objects that stay. The collector would look at them again
    and again, which takes a tenth of the import of torch; afterwards, three looks at all of them
    would take as long. Their garbage, below 1 MiB, stays, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle_process() -> None:
    """Keep the collector of cyclic garbage, and computing threads, from delaying streams.

    The collector skips all objects that live now and runs less often on the rest. The objects that
    a process makes for a token live for some milliseconds and are in no cycle, but by default a few
    hundred of them start a collection, often one of everything ever imported: that took an eighth
    of a router's time.

    A thread that holds Python's interpreter lock gives it up after 0.5 ms when another one waits,
    not after 5 ms. A worker's event loop then does not wait for the engine to plan a step, nor the
    engine for the loop to read a burst of messages.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    sys.setswitchinterval(SWITCH_S)


def process_age_s() -> float:
    """Return how long this process has existed, imports included."""
    # After the name in parentheses, which may have spaces, the 20th field is the start, in ticks.
    words = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started_s = int(words[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


async def stop_in_time(
    stop: Callable[[float], Awaitable[None]], grace_s: float, **names: str
) -> None:
    """Stop in order; return also if that fails or takes too long, as the process ends then.

    Args:
        stop: Gives running work its argument in seconds, then ends everything.
        grace_s: That argument.
        names: Fields of the log line about a failure.
    """
    try:
        async with asyncio.timeout(grace_s + CLOSE_TIMEOUT_S):
            await stop(grace_s)
    except Exception:
        log.exception("stop_failed", extra=fields(**names))
