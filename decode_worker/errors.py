"""Why a decode worker ends a request or a session, in addition to worker/errors.py.

WorkerError
├── InvalidRequest       the request contradicts the contract or the model's limits
└── SlowRouter           the router reads its tokens too slowly

PrefillFailed            a prefill worker refused or aborted an attempt; another one is asked
├── ConnectionUnknown    it does not know the connection; a new one must be made
└── PrefillPassFailed    one of its passes failed that computed for the attempt

server.py maps them to status codes.
"""

from worker.errors import WorkerError


class InvalidRequest(WorkerError):
    """The request contradicts the contract or the model's limits."""


class SlowRouter(WorkerError):
    """The router reads its tokens too slowly."""


class PrefillFailed(Exception):
    """A prefill worker refused or aborted an attempt."""


class ConnectionUnknown(PrefillFailed):
    """The prefill worker does not know the connection that the attempt named."""


class PrefillPassFailed(PrefillFailed):
    """A pass failed on the prefill worker that computed for the attempt."""
