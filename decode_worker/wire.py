"""Translates messages of protos/ to the decode worker's values."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import grpc

from decode_worker.errors import ConnectionUnknown, PrefillFailed, PrefillPassFailed
from decode_worker.request import PrefillGroup, Request, RequestStats, TokenDelta
from kv_transfer.errors import TransportRefused
from kv_transfer.messages import ReceiverMessage, SenderMessage, Ticket
from kv_transfer.wire import sender_message_from_proto, ticket_to_proto, transfer_message_to_proto
from llm_engine.drawing import FinishReason
from llm_engine.sampling import SampledToken
from pagewire.protos import common_pb2, worker_pb2, worker_pb2_grpc
from pagewire.protos.token_ids import pack_token_ids, token_array
from pagewire.protos.trace_context import TraceContext
from protos.peer_limits import check_limits
from worker.identity import WorkerIdentity
from worker.wire import (
    logprobs_to_proto,
    sampled_from_proto,
    sampling_from_proto,
    sampling_to_proto,
    worker_from_proto,
    worker_to_proto,
)

CHANNEL_CLOSED = "the channel was closed: the worker has restarted"
_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_STATS = tuple(each.name for each in fields(RequestStats))
_ABORTED = grpc.StatusCode.ABORTED.value[0]
_CODE_NAMES: dict[int, str] = {each.value[0]: each.name for each in grpc.StatusCode}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillResult:
    """The tokens that a prefill worker drew, and their cost."""

    tokens: list[SampledToken]  # one per choice of the group
    num_cached_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillEnd:
    """The last message of an attempt."""

    error: PrefillFailed | None  # why it was refused; None: it was not


# What a prefill worker says of an attempt; PrefillFailed: why an Abort follows.
PrefillMessage = SenderMessage | PrefillResult | PrefillFailed | PrefillEnd


def request_from_proto(message: worker_pb2.SubmitRequest) -> Request:
    """Read a submitted request.

    Raises:
        ValueError: If token ids are cut off, a choice comes twice, or a field has too much.
    """
    check_limits(message)
    emitted = {each.choice: token_array(each.emitted_token_ids) for each in message.choices}
    if len(emitted) != len(message.choices):
        raise ValueError("choices names a choice twice")
    return Request(
        request_id=message.request_id,
        attempt=message.attempt,
        prompt=token_array(message.prompt_token_ids),
        params=sampling_from_proto(message.sampling),
        emitted=emitted,
        first_stream=message.first_stream,
        salt=message.cache_salt,
        cache_share=message.cache_share or 1.0,
        candidates=tuple(worker_from_proto(each) for each in message.prefill_candidates),
        timeout_s=message.timeout_ms / 1000 or None,
        num_failed_passes=message.failed_passes,
        trace=TraceContext(message.traceparent, message.tracestate),
    )


def session_response(
    deltas: Iterable[TokenDelta], failures: Iterable[worker_pb2.RequestFailure]
) -> worker_pb2.SessionResponse:
    """Write what one step produced for one router."""
    response = worker_pb2.SessionResponse(failures=failures)
    streams: list[int] = []
    token_ids: list[int] = []
    indices: list[int] = []
    for delta in deltas:
        request, tokens = delta.request, delta.tokens
        if (
            len(tokens) == 1
            and delta.finish_reason is None
            and not delta.has_stats
            and request.params.logprobs is None
        ):
            streams.append(request.first_stream + delta.choice)
            token_ids.append(tokens[0].token_id)
            indices.append(delta.first_index)
        else:
            _write_delta(response.deltas.add(), delta)
    if streams:
        columns = response.tokens
        columns.streams.extend(streams)
        columns.token_ids.extend(token_ids)
        columns.indices.extend(indices)
    return response


async def connect(
    channel: grpc.aio.Channel,
    *,
    receiver: WorkerIdentity,
    sender_incarnation: int,
    connection_id: str,
    transport: str,
    offer: bytes,
    layout: str,
    timeout_s: float,
) -> None:
    """Ask a prefill worker to run its half of a connection's set-up; return when it has.

    Raises:
        TransportRefused: If it has no such transport.
        PrefillFailed: If it refuses, cannot be reached, or does not answer in time.
    """
    request = worker_pb2.ConnectRequest(
        receiver=worker_to_proto(receiver),
        sender_incarnation=sender_incarnation,
        connection_id=connection_id,
        transport=transport,
        offer=offer,
        layout=layout,
    )
    try:
        await _prefill_stub(channel).Connect(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise TransportRefused(error.details()) from None
        raise call_failed(error) from None
    except grpc.aio.UsageError as error:
        raise PrefillFailed(CHANNEL_CLOSED) from error


def open_prefill(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall:
    """Open a stream for attempts; raises PrefillFailed if the channel was closed."""
    try:
        return _prefill_stub(channel).Prefill()
    except grpc.aio.UsageError as error:
        raise PrefillFailed(CHANNEL_CLOSED) from error


def start_message(
    group: PrefillGroup,
    *,
    ticket: Ticket,
    connection_id: str,
    first_page: int,
    contract_version: int,
    trace: TraceContext,
) -> worker_pb2.PrefillRequest:
    """Write what to compute, and which pages are wanted."""
    request = group.request
    start = worker_pb2.PrefillStart(
        request_id=request.request_id,
        ticket=ticket_to_proto(ticket),
        connection_id=connection_id,
        token_ids=pack_token_ids(group.tokens),
        prompt_len=len(request.prompt),
        first_page=first_page,
        sampling=sampling_to_proto(request.params),
        choices=[choice.index for choice in group.choices],
        cache_salt=request.salt,
        cache_share=request.cache_share,
        failed_passes=request.num_failed_passes,
        traceparent=trace.traceparent,
        tracestate=trace.tracestate,
        contract_version=contract_version,
    )
    return worker_pb2.PrefillRequest(start=start)


def transfer_message(message: ReceiverMessage) -> worker_pb2.PrefillRequest:
    """Write a transfer message."""
    return worker_pb2.PrefillRequest(transfer=transfer_message_to_proto(message))


def leave_message() -> worker_pb2.PrefillRequest:
    """Write that nothing more comes of an attempt."""
    return worker_pb2.PrefillRequest(leave=worker_pb2.PrefillLeave())


def prefill_message_from_proto(response: worker_pb2.PrefillResponse) -> PrefillMessage:
    """Read a message of a prefill worker.

    Raises:
        ValueError: If token ids are cut off.
        TransferError: If a transfer message cannot be read.
    """
    kind = response.WhichOneof("message")
    if kind == "transfer":
        return sender_message_from_proto(response.transfer)
    if kind == "end":
        return PrefillEnd(error=_refused(response.end))
    if kind == "failure":
        return _told(response.failure)
    result = response.result
    return PrefillResult(
        tokens=sampled_from_proto(result.token_ids, result.logprobs),
        num_cached_tokens=result.cached_tokens,
        num_computed_tokens=result.computed_tokens,
    )


def call_failed(error: grpc.aio.AioRpcError) -> PrefillFailed:
    """Return why a call to a prefill worker failed."""
    return PrefillFailed(f"{error.code().name}: {error.details()}")


def _prefill_stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.PrefillServiceStub:
    return worker_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]


def _write_delta(message: worker_pb2.TokenDelta, delta: TokenDelta) -> None:
    """Write the tokens into an empty message."""
    message.request_id = delta.request.request_id
    message.attempt = delta.request.attempt
    message.choice = delta.choice
    message.token_ids = pack_token_ids([token.token_id for token in delta.tokens])
    message.first_index = delta.first_index
    if delta.request.params.logprobs is not None:
        message.logprobs.extend(logprobs_to_proto(delta.tokens))
    if delta.finish_reason is not None:
        message.finish_reason = _FINISH_REASONS[delta.finish_reason]
    if delta.has_stats:
        stats = delta.request.stats
        message.stats.SetInParent()
        for name in _STATS:
            if value := getattr(stats, name):
                setattr(message.stats, name, value)


def _told(failure: worker_pb2.PrefillFailure) -> PrefillFailed:
    kind = PrefillPassFailed if failure.code == _ABORTED else PrefillFailed
    return kind(failure.message)


def _refused(end: worker_pb2.PrefillEnd) -> PrefillFailed | None:
    if not end.code:
        return None
    # ABORTED: see the table of prefill_worker/server.py.
    kind = ConnectionUnknown if end.code == _ABORTED else PrefillFailed
    return kind(f"{_CODE_NAMES.get(end.code, end.code)}: {end.message}")
