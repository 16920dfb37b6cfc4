"""Converts between the router's values and protobuf, and makes the calls to workers."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, fields
from functools import partial
from operator import attrgetter
from typing import Any

import grpc

from credentials.door import Encryption
from grammars.errors import InvalidConstraint
from grammars.wire import constraint_from_proto, constraint_to_proto
from pagewire.protos import (
    common_pb2,
    controller_pb2,
    controller_pb2_grpc,
    inference_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from pagewire.protos.trace_context import TraceContext
from protos.contract import CONTRACT_VERSION
from protos.sampling_limits import MAX_CHOICES
from router.chat_format import ToolCallFormat
from router.errors import InvalidRequest, WrongDelta
from router.generation import Delta, Failure, Finish, Generation, Output, WorkerStats
from router.hot_prefixes import HotPrefix
from router.membership import WorkerMember, WorkerRole
from router.prefix_index import CacheBatch, Position
from router.prompt import Chat, ChatMessage, ToolCall
from router.request import (
    AskedSampling,
    GenerationRequest,
    Sampling,
    SamplingDefaults,
    ServedModel,
)
from router.resumption import ReceivedChoice, Resumption
from router.tenants.tenant import Tenant
from router.worker_report import KnownWorker, WorkerHeartbeat, WorkerInfo

_POOLS: dict[int, WorkerRole] = {
    common_pb2.POOL_PREFILL: "prefill",
    common_pb2.POOL_DECODE: "decode",
}
_FINISHES = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: Finish.STOP,
    common_pb2.FINISH_REASON_LENGTH: Finish.LENGTH,
}
_FINISH_NUMBERS = {finish: number for number, finish in _FINISHES.items() if finish}
_TOOL_CALL_FORMATS = {
    None: inference_pb2.TOOL_CALL_FORMAT_UNSPECIFIED,
    ToolCallFormat.LLAMA3_JSON: inference_pb2.TOOL_CALL_FORMAT_LLAMA3_JSON,
    ToolCallFormat.HERMES: inference_pb2.TOOL_CALL_FORMAT_HERMES,
    ToolCallFormat.MISTRAL: inference_pb2.TOOL_CALL_FORMAT_MISTRAL,
}
_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "n",
)
_read_numbers = attrgetter(*_NUMBERS)
# Fields of a client's parameters that AskedSampling takes as they are.
_PLAIN_SAMPLING = frozenset({*_NUMBERS, "logprobs", "ignore_eos", "skip_special_tokens"})
_PART_BYTES = 120  # of memory, of a message or call of a tool without text
_SHOWN_HASH_BYTES = 4  # of a hash: enough to tell ten prefixes apart
# Costs of a request |-> the most that a message can tell of it
_STATS = dict.fromkeys((each.name for each in fields(WorkerStats)), 2**32 - 1)
_STATS["bytes_moved"] = 2**64 - 1


def watch_members(channel: grpc.aio.Channel) -> Any:
    """Open the stream of members; the first message to write is a `members_request`."""
    stub = controller_pb2_grpc.ControllerServiceStub(channel)  # type: ignore[no-untyped-call]
    return stub.WatchMembers()


def members_request(router_id: str, applied_version: int) -> controller_pb2.WatchMembersRequest:
    """Make the message that says which members a router uses; 0: none yet."""
    return controller_pb2.WatchMembersRequest(
        router_id=router_id, applied_version=applied_version, contract_version=CONTRACT_VERSION
    )


def members(message: controller_pb2.WatchMembersResponse) -> list[WorkerMember]:
    """Convert the controller's members; leave out members of unknown roles."""
    return [
        WorkerMember(
            worker_id=each.worker.worker_id,
            incarnation=each.worker.incarnation,
            address=each.worker.address,
            contract_version=each.worker.contract_version,
            pool=_POOLS[each.pool],
            is_draining=each.draining,
        )
        for each in message.members
        if each.pool in _POOLS
    ]


async def get_info(channel: grpc.aio.Channel, timeout_s: float) -> WorkerInfo:
    """Ask a worker for its identity."""
    request = worker_pb2.GetInfoRequest()
    info = await _worker_service(channel).GetInfo(request, timeout=timeout_s)
    return WorkerInfo(
        incarnation=info.worker.incarnation,
        contract_version=info.worker.contract_version,
        pool=_POOLS.get(info.pool),
        model=ServedModel(
            name=info.model.name,
            fingerprint=info.model_fingerprint,
            vocab_size=info.model.vocab_size,
            max_context_tokens=info.model.max_context_tokens,
            page_size=info.model.page_size,
            eos_token_ids=tuple(info.eos_token_ids),
            max_choices=min(info.model.max_choices or MAX_CHOICES, MAX_CHOICES),
        ),
        transports=tuple(info.transports),
        page_bytes=info.page_bytes,
        device=info.device,
        tokenizer_digest=info.tokenizer_digest,
    )


def watch(channel: grpc.aio.Channel) -> Any:
    """Open the stream of heartbeats; read it with `heartbeat`."""
    return _worker_service(channel).Watch(worker_pb2.WatchRequest())


def heartbeat(response: worker_pb2.WatchResponse) -> WorkerHeartbeat:
    """Convert a message of the Watch stream."""
    beat = response.heartbeat
    pages = beat.pages
    return WorkerHeartbeat(
        incarnation=beat.worker.incarnation,
        steps=beat.steps,
        num_running=beat.running,
        num_waiting=beat.waiting,
        queued_tokens=beat.queued_tokens,
        num_pages=pages.total,
        num_used_pages=pages.live + pages.leased + pages.incoming + pages.quarantine,
        num_computed_tokens=beat.totals.computed_tokens,
        is_draining=beat.draining,
        is_stepping=beat.stepping,
        message=beat.SerializeToString(),
    )


async def cache_batches(
    channel: grpc.aio.Channel, position: Position | None
) -> AsyncGenerator[CacheBatch, None]:
    """Follow a worker's cache from a position on; None starts with a snapshot."""
    call = _worker_service(channel).SubscribeCacheEvents(
        worker_pb2.SubscribeCacheEventsRequest(
            incarnation=position.incarnation if position else 0,
            after_sequence=position.sequence if position else 0,
        )
    )
    try:
        async for batch in call:
            yield CacheBatch(
                incarnation=batch.incarnation,
                sequence=batch.sequence,
                is_snapshot=batch.snapshot,
                stored=batch.stored,
                removed=batch.removed,
            )
    finally:
        call.cancel()


def open_session(channel: grpc.aio.Channel) -> Any:
    """Open a session with a decode worker; the first message must be a hello."""
    stub = worker_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[no-untyped-call]
    return stub.Session()


async def meet(
    channel: grpc.aio.Channel, prefill_workers: Sequence[WorkerMember], *, timeout_s: float
) -> None:
    """Name prefill workers to a decode worker; raises AioRpcError."""
    stub = worker_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[no-untyped-call]
    members = [_worker_ref(each) for each in prefill_workers]
    await stub.Meet(worker_pb2.MeetRequest(prefill_workers=members), timeout=timeout_s)


def hello(router_id: str, incarnation: int, contract_version: int) -> worker_pb2.SessionRequest:
    """Make the first message of a session."""
    greeting = worker_pb2.SessionHello(
        router_id=router_id, incarnation=incarnation, contract_version=contract_version
    )
    return worker_pb2.SessionRequest(hello=greeting)


def submit(
    request: GenerationRequest,
    *,
    attempt: int,
    choices: Sequence[tuple[int, Sequence[int]]],
    prefill_candidates: Sequence[WorkerMember],
    timeout_s: float,
    failed_passes: int,
    trace: TraceContext,
) -> worker_pb2.SessionRequest:
    """Make the message that hands a request to a decode worker.

    Args:
        request: What to generate.
        attempt: 0 at first, one more at each resumption.
        choices: (choice, token ids already received) of those that are not finished.
        prefill_candidates: Best first.
        timeout_s: The worker gives up after it.
        failed_passes: As reported by the worker that had it last.
        trace: That of the attempt's span; empty: it is not traced.
    """
    message = worker_pb2.SessionRequest()
    submitted = message.submit
    submitted.request_id = request.request_id
    submitted.attempt = attempt
    submitted.prompt_token_ids = request.packed_token_ids
    _write_sampling(submitted.sampling, request.sampling)
    for choice, emitted in choices:
        state = submitted.choices.add(choice=choice)
        if emitted:
            state.emitted_token_ids = pack_token_ids(emitted)
    for each in prefill_candidates:
        submitted.prefill_candidates.append(_worker_ref(each))
    submitted.cache_salt = request.tenant.cache_salt
    submitted.cache_share = request.tenant.cache_share
    submitted.timeout_ms = max(1, min(int(timeout_s * 1000), 2**32 - 1))
    submitted.failed_passes = failed_passes
    submitted.traceparent, submitted.tracestate = trace
    return message


def _write_sampling(message: common_pb2.SamplingParams, sampling: Sampling) -> None:
    """Write complete parameters."""
    for name, value in zip(_NUMBERS, _read_numbers(sampling), strict=True):
        setattr(message, name, value)
    if sampling.logprobs is not None:
        message.logprobs = sampling.logprobs
    if sampling.stop_token_ids:
        message.stop_token_ids.extend(sampling.stop_token_ids)
    message.ignore_eos = sampling.ignore_eos
    constraint = constraint_to_proto(sampling.constraint)
    if constraint is not None:
        message.constraint.CopyFrom(constraint)


def cancel(request_id: str, choices: Sequence[int] = ()) -> worker_pb2.SessionRequest:
    """Make the message that frees a worker's state of these choices; none given: of all."""
    return worker_pb2.SessionRequest(
        cancel=worker_pb2.CancelRequest(request_id=request_id, choices=choices)
    )


def delta(message: worker_pb2.TokenDelta, *, has_logprobs: bool, vocab_size: int) -> Delta:
    """Convert new tokens of one choice, with their log probabilities if requested.

    Raises:
        WrongDelta: A token id is cut off or unknown, there are not as many ids of most probable
            tokens as log probabilities, or the finish reason is unknown.
    """
    logprobs = message.logprobs if has_logprobs else ()
    try:
        token_ids = _known_ids("token_ids", message.token_ids, vocab_size)
        for each in logprobs:
            num_top = len(_known_ids("top_token_ids", each.top_token_ids, vocab_size))
            if num_top != len(each.top_logprobs):
                allowed = f"{len(each.top_logprobs)}, one for each of top_logprobs"
                raise ValueError(f"top_token_ids: found {num_top}; allowed: {allowed}")
        if message.finish_reason not in _FINISHES:
            raise ValueError(f"finish_reason: found {message.finish_reason}; allowed: 0 to 2")
    except ValueError as error:
        raise WrongDelta(f"choice {message.choice}: {error}") from None
    return Delta(
        attempt=message.attempt,
        choice=message.choice,
        first_index=message.first_index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish=_FINISHES[message.finish_reason],
        stats=_stats(message.stats) if message.HasField("stats") else None,
    )


def _known_ids(field: str, packed: bytes, vocab_size: int) -> list[int]:
    token_ids = unpack_token_ids(packed)
    if (largest := max(token_ids, default=0)) >= vocab_size:
        raise ValueError(unknown_token(field, largest, vocab_size))
    return token_ids


def unknown_token(field: str, token_id: int, vocab_size: int) -> str:
    """Say that the model does not have a token."""
    return f"{field}: found {token_id}; allowed: 0 to {vocab_size - 1}"


def failure(message: worker_pb2.RequestFailure) -> Failure:
    """Convert the end of a request without a result."""
    return Failure(
        attempt=message.attempt,
        code=message.code,
        message=message.message,
        failed_passes=message.failed_passes,
        is_leaving=message.leaving,
    )


def asked_sampling(params: common_pb2.SamplingParams) -> AskedSampling:
    """Convert a client's parameters; unset fields become None.

    Raises:
        InvalidRequest: A constraint is empty.
    """
    given = {field.name: value for field, value in params.ListFields()}  # one call for all
    if given.keys() <= _PLAIN_SAMPLING:
        return AskedSampling(**given)
    try:
        constraint = constraint_from_proto(params)
    except InvalidConstraint as error:
        raise InvalidRequest("sampling.constraint", error.found, error.allowed) from None
    return AskedSampling(
        **{name: value for name, value in given.items() if name in _PLAIN_SAMPLING},
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        constraint=constraint,
    )


def resumption(request: inference_pb2.GenerateRequest) -> Resumption | None:
    """Convert a caller's part of a lost call; None: it makes a new call."""
    if not request.HasField("resume"):
        return None
    return Resumption(
        token=request.resume.token,
        choices=tuple(
            ReceivedChoice(
                choice=each.choice,
                packed_token_ids=each.token_ids,
                text_chars=each.text_chars,
                is_finished=each.finished,
            )
            for each in request.resume.choices
        ),
    )


def many_response() -> inference_pb2.GenerateManyResponse:
    """Make an empty message to add results to."""
    return inference_pb2.GenerateManyResponse()


def write_output(
    message: inference_pb2.GenerateResponse, request: GenerationRequest, output: Output
) -> None:
    """Write a piece of a choice into an empty message for the client."""
    message.request_id = request.request_id
    message.first_index = output.first_index
    message.token_ids = pack_token_ids(output.token_ids)
    if output.choice:
        message.choice = output.choice
    if output.text:
        message.text = output.text
    if output.logprobs:
        message.logprobs.extend(output.logprobs)
    if output.finish:
        message.finish_reason = _FINISH_NUMBERS[output.finish]
        message.stopped_by = output.stopped_by
    if request.begins_in_reasoning:
        message.begins_in_reasoning = True


def write_usage(message: inference_pb2.Usage, generation: Generation) -> None:
    """Write the account of a generation that has finished into an empty message."""
    timings = generation.timings()
    message.prompt_tokens = generation.request.prompt_len
    message.completion_tokens = generation.num_tokens
    message.ttft_ms = timings.ttft_ms
    message.total_ms = timings.total_ms
    message.tpot_ms = timings.tpot_ms
    message.decode_workers.extend(generation.decode_workers)
    stats = generation.stats
    for name, most in _STATS.items():
        if value := getattr(stats, name):
            setattr(message.stats, name, min(value, most))
    message.stats.resumptions = generation.num_resumptions


def chat(field: str, prompt: inference_pb2.ChatPrompt) -> Chat:
    """Convert a chat; `field` is its name in the request."""
    num_bytes = prompt.ByteSize()
    num_parts = sum(1 + len(each.tool_calls) for each in prompt.messages)
    return Chat(
        field,
        partial(_chat_messages, prompt),
        num_bytes,
        num_bytes + _PART_BYTES * num_parts,
        prompt.tools_json,
    )


def _chat_messages(prompt: inference_pb2.ChatPrompt) -> tuple[ChatMessage, ...]:
    return tuple(
        ChatMessage(
            role=each.role,
            content=each.content,
            reasoning_content=each.reasoning_content,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                for call in each.tool_calls
            ),
            tool_call_id=each.tool_call_id,
            name=each.name,
        )
        for each in prompt.messages
    )


def model(
    served: ServedModel,
    *,
    has_chat_template: bool,
    tool_call_format: ToolCallFormat | None,
    has_reasoning: bool,
    max_request_bytes: int,
    max_request_fields: int,
    sampling_defaults: SamplingDefaults,
) -> inference_pb2.Model:
    """Convert the served model."""
    return inference_pb2.Model(
        name=served.name,
        max_context_tokens=served.max_context_tokens,
        vocab_size=served.vocab_size,
        page_size=served.page_size,
        has_chat_template=has_chat_template,
        max_choices=served.max_choices,
        tool_call_format=_TOOL_CALL_FORMATS[tool_call_format],
        has_reasoning=has_reasoning,
        max_request_bytes=max_request_bytes,
        max_request_fields=max_request_fields,
        sampling_defaults=inference_pb2.SamplingDefaults(**asdict(sampling_defaults)),
    )


def worker_status(known: KnownWorker) -> inference_pb2.WorkerStatus:
    """Convert the registry's view of a worker."""
    status = inference_pb2.WorkerStatus(
        worker=_worker_ref(known.member),
        pool=f"POOL_{known.member.pool.upper()}",
        state=f"WORKER_STATE_{known.state}",
        misfit=known.misfit,
        silence=known.silence,
    )
    if known.heartbeat:
        status.heartbeat.ParseFromString(known.heartbeat.message)
        status.heartbeat_age_ms = int(known.heartbeat_age_s * 1000)
    return status


def tenant_status(tenant: Tenant) -> inference_pb2.TenantStatus:
    """Convert the figures of one tenant."""
    counts = tenant.counts
    return inference_pb2.TenantStatus(
        name=tenant.name,
        active_requests=tenant.num_active,
        requests=counts.requests,
        refused_requests=counts.refused,
        prompt_tokens=counts.prompt_tokens,
        generated_tokens=counts.generated_tokens,
    )


def hot_prefix(prefix: HotPrefix, workers: Sequence[str]) -> inference_pb2.HotPrefix:
    """Convert a shown prefix; `workers` hold its last page."""
    return inference_pb2.HotPrefix(
        id=prefix.page_hash[:_SHOWN_HASH_BYTES],
        tokens=prefix.num_tokens,
        hits=prefix.num_hits,
        workers=workers,
    )


def encryption(found: Encryption) -> inference_pb2.Encryption:
    """Convert the protection of one kind of connections."""
    return inference_pb2.Encryption(encrypted=found.is_on, expires_at_s=int(found.expires_at))


def _worker_service(channel: grpc.aio.Channel) -> Any:
    return worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]


def _worker_ref(member: WorkerMember) -> common_pb2.WorkerRef:
    return common_pb2.WorkerRef(
        worker_id=member.worker_id,
        incarnation=member.incarnation,
        address=member.address,
        contract_version=member.contract_version,
    )


def _stats(stats: common_pb2.RequestStats) -> WorkerStats:
    given = {field.name: value for field, value in stats.ListFields()}  # one call for all
    given.setdefault("cached_tokens", 0)
    return WorkerStats(**given)
