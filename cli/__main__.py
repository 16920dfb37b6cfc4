"""The command line's entry point; it imports the commands so that an interrupt ends silently."""

import atexit
import os
import sys
from contextlib import suppress

from pagewire.cli.early_interrupts import interrupts_end_at_once


def main() -> None:
    """Import the command line and run it."""
    with interrupts_end_at_once():
        from cli import commands
    try:
        commands.main()
    except SystemExit as end:
        if "ray" in sys.modules and isinstance(end.code, int | None):
            _leave(end.code or 0)
        raise


def _leave(exit_code: int) -> None:
    """End the process after Python's exit handlers, without those of C++.

    A thread of Ray's library, which gathers its metrics, outlives `ray.shutdown()`. It has crashed
    while C++ destroyed what it used: a command that had succeeded ended by SIGSEGV.
    """
    atexit._run_exitfuncs()  # they end a Ray that the command started
    for each in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # its reader has left
            each.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
