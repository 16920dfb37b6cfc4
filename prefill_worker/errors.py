"""Reasons why a prefill worker refuses a connection or a prompt, besides those in worker/errors.py.

WorkerError
├── InvalidPrompt        the prompt contradicts the contract or the model's limits
├── WrongMessage         no stream can have it: its attempt has not begun, or begins again
├── WrongReceiver        the call names a receiver other than its caller
├── IncompatibleLayout   the two workers cannot exchange pages
├── ConnectionUnknown    the named connection no longer exists; call Connect again
├── ConnectionFailed     the connection could not be made
└── TransportUnknown     this worker does not offer the transport

server.py maps them to status codes.
"""

from worker.errors import WorkerError


class InvalidPrompt(WorkerError):
    """The prompt contradicts the contract or the model's limits."""


class WrongMessage(WorkerError):
    """A stream cannot have this message: its attempt has not begun, or begins again."""


class WrongReceiver(WorkerError):
    """The call names a receiver other than its caller."""


class IncompatibleLayout(WorkerError):
    """The two workers cannot exchange pages."""


class ConnectionUnknown(WorkerError):
    """The named connection no longer exists."""


class ConnectionFailed(WorkerError):
    """The connection could not be made."""


class TransportUnknown(WorkerError):
    """This worker does not offer the transport."""
