"""The entry point of `pagewire`: the server's command line if that is installed.

It imports the commands so that an interrupt ends silently.
"""

from collections.abc import Callable

from pagewire.cli.early_interrupts import interrupts_end_at_once

SERVER = "pagewire.command"  # group of entry points where the server names its command line


def main() -> None:
    """Import a command line and run it."""
    with interrupts_end_at_once():
        run = _command_line()
    run()


def _command_line() -> Callable[[], None]:
    from importlib import metadata

    for each in metadata.entry_points(group=SERVER):
        run: Callable[[], None] = each.load()
        return run
    from pagewire.cli import commands

    return commands.main


if __name__ == "__main__":
    main()
