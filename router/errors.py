"""Errors of a request at the router.

RouterError
  InvalidRequest         a field is wrong; names it, the value found and what is allowed
    UnknownModel         the model name is not served
    PromptTooLong        the prompt does not fit the context
  NotAuthenticated       the call has no token of a tenant
  Overloaded             the router or the tenant is at a limit; try again after `retry_delay_s`
  NoWorker               no decode worker became available in time
  RouterStops            the router stops; another one can continue the call
  StreamIdle             no call ran on the stream for too long
  RequestFailed          a worker ended the request with an error of the request's own
    RequestCrashed       a bug in the router ended it
  RequestLost            the stream broke more often than it may be resumed
  DeadlineExceeded       the client's or the router's time limit passed
  SlowClient             the client did not take its messages

ModelFolderError         a file of the model folder is missing or broken (at start)
TenantsFileError         the tenants file cannot be used
ChatTemplateError        a chat template is not valid or broke a rule of the sandbox
  TemplateLimit          it took more time or memory than it may
  RenderingTooLong       it wrote more characters than a prompt may have
PortTaken                nothing can listen on the port of the metrics (at start)

Inside the router only:
ChildLimit               work in a child process took more than it may, or ended the process
  ChildCrash             it crashed the process
AttemptFailed            this attempt is over, another worker may continue
WrongDelta               a delta of a worker does not fit its choice
WrongMessage             a worker's message contradicts itself, so its session ends
RefusedByTemplate        the chat template does not accept the messages
WrongTools               the tools of a chat are not valid tools
WorkerGone               a worker cannot be used, for now
ControllerGone           the controller cannot be reached, for now

`statuses.py` maps these to gRPC status codes.
"""

import re

_INVALID_ARGUMENT, _INTERNAL = 3, 13  # google.rpc.Code numbers
_REFUSAL = re.compile(r"([\w.]+): found (.*); allowed: (.*)", re.ASCII | re.DOTALL)


class RouterError(Exception):
    """Base of errors that end a request without a result."""


class InvalidRequest(RouterError):
    """A field of the request is wrong, or several are.

    Args:
        field, found, allowed: Field, value found and what is allowed, for the first wrong field.
        others: Errors of further fields, which this one then includes.
    """

    def __init__(self, field: str, found: str, allowed: str, *others: "InvalidRequest") -> None:
        description = f"found {found}; allowed: {allowed}"
        super().__init__("\n".join([f"{field}: {description}", *map(str, others)]))
        self.field = field
        self.found = found
        self.allowed = allowed
        self.description = description
        self._others = others

    @property
    def violations(self) -> "tuple[InvalidRequest, ...]":
        """The error of each wrong field, this one first."""
        return (self, *(each for other in self._others for each in other.violations))


class UnknownModel(InvalidRequest):
    """The model name is not served."""


class PromptTooLong(InvalidRequest):
    """The prompt has more tokens, or characters, than the context can hold."""


class NotAuthenticated(RouterError):
    """A call has no token of a tenant. The error does not reveal which tenants exist."""


class Overloaded(RouterError):
    """There is no room for another request."""

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class NoWorker(RouterError):
    """No worker can serve the request now."""


class RouterStops(RouterError):
    """This router is stopping; the client's library continues at another one."""


class StreamIdle(RouterError):
    """A stream was silent while there were too many such; the caller's next call opens another."""

    def __init__(self, idle_s: float) -> None:
        super().__init__(f"no call for {idle_s:g} s, and many streams without calls are open")


class RequestFailed(RouterError):
    """A worker ended the request; another would do the same.

    Args:
        code: A google.rpc.Code number.
        message: The worker's message; for a wrong field it has the form of InvalidRequest's.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        told = _REFUSAL.fullmatch(message) if code == _INVALID_ARGUMENT else None
        self.violations = (InvalidRequest(told[1], told[2], told[3]),) if told else ()


class RequestCrashed(RequestFailed):
    """A bug in the router ended the request; only the router's log says which, under its id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            _INTERNAL, f"internal error; see request_id {request_id} in the router's log"
        )


class RequestLost(RouterError):
    """The request was resumed as often as allowed and broke again."""


class DeadlineExceeded(RouterError):
    """Time is up."""


class SlowClient(RouterError):
    """The client stopped reading."""


class ModelFolderError(Exception):
    """A file of the model folder cannot be used."""


class TenantsFileError(Exception):
    """The tenants file cannot be used; the message says why, line by line."""


class PortTaken(Exception):
    """Nothing can listen on the port of the metrics."""


class ChatTemplateError(Exception):
    """The model's chat template cannot be compiled or broke a rule of the sandbox."""


class ChildLimit(Exception):
    """Work in a child process took more time or memory than it may, or ended the process."""


class ChildCrash(ChildLimit):
    """Work in a child process crashed it, as text that is nested too deeply does."""


class TemplateLimit(ChatTemplateError):
    """The chat template took more time or memory than it may."""


class RenderingTooLong(ChatTemplateError):
    """The chat template wrote more characters than a prompt may have."""


class AttemptFailed(Exception):
    """The worker, the session or the stream of deltas failed; the request can go on elsewhere."""

    def __init__(
        self,
        reason: str,
        *,
        is_refusal: bool = False,
        is_overload: bool = False,
        is_hand_over: bool = False,
    ) -> None:
        super().__init__(reason)
        self.is_refusal = is_refusal  # the worker itself refused
        self.is_overload = is_overload  # because it is healthy but takes no more requests
        self.is_hand_over = is_hand_over  # because it leaves as planned


class WrongDelta(Exception):
    """A delta begins after the next expected token, or has more tokens than its choice may have.

    Or it has log probabilities, but not one for each token; or its most probable tokens do not fit
    their log probabilities; or a token id is cut off. Or it has what no worker can mean: an end
    before tokens that came, or an unknown reason for it.
    """


class WrongMessage(Exception):
    """Nobody knows whose tokens a worker's message has: its columns differ in length."""


class RefusedByTemplate(Exception):
    """The template called raise_exception: it does not accept these messages."""


class WrongTools(Exception):
    """The tools of a chat are not valid tools; the message says what was found."""


class WorkerGone(Exception):
    """The worker cannot be used; the message says why."""


class ControllerGone(Exception):
    """The controller does not report the workers; the message says why."""
