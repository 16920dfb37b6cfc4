"""Transfer messages as protobuf."""

import contextlib
import tracemalloc

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import TransferError
from kv_transfer.messages import (
    Abort,
    ChunkAck,
    ChunkGo,
    ChunkPosted,
    ChunkReady,
    Granted,
    ReceiverMessage,
    SenderMessage,
    Ticket,
    TransferMessage,
)
from kv_transfer.wire import (
    receiver_message_from_proto,
    sender_message_from_proto,
    ticket_from_proto,
    ticket_to_proto,
    transfer_message_to_proto,
)
from pagewire.protos import worker_pb2

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
tickets = st.builds(
    Ticket,
    transfer_id=st.binary(min_size=16, max_size=16),
    attempt=u32,
    sender_incarnation=u64,
    receiver_incarnation=u64,
)
digests = st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=5).map(b"".join)
messages = st.one_of(
    st.builds(Granted, tickets),
    st.builds(ChunkReady, tickets, u32, u32, u32, st.booleans()),
    st.builds(ChunkGo, tickets, u32),
    st.builds(ChunkPosted, tickets, u32, digests, u64),
    st.builds(ChunkAck, tickets, u32),
    st.builds(Abort, tickets, st.text(max_size=100)),
)


@given(messages)
def test_every_message_survives_the_wire(message: TransferMessage) -> None:
    encoded = transfer_message_to_proto(message).SerializeToString()
    proto = worker_pb2.TransferMessage.FromString(encoded)

    if isinstance(message, SenderMessage):
        assert sender_message_from_proto(proto) == message
    if isinstance(message, ReceiverMessage):
        assert receiver_message_from_proto(proto) == message


@given(tickets)
def test_tickets_survive_the_wire(ticket: Ticket) -> None:
    assert ticket_from_proto(ticket_to_proto(ticket)) == ticket


def test_a_message_of_the_wrong_side_is_refused() -> None:
    ticket = Ticket(transfer_id=b"x" * 16, attempt=0, sender_incarnation=1, receiver_incarnation=2)

    with pytest.raises(TransferError, match="chunk_go"):
        sender_message_from_proto(transfer_message_to_proto(ChunkGo(ticket, 0)))
    with pytest.raises(TransferError, match="granted"):
        receiver_message_from_proto(transfer_message_to_proto(Granted(ticket)))


@pytest.mark.parametrize(
    ("proto", "complaint"),
    [
        (worker_pb2.TransferMessage(), "transfer_id: found 0 bytes"),
        (
            worker_pb2.TransferMessage(ticket=worker_pb2.TransferTicket(transfer_id=b"x" * 16)),
            "no kind",
        ),
        (
            worker_pb2.TransferMessage(
                ticket=worker_pb2.TransferTicket(transfer_id=b"x" * 16),
                chunk_posted=worker_pb2.ChunkPosted(digests=b"short"),
            ),
            "digests: found 5 bytes",
        ),
        (
            worker_pb2.TransferMessage(
                ticket=worker_pb2.TransferTicket(transfer_id=b"x" * 16),
                chunk_posted=worker_pb2.ChunkPosted(),
            ),
            "digests: found 0 bytes",
        ),
    ],
)
def test_malformed_messages_are_named(proto: worker_pb2.TransferMessage, complaint: str) -> None:
    with pytest.raises(TransferError, match=complaint):
        sender_message_from_proto(proto)


def test_digests_that_nobody_asked_for_take_no_more_memory_than_on_the_wire() -> None:
    ticket = worker_pb2.TransferTicket(transfer_id=b"x" * 16)
    posted = worker_pb2.ChunkPosted(digests=b"d" * (16 << 16))
    proto = worker_pb2.TransferMessage(ticket=ticket, chunk_posted=posted)

    tracemalloc.start()
    try:
        message = sender_message_from_proto(proto)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert isinstance(message, ChunkPosted)
    assert most < 1.1 * len(posted.digests)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_the_named_errors(encoded: bytes) -> None:
    try:
        proto = worker_pb2.TransferMessage.FromString(encoded)
    except DecodeError:
        return
    for parse in (sender_message_from_proto, receiver_message_from_proto):
        with contextlib.suppress(TransferError):
            parse(proto)
