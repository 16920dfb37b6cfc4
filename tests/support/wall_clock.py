"""Bounds of wall-clock time, on hosts that compute other things, too."""

import os
from pathlib import Path


class TooSlow(AssertionError):
    """Something took longer than it may: the only failure after which pytest tries again.

    A host that stands still for a second does so once; code that is too slow is so each time.
    """


def assert_within(seconds: float, limit_s: float) -> None:
    if not seconds < limit_s:
        raise TooSlow(f"took {seconds:.2f} s; allowed: at most {limit_s} s")


def on_this_host(limit_s: float) -> float:
    """Return a bound, extended where more processes want to run than there are cores."""
    load, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    # The load of the last minute does not know of what has just begun.
    num_wanting = max(float(load), int(running.partition("/")[0]))
    return limit_s * max(1.0, num_wanting / (os.cpu_count() or 1))
