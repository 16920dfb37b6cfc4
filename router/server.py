"""The router's public gRPC service: requests in, streams out, errors as rich statuses."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from observability.logs import fields
from protos import inference_pb2, inference_pb2_grpc
from protos.token_ids import pack_token_ids
from router import wire
from router.admission import Admission
from router.dispatch import Dispatcher
from router.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoWorker,
    Overloaded,
    RequestFailed,
    RequestLost,
    RouterError,
    SlowClient,
    UnknownModel,
)
from router.generation import Generation
from router.prefix_index import PrefixIndex
from router.prompt import Chat, PackedTokens, Prompt, Text
from router.validation import check_num_messages
from router.worker_registry import WorkerRegistry

logger = logging.getLogger(__name__)

_ERROR_DOMAIN = "pagewire"
# The first class that an error is an instance of decides.
_CODES: tuple[tuple[type[RouterError], grpc.StatusCode], ...] = (
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoWorker, grpc.StatusCode.UNAVAILABLE),
    (RequestLost, grpc.StatusCode.ABORTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (SlowClient, grpc.StatusCode.CANCELLED),
)
_CODES_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Implements InferenceService on top of admission, dispatch and registry."""

    def __init__(
        self,
        *,
        admission: Admission,
        dispatcher: Dispatcher,
        registry: WorkerRegistry,
        index: PrefixIndex,
        random_id: Callable[[], str],
        slow_client_timeout_s: float,
    ) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._registry = registry
        self._index = index
        self._random_id = random_id
        self._slow_client_timeout_s = slow_client_timeout_s

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        record = _Record(self._random_id(), asyncio.get_running_loop().time())
        try:
            with self._admission.slot():
                await self._generate(request, context, record)
            record.outcome = "ok"
            self._admission.num_finished += 1
        except RouterError as error:
            record.outcome = _code(error).name
            await _abort(context, error)
        except asyncio.CancelledError:
            record.outcome = "CANCELLED"
            raise
        except Exception:
            # Nothing that one request does may reach the others.
            logger.exception("request_crashed", extra=fields(request_id=record.request_id))
            record.outcome = "INTERNAL"
            await _abort(context, _internal_error())
        finally:
            record.log()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        try:
            prompt = _prompt(request, "input")
            text, token_ids = await self._admission.tokenize(request.model, prompt)
        except RouterError as error:
            await _abort(context, error)
        return inference_pb2.TokenizeResponse(token_ids=pack_token_ids(token_ids), text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        served = self._registry.model
        if served is None:
            return inference_pb2.ListModelsResponse()
        model = wire.model(served, has_chat_template=self._admission.has_chat_template)
        return inference_pb2.ListModelsResponse(models=[model])

    async def GetClusterStatus(
        self, request: inference_pb2.GetClusterStatusRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetClusterStatusResponse:
        return inference_pb2.GetClusterStatusResponse(
            workers=[
                wire.worker_status(each.member, each.state, each.heartbeat, each.heartbeat_age_s)
                for each in self._registry.known_workers()
            ],
            active_requests=self._admission.num_active,
            finished_requests=self._admission.num_finished,
            resumed_requests=self._dispatcher.num_resumed,
            index_pages=self._index.num_pages,
        )

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,
        record: "_Record",
    ) -> None:
        generation = await self._admission.admit(
            request_id=record.request_id,
            model_name=request.model,
            prompt=_prompt(request, "prompt"),
            asked=wire.asked_sampling(request.sampling),
            arrived_at=record.arrived_at,
            time_remaining_s=context.time_remaining(),
        )
        record.generation = generation
        async with self._dispatcher.serve(generation) as stream:
            while outputs := await stream.next_outputs():
                messages = [wire.response(record.request_id, output) for output in outputs]
                if generation.is_finished:  # and this is the last of it
                    messages[-1].usage.CopyFrom(_usage(generation))
                for message in messages:
                    await self._write(context, message)

    async def _write(
        self, context: grpc.aio.ServicerContext, message: inference_pb2.GenerateResponse
    ) -> None:
        try:
            async with asyncio.timeout(self._slow_client_timeout_s):
                await context.write(message)
        except TimeoutError:
            raise SlowClient(
                f"the client took nothing for {self._slow_client_timeout_s:g} s"
            ) from None


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Serve InferenceService on a server."""
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    add(servicer, server)  # type: ignore[no-untyped-call]


class _Record:
    """What the log says about one request, in one line."""

    def __init__(self, request_id: str, arrived_at: float) -> None:
        self.request_id = request_id
        self.arrived_at = arrived_at
        self.outcome = "INTERNAL"
        self.generation: Generation | None = None

    def log(self) -> None:
        generation = self.generation
        total_ms = 1000 * (asyncio.get_running_loop().time() - self.arrived_at)
        if generation is None:
            logger.info(
                "request_refused",
                extra=fields(
                    request_id=self.request_id, outcome=self.outcome, total_ms=round(total_ms, 1)
                ),
            )
            return
        ttft_ms = None
        if generation.first_token_at is not None:
            ttft_ms = round(1000 * (generation.first_token_at - self.arrived_at), 1)
        logger.info(
            "request_done",
            extra=fields(
                request_id=self.request_id,
                outcome=self.outcome,
                prompt_tokens=len(generation.request.token_ids),
                completion_tokens=generation.num_tokens,
                ttft_ms=ttft_ms,
                total_ms=round(total_ms, 1),
                resumptions=generation.num_resumptions,
                decode_workers=",".join(generation.decode_workers),
            ),
        )


def _prompt(request: Any, field: str) -> Prompt:
    """Read a prompt from one of the fields of a oneof."""
    kind = request.WhichOneof(field)
    if kind == "text":
        return Text(f"{field}.text", request.text)
    if kind == "token_ids":
        return PackedTokens(request.token_ids)
    if kind == "chat":
        check_num_messages(f"{field}.chat.messages", len(request.chat.messages))
        messages = tuple((message.role, message.content) for message in request.chat.messages)
        return Chat(f"{field}.chat", messages)
    kinds = (each.name for each in request.DESCRIPTOR.oneofs_by_name[field].fields)
    raise InvalidRequest(field, "nothing", f"one of {', '.join(kinds)}")


def _usage(generation: Generation) -> inference_pb2.Usage:
    timings = generation.timings()
    stats = wire.request_stats(generation.stats)
    stats.resumptions = generation.num_resumptions
    return inference_pb2.Usage(
        prompt_tokens=len(generation.request.token_ids),
        completion_tokens=generation.num_tokens,
        stats=stats,
        ttft_ms=timings.ttft_ms,
        total_ms=timings.total_ms,
        tpot_ms=timings.tpot_ms,
        decode_workers=generation.decode_workers,
    )


def _internal_error() -> RequestFailed:
    return RequestFailed(grpc.StatusCode.INTERNAL.value[0], "internal error; see the router's log")


def _code(error: RouterError) -> grpc.StatusCode:
    if isinstance(error, RequestFailed):
        code = _CODES_BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
        return grpc.StatusCode.UNKNOWN if code is grpc.StatusCode.OK else code
    return next(code for kind, code in _CODES if isinstance(error, kind))


async def _abort(context: grpc.aio.ServicerContext, error: RouterError) -> NoReturn:
    """End the call with a status that programs can read: reason, fields, retry delay."""
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
        delay.FromMilliseconds(int(1000 * error.retry_delay_s))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
    raise AssertionError("abort always raises")


def _reason(error: RouterError) -> str:
    """Return the class name as gRPC's guide wants it: InvalidRequest -> INVALID_REQUEST."""
    name = type(error).__name__
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()
