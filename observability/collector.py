"""Keeps Python's collector of cyclic garbage from holding up streams."""

import gc

YOUNG_OBJECTS = 20_000  # more than a step of many streams makes; to look at them takes below 1 ms


def settle_collector() -> None:
    """Let the collector skip everything that lives now, and look at the rest less often.

    For a process that has started and now serves. What it makes for a token lives for some
    milliseconds and is in no cycle, but by default some hundred of these objects start a
    collection, and often one of all that was ever imported: that took an eighth of a router's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
