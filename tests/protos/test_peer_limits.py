"""Messages between processes of a cluster are bounded, field by field, by the contract itself."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cluster.config import MAX_MODEL_NAME_CHARS
from grammars import constraint
from kv_transfer.wire import MAX_REASON_CHARS as MAX_ABORT_CHARS
from llm_engine import limits as engine_limits
from pagewire.protos import common_pb2, controller_pb2, worker_pb2
from pagewire.protos.common_pb2 import callers, most, most_each
from pagewire.protos.gathering import MAX_MORE
from protos import peer_limits
from protos.peer_limits import CHECKED_ALONE, check_limits, parse_checked
from protos.sampling_limits import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_TOKENS
from router.validation import MAX_STOP_CHARS, MAX_STOP_STRINGS
from worker.wire import MAX_REASON_CHARS

TEXT, BYTES = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES
MESSAGE = FieldDescriptor.TYPE_MESSAGE
PEERS = {common_pb2.CALLER_ROUTER, common_pb2.CALLER_DECODE}
# Fields whose limit is not a number of the contract |-> who has it.
BOUNDED_ELSEWHERE = {
    "SubmitRequest.prompt_token_ids": "the model's context: decode_worker.admission",
    "ChoiceState.emitted_token_ids": "max_tokens and the context: decode_worker.admission",
    "PrefillStart.token_ids": "the model's context: prefill_worker.admission",
    "TokenDelta.token_ids": "max_tokens: router.generation",
    "TokenDelta.logprobs": "one per token: router.generation",
    "SubscribeCacheEventsResponse.stored": "router.max_index_pages: router.prefix_index",
    "SubscribeCacheEventsResponse.removed": "what was stored: router.prefix_index",
    "TransferTicket.transfer_id": "its one length: kv_transfer.wire",
    "ChunkPosted.digests": "the pages of the chunk: kv_transfer.receiver_protocol",
}


def sent_between_peers() -> Iterator[Any]:
    """Yield the descriptor of each message that a peer may send, those within others included."""
    services = [
        service
        for file in (worker_pb2.DESCRIPTOR, controller_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
    ]
    waiting = [
        message
        for service in services
        for method in service.methods
        if PEERS & set(method.GetOptions().Extensions[callers])
        for message in (method.input_type, method.output_type)
    ]
    seen = set()
    while waiting:
        message = waiting.pop()
        if message.full_name not in seen:
            seen.add(message.full_name)
            yield message
            waiting += [field.message_type for field in message.fields if field.message_type]


FIELDS = {
    f"{message.name}.{field.name}": field
    for message in sent_between_peers()
    for field in message.fields
}
MOST = {
    name: field.GetOptions().Extensions[most]
    for name, field in FIELDS.items()
    if field.GetOptions().HasExtension(most)
}


def test_every_field_that_can_be_large_has_a_limit() -> None:
    sized = {
        name for name, field in FIELDS.items() if field.is_repeated or field.type in (TEXT, BYTES)
    }
    texts = {name for name, field in FIELDS.items() if field.is_repeated and field.type == TEXT}
    of_each = {n for n, f in FIELDS.items() if f.GetOptions().HasExtension(most_each)}

    assert sized - MOST.keys() == BOUNDED_ELSEWHERE.keys()
    assert texts == of_each


def new(descriptor: Any) -> Any:
    return GetMessageClass(descriptor)()


def message_with(name: str, size: int) -> Message:
    """Return the smallest message whose field has so many items, characters or bytes."""
    field = FIELDS[name]
    message = new(field.containing_type)
    if field.is_repeated:
        items = {TEXT: "", BYTES: b"", MESSAGE: field.message_type and new(field.message_type)}
        getattr(message, field.name).extend([items.get(field.type, 0)] * size)
    elif field.type == MESSAGE:  # with a field that this version does not know, of two-byte length
        num_bytes = size - 4
        head = bytes([0xFA, 0x3F, num_bytes & 0x7F | 0x80, num_bytes >> 7])
        getattr(message, field.name).MergeFromString(head + b"x" * num_bytes)
    else:
        setattr(message, field.name, ("x" if field.type == TEXT else b"x") * size)
    return message


@pytest.mark.parametrize("name", [name for name, size in MOST.items() if size < 2**20])
def test_a_field_holds_as_much_as_the_contract_allows_and_no_more(name: str) -> None:
    field = name.partition(".")[2]
    check_limits(message_with(name, MOST[name]))

    told = f"^{field}: found {MOST[name] + 1} [a-z]+; allowed: at most {MOST[name]}$"
    too_much = message_with(name, MOST[name] + 1)
    with pytest.raises(ValueError, match=told):
        check_limits(too_much)
    # Else it would be left out as one of many.
    assert too_much.ByteSize() > peer_limits._limits_of(too_much.DESCRIPTOR).safe_bytes


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            worker_pb2.SessionResponse(
                failures=[{}, {"message": "x" * 2001}]  # type: ignore[list-item]
            ),
            "failures[1].message: found 2001 characters; allowed: at most 2000",
        ),
        (
            worker_pb2.PrefillResponse(
                more=[worker_pb2.PrefillResponse(end=worker_pb2.PrefillEnd(message="x" * 2001))]
            ),
            "more[0].end.message: found 2001 characters; allowed: at most 2000",
        ),
        (
            worker_pb2.GetInfoResponse(transports=["tcp", "x" * 65]),
            "transports[1]: found 65 characters; allowed: at most 64",
        ),
        (
            worker_pb2.SubmitRequest(sampling={"stop_token_ids": [1] * 257}),  # type: ignore[arg-type]
            "sampling.stop_token_ids: found 257 items; allowed: at most 256",
        ),
    ],
)
def test_an_excess_is_named_by_its_path(message: Message, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        check_limits(message)


def test_a_request_with_too_much_is_not_its_whole_streams_fault() -> None:
    submit = worker_pb2.SubmitRequest(traceparent="x" * 1000)
    start = worker_pb2.PrefillStart(traceparent="x" * 1000)

    check_limits(worker_pb2.SessionRequest(submit=submit))
    check_limits(worker_pb2.PrefillRequest(more=[worker_pb2.PrefillRequest(start=start)]))
    assert {each.DESCRIPTOR.full_name for each in (submit, start)} == CHECKED_ALONE
    for each in (submit, start):
        with pytest.raises(ValueError, match="traceparent: found 1000 characters"):
            check_limits(each)


def test_too_many_fields_are_refused_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_limits, "MAX_PEER_FIELDS", 100)
    response = worker_pb2.SessionResponse.DESCRIPTOR
    failure = b"\x12\x00"

    def parse(raw: bytes) -> Message:
        raise AssertionError("it was parsed")

    with pytest.raises(ValueError, match="found more than 100 fields; allowed: at most 100"):
        parse_checked(failure * 101, response, parse)
    with pytest.raises(AssertionError, match="it was parsed"):
        parse_checked(failure * 100, response, parse)


def test_numbers_in_columns_do_not_count_as_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_limits, "MAX_PEER_FIELDS", 4)
    tokens = worker_pb2.SessionTokens(streams=[1] * 70_000, token_ids=[2], indices=[3])
    raw = worker_pb2.SessionResponse(tokens=tokens).SerializeToString()

    parse_checked(raw, worker_pb2.SessionResponse.DESCRIPTOR, worker_pb2.SessionResponse.FromString)


def test_the_longest_name_of_a_router_is_within_the_limits() -> None:
    """`pagewire router` names itself after its host and its process."""
    longest = f"router-{'h' * 64}-{2**22}"

    check_limits(worker_pb2.SessionHello(router_id=longest))
    check_limits(controller_pb2.WatchMembersRequest(router_id=longest))


def test_senders_and_clients_stay_within_the_limits() -> None:
    for name in ("SessionRequest", "PrefillRequest", "PrefillResponse"):
        assert MOST[f"{name}.more"] == MAX_MORE
    for name in ("RequestFailure", "PrefillFailure", "PrefillEnd"):
        assert MOST[f"{name}.message"] == MAX_REASON_CHARS
    assert MOST["Abort.reason"] == MAX_ABORT_CHARS
    for name in ("SubmitRequest", "CancelRequest", "PrefillStart"):
        assert MOST[f"{name}.choices"] == MAX_CHOICES
    assert MOST["PrefillResult.logprobs"] == MAX_CHOICES
    assert MOST["PrefillResult.token_ids"] == 4 * MAX_CHOICES
    assert engine_limits.MAX_LOGPROBS >= MAX_LOGPROBS
    assert MOST["TokenLogprobs.top_logprobs"] >= MAX_LOGPROBS
    assert MOST["TokenLogprobs.top_token_ids"] >= 4 * MAX_LOGPROBS
    assert MOST["SamplingParams.stop_token_ids"] == MAX_STOP_TOKENS
    assert MOST["SamplingParams.stop"] == MAX_STOP_STRINGS
    of_each = FIELDS["SamplingParams.stop"].GetOptions().Extensions[most_each]
    assert of_each == MAX_STOP_CHARS
    assert MOST["Choices.texts"] == constraint.MAX_CHOICES
    assert MOST["Model.name"] == MAX_MODEL_NAME_CHARS
    assert MOST["Constraint.grammar"] == constraint.MAX_BYTES
