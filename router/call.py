"""One call for a generation, from its arrival until its caller has everything.

Life of a call:
1. BEGUN       it takes a place among the active requests, and is admitted
2. DISPATCHED  its stream is fed, and `take` hands out what has come
3. OVER        the last was taken, or an error refused the call
4. CLOSED      what it held is free, its usage is counted, and its line is logged

A call is no task. Where something has to be waited for, a task admits it, and the dispatcher has
one for its stream; most calls need neither. Many calls can therefore begin in one turn of the event
loop, and their requests leave for the worker in one message.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from observability.logs import fields
from observability.rare_line import RareLine
from observability.request_metrics import decode_s
from observability.tracing import NO_SPAN, NoSpan, begin_trace
from pagewire.protos.trace_context import told_context
from router import wire
from router.admission import Admission, Asking, IssueToken
from router.dispatch import Dispatcher
from router.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoWorker,
    Overloaded,
    RequestCrashed,
    RequestLost,
    RouterError,
    RouterStops,
)
from router.generation import Generation, Output
from router.metrics import RouterMetrics
from router.pacing import Pace
from router.prompt import Chat, PackedTokens, Prompt, Text
from router.session import Stream
from router.statuses import code_of
from router.tenants.account import Account
from router.tenants.gate import current_tenant
from router.tenants.registry import Tenants
from router.tenants.tenant import Tenant
from router.validation import check_num_messages

logger = logging.getLogger(__name__)

MAX_LOGGED_REFUSALS = 20  # of a tenant, in a period of RareLine

# Adds an empty GenerateResponse to those that the caller gets, and returns it.
AddMessage = Callable[[], Any]


class Reception:
    """Takes in the calls of all front ends of a router.

    Args:
        admission: Admits them.
        dispatcher: Has them served.
        metrics: Counts them.
        tenants: The callers allowed.
        random_id: Returns 32 random hexadecimal digits.
        model_name: Returns the name of the served model; empty while it is not known.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        tenants: Tenants,
        random_id: Callable[[], str],
        model_name: Callable[[], str],
    ) -> None:
        self.admission = admission
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.tenants = tenants
        self.random_id = random_id
        self.model_name = model_name
        # By tenant: a flood of refused calls must not fill the disk.
        self.refusals: defaultdict[str, RareLine] = defaultdict(
            lambda: RareLine(logger, logging.INFO, "request_refused", most=MAX_LOGGED_REFUSALS)
        )
        self._admitting: dict[asyncio.Task[None], Call] = {}  # held until they end

    def call(self, on_news: Callable[[], None]) -> "Call":
        """Return a new call; `on_news` is called when `take` has something, or the call is over."""
        return Call(self, on_news)

    def admit_later(self, call: "Call", asking: Asking, pace: Pace) -> "asyncio.Task[None]":
        """Admit a call in a task."""
        task = asyncio.create_task(call.admit(asking, pace), name=f"admit-{asking.request_id}")
        self._admitting[task] = call
        task.add_done_callback(self._admitting.pop)
        return task

    def abandon(self) -> None:
        """End all calls that still run."""
        for call in list(self._admitting.values()):
            call.fail(RouterStops("the router stopped"))
        self.dispatcher.abandon()


class Call:
    """See the module's docstring. `begin` comes first; whatever follows, `close` or `cancel` last.

    Attributes:
        is_over: Nothing more will come.
        error: Why it ended without a result.
    """

    def __init__(self, reception: Reception, on_news: Callable[[], None]) -> None:
        self.is_over = False
        self.error: RouterError | None = None
        self._reception = reception
        self._on_news = on_news
        self._request_id = reception.random_id()
        self._arrived_at = asyncio.get_running_loop().time()
        self._span: NoSpan = NO_SPAN
        self._tenant: Tenant | None = None
        self._num_answers = 0  # for which it holds a place
        self._account: Account | None = None
        self._admitting: asyncio.Task[None] | None = None
        self._generation: Generation | None = None
        self._issue_token: IssueToken | None = None  # until it is sent
        self._stream: Stream | None = None
        self._has_begun = False  # its first token has come
        self._is_closed = False

    def begin(self, request: Any, time_remaining_s: float | None, pace: Pace) -> None:
        """Begin the call that a GenerateRequest asks for; an error is news, as a result is."""
        self._reception.metrics.call_begun()
        caller = told_context(request.traceparent, request.tracestate)
        self._span = begin_trace("generate", caller, request_id=self._request_id)
        try:
            asking = self._enter(request, time_remaining_s)
            admitted = self._reception.admission.admit_at_once(asking)
            if admitted is None:
                self._admitting = self._reception.admit_later(self, asking, pace)
            else:
                self._dispatch(*admitted, pace)
        except Exception as error:
            self.fail(error)

    async def admit(self, asking: Asking, pace: Pace) -> None:
        """Go on after `begin` where there is something to wait for."""
        admission = self._reception.admission
        try:
            async with asyncio.timeout_at(admission.deadline_of(asking)):
                admitted = await admission.admit(asking)
            self._dispatch(*admitted, pace)
        except TimeoutError:
            self.fail(DeadlineExceeded("not admitted in time"))
        except Exception as error:
            self.fail(error)

    def take_token(self, now: float) -> tuple[int, int, str] | None:
        """Do what `take` does if one token of a lone choice has come: its index, it, its text.

        None: nothing was taken.
        """
        stream = self._stream
        if stream is None or stream.is_over or not self._has_begun:
            return None
        try:
            token = stream.take_token(now)
            if token is not None:
                assert self._account
                self._account.use_generated(stream.generation.num_tokens, now)
        except Exception as error:
            self.fail(error)
            return None
        return token

    def take(self, add: AddMessage) -> None:
        """Add messages with what has come since the last time."""
        stream = self._stream
        if stream is None or self.is_over:
            return
        try:
            if outputs := stream.take():
                self._write(outputs, add)
        except Exception as error:
            self.fail(error)
            return
        if stream.is_over:
            self.is_over, self.error = True, stream.error

    def fail(self, error: Exception) -> RouterError:
        """End the call with an error; what is no RouterError is a bug, which must not harm others.

        Returns:
            What its caller is told.
        """
        if not isinstance(error, RouterError):
            logger.error(
                "request_crashed", exc_info=error, extra=fields(request_id=self._request_id)
            )
            error = RequestCrashed(self._request_id)
        self.is_over, self.error = True, error
        self.close()
        self._on_news()
        return error

    def cancel(self) -> None:
        """Close a call that its caller has left; no effect on a closed one."""
        self._close("CANCELLED")

    def close(self) -> None:
        """Free what a call that is over holds, and account for it; no effect on a closed one."""
        assert self.is_over, "else it is cancelled"
        self._close(code_of(self.error).name if self.error else "ok")

    def _enter(self, request: Any, time_remaining_s: float | None) -> Asking:
        reception = self._reception
        self._tenant = current_tenant(reception.tenants)
        num_answers = request.sampling.n or 1
        reception.admission.take_place(self._tenant, num_answers)
        self._num_answers = num_answers
        self._account = Account(self._tenant)
        resumption = wire.resumption(request)
        if resumption is None:
            reception.dispatcher.check_room()
        return Asking(
            account=self._account,
            request_id=self._request_id,
            model_name=request.model,
            prompt=read_prompt(request, "prompt"),
            asked=wire.asked_sampling(request.sampling),
            arrived_at=self._arrived_at,
            time_remaining_s=time_remaining_s,
            resumption=resumption,
        )

    def _dispatch(self, generation: Generation, issue_token: IssueToken, pace: Pace) -> None:
        self._generation, self._issue_token = generation, issue_token
        generation.token_gaps = self._reception.metrics.token_gaps
        generation.span = self._span
        self._span.event("admitted")
        dispatcher = self._reception.dispatcher
        self._stream = dispatcher.open(generation, pace, self._on_news)
        dispatcher.begin(self._stream)

    def _write(self, outputs: list[Output], add: AddMessage) -> None:
        generation, account = self._generation, self._account
        assert generation
        assert account
        account.use_generated(generation.num_tokens, asyncio.get_running_loop().time())
        model, metrics = self._reception.model_name(), self._reception.metrics
        if not self._has_begun:
            self._has_begun = True
            self._span.event("first_token")
            metrics.waiting(-1)
            if generation.first_token_at is not None:
                metrics.first_token(model, generation.first_token_at - self._arrived_at)
        for output in outputs:
            message = add()
            wire.write_output(message, generation.request, output)
            if self._issue_token:
                message.resume_token, self._issue_token = self._issue_token(), None
            if output.finish:
                metrics.choice_finished(model, output.finish.value)
        if generation.is_finished:  # and this is the last of it
            usage = message.usage
            wire.write_usage(usage, generation)
            metrics.call_finished(model, usage, usage.stats.cached_tokens)
            sampling = generation.request.sampling
            metrics.asked(model, n=sampling.n, max_tokens=sampling.max_tokens)
            if generation.prefill_s is not None:
                metrics.computed(model, prefill_s=generation.prefill_s, decode_s=decode_s(usage))
            metrics.answered(model, usage.total_ms / 1000)

    def _close(self, outcome: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._admitting:
            self._admitting.cancel()
        if self._stream:
            self._reception.dispatcher.leave(self._stream)
        admission, metrics = self._reception.admission, self._reception.metrics
        generation = self._generation
        if self._account:
            if generation:  # with what its client did not take
                now = asyncio.get_running_loop().time()
                self._account.use_generated(generation.num_tokens, now)
            # What no worker has worked for is given back.
            self._account.close(
                may_have_run=generation is not None and generation.may_have_run,
                is_refused=isinstance(self.error, Overloaded | NoWorker | RequestLost),
            )
        if self._tenant and self._num_answers:
            admission.leave_place(self._tenant, self._num_answers)
        if self._tenant and isinstance(self.error, Overloaded):
            self._tenant.counts.refused += 1
        admission.num_finished += outcome == "ok"
        metrics.call_ended(outcome, is_waiting=not self._has_begun)
        self._log_end(outcome)

    def _log_end(self, outcome: str) -> None:
        """Write the call's line, unless many like it were written, and end its span."""
        total_ms = 1000 * (asyncio.get_running_loop().time() - self._arrived_at)
        ends: dict[str, object] = {"outcome": outcome, "total_ms": round(total_ms, 1)}
        if generation := self._generation:
            ttft_ms = None
            if generation.first_token_at is not None:
                ttft_ms = round(1000 * (generation.first_token_at - self._arrived_at), 1)
            ends |= {
                "prompt_tokens": generation.request.prompt_len,
                "completion_tokens": generation.num_tokens,
                "ttft_ms": ttft_ms,
                "resumptions": generation.num_resumptions,
                "decode_workers": ",".join(generation.decode_workers),
            }
            if generation.request.resumed_from:
                ends["resumed_from"] = generation.request.resumed_from
        if self._tenant and self._tenant.name:
            ends["tenant"] = self._tenant.name
        self._span.end("" if outcome == "ok" else outcome, **ends)
        line = {"request_id": self._request_id, **ends, **self._span.log_fields}
        if generation:
            logger.info("request_done", extra=fields(**line))
            return
        name = self._tenant.name if self._tenant else ""
        self._reception.refusals[name].write(**line)


def read_tokenize_prompt(request: Any) -> Prompt:
    """Read a TokenizeRequest: its input, and what it asks of special tokens and the chat's end.

    Raises:
        InvalidRequest: As `read_prompt` does, or because fields contradict each other.
    """
    prompt = read_prompt(request, "input")
    continues = request.continue_final_message
    begins = request.add_generation_prompt
    if isinstance(prompt, Chat):
        if continues and begins:
            allowed = "false, or unset, with continue_final_message"
            raise InvalidRequest("add_generation_prompt", "true", allowed)
        if not request.HasField("add_generation_prompt"):
            begins = not continues
        prompt = replace(prompt, adds_generation_prompt=begins, continues_final=continues)
    elif continues or begins:
        field = "continue_final_message" if continues else "add_generation_prompt"
        raise InvalidRequest(field, "true", "false, or unset, without a chat")
    assert not isinstance(prompt, PackedTokens), "the message has no field of this kind"
    if request.HasField("add_special_tokens"):
        prompt = replace(prompt, adds_special_tokens=request.add_special_tokens)
    return prompt


def read_prompt(request: Any, field: str) -> Prompt:
    """Read a prompt from one of the fields of a oneof.

    Raises:
        InvalidRequest: There is none, or a chat of too many messages.
    """
    kind = request.WhichOneof(field)
    if kind == "token_ids":
        return PackedTokens(request.token_ids)
    if kind == "text":
        return Text(f"{field}.text", request.text)
    if kind == "chat":
        check_num_messages(f"{field}.chat.messages", len(request.chat.messages))
        return wire.chat(f"{field}.chat", request.chat)
    kinds = (each.name for each in request.DESCRIPTOR.oneofs_by_name[field].fields)
    raise InvalidRequest(field, "nothing", f"one of {', '.join(kinds)}")
