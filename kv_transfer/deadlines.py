"""How long each wait of a transfer may take."""

import enum
from dataclasses import dataclass

from options.kept_by_name import kept_by_name
from options.option import check_options, option
from pagewire.protos.grpc_options import MAX_CALL_S


class WaitKind(enum.Enum):
    """What a side waits for."""

    GRANT = "grant"  # the sender accepts the request
    CHUNK = "chunk"  # the next chunk is computed
    SLOT = "slot"  # one of the connection's receive slots is free
    POST = "post"  # the sender answers ChunkGo with ChunkPosted, once it has the digests
    STOP = "stop"  # the sender answers Abort with its own
    TRANSFER = "transfer"  # a posted send or receive completes
    LOST = "lost"  # likewise, but the other side may be dead
    DIGEST = "digest"  # local digests are computed
    ACK = "ack"  # the receiver answers: ChunkGo after ChunkReady, ChunkAck after the send
    ABORT = "abort"  # the transport confirms that nothing is posted any more


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """One wait; a new one (of another kind or for another chunk) starts a new deadline."""

    kind: WaitKind
    chunk: int = 0


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class TransferDeadlines:
    """How long each wait may take, in seconds of the event loop's clock."""

    connect_s: float = option(
        10.0,
        "Time limit for setting up a connection, on both sides together.",
        above=0,
        at_most=MAX_CALL_S,
    )
    grant_s: float = option(
        10.0, "Time limit until the sender accepts the request, and to read a message.", above=0
    )
    chunk_s: float = option(
        60.0, "Time limit until the next chunk is computed; a prompt may queue before.", above=0
    )
    slot_s: float = option(
        60.0,
        "Time limit for a receive slot: other transfers of the same two workers come first.",
        above=0,
    )
    post_s: float = option(
        2.0,
        "Time limit until the sender has posted a chunk that was asked for, beside digest_s, in "
        "which it computes the digests; or until it has answered that it stops.",
        above=0,
    )
    transfer_s: float = option(
        2.0,
        "Moving a chunk takes at most this, plus the time of its bytes at assumed_bytes_per_s.",
        above=0,
    )
    lost_s: float = option(
        1.0,
        "Time limit for a chunk that is on its way when the stream of its two workers breaks: "
        "NCCL does not tell that one of them has died. Then the connection is aborted.",
        above=0,
    )
    assumed_bytes_per_s: float = option(
        200e6, "Least bandwidth that transfers are granted; a fifth of a slow network's.", above=0
    )
    digest_s: float = option(30.0, "Time limit for computing the digests of a chunk.", above=0)
    ack_s: float = option(
        60.0, "Time limit for the receiver's answer; like slot_s, seen by the sender.", above=0
    )
    abort_s: float = option(
        5.0,
        "Time limit for aborting a connection; NCCL takes 0.5 to 2 s. A worker where it takes "
        "longer should be restarted.",
        above=0,
    )
    idle_s: float = option(
        1800.0,
        "A decode worker closes its connection to a prefill worker that none of its requests has "
        "used for this long, and the prefill worker its side after twice as long: the peer may "
        "have left for good. A later request connects again. More than grant_s, or a request "
        "could name a connection that is gone.",
        # A request may name a connection until idle_s after its last use, and be accepted grant_s
        # later. By then the prefill worker, after twice idle_s, must not have closed it.
        exceeds="grant_s",
    )

    def __post_init__(self) -> None:
        check_options(self)

    def seconds(self, wait: Wait, num_bytes: int, num_chunks: int = 1) -> float:
        """Return the longest time for `wait`; the rest matters where bytes move.

        Args:
            num_bytes: The size of all chunks, which move one after the other.
        """
        match wait.kind:
            case WaitKind.TRANSFER:
                return num_chunks * self.transfer_s + num_bytes / self.assumed_bytes_per_s
            case WaitKind.POST:
                return self.digest_s + self.post_s
            case WaitKind.STOP:
                return self.post_s
            case kind:
                limit: float = getattr(self, f"{kind.value}_s")
                return limit
