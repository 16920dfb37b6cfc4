"""Converts failures of gRPC calls to the client's exceptions, and says what may be tried next."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from pagewire import errors
from pagewire.arguments import refused

STATUS_DETAILS_KEY = "grpc-status-details-bin"
# gRPC's words for HTTP/1.1, SSH and others; and for HTTP/1.1 over TLS
_NO_GRPC = ("Failed parsing HTTP/2", "missing selected ALPN property")
# What gRPC puts before the reason: that other addresses failed, too, and the address once more.
_LAST_ERROR = re.compile(r"failed to connect .*last error: \w+: ipv\S+ (?:Failed to .*?: )?")
# gRPC's words for a connection that could not be made, or broke
_UNREACHED = ("failed to connect", "DNS resolution failed", "Socket closed", "Stream removed")
_STOPS = "ROUTER_STOPS"  # reason of a router's UNAVAILABLE
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")  # gRPC's words
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class CallFailure:
    """How a generate call failed at a router."""

    error: errors.PagewireError
    is_router_lost: bool = False  # another router may succeed
    is_unready: bool = False  # the router answers, but cannot serve yet: it may soon
    retry_after_s: float = 0.0  # the router's advice
    is_stopping: bool = False  # the router said that it stops


# Makes a failure, given the limit of the call in seconds, which the message may name.
FailureWithin = Callable[[float], CallFailure]


def _is_router_lost(failure: grpc.aio.AioRpcError) -> bool:
    """Return whether another router may succeed: this one is gone, or stops."""
    if failure.code() is not grpc.StatusCode.UNAVAILABLE or speaks_no_grpc(failure.details() or ""):
        return False
    details = _details(failure)
    return not details.code or _is_stopping(details)  # without a router there are no details


def failure_from(failure: grpc.aio.AioRpcError, address: str, timeout_s: float) -> CallFailure:
    """Convert the end of a gRPC call."""
    details = _details(failure)
    return CallFailure(
        error_from(failure, address, timeout_s),
        _is_router_lost(failure),
        _is_unready(failure.code(), details),
        _retry_after_s(details) or 0.0,
        _is_stopping(details),
    )


def speaks_no_grpc(details: str) -> bool:
    """Return whether gRPC's words for a failed call are those for a server without gRPC."""
    return any(each in details for each in _NO_GRPC)


def failure_from_status(serialized: bytes, address: str, timeout_s: float) -> CallFailure:
    """Convert the google.rpc.Status that ends a call of GenerateMany."""
    try:
        status = status_pb2.Status.FromString(serialized)
    except DecodeError:
        told = f"{address} ended the call with a status that cannot be read"
        return CallFailure(errors.ServerError(told, code="UNKNOWN"))
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    message = status.message or code.name
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallFailure(timed_out(address, timeout_s, message))
    is_lost = code is grpc.StatusCode.UNAVAILABLE and _is_stopping(status)
    return CallFailure(
        _error_told(code, message, status),
        is_lost,
        _is_unready(code, status),
        _retry_after_s(status) or 0.0,
        is_lost,
    )


def stream_ended(address: str, _timeout_s: float) -> CallFailure:
    """Return the failure of calls whose stream a router ended without a status."""
    told = f"the router at {address} ended the stream"
    return CallFailure(errors.ConnectionFailedError(told, code="UNAVAILABLE"), is_router_lost=True)


def timed_out(address: str, timeout_s: float, said: str = "") -> errors.TimeoutError:
    """Make the error of a call that took too long; `said` is the router's message."""
    told = f"{address}: no complete answer within timeout_s = {timeout_s:g}"
    code = grpc.StatusCode.DEADLINE_EXCEEDED.name
    return errors.TimeoutError(f"{told}: {said}" if said else told, code=code)


def error_from(
    failure: grpc.aio.AioRpcError, address: str, timeout_s: float
) -> errors.PagewireError:
    """Make the exception that a failed call raises, with the details the router attached."""
    code = failure.code()
    message = failure.details() or code.name
    match code:
        case grpc.StatusCode.RESOURCE_EXHAUSTED if sizes := _TOO_LARGE.search(message):
            # The connection's limit differs from ours; waiting would not help.
            return refused("request", f"a request of {sizes[1]} bytes", f"at most {sizes[2]} bytes")
        case grpc.StatusCode.UNAVAILABLE if _is_from_server(failure):
            pass
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.UNIMPLEMENTED:
            other = f"something answers at {address}, but it is not a Pagewire router"
            if speaks_no_grpc(message):
                told = other
            elif code is grpc.StatusCode.UNIMPLEMENTED:
                # A router has all methods; a server without one is a worker or not Pagewire.
                told = f"{other}, or one older than this client: it lacks the method"
            elif message.startswith(_UNREACHED):
                told = f"no connection to {address}: {_LAST_ERROR.sub('', message)}"
            else:
                told = f"{address} is unavailable: {message}"
            is_other = speaks_no_grpc(message) or code is grpc.StatusCode.UNIMPLEMENTED
            return errors.ConnectionFailedError(told, code=code.name, is_other=is_other)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            # If the router noticed first, its message says more.
            return timed_out(address, timeout_s, message if failure.trailing_metadata() else "")
    return _error_told(code, message, _details(failure))


def _error_told(
    code: grpc.StatusCode, message: str, details: status_pb2.Status
) -> errors.PagewireError:
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
            return errors.InvalidRequestError(
                message, code=code.name, violations=_violations(details)
            )
        case grpc.StatusCode.NOT_FOUND:
            return errors.NotFoundError(message, code=code.name, violations=_violations(details))
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return errors.AuthenticationError(message, code=code.name)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.OverloadedError(
                message, code=code.name, retry_after_s=_retry_after_s(details)
            )
        case (
            grpc.StatusCode.UNAVAILABLE
            | grpc.StatusCode.ABORTED
            | grpc.StatusCode.FAILED_PRECONDITION
        ):
            return errors.UnavailableError(message, code=code.name)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.TimeoutError(message, code=code.name)
        case grpc.StatusCode.CANCELLED:
            return errors.CancelledError(message, code=code.name)
        case _:
            return errors.ServerError(message, code=code.name)


def _details(failure: grpc.aio.AioRpcError) -> status_pb2.Status:
    status = status_pb2.Status()
    for key, value in failure.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            with suppress(DecodeError):  # the code and the message are enough
                status.ParseFromString(value)
    return status


def _is_stopping(status: status_pb2.Status) -> bool:
    reason = error_details_pb2.ErrorInfo()
    return any(each.Unpack(reason) and reason.reason == _STOPS for each in status.details)


def _is_unready(code: grpc.StatusCode, details: status_pb2.Status) -> bool:
    """Return whether a router itself answered UNAVAILABLE, for instance without workers."""
    return code is grpc.StatusCode.UNAVAILABLE and bool(details.code) and not _is_stopping(details)


def _violations(details: status_pb2.Status) -> tuple[errors.FieldViolation, ...]:
    found: list[errors.FieldViolation] = []
    for detail in details.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Is(bad_request.DESCRIPTOR) and detail.Unpack(bad_request):
            found += [
                errors.FieldViolation(field=v.field, description=v.description, reason=v.reason)
                for v in bad_request.field_violations
            ]
    return tuple(found)


def _retry_after_s(details: status_pb2.Status) -> float | None:
    for detail in details.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            return float(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
    return None


def _is_from_server(failure: grpc.aio.AioRpcError) -> bool:
    """Tell an UNAVAILABLE that a router answered from one that the channel made up.

    Only an answering server sends trailing metadata; headers a lost one may have sent before.
    """
    return bool(failure.trailing_metadata())
