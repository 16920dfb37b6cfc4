"""Transfer control messages as protobuf, for the Prefill stream.

Messages from the network are checked here once: lengths, presence, direction.
"""

from kv_transfer.errors import TransferError
from kv_transfer.messages import (
    DIGEST_BYTES,
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
from pagewire.protos import worker_pb2

TRANSFER_ID_BYTES = 16
MAX_REASON_CHARS = 500


def ticket_to_proto(ticket: Ticket) -> worker_pb2.TransferTicket:
    """Return the ticket as protobuf."""
    return worker_pb2.TransferTicket(
        transfer_id=ticket.transfer_id,
        attempt=ticket.attempt,
        sender_incarnation=ticket.sender_incarnation,
        receiver_incarnation=ticket.receiver_incarnation,
    )


def ticket_from_proto(proto: worker_pb2.TransferTicket) -> Ticket:
    """Return the ticket; raises TransferError if its id has a wrong length."""
    found = len(proto.transfer_id)
    if found != TRANSFER_ID_BYTES:
        raise TransferError(
            f"ticket.transfer_id: found {found} bytes; allowed: {TRANSFER_ID_BYTES}"
        )
    return Ticket(
        transfer_id=proto.transfer_id,
        attempt=proto.attempt,
        sender_incarnation=proto.sender_incarnation,
        receiver_incarnation=proto.receiver_incarnation,
    )


def transfer_message_to_proto(message: TransferMessage) -> worker_pb2.TransferMessage:
    """Return a control message as protobuf."""
    ticket = ticket_to_proto(message.ticket)
    make = worker_pb2.TransferMessage
    match message:
        case Granted():
            return make(ticket=ticket, granted=worker_pb2.Granted())
        case ChunkReady():
            ready = worker_pb2.ChunkReady(
                chunk=message.chunk,
                first_page=message.first_page,
                num_pages=message.num_pages,
                is_last=message.is_last,
            )
            return make(ticket=ticket, chunk_ready=ready)
        case ChunkGo(chunk=chunk):
            return make(ticket=ticket, chunk_go=worker_pb2.ChunkGo(chunk=chunk))
        case ChunkPosted():
            posted = worker_pb2.ChunkPosted(
                chunk=message.chunk, digests=message.digests, order=message.order
            )
            return make(ticket=ticket, chunk_posted=posted)
        case ChunkAck(chunk=chunk):
            return make(ticket=ticket, chunk_ack=worker_pb2.ChunkAck(chunk=chunk))
        case Abort(reason=reason):
            return make(ticket=ticket, abort=worker_pb2.Abort(reason=reason[:MAX_REASON_CHARS]))


def sender_message_from_proto(proto: worker_pb2.TransferMessage) -> SenderMessage:
    """Return a sender's message; raises TransferError if it is a receiver's."""
    message = _message(proto)
    if not isinstance(message, SenderMessage):
        raise TransferError(f"the sender sent {proto.WhichOneof('kind')}, a receiver's message")
    return message


def receiver_message_from_proto(proto: worker_pb2.TransferMessage) -> ReceiverMessage:
    """Return a receiver's message; raises TransferError if it is a sender's."""
    message = _message(proto)
    if not isinstance(message, ReceiverMessage):
        raise TransferError(f"the receiver sent {proto.WhichOneof('kind')}, a sender's message")
    return message


def _message(proto: worker_pb2.TransferMessage) -> TransferMessage:
    ticket = ticket_from_proto(proto.ticket)
    match proto.WhichOneof("kind"):
        case "granted":
            return Granted(ticket)
        case "chunk_ready":
            ready = proto.chunk_ready
            return ChunkReady(ticket, ready.chunk, ready.first_page, ready.num_pages, ready.is_last)
        case "chunk_go":
            return ChunkGo(ticket, proto.chunk_go.chunk)
        case "chunk_posted":
            posted = proto.chunk_posted
            return ChunkPosted(ticket, posted.chunk, _checked(posted.digests), posted.order)
        case "chunk_ack":
            return ChunkAck(ticket, proto.chunk_ack.chunk)
        case "abort":
            return Abort(ticket, proto.abort.reason[:MAX_REASON_CHARS])
        case _:
            raise TransferError("a transfer message has no kind")


def _checked(digests: bytes) -> bytes:
    if not digests or len(digests) % DIGEST_BYTES:
        raise TransferError(
            f"chunk_posted.digests: found {len(digests)} bytes; "
            f"allowed: a multiple of {DIGEST_BYTES}, at least {DIGEST_BYTES}"
        )
    return digests
