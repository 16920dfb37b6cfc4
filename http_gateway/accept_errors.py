"""What a gateway's event loop logs when it cannot accept a connection."""

import asyncio
import errno
import logging
from typing import Any

from observability.rare_line import RareLine

log = logging.getLogger(__name__)

OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class AcceptErrors:
    """An exception handler of an event loop, which logs a lack of files rarely, not at each try.

    asyncio pauses for a second and tries again; by default it logs a traceback for each connection
    that waits.
    """

    def __init__(self) -> None:
        self._line = RareLine(log, logging.WARNING, "accept_failed")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error that a loop met."""
        error = context.get("exception")
        is_accept = "socket" in context and "protocol" not in context
        if is_accept and isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES:
            self._line.write(reason=str(error))
        else:
            loop.default_exception_handler(context)
