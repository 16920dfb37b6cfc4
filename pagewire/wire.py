"""Converts protobuf messages to the client's values and back."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pagewire.arguments import (
    check_flag,
    check_prompt_text,
    check_sampling,
    check_text,
    check_token_ids,
    refused,
)
from pagewire.chat_arguments import check_messages, check_tools
from pagewire.protos import common_pb2, inference_pb2
from pagewire.protos.grpc_options import MAX_MESSAGE_BYTES
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from pagewire.tracing import active_span
from pagewire.types import (
    ClusterStatus,
    Delta,
    Encryption,
    HotPrefix,
    Message,
    Model,
    PageCounts,
    SamplingDefaults,
    SamplingOptions,
    TenantStatus,
    TokenLogprob,
    Usage,
    WorkerStatus,
)

Prompt = str | Sequence[int]
FINISH_REASONS: dict[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}
_TOOL_CALL_FORMATS = {
    inference_pb2.TOOL_CALL_FORMAT_LLAMA3_JSON: "llama3_json",
    inference_pb2.TOOL_CALL_FORMAT_HERMES: "hermes",
    inference_pb2.TOOL_CALL_FORMAT_MISTRAL: "mistral",
}

Messages = Sequence[Message | Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Request = TypeVar("Request", inference_pb2.GenerateRequest, inference_pb2.TokenizeRequest)


class NextToken:
    """A GenerateResponse that has one token and its text; a CallTokens message holds many."""

    __slots__ = ("begins_in_reasoning", "first_index", "request_id", "text", "token_id")

    choice = 0
    finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
    logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    resume_token = b""
    stopped_by = ""

    def __init__(
        self, request_id: str, begins_in_reasoning: bool, token_id: int, index: int, text: str
    ) -> None:
        self.request_id = request_id
        self.begins_in_reasoning = begins_in_reasoning
        self.token_id = token_id
        self.first_index = index
        self.text = text

    @property
    def token_ids(self) -> bytes:
        return pack_token_ids([self.token_id])

    def HasField(self, name: str) -> bool:  # noqa: N802 - as in generated code
        return False


AnswerPart = inference_pb2.GenerateResponse | NextToken


def generate_request(
    prompt: Prompt, model: str, options: SamplingOptions
) -> inference_pb2.GenerateRequest:
    """Build the request for text or token ids.

    Raises:
        InvalidRequestError: An argument has a wrong type or is out of range.
    """
    request = _generate_request(model, options)
    if isinstance(prompt, str):
        request.text = check_prompt_text("prompt.text", prompt)
    else:
        allowed = "a text, or a sequence of token ids"
        token_ids = check_token_ids("prompt.token_ids", prompt, allowed=allowed)
        if not token_ids:
            raise refused("prompt", "no tokens", "at least one token")
        request.token_ids = pack_token_ids(token_ids)
    return _sized("prompt", request)


def chat_request(
    messages: Messages, tools: Tools | None, model: str, options: SamplingOptions
) -> inference_pb2.GenerateRequest:
    """Build the request for a chat; raises like `generate_request`."""
    request = _generate_request(model, options)
    request.chat.CopyFrom(_chat("prompt.chat", messages, tools))
    return _sized("prompt", request)


def tokenize_request(
    text: str, model: str, *, add_special_tokens: bool = True
) -> inference_pb2.TokenizeRequest:
    """Build the request to tokenize a text; raises like `generate_request`."""
    request = inference_pb2.TokenizeRequest(
        model=check_text("model", model),
        text=check_prompt_text("input.text", text),
        add_special_tokens=add_special_tokens,
    )
    return _sized("input", request)


def tokenize_chat_request(
    messages: Messages,
    tools: Tools | None,
    model: str,
    *,
    add_special_tokens: bool = False,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> inference_pb2.TokenizeRequest:
    """Build the request to tokenize a chat; raises like `generate_request`."""
    request = inference_pb2.TokenizeRequest(
        model=check_text("model", model),
        chat=_chat("input.chat", messages, tools),
        add_special_tokens=add_special_tokens,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    return _sized("input", request)


def detokenize_request(
    token_ids: Sequence[int], model: str, skip_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """Build the request to turn token ids into text; raises like `generate_request`."""
    return inference_pb2.DetokenizeRequest(
        model=check_text("model", model),
        token_ids=pack_token_ids(check_token_ids("token_ids", token_ids)),
        skip_special_tokens=check_flag("skip_special_tokens", skip_special_tokens),
    )


def delta_from(response: AnswerPart) -> Delta:
    """Decode one message of a Generate stream."""
    if isinstance(response, NextToken):
        return Delta(
            request_id=response.request_id,
            choice=0,
            text=response.text,
            token_ids=(response.token_id,),
            first_index=response.first_index,
            logprobs=(),
            finish_reason=None,
            stopped_by=None,
            usage=None,
        )
    token_ids = tuple(unpack_token_ids(response.token_ids))
    return Delta(
        request_id=response.request_id,
        choice=response.choice,
        text=response.text,
        token_ids=token_ids,
        first_index=response.first_index,
        logprobs=tuple(map(_token_logprob, token_ids, response.logprobs)),
        finish_reason=FINISH_REASONS.get(response.finish_reason),
        stopped_by=response.stopped_by or None,
        usage=usage_from(response.usage) if response.HasField("usage") else None,
    )


def model_from(model: inference_pb2.Model) -> Model:
    """Decode a served model."""
    return Model(
        name=model.name,
        max_context_tokens=model.max_context_tokens,
        vocab_size=model.vocab_size,
        page_size=model.page_size,
        has_chat_template=model.has_chat_template,
        max_choices=model.max_choices,
        tool_call_format=_TOOL_CALL_FORMATS.get(model.tool_call_format),
        has_reasoning=model.has_reasoning,
        max_request_bytes=model.max_request_bytes,
        max_request_fields=model.max_request_fields,
        sampling_defaults=_sampling_defaults(model),
    )


def _sampling_defaults(model: inference_pb2.Model) -> SamplingDefaults | None:
    if not model.HasField("sampling_defaults"):
        return None
    defaults = model.sampling_defaults
    return SamplingDefaults(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
    )


def status_from(response: inference_pb2.GetClusterStatusResponse) -> ClusterStatus:
    """Decode the cluster's status."""
    return ClusterStatus(
        workers=tuple(worker_status_from(worker) for worker in response.workers),
        active_requests=response.active_requests,
        finished_requests=response.finished_requests,
        resumed_requests=response.resumed_requests,
        index_pages=response.index_pages,
        is_stopping=response.is_stopping,
        hot_prefixes=tuple(
            HotPrefix(
                prefix_id=each.id.hex(),
                num_tokens=each.tokens,
                num_hits=each.hits,
                workers=tuple(each.workers),
            )
            for each in response.hot_prefixes
        ),
        front_tls=_encryption(response, "front_tls"),
        cluster_tls=_encryption(response, "cluster_tls"),
        tenants=tuple(
            TenantStatus(
                name=each.name,
                active_requests=each.active_requests,
                requests=each.requests,
                refused_requests=each.refused_requests,
                prompt_tokens=each.prompt_tokens,
                generated_tokens=each.generated_tokens,
            )
            for each in response.tenants
        ),
        is_partial=response.is_partial,
        controller_silence=response.controller_silence,
    )


def _encryption(response: inference_pb2.GetClusterStatusResponse, name: str) -> Encryption | None:
    if not response.HasField(name):
        return None
    told = getattr(response, name)
    return Encryption(encrypted=told.encrypted, expires_at_s=told.expires_at_s or None)


def _generate_request(model: str, options: SamplingOptions) -> inference_pb2.GenerateRequest:
    span = active_span()
    return inference_pb2.GenerateRequest(
        model=check_text("model", model),
        sampling=common_pb2.SamplingParams(**check_sampling(options)),
        traceparent=span.traceparent,
        tracestate=span.tracestate,
    )


def _chat(field: str, messages: Messages, tools: Tools | None) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(
        messages=[
            inference_pb2.ChatMessage(
                role=each.role,
                content=each.content,
                reasoning_content=each.reasoning_content,
                tool_calls=[
                    inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                    for call in each.tool_calls
                ],
                tool_call_id=each.tool_call_id,
                name=each.name,
            )
            for each in check_messages(f"{field}.messages", messages)
        ],
        tools_json=check_tools(f"{field}.tools", tools),
    )


def _sized(field: str, request: Request) -> Request:
    """Refuse a request that gRPC would refuse less clearly.

    A router's own limit may be lower; it reports that itself.
    """
    if request.ByteSize() > MAX_MESSAGE_BYTES:
        found = f"a request of {request.ByteSize()} bytes"
        raise refused(field, found, f"at most {MAX_MESSAGE_BYTES} bytes")
    return request


def _token_logprob(token_id: int, entry: common_pb2.TokenLogprobs) -> TokenLogprob:
    top = zip(unpack_token_ids(entry.top_token_ids), entry.top_logprobs, strict=True)
    return TokenLogprob(token_id=token_id, logprob=entry.logprob, top=tuple(top))


def usage_from(usage: inference_pb2.Usage) -> Usage:
    """Decode the cost of a call."""
    stats = usage.stats
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        decode_cached_tokens=stats.decode_cached_tokens,
        prefill_cached_tokens=stats.prefill_cached_tokens,
        prefill_computed_tokens=stats.prefill_computed_tokens,
        decode_computed_tokens=stats.decode_computed_tokens,
        pages_moved=stats.pages_moved,
        bytes_moved=stats.bytes_moved,
        preemptions=stats.preemptions,
        prefill_retries=stats.prefill_retries,
        resumptions=stats.resumptions,
        cached_tokens=stats.cached_tokens,
        ttft_ms=usage.ttft_ms,
        total_ms=usage.total_ms,
        tpot_ms=usage.tpot_ms,
        decode_workers=tuple(usage.decode_workers),
    )


def worker_status_from(status: inference_pb2.WorkerStatus) -> WorkerStatus:
    """Decode a router's view of a worker."""
    heartbeat = status.heartbeat
    pages, totals = heartbeat.pages, heartbeat.totals
    return WorkerStatus(
        worker_id=status.worker.worker_id,
        incarnation=status.worker.incarnation,
        address=status.worker.address,
        pool=common_pb2.Pool.Name(status.pool).removeprefix("POOL_").lower(),
        state=inference_pb2.WorkerState.Name(status.state).removeprefix("WORKER_STATE_").lower(),
        misfit=status.misfit,
        silence=status.silence,
        heartbeat_age_ms=status.heartbeat_age_ms,
        steps=heartbeat.steps,
        running=heartbeat.running,
        waiting=heartbeat.waiting,
        queued_tokens=heartbeat.queued_tokens,
        pages=PageCounts(
            total=pages.total,
            free=pages.free,
            live=pages.live,
            cached=pages.cached,
            leased=pages.leased,
            incoming=pages.incoming,
            quarantine=pages.quarantine,
        ),
        gpu_allocated_bytes=heartbeat.gpu_allocated_bytes,
        gpu_reserved_bytes=heartbeat.gpu_reserved_bytes,
        looked_up_tokens=totals.looked_up_tokens,
        cached_tokens=totals.cached_tokens,
        computed_tokens=totals.computed_tokens,
        generated_tokens=totals.generated_tokens,
        pages_moved=totals.pages_moved,
        bytes_moved=totals.bytes_moved,
        transfer_failures=totals.transfer_failures,
        preemptions=totals.preemptions,
        needed_bytes=totals.needed_bytes,
        steps_ahead=totals.steps_ahead,
        steps_alone=totals.steps_alone,
        attention_needed_bytes=totals.attention_needed_bytes,
        attention_read_bytes=totals.attention_read_bytes,
        sharing_groups=totals.sharing_groups,
        sharing_rows=totals.sharing_rows,
        transfer_s=totals.transfer_s,
        exposed_transfer_s=totals.exposed_transfer_s,
        over_quota_pages=totals.over_quota_pages,
        prompt_step_s=totals.prompt_step_s,
        decode_step_s=totals.decode_step_s,
        mixed_step_s=totals.mixed_step_s,
    )
