"""A full-screen terminal, by control sequences that every terminal knows."""

import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, Self

# The alternate screen, so that the old content comes back; cursor hidden; lines cut, not wrapped.
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME = "\x1b[H"
ERASE_REST_OF_LINE = "\x1b[K"
ERASE_BELOW = "\x1b[J"
QUIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNALS = (*QUIT_SIGNALS, signal.SIGTSTP, signal.SIGWINCH)
QUIT_KEYS = b"qQ\x03"  # the last one: Ctrl-C, if the terminal sends it as a key
NUDGE = b"\0"  # not a signal number


class Event(Enum):
    """Why a wait ended."""

    QUIT = "quit"
    CHANGE = "change"  # of the terminal's size, or a nudge
    TIMEOUT = "timeout"


class Screen:
    """The terminal of standard output; keys come from standard input if that is a terminal, too.

    Use it with `with`, in the main thread: the old content comes back even after an error, and
    while Ctrl-Z suspends the process.
    """

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        for each in (self._reader, self._writer):
            os.set_blocking(each, False)
        # Signals arrive as bytes, so that one just before a wait still ends it.
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {each: signal.signal(each, lambda *_: None) for each in SIGNALS}
        self._keys: int | None = None
        if sys.stdin is not None and sys.stdin.isatty():
            self._keys = sys.stdin.fileno()
        self._modes: list[Any] = []
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._give_back()
        finally:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines of the terminal."""
        return shutil.get_terminal_size()

    def nudge(self) -> None:
        """End a wait; for other threads, even after the screen was left."""
        with suppress(BlockingIOError):  # the pipe is full, so the wait ends anyway
            os.write(self._writer, NUDGE)

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines alone; those that do not fit are left out."""
        shown = f"{ERASE_REST_OF_LINE}\r\n".join(lines[: self.size.lines])
        sys.stdout.write(f"{HOME}{shown}{ERASE_REST_OF_LINE}{ERASE_BELOW}")
        sys.stdout.flush()

    def wait(self, timeout_s: float) -> Event:
        """Wait for a quit key, a signal, a nudge or the timeout."""
        sources = [self._reader] if self._keys is None else [self._reader, self._keys]
        ready, _, _ = select.select(sources, [], [], max(timeout_s, 0.0))
        if not ready:
            return Event.TIMEOUT
        if self._keys in ready:
            keys = os.read(self._keys, 1024)
            if not keys:
                self._keys = None  # its end: signals remain
            elif any(each in QUIT_KEYS for each in keys):
                return Event.QUIT
        arrived = os.read(self._reader, 1024) if self._reader in ready else b""
        if any(each in arrived for each in QUIT_SIGNALS):
            return Event.QUIT
        if signal.SIGTSTP in arrived:
            self._suspend()
        return Event.CHANGE

    def _suspend(self) -> None:
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when the shell continues the process
        signal.signal(signal.SIGTSTP, lambda *_: None)
        self._take()

    def _take(self) -> None:
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        sys.stdout.write(ENTER)
        sys.stdout.flush()

    def _give_back(self) -> None:
        if self._modes and sys.stdin is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._modes)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
