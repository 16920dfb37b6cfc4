"""Transfer control messages as values; wire.py converts them to and from protobuf.

One transfer, in order (receiver = decode worker, sender = prefill worker):

    receiver: reserves pages, begins an attempt with a fresh Ticket
    sender:   Granted
    sender:   ChunkReady(k)         as soon as chunk k is computed; several may be outstanding
    receiver: ChunkGo(k)            when one of the connection's receive slots is free
    sender:   ChunkPosted(k, digests, order)
                                    when the digests are known as well, the send is posted; the
                                    receiver posts its receive in turn
    receiver: ChunkAck(k)           digests verified, pages committed; the sender's lease ends

Abort may come from either side at any point. See docs/protocol.md.
"""

from dataclasses import dataclass

DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Identity of one attempt of one transfer; a message with another ticket is a no-op."""

    transfer_id: bytes  # 16 random bytes
    attempt: int
    sender_incarnation: int
    receiver_incarnation: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The request is accepted; its pages are leased as they are computed."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """A chunk is computed; its digests may not be known yet."""

    ticket: Ticket
    chunk: int  # 0, 1, 2 ... within the transfer
    first_page: int  # counted in pages of the prompt
    num_pages: int
    is_last: bool  # holds the prompt's last page


@dataclass(frozen=True, slots=True)
class ChunkGo:
    """A receive slot is free for this chunk."""

    ticket: Ticket
    chunk: int


@dataclass(frozen=True, slots=True)
class ChunkPosted:
    """The send of this chunk is posted."""

    ticket: Ticket
    chunk: int
    # Of the pages as computed, DIGEST_BYTES for each. Not apart: a broken sender's can be millions.
    digests: bytes
    order: int = 0  # 0, 1, 2 ... among all sends of the connection


@dataclass(frozen=True, slots=True)
class ChunkAck:
    """The chunk is verified and committed."""

    ticket: Ticket
    chunk: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Nothing more will be posted for this transfer."""

    ticket: Ticket
    reason: str


SenderMessage = Granted | ChunkReady | ChunkPosted | Abort  # prefill -> decode
ReceiverMessage = ChunkGo | ChunkAck | Abort  # decode -> prefill
TransferMessage = SenderMessage | ReceiverMessage
