"""Prints the path of the demo's model for `make serve`; if none is installed, of a random one."""

import sys

from pagewire.cli.early_interrupts import interrupts_end_at_once


def main() -> None:
    """Print the path, and on standard error whether the weights are random."""
    with interrupts_end_at_once():
        from cluster.demo_model import INSTALL_TRAINED, demo_model_dir, trained_model
        from cluster.errors import ClusterError
    path = trained_model()
    if path is None:
        print(f"random weights, as {INSTALL_TRAINED} has not been run", file=sys.stderr)
    try:
        print(path or demo_model_dir())
    except ClusterError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
