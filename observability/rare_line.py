"""Log lines that strangers, or one caller's many calls, cause: they must not fill the disk."""

import asyncio
import logging

from observability.logs import fields

LOG_PERIOD_S = 10.0


class RareLine:
    """Logs the first events of a period of LOG_PERIOD_S, and counts the others.

    Args:
        logger: Writes the lines.
        level: Their level.
        event: Their event name.
        most: Lines in a period.
    """

    def __init__(self, logger: logging.Logger, level: int, event: str, *, most: int = 1) -> None:
        self._logger = logger
        self._level = level
        self._event = event
        self._most = most
        self._num_shown = 0  # in this period
        self._ends_at = float("-inf")
        self._num_hidden = 0

    def write(self, **values: object) -> None:
        """Log an event with these fields, or count it; needs a running event loop."""
        now = asyncio.get_running_loop().time()
        if now >= self._ends_at:
            self._ends_at, self._num_shown = now + LOG_PERIOD_S, 0
        if self._num_shown >= self._most:
            self._num_hidden += 1
            return
        self._num_shown += 1
        extra = fields(**values, not_logged=self._num_hidden)
        self._logger.log(self._level, self._event, extra=extra)
        self._num_hidden = 0
