"""Notes the stop signals of a command for waits to check.

An exception in the middle of a start of Ray would leave its processes behind.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from cluster.descendants import kill_descendants
from cluster.errors import Interrupted
from observability.logs import fields
from pagewire.cli.stopped import Stopped

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STANDARD_OUTPUTS = (1, 2)  # file descriptors


class StopSignals:
    """While entered, notes SIGINT, SIGTERM and SIGHUP, which a closing terminal sends.

    A second SIGINT or SIGTERM ends the process and all it started at once. Under nohup SIGHUP stays
    ignored. Enter it in the main thread, before Ray starts.
    """

    def __init__(self) -> None:
        self.stopped = Stopped()
        # A note for Interrupted on what a signal does not end.
        self.goes_on = ""
        self._number = 0
        self._previous: dict[int, Any] = {}  # signal number |-> handler
        self._terminals: list[int] = []  # file descriptors
        self._on_stop: Callable[[], object] = lambda: None

    def __enter__(self) -> "StopSignals":
        self._previous = {each: signal.getsignal(each) for each in STOP_SIGNALS}
        if self._previous[signal.SIGHUP] is signal.SIG_IGN:
            del self._previous[signal.SIGHUP]
        self._terminals = [each for each in STANDARD_OUTPUTS if os.isatty(each)]
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals, also back from code that has taken them meanwhile."""
        for each in self._previous:
            signal.signal(each, self._note)

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.stopped.is_set():
            raise Interrupted(self._number, self.goes_on)

    async def wait_beside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Wait for a signal while a coroutine runs, which then is cancelled and has ended.

        Args:
            work: May end before. A bug in it is logged, and ends nothing else.
            name: Of its task.
        """
        task = asyncio.create_task(_logged(work, name), name=name)
        try:
            await asyncio.to_thread(self.stopped.wait)
        finally:
            task.cancel()
            await asyncio.wait([task])

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine to its end; the first signal cancels it, and raises Interrupted."""

        async def cancellable() -> None:
            task = asyncio.ensure_future(work)
            loop = asyncio.get_running_loop()
            self._on_stop = lambda: loop.call_soon_threadsafe(task.cancel)
            if self.stopped.is_set():
                task.cancel()
            await task

        try:
            asyncio.run(cancellable())
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._on_stop = lambda: None

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_closed_terminal()
        if self.stopped.is_set():
            if number == signal.SIGHUP:
                return  # when a terminal closes, the kernel sends one and the shell another
            kill_descendants()
            os._exit(128 + number)
        self._number = number
        self.stopped.set()
        self._on_stop()

    def _leave_closed_terminal(self) -> None:
        """Discard further output: writing to a terminal that is gone fails."""
        gone = [each for each in self._terminals if not os.isatty(each)]
        if gone:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for each in gone:
                os.dup2(nowhere, each)
            os.close(nowhere)


async def _logged(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except Exception:
        log.exception("task_crashed", extra=fields(task=name))
