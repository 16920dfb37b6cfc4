"""Shared by the two state machines of a transfer: failures, events and actions.

The machines (`receiver_protocol`, `sender_protocol`) are pure: `step(state, event)` returns the
next state and the actions that a driver must execute, in order. Same state and same event, same
result; no clock, no task, no logger. `waiting_for(state)` names the one thing that may not take
forever, so that a driver can give every wait a deadline.
"""

import enum
from dataclasses import dataclass

from kv_transfer.deadlines import Wait, WaitKind
from kv_transfer.errors import (
    ConnectionBroken,
    DigestMismatch,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from kv_transfer.messages import TransferMessage


class FailureKind(enum.Enum):
    """Why an attempt ended; each is one exception of kv_transfer.errors."""

    BROKEN = "broken"
    ABORTED = "aborted"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    DIGEST = "digest"
    VIOLATION = "violation"


_ERRORS: dict[FailureKind, type[TransferError]] = {
    FailureKind.BROKEN: ConnectionBroken,
    FailureKind.ABORTED: TransferAborted,
    FailureKind.CANCELLED: TransferAborted,
    FailureKind.TIMEOUT: TransferTimeout,
    FailureKind.DIGEST: DigestMismatch,
    FailureKind.VIOLATION: TransferError,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """How an attempt failed, as a value."""

    kind: FailureKind
    detail: str

    def error(self) -> TransferError:
        """Return the equivalent exception."""
        return _ERRORS[self.kind](self.detail)


def wait_for_posted(chunk: int, failure: Failure | None) -> Wait:
    """Return the wait for a posted send or receive; without its stream, the peer may be dead."""
    is_lost = failure is not None and failure.kind is FailureKind.BROKEN
    return Wait(kind=WaitKind.LOST if is_lost else WaitKind.TRANSFER, chunk=chunk)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Event: this side gives up."""

    reason: str


@dataclass(frozen=True, slots=True)
class StreamLost:
    """Event: control messages no longer reach the other side."""

    detail: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """Event: the connection broke, or a posted operation failed."""

    detail: str


@dataclass(frozen=True, slots=True)
class ConnectionAborted:
    """Event: abort returned; nothing is posted any more."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Event: `wait` exceeded its deadline."""

    wait: Wait


@dataclass(frozen=True, slots=True)
class PagesDigested:
    """Event: the digests of a chunk's local pages are known."""

    chunk: int
    digests: tuple[bytes, ...]


CommonEvent = (
    Cancelled | StreamLost | ConnectionLost | ConnectionAborted | DeadlinePassed | PagesDigested
)


@dataclass(frozen=True, slots=True)
class Send:
    """Action: send a control message."""

    message: TransferMessage


@dataclass(frozen=True, slots=True)
class DigestPages:
    """Action: compute the digests of local pages, then report PagesDigested."""

    chunk: int
    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class AbortConnection:
    """Action: abort the connection, then report ConnectionAborted."""
