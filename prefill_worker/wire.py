"""Converts between the contract of protos/ and the values of the prefill worker."""

from dataclasses import dataclass

from kv_transfer.messages import SenderMessage, Ticket
from kv_transfer.wire import ticket_from_proto, transfer_message_to_proto
from llm_engine.sampling import SampledToken
from pagewire.protos import worker_pb2
from pagewire.protos.token_ids import pack_token_ids, token_array
from pagewire.protos.trace_context import TraceContext
from prefill_worker.request import Prompt
from protos.peer_limits import check_limits
from worker.wire import cut_reason, logprobs_to_proto, sampling_from_proto


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStart:
    """The first message of an attempt."""

    ticket: Ticket
    connection_id: str
    prompt: Prompt
    contract_version: int  # of the receiver


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillResult:
    """The first tokens and their cost."""

    tokens: tuple[SampledToken, ...]  # one per choice
    num_cached_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFailure:
    """Why the transfer is about to be aborted."""

    code: int  # a google.rpc.Code number
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillEnd:
    """The last message of an attempt."""

    code: int = 0  # a google.rpc.Code number; 0: it was not refused
    message: str = ""


PrefillMessage = SenderMessage | PrefillResult | PrefillFailure | PrefillEnd


def start_from_proto(message: worker_pb2.PrefillStart) -> PrefillStart:
    """Read the first message.

    Raises:
        ValueError: If token ids are truncated, or a field has too much.
        TransferError: If the ticket is malformed.
    """
    check_limits(message)
    prompt = Prompt(
        request_id=message.request_id,
        tokens=token_array(message.token_ids),
        prompt_len=message.prompt_len,
        params=sampling_from_proto(message.sampling),
        choices=tuple(message.choices),
        first_page=message.first_page,
        salt=message.cache_salt,
        cache_share=message.cache_share or 1.0,
        is_suspect=message.failed_passes > 0,
        trace=TraceContext(message.traceparent, message.tracestate),
    )
    return PrefillStart(
        ticket=ticket_from_proto(message.ticket),
        connection_id=message.connection_id,
        prompt=prompt,
        contract_version=message.contract_version,
    )


def response_to_proto(attempt_id: int, message: PrefillMessage) -> worker_pb2.PrefillResponse:
    """Write a message to the receiver."""
    make = worker_pb2.PrefillResponse
    match message:
        case PrefillResult():
            result = worker_pb2.PrefillResult(
                token_ids=pack_token_ids([token.token_id for token in message.tokens]),
                logprobs=logprobs_to_proto(message.tokens),
                cached_tokens=message.num_cached_tokens,
                computed_tokens=message.num_computed_tokens,
            )
            return make(attempt_id=attempt_id, result=result)
        case PrefillFailure(code=code, message=text):
            failure = worker_pb2.PrefillFailure(code=code, message=cut_reason(text))
            return make(attempt_id=attempt_id, failure=failure)
        case PrefillEnd(code=code, message=text):
            end = worker_pb2.PrefillEnd(code=code, message=cut_reason(text))
            return make(attempt_id=attempt_id, end=end)
        case transfer:
            return make(attempt_id=attempt_id, transfer=transfer_message_to_proto(transfer))
