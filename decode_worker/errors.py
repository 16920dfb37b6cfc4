"""Why a decode worker ends a request or a session, beside what worker/errors.py names.

WorkerError
├── InvalidRequest       the request contradicts the contract or the model's limits
└── SlowRouter           the router does not read what was made for it

PrefillFailed            a prefill worker refused an attempt or broke it off; another is asked
├── ConnectionUnknown    it does not know the connection; a new one must be made
└── PrefillPassFailed    a pass of it failed that computed for the attempt

server.py maps them to status codes.
"""

from worker.errors import WorkerError


class InvalidRequest(WorkerError):
    """The request contradicts the contract or the model's limits."""


class SlowRouter(WorkerError):
    """The router does not read what was made for it."""


class PrefillFailed(Exception):
    """A prefill worker refused an attempt or broke it off."""


class ConnectionUnknown(PrefillFailed):
    """The prefill worker does not know the connection that the attempt named."""


class PrefillPassFailed(PrefillFailed):
    """A pass of the prefill worker failed that computed for the attempt."""
