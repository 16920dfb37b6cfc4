"""An event for signal handlers."""

from contextlib import suppress
from queue import Empty, SimpleQueue


class Stopped:
    """An event that a signal handler may set in the middle of a wait for it.

    threading.Event takes the same lock to set and to wait. So a handler could wait for ever for the
    code that it has interrupted.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakes = SimpleQueue[None]()  # whose methods may interrupt each other

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._wakes.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it is set, as soon as it is or after so many seconds."""
        if not self._is_set:
            with suppress(Empty):
                self._wakes.put(self._wakes.get(timeout=timeout_s))  # for others that wait
        return self._is_set
