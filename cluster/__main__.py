"""The command line's entry, which imports the commands so that an interrupt ends in silence."""

from cluster.early_interrupts import interrupts_end_at_once


def main() -> None:
    """Import the command line and run it."""
    with interrupts_end_at_once():
        from cluster import cli
    cli.main()


if __name__ == "__main__":
    main()
