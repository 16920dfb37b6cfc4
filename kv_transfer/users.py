"""Counts who uses something that is kept for a peer, so that it can be given up when nobody does.

A peer that left for good says no goodbye, and over NCCL its connection shows no error either.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Users:
    """The present users of one thing.

    Args:
        idle_s: How long it may have none.
        give_up: Called once it has had none for so long, from its creation or the last user's end.
    """

    def __init__(self, idle_s: float, give_up: Callable[[], None]) -> None:
        self._idle_s = idle_s
        self._give_up = give_up
        self._num_users = 0
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Be a user while entered."""
        self._num_users += 1
        self._end_wait()
        try:
            yield
        finally:
            self._num_users -= 1
            self._wait()

    def forget(self) -> None:
        """Never call `give_up`: the thing is gone."""
        self._is_over = True
        self._end_wait()

    def _wait(self) -> None:
        if not (self._num_users or self._is_over):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._idle_s, self._give_up)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
