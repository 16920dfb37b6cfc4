"""Standard output of the command line, with its failures kept apart from other system errors."""

import io
import sys
from typing import Any


class OutputLost(Exception):
    """Standard output accepts nothing: a disk is full, or it is closed."""


def say(line: str) -> None:
    """Print one line at once and unwrapped, so that scripts can wait for it.

    Such lines tell of work, which goes on without them: in silence if their reader has left, else
    after one warning.
    """
    try:
        print(line, flush=True)
    except BrokenPipeError:
        pass
    except OutputLost as lost:
        sys.stderr.write(f"warning: {lost}\n")


def guard_standard_output() -> None:
    """Let sys.stdout raise OutputLost, and write `?` for characters that it cannot encode.

    If the reader leaves, it still raises BrokenPipeError, which typer handles silently.

    Raises:
        OutputLost: It is closed.
    """
    if sys.stdout is None:
        raise OutputLost("standard output is closed")
    # Line by line: a failure at the interpreter's exit could not be handled.
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_StandardOutput(sys.stdout.fileno(), "w", closefd=False)),
        encoding=sys.stdout.encoding,
        errors="replace",
        line_buffering=True,
    )


class _StandardOutput(io.FileIO):
    """Fails once: later output is discarded."""

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
