"""Errors in the format of OpenAI's API, and the conversion of the router's errors.

HttpError        a status and {"error": {"message", "type", "param", "code"}}
ClientLeft       the client closed the connection: there is nobody to answer
"""

import json
import math
from collections.abc import Callable, Sequence

import pagewire

INVALID = "invalid_request_error"
SERVER = "server_error"
CLIENT_CLOSED = 499  # nginx's name, for logs: no client gets it

RenameField = Callable[[str], str]  # a field's name in gRPC |-> its name in HTTP


class ClientLeft(Exception):
    """The client closed the connection."""


class HttpError(Exception):
    """Ends a request.

    Args:
        status: The HTTP status.
        message: For people.
        kind: `type` of the error.
        param: The wrong field.
        code: For programs.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> bytes:
        """The JSON of the answer, or of an event in the middle of a stream."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()


def refused(param: str, found: str, allowed: str, *, code: str | None = None) -> HttpError:
    """Make the error for one wrong field."""
    return HttpError(400, f"{param}: found {found}; allowed: {allowed}", param=param, code=code)


def joined(errors: Sequence[HttpError]) -> HttpError:
    """Return one error for several wrong fields, with a line for each."""
    first = errors[0]
    message = "\n".join(each.message for each in errors)
    return HttpError(400, message, param=first.param, code=first.code)


def http_error(error: pagewire.PagewireError, rename: RenameField) -> HttpError:
    """Return the HTTP error for an error of the client or of the router."""
    match error:
        case pagewire.InvalidRequestError():
            return _invalid(error, rename)
        case pagewire.NotFoundError():
            return HttpError(404, error.message, param="model", code="model_not_found")
        case pagewire.AuthenticationError(code="UNAUTHENTICATED"):
            headers = (("www-authenticate", "Bearer"),)
            return HttpError(401, error.message, code="invalid_api_key", headers=headers)
        case pagewire.AuthenticationError():
            return HttpError(403, error.message, code="permission_denied")
        case pagewire.OverloadedError():
            return HttpError(
                429,
                error.message,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers=_retry_after(error.retry_after_s),
            )
        case pagewire.TimeoutError():
            return HttpError(504, error.message, kind=SERVER, code="timeout")
        case pagewire.CancelledError():
            return HttpError(CLIENT_CLOSED, error.message, kind=SERVER, code="cancelled")
        case pagewire.TransportError() | pagewire.ClosedError():
            return HttpError(503, error.message, kind=SERVER, code="unavailable")
        case _:
            return HttpError(500, error.message, kind=SERVER, code="internal_error")


def _invalid(error: pagewire.InvalidRequestError, rename: RenameField) -> HttpError:
    if not error.violations:
        return HttpError(400, error.message)
    first = error.violations[0]
    if first.field == "request":  # more bytes than the router reads
        return HttpError(413, first.description, code="request_too_large")
    return HttpError(
        400,
        "\n".join(f"{rename(each.field)}: {each.description}" for each in error.violations),
        param=rename(first.field),
        code="context_length_exceeded" if first.reason == "PROMPT_TOO_LONG" else None,
    )


def _retry_after(seconds: float | None) -> tuple[tuple[str, str], ...]:
    """Return the headers that say when to retry: in whole seconds, and exactly, as OpenAI does."""
    if seconds is None:
        return ()
    exact = str(math.ceil(1000 * seconds))
    return (("retry-after", str(math.ceil(seconds))), ("retry-after-ms", exact))
