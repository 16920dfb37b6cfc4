"""Why a request ends without a result, or a session before its router leaves.

RequestError
├── InvalidRequest       the request contradicts the contract or the model's limits
├── Overloaded           too many requests wait already
├── Draining             the worker is going away; another one can take over
├── RequestTimeout       the request's own deadline passed
├── EngineFailed         the pass that computed for it failed, or drew no token
├── StaleIncarnation     the router means another start of this worker
└── SlowRouter           the router does not read what was made for it

PrefillFailed            a prefill worker refused an attempt or broke it off; another is asked
└── ConnectionUnknown    it does not know the connection; a new one must be made

server.py maps them to status codes.
"""


class RequestError(Exception):
    """Base of all failures that a router is told about."""


class InvalidRequest(RequestError):
    """The request contradicts the contract or the model's limits."""


class Overloaded(RequestError):
    """Too many requests wait already."""


class Draining(RequestError):
    """The worker is going away."""


class RequestTimeout(RequestError):
    """The request's own deadline passed."""


class EngineFailed(RequestError):
    """The pass that computed for the request failed, or drew no token for it."""


class StaleIncarnation(RequestError):
    """The router means another start of this worker."""


class SlowRouter(RequestError):
    """The router does not read what was made for it."""


class PrefillFailed(Exception):
    """A prefill worker refused an attempt or broke it off."""


class ConnectionUnknown(PrefillFailed):
    """The prefill worker does not know the connection that the attempt named."""
