"""Exceptions of the client.

PagewireError
├── RequestError                the request cannot succeed as it is; `violations` names wrong fields
│   ├── InvalidRequestError     an argument is wrong
│   ├── NotFoundError           the model is not served
│   ├── AuthenticationError     the caller is unknown or not allowed
│   └── OverloadedError         the cluster is full; try again after `retry_after_s`
├── TransportError              the answer did not arrive; the request itself may be fine
│   ├── ConnectionFailedError   no router answers at the address, or the connection broke
│   ├── TlsError                a router answers, but the two sides disagree on encryption
│   ├── UnavailableError        the router answers, but no worker can serve the request now, or
│   │                           it cannot continue the answer of a lost one
│   ├── TimeoutError            `timeout_s` passed
│   └── CancelledError          the call was cancelled by the other side
├── ServerError                 a bug or a broken worker on the cluster's side
└── ClosedError                 the client was closed, or cannot be used from here

Each carries `code`, the name of the gRPC status that caused it, or the fitting one for an error
found before anything was sent. A call whose router is lost continues at another one by itself, see
AsyncClient; after any other TransportError the caller decides.
"""

import copyreg
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldViolation:
    """One wrong field of a request."""

    field: str  # path in the request, "sampling.top_p"
    description: str  # what was found and what is allowed
    reason: str = "INVALID_REQUEST"  # for programs; or "PROMPT_TOO_LONG"


class PagewireError(Exception):
    """Base of all errors that the client raises for a call."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # By default exceptions are copied by calling the class with `args`, which lack the
        # keywords; a process pool could then not pass on the error of its worker.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class RequestError(PagewireError):
    """The request was refused; unless the error says otherwise, retrying it does not help."""

    def __init__(
        self, message: str, *, code: str, violations: tuple[FieldViolation, ...] = ()
    ) -> None:
        super().__init__(message, code=code)
        self.violations = violations


class InvalidRequestError(RequestError):
    """The request has wrong fields. Raised before anything is sent, or by the router."""


class NotFoundError(RequestError):
    """The model, or another thing that the request names, does not exist."""


class AuthenticationError(RequestError):
    """The caller is unknown, or may not do this."""


class OverloadedError(RequestError):
    """The request was refused before any work, because too many are being served."""

    def __init__(self, message: str, *, code: str, retry_after_s: float | None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s  # None: the cluster gave no advice


class TransportError(PagewireError):
    """No complete answer arrived."""


class ConnectionFailedError(TransportError):
    """No router answers at the address, or the connection broke."""

    def __init__(self, message: str, *, code: str, is_other: bool = False) -> None:
        super().__init__(message, code=code)
        self.is_other = is_other  # something answers, but no router


class TlsError(TransportError):
    """A router answers, but one side requires TLS, or does not trust the other's certificate."""

    def __init__(self, message: str, *, code: str, field: str = "") -> None:
        super().__init__(message, code=code)
        self.field = field  # the client's argument that may mend it, "tls.server_name"; empty: none


class UnavailableError(TransportError):
    """The router answers, but has no worker for the request now, or cannot continue its answer."""


class TimeoutError(TransportError):  # noqa: A001 - like asyncio's
    """The call took longer than `timeout_s`."""


class CancelledError(TransportError):
    """The other side cancelled the call. A caller's own cancellation is not an error."""


class ServerError(PagewireError):
    """The cluster failed unexpectedly."""


class ClosedError(PagewireError):
    """The client was closed, or belongs to another event loop or to the process before a fork."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="FAILED_PRECONDITION")
