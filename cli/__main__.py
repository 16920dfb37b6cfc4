"""The command line's entry point; it imports the commands so that an interrupt ends silently."""

from pagewire.cli.early_interrupts import interrupts_end_at_once


def main() -> None:
    """Import the command line and run it."""
    with interrupts_end_at_once():
        from cli import commands
    commands.main()


if __name__ == "__main__":
    main()
