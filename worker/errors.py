"""Why a worker of either pool refuses or ends a call; each pool adds its own errors.

WorkerError              reported to the caller
├── Overloaded           too many requests wait already
├── Draining             the worker leaves or restarts as planned; another one can take over
├── Failing              the worker cannot go on, and ends; another one can take over
├── TimedOut             the call, or the request, took longer than it may
├── PassFailed           a pass that computed for it failed; another worker may succeed
├── EngineFailed         passes for it failed repeatedly, or drew no token
├── InternalError        a bug in the worker ended it; the log says which
├── StaleIncarnation     the caller means another incarnation of this worker
└── OtherContract        the caller speaks another version of the contract

HostUnfit                a worker cannot run on the host where it was placed
EngineLost               the engine no longer computes: the worker must end
EngineHangs              a call of the engine has not returned in time
EngineClosed             the executor was called after close()

STATUS_CODES in worker/server.py maps them to status codes.
"""


class WorkerError(Exception):
    """Base of the errors that are reported to a caller."""


class Overloaded(WorkerError):
    """Too many requests wait already."""


class Draining(WorkerError):
    """The worker leaves or restarts as planned."""


class Failing(WorkerError):
    """The worker cannot go on, and ends."""


class TimedOut(WorkerError):
    """The call, or the request, took longer than it may."""


class PassFailed(WorkerError):
    """A pass that computed for it failed."""


class EngineFailed(WorkerError):
    """Passes for it failed on several workers, or no token could be drawn for it."""


class InternalError(WorkerError):
    """A bug of the worker ended it."""

    def __init__(self) -> None:
        super().__init__("an internal error; the log of the worker has it")


class StaleIncarnation(WorkerError):
    """The caller means another incarnation of this worker."""


class OtherContract(WorkerError):
    """The caller speaks another version of the contract."""


class HostUnfit(Exception):
    """A worker cannot run on the host where it was placed; the message names the host."""


class EngineLost(Exception):
    """The engine no longer computes."""


class EngineHangs(Exception):
    """A call of the engine has not returned in time; it may still compute."""


class EngineClosed(Exception):
    """A call after close()."""
