"""Why a prefill worker refuses a connection or a prompt, or stops computing it.

PrefillError
├── InvalidPrompt        the prompt contradicts the contract or the model's limits
├── Overloaded           too many prompts are queued already
├── Draining             the worker is going away
├── StartTimeout         the call did not begin in time
├── StaleIncarnation     the decode worker means another start of this worker
├── IncompatibleLayout   the two workers cannot exchange pages
├── ConnectionUnknown    the named connection does not exist any more; call Connect again
├── ConnectionFailed     the connection could not be made
└── TransportUnknown     this worker does not offer the transport

server.py maps them to status codes.
"""


class PrefillError(Exception):
    """Base of all refusals that a decode worker is told about."""


class InvalidPrompt(PrefillError):
    """The prompt contradicts the contract or the model's limits."""


class Overloaded(PrefillError):
    """Too many prompts are queued already."""


class Draining(PrefillError):
    """The worker is going away."""


class StartTimeout(PrefillError):
    """The call did not begin in time."""


class StaleIncarnation(PrefillError):
    """The decode worker means another start of this worker."""


class IncompatibleLayout(PrefillError):
    """The two workers cannot exchange pages."""


class ConnectionUnknown(PrefillError):
    """The named connection does not exist any more."""


class ConnectionFailed(PrefillError):
    """The connection could not be made."""


class TransportUnknown(PrefillError):
    """This worker does not offer the transport."""
