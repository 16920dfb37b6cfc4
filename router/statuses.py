"""Rich statuses that programs can read, for the errors of calls."""

import grpc
from google.rpc import error_details_pb2, status_pb2

from protos.retry_delay import retry_info
from router.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotAuthenticated,
    NoWorker,
    Overloaded,
    RequestFailed,
    RequestLost,
    RouterError,
    RouterStops,
    SlowClient,
    StreamIdle,
    UnknownModel,
)

_ERROR_DOMAIN = "pagewire"
# The first class that an error is an instance of decides.
_CODES: tuple[tuple[type[RouterError], grpc.StatusCode], ...] = (
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotAuthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoWorker, grpc.StatusCode.UNAVAILABLE),
    (RouterStops, grpc.StatusCode.UNAVAILABLE),
    (StreamIdle, grpc.StatusCode.UNAVAILABLE),
    (RequestLost, grpc.StatusCode.ABORTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (SlowClient, grpc.StatusCode.CANCELLED),
)
_CODES_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def code_of(error: RouterError) -> grpc.StatusCode:
    """Return the gRPC status code of an error."""
    if isinstance(error, RequestFailed):
        code = _CODES_BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
        return grpc.StatusCode.UNKNOWN if code is grpc.StatusCode.OK else code
    return next(code for kind, code in _CODES if isinstance(error, kind))


def status_of(error: RouterError) -> status_pb2.Status:
    """Return a status that programs can read: reason, fields, retry delay."""
    status = status_pb2.Status(code=code_of(error).value[0], message=str(error))
    reason = error_details_pb2.ErrorInfo(reason=_reason(error), domain=_ERROR_DOMAIN)
    status.details.add().Pack(reason)
    if isinstance(error, InvalidRequest | RequestFailed) and error.violations:
        bad_request = error_details_pb2.BadRequest()
        for each in error.violations:
            bad_request.field_violations.add(
                field=each.field, description=each.description, reason=_reason(each)
            )
        status.details.add().Pack(bad_request)
    if isinstance(error, Overloaded):
        status.details.add().Pack(retry_info(error.retry_delay_s))
    return status


def _reason(error: RouterError) -> str:
    """Return the class name as gRPC's guide wants it: InvalidRequest -> INVALID_REQUEST."""
    name = type(error).__name__
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()
