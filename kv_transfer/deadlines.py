"""How long each wait of a transfer may take."""

import enum
import math
from dataclasses import dataclass, fields


class WaitKind(enum.Enum):
    """What a side waits for."""

    GRANT = "grant"  # the sender accepts the request
    CHUNK = "chunk"  # the next chunk is computed
    SLOT = "slot"  # the connection's one receive slot is free
    POST = "post"  # the sender answers ChunkGo with ChunkPosted
    TRANSFER = "transfer"  # a posted send or receive completes
    DIGEST = "digest"  # local digests are computed
    ACK = "ack"  # the receiver answers: ChunkGo after ChunkReady, ChunkAck after the send
    ABORT = "abort"  # the transport confirms that nothing is posted any more


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """One wait; a new one (of another kind or for another chunk) starts a new deadline."""

    kind: WaitKind
    chunk: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferDeadlines:
    """How long each wait may take, in seconds of the event loop's clock."""

    connect_s: float = 10.0  # setting up a connection, both sides together
    grant_s: float = 10.0  # the sender accepts the request
    chunk_s: float = 60.0  # the prefill may queue before it computes
    slot_s: float = 60.0  # other transfers of the same pair of workers come first
    post_s: float = 2.0  # the sender answers that it has posted a chunk
    transfer_s: float = 2.0  # at least; plus the time that the bytes take at assumed_bytes_per_s
    assumed_bytes_per_s: float = 200e6  # a fifth of a slow network
    digest_s: float = 30.0  # computing the digests of a chunk
    ack_s: float = 60.0  # as slot_s, seen from the sender
    abort_s: float = 5.0  # NCCL takes 0.5 to 2 s; beyond this the worker should be restarted

    def __post_init__(self) -> None:
        """Raise ValueError with one line for each wrong option, beginning with its name."""
        wrong = [
            f"{field.name} is {getattr(self, field.name)}; it must be positive and finite"
            for field in fields(self)
            if not 0 < getattr(self, field.name) < math.inf
        ]
        if wrong:
            raise ValueError("\n".join(wrong))

    def seconds(self, wait: Wait, num_bytes: int) -> float:
        """Return the longest time for `wait`; `num_bytes` matters where bytes move."""
        match wait.kind:
            case WaitKind.TRANSFER:
                return self.transfer_s + num_bytes / self.assumed_bytes_per_s
            case kind:
                limit: float = getattr(self, f"{kind.value}_s")
                return limit
