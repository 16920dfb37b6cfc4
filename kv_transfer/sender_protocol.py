"""Pure state machine of a transfer's sender (the prefill worker).

Life of a chunk:
1. ANNOUNCED   the engine wrote its pages, and ChunkReady was sent
2. SENDING     their digests are known, and ChunkGo came, in either order: the send is posted, and
               ChunkPosted sent with the digests
3. SENT        the transport has read the pages
4. released    ChunkAck came as well; the lease of the pages ends

Digests are computed chunk by chunk, before anything of the chunk is sent: so a page that changes in
between is found.

The sender answers an Abort with its own, after all its posted sends: so the receiver learns whether
a send is under way. A failure while SENDING does not end the machine: the transport may still read
the pages. It is quiescent when the posted sends are over or the connection's abort returned.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from kv_transfer.deadlines import Wait, WaitKind
from kv_transfer.messages import (
    Abort,
    ChunkAck,
    ChunkGo,
    ChunkPosted,
    ChunkReady,
    Granted,
    ReceiverMessage,
    Ticket,
)
from kv_transfer.protocol import (
    AbortConnection,
    Cancelled,
    CommonEvent,
    ConnectionAborted,
    ConnectionLost,
    DeadlinePassed,
    DigestPages,
    Failure,
    FailureKind,
    PagesDigested,
    Send,
    StreamLost,
    wait_for_posted,
)


class Stage(enum.Enum):
    """The stage of a chunk's life."""

    ANNOUNCED = "announced"
    SENDING = "sending"
    SENT = "sent"


class OutgoingChunk(NamedTuple):
    """A chunk that is not yet released."""

    chunk: int
    first_page: int
    num_pages: int
    stage: Stage = Stage.ANNOUNCED
    digests: tuple[bytes, ...] | None = None  # None: not known yet, only while ANNOUNCED
    is_called: bool = False
    is_acked: bool = False


@dataclass(frozen=True, slots=True)
class GrantGiven:
    """Event: the worker accepted the request."""


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """Event: the next pages of the prompt are in the storage."""

    first_page: int
    num_pages: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class SendDone:
    """Event: the posted send completed."""

    chunk: int


SenderEvent = ReceiverMessage | CommonEvent | GrantGiven | ChunkComputed | SendDone


@dataclass(frozen=True, slots=True)
class PostSend:
    """Action: post the send of the chunk's pages, then report SendDone.

    The driver puts its number among the connection's sends into the following ChunkPosted.
    """

    chunk: int


@dataclass(frozen=True, slots=True)
class ReleasePages:
    """Action: the receiver has committed these pages; their lease ends."""

    first_page: int
    num_pages: int


SenderAction = Send | DigestPages | AbortConnection | PostSend | ReleasePages
Actions = tuple[SenderAction, ...]


class SenderState(NamedTuple):
    """One attempt. `chunks` are in order; the first without digests is being digested."""

    ticket: Ticket
    is_granted: bool = False
    num_chunks: int = 0  # computed so far
    has_last: bool = False
    chunks: tuple[OutgoingChunk, ...] = ()
    is_aborting: bool = False
    is_stuck: bool = False  # abort did not return in time; only its return makes it quiescent
    failure: Failure | None = None

    @property
    def is_ended(self) -> bool:
        """True when the attempt's outcome is known."""
        return self.failure is not None or (self.has_last and not self.chunks)

    @property
    def is_acked(self) -> bool:
        """True when the receiver has all pages, even if the end of a send was not seen yet."""
        return self.has_last and all(each.is_acked for each in self.chunks)

    @property
    def is_quiescent(self) -> bool:
        """True when no send is posted, so that the transport reads no page."""
        return not (
            self.is_aborting or self.is_stuck or any(c.stage is Stage.SENDING for c in self.chunks)
        )

    @property
    def is_finished(self) -> bool:
        """True when no further event changes anything."""
        return self.is_ended and self.is_quiescent


def begin(ticket: Ticket) -> SenderState:
    """Return the state before the grant."""
    return SenderState(ticket=ticket)


def waiting_for(state: SenderState) -> Wait | None:
    """Return what must happen before a deadline; None when it is finished or stuck."""
    if state.is_aborting:
        return Wait(kind=WaitKind.ABORT)
    sending = [c for c in state.chunks if c.stage is Stage.SENDING]
    if sending and not state.is_stuck:
        return wait_for_posted(sending[0].chunk, state.failure)
    if state.is_ended:
        return None
    if not state.is_granted:
        return Wait(kind=WaitKind.GRANT)
    if (digesting := _first_undigested(state)) is not None:
        return Wait(kind=WaitKind.DIGEST, chunk=digesting.chunk)
    if state.chunks:
        return Wait(kind=WaitKind.ACK, chunk=state.chunks[0].chunk)
    return Wait(kind=WaitKind.CHUNK, chunk=state.num_chunks)


def step(state: SenderState, event: SenderEvent) -> tuple[SenderState, Actions]:
    """Apply one event. A message with another ticket and a repeated event change nothing."""
    if isinstance(event, ReceiverMessage) and event.ticket != state.ticket:
        return state, ()
    match event:
        case GrantGiven() if not (state.is_granted or state.is_ended):
            return state._replace(is_granted=True), (Send(Granted(state.ticket)),)
        case ChunkComputed():
            return _computed(state, event)
        case PagesDigested(chunk=chunk, digests=digests):
            return _digested(state, chunk, digests)
        case ChunkGo(chunk=chunk):
            return _called(state, chunk)
        case SendDone(chunk=chunk):
            return _sent(state, chunk)
        case ChunkAck(chunk=chunk):
            return _acked(state, chunk)
        case Abort(reason=reason):
            return _fail(state, FailureKind.ABORTED, f"the receiver aborted: {reason}")
        case Cancelled(reason=reason):
            return _fail(state, FailureKind.CANCELLED, reason)
        case StreamLost(detail=detail) if not state.is_acked:  # else nobody has to hear more
            return _fail(state, FailureKind.BROKEN, detail)
        case ConnectionLost(detail=detail):
            return _break(state, FailureKind.BROKEN, detail)
        case ConnectionAborted() if state.is_aborting or state.is_stuck:
            return state._replace(is_aborting=False, is_stuck=False, chunks=()), ()
        case DeadlinePassed(wait=wait) if wait == waiting_for(state):
            return _late(state, wait)
    return state, ()


def _computed(state: SenderState, event: ChunkComputed) -> tuple[SenderState, Actions]:
    if state.is_ended:
        return state, ()
    assert state.is_granted, "a chunk was computed before the grant"
    assert not state.has_last, "a chunk was computed after the last one"
    outgoing = OutgoingChunk(
        chunk=state.num_chunks,
        first_page=event.first_page,
        num_pages=event.num_pages,
    )
    ready = ChunkReady(
        state.ticket, outgoing.chunk, event.first_page, event.num_pages, event.is_last
    )
    is_digesting = _first_undigested(state) is not None
    state = state._replace(
        num_chunks=state.num_chunks + 1,
        has_last=event.is_last,
        chunks=(*state.chunks, outgoing),
    )
    return state, (Send(ready), *(() if is_digesting else _digest_next(state)))


def _digest_next(state: SenderState) -> Actions:
    following = _first_undigested(state)
    if following is None:
        return ()
    return (DigestPages(following.chunk, following.first_page, following.num_pages),)


def _digested(
    state: SenderState, chunk: int, digests: tuple[bytes, ...]
) -> tuple[SenderState, Actions]:
    digesting = _first_undigested(state)
    if digesting is None or digesting.chunk != chunk:
        return state, ()
    state, posting = _post_if_due(state, digesting._replace(digests=digests))
    return state, (*posting, *_digest_next(state))


def _called(state: SenderState, chunk: int) -> tuple[SenderState, Actions]:
    outgoing = _find(state, chunk, Stage.ANNOUNCED)
    if outgoing is None:
        return state, ()
    return _post_if_due(state, outgoing._replace(is_called=True))


def _post_if_due(state: SenderState, outgoing: OutgoingChunk) -> tuple[SenderState, Actions]:
    if outgoing.digests is None or not outgoing.is_called:
        return _update(state, outgoing), ()
    # An earlier send may still be posted: its data arrived before its completion was seen here.
    # The connection keeps the order.
    posted = Send(ChunkPosted(state.ticket, outgoing.chunk, b"".join(outgoing.digests)))
    state = _update(state, outgoing._replace(stage=Stage.SENDING))
    return state, (PostSend(outgoing.chunk), posted)


def _sent(state: SenderState, chunk: int) -> tuple[SenderState, Actions]:
    outgoing = _find(state, chunk, Stage.SENDING)
    if outgoing is None or state.is_aborting:
        return state, ()
    if state.failure is not None:
        return _remove(state, chunk), ()
    if outgoing.is_acked:
        return _remove(state, chunk), (ReleasePages(outgoing.first_page, outgoing.num_pages),)
    return _update(state, outgoing._replace(stage=Stage.SENT)), ()


def _acked(state: SenderState, chunk: int) -> tuple[SenderState, Actions]:
    if state.failure is not None:
        return state, ()
    if (outgoing := _find(state, chunk, Stage.SENDING)) is not None:
        return _update(state, outgoing._replace(is_acked=True)), ()
    if (outgoing := _find(state, chunk, Stage.SENT)) is not None:
        return _remove(state, chunk), (ReleasePages(outgoing.first_page, outgoing.num_pages),)
    return state, ()


def _fail(state: SenderState, kind: FailureKind, detail: str) -> tuple[SenderState, Actions]:
    if state.is_ended:
        return state, ()
    sending = tuple(c for c in state.chunks if c.stage is Stage.SENDING)
    state = state._replace(failure=Failure(kind, detail), chunks=sending)
    return state, (Send(Abort(state.ticket, detail)),)


def _break(state: SenderState, kind: FailureKind, detail: str) -> tuple[SenderState, Actions]:
    must_abort = not state.is_quiescent and not (state.is_aborting or state.is_stuck)
    state, actions = _fail(state, kind, detail)
    if not must_abort:
        return state, actions
    return state._replace(is_aborting=True), (*actions, AbortConnection())


def _late(state: SenderState, wait: Wait) -> tuple[SenderState, Actions]:
    if wait.kind is WaitKind.ABORT:
        return state._replace(is_aborting=False, is_stuck=True), ()
    detail = f"waiting for {wait.kind.value} of chunk {wait.chunk} took too long"
    return _break(state, FailureKind.TIMEOUT, detail)


def _find(state: SenderState, chunk: int, stage: Stage) -> OutgoingChunk | None:
    return next((c for c in state.chunks if c.chunk == chunk and c.stage is stage), None)


def _first_undigested(state: SenderState) -> OutgoingChunk | None:
    return next((c for c in state.chunks if c.digests is None), None)


def _update(state: SenderState, outgoing: OutgoingChunk) -> SenderState:
    chunks = tuple(outgoing if c.chunk == outgoing.chunk else c for c in state.chunks)
    return state._replace(chunks=chunks)


def _remove(state: SenderState, chunk: int) -> SenderState:
    return state._replace(chunks=tuple(c for c in state.chunks if c.chunk != chunk))
