"""Translates messages of protos/ to the decode worker's values; the client of prefill workers."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, fields

import grpc

from decode_worker.errors import ConnectionUnknown, PrefillFailed, PrefillPassFailed
from decode_worker.request import PrefillGroup, Request, RequestStats, TokenDelta
from kv_transfer.errors import TransferError, TransportRefused
from kv_transfer.messages import ReceiverMessage, SenderMessage, Ticket
from kv_transfer.wire import sender_message_from_proto, ticket_to_proto, transfer_message_to_proto
from llm_engine.drawing import FinishReason
from llm_engine.sampling import SampledToken
from pagewire.protos import common_pb2, worker_pb2, worker_pb2_grpc
from pagewire.protos.token_ids import pack_token_ids, token_array
from worker.identity import WorkerIdentity
from worker.wire import (
    logprobs_to_proto,
    sampled_from_proto,
    sampling_from_proto,
    sampling_to_proto,
    worker_from_proto,
    worker_to_proto,
)

_CHANNEL_CLOSED = "the channel was closed: the worker has restarted"
_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_STATS = tuple(each.name for each in fields(RequestStats))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillResult:
    """The tokens that a prefill worker drew, and their cost."""

    tokens: list[SampledToken]  # one per choice of the group
    num_cached_tokens: int
    num_computed_tokens: int


def request_from_proto(message: worker_pb2.SubmitRequest) -> Request:
    """Read a submitted request.

    Raises:
        ValueError: If token ids are cut off or a choice comes twice.
    """
    emitted = {each.choice: token_array(each.emitted_token_ids) for each in message.choices}
    if len(emitted) != len(message.choices):
        raise ValueError("choices names a choice twice")
    return Request(
        request_id=message.request_id,
        attempt=message.attempt,
        prompt=token_array(message.prompt_token_ids),
        params=sampling_from_proto(message.sampling),
        emitted=emitted,
        salt=message.cache_salt,
        cache_share=message.cache_share or 1.0,
        candidates=tuple(worker_from_proto(each) for each in message.prefill_candidates),
        timeout_s=message.timeout_ms / 1000 or None,
        num_failed_passes=message.failed_passes,
        traceparent=message.traceparent,
    )


def session_response(
    deltas: Iterable[TokenDelta], failures: Iterable[worker_pb2.RequestFailure]
) -> worker_pb2.SessionResponse:
    """Write what one step produced for one router."""
    response = worker_pb2.SessionResponse(failures=failures)
    for delta in deltas:
        _write_delta(response.deltas.add(), delta)
    return response


class PrefillClient:
    """The PrefillService of one prefill worker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = worker_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]

    async def connect(
        self,
        *,
        receiver: WorkerIdentity,
        sender_incarnation: int,
        connection_id: str,
        transport: str,
        offer: bytes,
        layout: str,
        timeout_s: float,
    ) -> None:
        """Ask the worker to run its half of a connection's set-up; return when it has.

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
            await self._stub.Connect(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise TransportRefused(error.details()) from None
            raise _failed(error) from None
        except grpc.aio.UsageError as error:
            raise PrefillFailed(_CHANNEL_CLOSED) from error

    def prefill(self) -> "PrefillCall":
        """Open a call for one attempt; raises PrefillFailed if the channel was closed."""
        try:
            return PrefillCall(self._stub.Prefill())
        except grpc.aio.UsageError as error:
            raise PrefillFailed(_CHANNEL_CLOSED) from error


class PrefillCall:
    """The stream of one attempt. All but finish and cancel raise PrefillFailed if it is broken."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._call = call

    async def start(
        self,
        group: PrefillGroup,
        *,
        ticket: Ticket,
        connection_id: str,
        first_page: int,
        contract_version: int,
        traceparent: str,
    ) -> None:
        """Send the first message: what to compute, and which pages are wanted."""
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
            traceparent=traceparent,
            contract_version=contract_version,
        )
        await self._write(worker_pb2.PrefillRequest(start=start))

    async def send(self, message: ReceiverMessage) -> None:
        """Send a transfer message."""
        await self._write(worker_pb2.PrefillRequest(transfer=transfer_message_to_proto(message)))

    async def messages(
        self,
    ) -> AsyncGenerator[SenderMessage | PrefillResult | PrefillFailed, None]:
        """Yield the worker's messages until it ends the stream."""
        try:
            # Iteration yields what came before the status; read() may drop it.
            async for response in self._call:
                kind = response.WhichOneof("message")
                if kind == "transfer":
                    yield sender_message_from_proto(response.transfer)
                    continue
                if kind == "failure":
                    yield _told(response.failure)
                    continue
                result = response.result
                yield PrefillResult(
                    tokens=sampled_from_proto(result.token_ids, result.logprobs),
                    num_cached_tokens=result.cached_tokens,
                    num_computed_tokens=result.computed_tokens,
                )
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        except (ValueError, TransferError) as error:
            raise PrefillFailed(f"a message that cannot be read: {error}") from None

    async def finish(self) -> None:
        """Say that nothing more will be sent."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # it is over already

    def cancel(self) -> None:
        """Abort the stream; a no-op when it has ended."""
        self._call.cancel()

    async def _write(self, message: worker_pb2.PrefillRequest) -> None:
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise PrefillFailed(f"the call is over: {error}") from None


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
    is_pass = failure.code == grpc.StatusCode.ABORTED.value[0]
    kind = PrefillPassFailed if is_pass else PrefillFailed
    return kind(failure.message)


def _failed(error: grpc.aio.AioRpcError) -> PrefillFailed:
    # ABORTED: see the table of prefill_worker/server.py.
    is_unknown = error.code() is grpc.StatusCode.ABORTED
    kind = ConnectionUnknown if is_unknown else PrefillFailed
    return kind(f"{error.code().name}: {error.details()}")
