"""Exceptions of the composition root; the command line prints their text.

The exit code is 2 for a ConfigError, 128 + the signal's number for Interrupted, else 1.

ClusterError
├── ConfigError        an option is wrong; names its path, the value found and what is allowed
├── PlacementError     the hosts lack requested resources
├── StartError         something did not start, or not in time
├── NotRunning         no cluster runs
├── Stopping           the cluster is being stopped
├── RayLost            a process of the Ray that was started here has ended
├── DemoError          the demo ran but did not show what it must
└── Interrupted        a stop signal came before the work was done
"""

import signal


class ClusterError(Exception):
    """Base; its text is for people and says what to do."""


class ConfigError(ClusterError):
    """An option is wrong."""


class PlacementError(ClusterError):
    """The hosts lack requested resources."""


class StartError(ClusterError):
    """Something did not start, or not in time."""


class NotRunning(ClusterError):
    """No cluster runs."""


class Stopping(ClusterError):
    """The cluster is being stopped, but the command that stopped it may have died."""

    def __init__(self, text: str = "the cluster is being stopped; run `pagewire down` again"):
        super().__init__(text)


class RayLost(ClusterError):
    """A process of the Ray that was started here has ended."""


class DemoError(ClusterError):
    """The demo ran but did not show what it must."""


class Interrupted(ClusterError):
    """A stop signal came before the work was done.

    Args:
        signal_number: The signal's.
        goes_on: The part that keeps running; empty: everything was stopped.
    """

    def __init__(self, signal_number: int, goes_on: str = "") -> None:
        name = signal.Signals(signal_number).name
        left = goes_on or "nothing that it started is left"
        super().__init__(f"stopped by {name} before it was done; {left}")
        self.exit_code = 128 + signal_number  # as shells know it
