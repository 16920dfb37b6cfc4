"""Why a worker of either pool refuses a call, or ends what it serves; each pool adds its own.

WorkerError              the caller is told why
├── Overloaded           too much waits already
├── Draining             the worker is going away; another one can take over
├── TimedOut             the call, or the request, took longer than it may
├── PassFailed           a pass failed that computed for it; another worker may succeed
├── EngineFailed         passes failed for it again and again, or drew no token
├── InternalError        a bug of the worker ended it; the log says which
└── StaleIncarnation     the caller means another start of this worker

HostUnfit                a worker cannot run on the host where it was placed
EngineLost               the engine computes nothing any more: the worker must end
EngineClosed             the executor was called after close()

STATUS_CODES in worker/server.py maps them to status codes.
"""


class WorkerError(Exception):
    """Base of everything that a caller is told about."""


class Overloaded(WorkerError):
    """Too much waits already."""


class Draining(WorkerError):
    """The worker is going away."""


class TimedOut(WorkerError):
    """The call, or the request, took longer than it may."""


class PassFailed(WorkerError):
    """A pass failed that computed for it."""


class EngineFailed(WorkerError):
    """Passes failed for it on several workers, or no token could be drawn for it."""


class InternalError(WorkerError):
    """A bug of the worker ended it."""

    def __init__(self) -> None:
        super().__init__("an internal error; the log of the worker has it")


class StaleIncarnation(WorkerError):
    """The caller means another start of this worker."""


class HostUnfit(Exception):
    """A worker cannot run on the host where it was placed; the message names the host."""


class EngineLost(Exception):
    """The engine computes nothing any more."""


class EngineClosed(Exception):
    """A call after close()."""
