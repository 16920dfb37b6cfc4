"""Bounds of wall-clock time, on hosts that compute other things, too."""

import os


class TooSlow(AssertionError):
    """Something took longer than it may: the only failure after which pytest tries again.

    A host that stands still for a second does so once; code that is too slow is so each time.
    """


def assert_within(seconds: float, limit_s: float) -> None:
    if not seconds < limit_s:
        raise TooSlow(f"took {seconds:.2f} s; allowed: at most {limit_s} s")


def on_this_host(limit_s: float) -> float:
    """Return a bound, extended where more processes want to run than there are cores."""
    return limit_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
