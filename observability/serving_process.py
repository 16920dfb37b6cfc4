"""Settles a process that has started and now serves: garbage collection, and turns of threads."""

import gc
import sys

YOUNG_OBJECTS = 20_000  # more than a step of many streams makes; to look at them takes below 1 ms
SWITCH_S = 0.0005


def settle_process() -> None:
    """Keep the collector of cyclic garbage, and threads that compute, from holding up streams.

    The collector skips everything that lives now, and looks at the rest less often. What a process
    makes for a token lives for some milliseconds and is in no cycle, but by default some hundred of
    these objects start a collection, and often one of all that was ever imported: that took an
    eighth of a router's time.

    A thread that holds Python's interpreter lock gives it up after 0.5 ms when another one waits,
    not after 5 ms. A worker's event loop then does not wait for the engine to plan a step, nor the
    engine for the loop to read a burst of messages.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    sys.setswitchinterval(SWITCH_S)
