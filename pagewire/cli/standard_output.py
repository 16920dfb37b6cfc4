"""Standard output of the command line, whose failures are told from other errors of the system."""

import io
import sys
from typing import Any


class OutputLost(Exception):
    """Standard output takes nothing: a disk is full, or it is closed."""


def say(line: str) -> None:
    """Print one line at once and unwrapped, so that scripts can wait for it."""
    print(line, flush=True)


def guard_standard_output() -> None:
    """Let sys.stdout raise OutputLost, and write `?` for what a terminal does not know.

    A reader that leaves stays a BrokenPipeError, with which typer ends in silence.

    Raises:
        OutputLost: It is closed.
    """
    if sys.stdout is None:
        raise OutputLost("standard output is closed")
    # Line by line: what fails at the interpreter's own exit, nobody can handle.
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_StandardOutput(sys.stdout.fileno(), "w", closefd=False)),
        encoding=sys.stdout.encoding,
        errors="replace",
        line_buffering=True,
    )


class _StandardOutput(io.FileIO):
    """Fails once: what is written on the way out goes nowhere."""

    _is_lost = False

    def write(self, data: Any, /) -> int:
        if self._is_lost:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self._is_lost = True
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputLost(f"standard output cannot be written: {error.strerror}") from error
