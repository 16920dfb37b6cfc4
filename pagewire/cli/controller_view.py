"""What a cluster's controller knows of it, for `pagewire status` while no router answers."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewire import TransportError


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerView:
    """A cluster as its controller sees it."""

    # worker's name |-> "alive", "silent": it loads, restarts or is dead, or "leaving"
    workers: Mapping[str, str]
    is_stopping: bool


class RouterSilent(TransportError):
    """The router of a cluster does not answer, but its controller does.

    Args:
        reason: Why there is no answer.
        view: What the controller knows.
    """

    def __init__(self, reason: str, view: ControllerView) -> None:
        super().__init__(
            f"the router does not answer: {reason}; if it has ended, Ray starts it again by "
            "itself: try again in some seconds",
            code="UNAVAILABLE",
        )
        self.reason = reason
        self.view = view
