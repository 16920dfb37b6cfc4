"""The router's public gRPC service: requests in, streams out, errors as rich statuses."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from credentials.door import Encryption
from observability.logs import fields
from observability.tracing import NO_SPAN, begin_trace
from pagewire.protos import inference_pb2, inference_pb2_grpc
from pagewire.protos.gathering import MAX_MORE, READS_MORE_KEY
from router import wire
from router.admission import Admission
from router.delivery import Delivery
from router.dispatch import Dispatcher
from router.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotAuthenticated,
    NoWorker,
    Overloaded,
    RequestFailed,
    RequestLost,
    RouterError,
    RouterStops,
    SlowClient,
    UnknownModel,
)
from router.generation import Generation, Output
from router.many_calls import ManyCalls, Send
from router.metrics import RouterMetrics
from router.pacing import OWN_CALL_US, SHARED_CALL_US, Pace
from router.prefix_index import PrefixIndex
from router.prompt import PackedTokens, Prompt, Text
from router.session import Stream
from router.tenants.account import Account
from router.tenants.gate import current_tenant
from router.tenants.registry import Tenants
from router.tenants.tenant import Tenant
from router.validation import check_num_messages
from router.worker_registry import WorkerRegistry

logger = logging.getLogger(__name__)

_ERROR_DOMAIN = "pagewire"
_MOST_RESULTS = 128  # in a message of GenerateMany
_SHOWN_PREFIXES = 10  # in a cluster's status
_LONGEST_INTERVAL_S = 10.0  # as protos/inference.proto says; some memory is held as long
# The first class that an error is an instance of decides.
_CODES: tuple[tuple[type[RouterError], grpc.StatusCode], ...] = (
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotAuthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoWorker, grpc.StatusCode.UNAVAILABLE),
    (RouterStops, grpc.StatusCode.UNAVAILABLE),
    (RequestLost, grpc.StatusCode.ABORTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (SlowClient, grpc.StatusCode.CANCELLED),
)
_CODES_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
# Takes all messages of a call to its caller.
_Deliver = Callable[[AsyncGenerator[inference_pb2.GenerateResponse, None]], Awaitable[None]]

# Describes the connections of clients to the router, and of the router to the cluster.
DescribeTls = Callable[[], tuple[Encryption, Encryption]]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Implements InferenceService on top of admission, dispatch and registry."""

    def __init__(
        self,
        *,
        admission: Admission,
        dispatcher: Dispatcher,
        registry: WorkerRegistry,
        index: PrefixIndex,
        metrics: RouterMetrics,
        tenants: Tenants,
        random_id: Callable[[], str],
        slow_client_timeout_s: float,
        describe_tls: DescribeTls,
    ) -> None:
        self._admission = admission
        self._describe_tls = describe_tls
        self._dispatcher = dispatcher
        self._registry = registry
        self._index = index
        self._metrics = metrics
        self._tenants = tenants
        self._random_id = random_id
        self._slow_client_timeout_s = slow_client_timeout_s

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async def deliver(
            messages: AsyncGenerator[inference_pb2.GenerateResponse, None],
        ) -> None:
            await Delivery(
                messages,
                begin=lambda: context.send_initial_metadata(()),
                write=context.write,
                timeout_s=self._slow_client_timeout_s,
            ).run()

        pace = Pace(message_us=OWN_CALL_US)
        async with _answering(context):
            if not request.traceparent:
                request.traceparent = _traceparent(context)
            await self._generate(request, context.time_remaining(), deliver, pace)

    async def GenerateMany(
        self,
        requests: AsyncIterator[inference_pb2.GenerateManyRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        cancelled = status_pb2.Status(code=grpc.StatusCode.CANCELLED.value[0], message="cancelled")
        calls = ManyCalls(self._play, cancelled_status=cancelled.SerializeToString())
        reader = asyncio.create_task(_read_calls(requests, calls), name="many-calls")
        try:
            async with _answering(context):
                await context.send_initial_metadata(((READS_MORE_KEY, "1"),))
                await Delivery(
                    _results(calls),
                    begin=None,
                    write=context.write,
                    timeout_s=self._slow_client_timeout_s,
                ).run()
        finally:
            reader.cancel()
            await calls.stop()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with _answering(context), self._served(self._record()):
            prompt = _prompt(request, "input")
            text, packed = await self._admission.tokenize(request.model, prompt)
        return inference_pb2.TokenizeResponse(token_ids=packed, text=text)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        async with _answering(context), self._served(self._record()):
            text, pieces = await self._admission.detokenize(
                request.model,
                request.token_ids,
                skip_special_tokens=request.skip_special_tokens,
                with_pieces=request.with_pieces,
            )
        return inference_pb2.DetokenizeResponse(text=text, pieces=pieces)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        async with _answering(context):
            tenant = current_tenant(self._tenants)
        served = self._registry.model
        if served is None:
            return inference_pb2.ListModelsResponse(tenant=tenant.name)
        model = wire.model(
            served,
            has_chat_template=self._admission.has_chat_template,
            tool_call_format=self._admission.tool_call_format,
            has_reasoning=self._admission.has_reasoning,
            max_request_bytes=self._admission.max_request_bytes,
            max_request_fields=self._admission.max_request_fields,
        )
        return inference_pb2.ListModelsResponse(models=[model], tenant=tenant.name)

    async def GetClusterStatus(
        self, request: inference_pb2.GetClusterStatusRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetClusterStatusResponse:
        async with _answering(context):
            tenant = current_tenant(self._tenants)
        if not tenant.rules.operator:
            return inference_pb2.GetClusterStatusResponse(
                active_requests=tenant.num_active,
                is_stopping=self._admission.is_closed,
                hot_prefixes=self._hot_prefixes(tenant.name),
                tenants=[wire.tenant_status(tenant)],
                is_partial=True,
            )
        return self.cluster_status()

    def cluster_status(self) -> inference_pb2.GetClusterStatusResponse:
        """Return this router's current view of the cluster, for operators."""
        front, cluster = self._describe_tls()
        return inference_pb2.GetClusterStatusResponse(
            workers=[
                wire.worker_status(each.member, each.state, each.heartbeat, each.heartbeat_age_s)
                for each in self._registry.known_workers()
            ],
            active_requests=self._admission.num_active,
            finished_requests=self._admission.num_finished,
            resumed_requests=self._dispatcher.num_resumed,
            index_pages=self._index.num_pages,
            is_stopping=self._admission.is_closed,
            hot_prefixes=self._hot_prefixes(None),
            front_tls=wire.encryption(front),
            cluster_tls=wire.encryption(cluster),
            tenants=[wire.tenant_status(each) for each in self._tenants.told],
        )

    def _hot_prefixes(self, tenant: str | None) -> list[inference_pb2.HotPrefix]:
        return [
            wire.hot_prefix(each, self._index.holders(each.page_hash))
            for each in self._dispatcher.hot_prefixes.hottest(_SHOWN_PREFIXES, tenant)
        ]

    async def _play(self, start: inference_pb2.GenerateManyRequest, send: Send) -> bytes:
        """Run one call of many."""

        async def deliver(
            messages: AsyncGenerator[inference_pb2.GenerateResponse, None],
        ) -> None:
            async with aclosing(messages):
                async for message in messages:
                    await send(message)

        least_s = min(start.interval_ms / 1000, _LONGEST_INTERVAL_S)
        pace = Pace(message_us=SHARED_CALL_US, least_s=least_s)
        try:
            await self._generate(start.start, start.timeout_ms / 1000 or None, deliver, pace)
        except RouterError as error:
            status: bytes = _status(error).SerializeToString()
            return status
        return b""

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        time_remaining_s: float | None,
        deliver: _Deliver,
        pace: Pace,
    ) -> None:
        record = self._record()
        record.span = begin_trace("generate", request.traceparent, request_id=record.request_id)
        self._metrics.waiting(1)
        try:
            with self._metrics.running():
                await self._serve(record, request, time_remaining_s, deliver, pace)
        finally:
            if not record.has_begun:
                self._metrics.waiting(-1)
            self._metrics.call_ended(record.outcome)
            record.close()

    async def _serve(
        self,
        record: "_Record",
        request: inference_pb2.GenerateRequest,
        time_remaining_s: float | None,
        deliver: _Deliver,
        pace: Pace,
    ) -> None:
        async with self._served(record) as tenant:
            with _accounted(record, tenant) as account:
                resumption = wire.resumption(request)
                if resumption is None:
                    self._dispatcher.check_room()
                record.generation, resume_token = await self._admission.admit(
                    account=account,
                    request_id=record.request_id,
                    model_name=request.model,
                    prompt=_prompt(request, "prompt"),
                    asked=wire.asked_sampling(request.sampling),
                    arrived_at=record.arrived_at,
                    time_remaining_s=time_remaining_s,
                    resumption=resumption,
                )
                record.generation.token_gaps = self._metrics.token_gaps
                record.generation.span = record.span
                record.span.event("admitted")
                async with self._dispatcher.serve(record.generation, pace) as stream:
                    await deliver(self._responses(record, stream, resume_token, account))
            self._admission.num_finished += 1

    @asynccontextmanager
    async def _served(self, record: "_Record") -> AsyncIterator[Tenant]:
        """Hold a place for a request, and note how it ends; failures become a RouterError."""
        tenant: Tenant | None = None
        try:
            tenant = current_tenant(self._tenants)
            record.tenant = tenant.name
            with self._admission.slot(tenant):
                yield tenant
            record.outcome = "ok"
        except RouterError as error:
            record.outcome = _code(error).name
            if tenant and isinstance(error, Overloaded):
                tenant.counts.refused += 1
            raise
        except asyncio.CancelledError:
            record.outcome = "CANCELLED"
            raise
        except Exception:
            # A bug in one request must not affect others.
            logger.exception("request_crashed", extra=fields(request_id=record.request_id))
            record.outcome = "INTERNAL"
            raise RequestFailed(
                grpc.StatusCode.INTERNAL.value[0], "internal error; see the router's log"
            ) from None

    async def _responses(
        self, record: "_Record", stream: Stream, resume_token: bytes, account: Account
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        generation = stream.generation
        while outputs := await stream.next_outputs():
            account.use_generated(generation.num_tokens)
            self._count(record, outputs)
            messages = [wire.response(generation.request, output) for output in outputs]
            messages[0].resume_token, resume_token = resume_token, b""
            if generation.is_finished:  # and this is the last of it
                usage = _usage(generation)
                self._metrics.call_finished(self._model_name, usage, usage.stats.cached_tokens)
                self._metrics.answered(self._model_name, usage.total_ms / 1000)
                messages[-1].usage.CopyFrom(usage)
            for message in messages:
                yield message

    def _count(self, record: "_Record", outputs: Iterable[Output]) -> None:
        generation = record.generation
        assert generation
        if not record.has_begun:
            record.has_begun = True
            record.span.event("first_token")
            self._metrics.waiting(-1)
            if generation.first_token_at is not None:
                ttft_s = generation.first_token_at - record.arrived_at
                self._metrics.first_token(self._model_name, ttft_s)
        for output in outputs:
            if output.finish:
                self._metrics.choice_finished(self._model_name, output.finish.value)

    @property
    def _model_name(self) -> str:
        assert self._registry.model, "no call is admitted before"
        return self._registry.model.name

    def _record(self) -> "_Record":
        return _Record(self._random_id(), asyncio.get_running_loop().time())


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Serve InferenceService on a server."""
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    add(servicer, server)  # type: ignore[no-untyped-call]


@contextmanager
def _accounted(record: "_Record", tenant: Tenant) -> Iterator[Account]:
    """Count the usage of a generation; what no worker has worked for is given back."""
    account = Account(tenant)
    is_refused = False
    try:
        yield account
    except (Overloaded, NoWorker, RequestLost):
        is_refused = True
        raise
    finally:
        generation = record.generation
        if generation:  # with what its client did not take
            account.use_generated(generation.num_tokens)
        may_have_run = generation is not None and generation.may_have_run
        account.close(may_have_run=may_have_run, is_refused=is_refused)


class _Record:
    """The log line of one request."""

    def __init__(self, request_id: str, arrived_at: float) -> None:
        self.request_id = request_id
        self.arrived_at = arrived_at
        self.outcome = "INTERNAL"
        self.tenant = ""
        self.generation: Generation | None = None
        self.has_begun = False  # its first token has come
        self.span = NO_SPAN

    def close(self) -> None:
        """Write the line, and end the span."""
        total_ms = 1000 * (asyncio.get_running_loop().time() - self.arrived_at)
        event, values = "request_refused", self._tenant()
        if generation := self.generation:
            event, values = "request_done", self._account(generation) | values
        ends = {"outcome": self.outcome, "total_ms": round(total_ms, 1), **values}
        self.span.end("" if self.outcome == "ok" else self.outcome, **ends)
        line = {"request_id": self.request_id, **ends, **self.span.log_fields}
        logger.info(event, extra=fields(**line))

    def _account(self, generation: Generation) -> dict[str, object]:
        ttft_ms = None
        if generation.first_token_at is not None:
            ttft_ms = round(1000 * (generation.first_token_at - self.arrived_at), 1)
        return {
            "prompt_tokens": generation.request.prompt_len,
            "completion_tokens": generation.num_tokens,
            "ttft_ms": ttft_ms,
            "resumptions": generation.num_resumptions,
            "decode_workers": ",".join(generation.decode_workers),
            **_resumed_from(generation),
        }

    def _tenant(self) -> dict[str, object]:
        return {"tenant": self.tenant} if self.tenant else {}


def _resumed_from(generation: Generation) -> dict[str, object]:
    request_id = generation.request.resumed_from
    return {"resumed_from": request_id} if request_id else {}


def _traceparent(context: grpc.aio.ServicerContext) -> str:
    """Return the trace context in the call's metadata."""
    metadata = context.invocation_metadata() or ()
    return next((value for key, value in metadata if key == "traceparent"), "")


def _prompt(request: Any, field: str) -> Prompt:
    """Read a prompt from one of the fields of a oneof."""
    kind = request.WhichOneof(field)
    if kind == "text":
        return Text(f"{field}.text", request.text)
    if kind == "token_ids":
        return PackedTokens(request.token_ids)
    if kind == "chat":
        check_num_messages(f"{field}.chat.messages", len(request.chat.messages))
        return wire.chat(f"{field}.chat", request.chat)
    kinds = (each.name for each in request.DESCRIPTOR.oneofs_by_name[field].fields)
    raise InvalidRequest(field, "nothing", f"one of {', '.join(kinds)}")


async def _results(calls: ManyCalls) -> AsyncGenerator[inference_pb2.GenerateManyResponse, None]:
    while results := await calls.take():
        # A caller that reads late gets much at once, but no message may be too long.
        for first in range(0, len(results), _MOST_RESULTS):
            part = results[first : first + _MOST_RESULTS]
            yield inference_pb2.GenerateManyResponse(
                results=[wire.call_result(*each) for each in part]
            )


def _usage(generation: Generation) -> inference_pb2.Usage:
    timings = generation.timings()
    stats = wire.request_stats(generation.stats)
    stats.resumptions = generation.num_resumptions
    return inference_pb2.Usage(
        prompt_tokens=generation.request.prompt_len,
        completion_tokens=generation.num_tokens,
        stats=stats,
        ttft_ms=timings.ttft_ms,
        total_ms=timings.total_ms,
        tpot_ms=timings.tpot_ms,
        decode_workers=generation.decode_workers,
    )


def _code(error: RouterError) -> grpc.StatusCode:
    if isinstance(error, RequestFailed):
        code = _CODES_BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
        return grpc.StatusCode.UNKNOWN if code is grpc.StatusCode.OK else code
    return next(code for kind, code in _CODES if isinstance(error, kind))


async def _read_calls(
    requests: AsyncIterator[inference_pb2.GenerateManyRequest], calls: ManyCalls
) -> None:
    error = None
    try:
        async for message in requests:
            if len(message.more) > MAX_MORE:
                raise InvalidRequest("more", f"{len(message.more)} of them", f"at most {MAX_MORE}")
            for each in (message, *message.more):
                if each.HasField("start"):
                    calls.start(each.call_id, each)
                else:
                    calls.cancel(each.call_id)
            await calls.wait_taken()
    except Exception as found:  # whatever ends the reading ends the stream
        error = found
    calls.close(error)


@asynccontextmanager
async def _answering(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """End a call with the status of its error."""
    try:
        yield
    except RouterError as error:
        await _abort(context, _status(error))


def _status(error: RouterError) -> status_pb2.Status:
    """Return a status that programs can read: reason, fields, retry delay."""
    status = status_pb2.Status(code=_code(error).value[0], message=str(error))
    reason = error_details_pb2.ErrorInfo(reason=_reason(error), domain=_ERROR_DOMAIN)
    status.details.add().Pack(reason)
    if isinstance(error, InvalidRequest):
        bad_request = error_details_pb2.BadRequest()
        for field, description in error.violations:
            bad_request.field_violations.add(field=field, description=description)
        status.details.add().Pack(bad_request)
    if isinstance(error, Overloaded):
        delay = Duration()
        delay.FromMilliseconds(math.ceil(1000 * error.retry_delay_s))  # not sooner than it may
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


async def _abort(context: grpc.aio.ServicerContext, status: status_pb2.Status) -> NoReturn:
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
    raise AssertionError("abort always raises")


def _reason(error: RouterError) -> str:
    """Return the class name as gRPC's guide wants it: InvalidRequest -> INVALID_REQUEST."""
    name = type(error).__name__
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()
