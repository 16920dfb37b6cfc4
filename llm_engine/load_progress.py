"""Reports the progress of loading weights at a limited rate."""

import time
from collections.abc import Callable

REPORT_PERIOD_S = 0.5  # between two reports; faster loads report nothing

ReportLoaded = Callable[[int, int], None]  # loaded bytes, all bytes


class LoadProgress:
    """Counts bytes and reports them now and then, and at the end if it has reported before."""

    def __init__(
        self,
        total_bytes: int,
        report: ReportLoaded,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_bytes = total_bytes
        self._report = report
        self._clock = clock
        self._done_bytes = 0
        self._has_reported = False
        self._next_at = clock() + REPORT_PERIOD_S

    def advance(self, num_bytes: int) -> None:
        """Count bytes loaded since the last call."""
        self._done_bytes += num_bytes
        is_end = self._done_bytes == self._total_bytes and self._has_reported
        if is_end or self._clock() >= self._next_at:
            self._next_at = self._clock() + REPORT_PERIOD_S
            self._has_reported = True
            self._report(self._done_bytes, self._total_bytes)
