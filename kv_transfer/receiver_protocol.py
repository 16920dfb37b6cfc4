"""Pure state machine of a transfer's receiver (the decode worker).

Life of a chunk:
1. ANNOUNCED   ChunkReady came
2. WAITING     its turn for one of the connection's receive slots
3. CALLED      ChunkGo was sent; the sender may post its send, once it has the digests
4. RECEIVING   ChunkPosted came with the digests; the receive is posted and writes into the pages
5. RECEIVED    the slot is free; digests of what arrived are computed, chunk by chunk
6. committed   digests are equal: Commit, then ChunkAck

While one chunk is received, the next is called already, so that no round trip lies between them.

A failure in CALLED or RECEIVING does not end the machine: the pages may still be written. It stays
until the posted receives are over (then the connection is still good), or aborts the connection and
stays until abort returned. Only then is it quiescent, and the caller may reuse the pages. An
overdue abort makes it stuck: no caller should wait for it, but it may still return.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from kv_transfer.deadlines import Wait, WaitKind
from kv_transfer.messages import (
    DIGEST_BYTES,
    Abort,
    ChunkAck,
    ChunkGo,
    ChunkPosted,
    ChunkReady,
    Granted,
    SenderMessage,
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

MAX_CALLED = 2  # chunks of a transfer that wait for a slot or have one


class Stage(enum.Enum):
    """The stage of a chunk's life, from its turn on."""

    WAITING = "waiting"
    CALLED = "called"
    RECEIVING = "receiving"
    RECEIVED = "received"


_MAYBE_WRITTEN = (Stage.CALLED, Stage.RECEIVING)
_CALLED_OR_WAITING = (Stage.WAITING, *_MAYBE_WRITTEN)


class IncomingChunk(NamedTuple):
    """A chunk that had its turn, and is not yet committed."""

    ready: ChunkReady
    stage: Stage = Stage.WAITING
    digests: bytes = b""  # as in ChunkPosted; from RECEIVING on, if there was one for each page

    @property
    def chunk(self) -> int:
        """Its number."""
        return self.ready.chunk


@dataclass(frozen=True, slots=True)
class SlotTaken:
    """Event: a receive slot is the chunk's."""

    chunk: int


@dataclass(frozen=True, slots=True)
class ReceiveDone:
    """Event: the posted receive completed."""

    chunk: int


ReceiverEvent = SenderMessage | CommonEvent | SlotTaken | ReceiveDone


@dataclass(frozen=True, slots=True)
class TakeSlot:
    """Action: wait for a receive slot for a chunk, then report SlotTaken."""

    chunk: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class LeaveSlot:
    """Action: give the chunk's slot back, or stop waiting for it."""

    chunk: int


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Action: receive pages, then report ReceiveDone."""

    chunk: int
    first_page: int
    num_pages: int
    order: int  # its number among all receives of the connection


@dataclass(frozen=True, slots=True)
class Commit:
    """Action: the first `num_pages` pages of the sequence are valid."""

    num_pages: int


ReceiverAction = Send | DigestPages | AbortConnection | TakeSlot | LeaveSlot | PostReceive | Commit
Actions = tuple[ReceiverAction, ...]


class ReceiverState(NamedTuple):
    """One attempt. Invariant: num_committed <= next_page <= num_pages; all counts only grow."""

    ticket: Ticket
    num_pages: int  # of the whole sequence
    num_committed: int  # pages of the sequence that are valid; at first those that were cached
    next_page: int  # first page of the chunk that is announced next; at first num_committed
    next_chunk: int = 0
    is_granted: bool = False
    announced: tuple[ChunkReady, ...] = ()  # in order, behind `chunks`: each event looks at those
    chunks: tuple[IncomingChunk, ...] = ()  # in order; after a failure those that may be written
    is_aborting: bool = False
    is_stuck: bool = False  # abort did not return in time; the pages are lost until it does
    failure: Failure | None = None

    @property
    def is_ended(self) -> bool:
        """True when the attempt's outcome is known."""
        return self.failure is not None or self.num_committed == self.num_pages

    @property
    def is_quiescent(self) -> bool:
        """True when no receive is posted, nor can one still become posted."""
        return not (
            self.is_aborting or self.is_stuck or any(c.stage in _MAYBE_WRITTEN for c in self.chunks)
        )

    @property
    def is_finished(self) -> bool:
        """True when no further event changes anything."""
        return self.is_ended and self.is_quiescent


def begin(ticket: Ticket, *, first_page: int, num_pages: int) -> ReceiverState:
    """Return the state of an attempt that wants the pages [first_page, num_pages)."""
    if not 0 <= first_page < num_pages:
        raise ValueError(f"first_page is {first_page}, must be in [0, {num_pages})")
    return ReceiverState(
        ticket=ticket, num_pages=num_pages, num_committed=first_page, next_page=first_page
    )


def waiting_for(state: ReceiverState) -> Wait | None:
    """Return what must happen before a deadline; None when it is finished or stuck."""
    if state.is_aborting:
        return Wait(kind=WaitKind.ABORT)
    if (receiving := _first(state, Stage.RECEIVING)) is not None:
        return wait_for_posted(receiving.chunk, state.failure)
    if (called := _first(state, Stage.CALLED)) is not None:
        # After a failure the sender's answer to Abort needs no digests.
        kind = WaitKind.POST if state.failure is None else WaitKind.STOP
        return Wait(kind=kind, chunk=called.chunk)
    if state.is_ended:
        return None
    if (waiting := _first(state, Stage.WAITING)) is not None:
        return Wait(kind=WaitKind.SLOT, chunk=waiting.chunk)
    if (received := _first(state, Stage.RECEIVED)) is not None:
        return Wait(kind=WaitKind.DIGEST, chunk=received.chunk)
    if not state.is_granted:
        return Wait(kind=WaitKind.GRANT)
    return Wait(kind=WaitKind.CHUNK, chunk=state.next_chunk)


def step(state: ReceiverState, event: ReceiverEvent) -> tuple[ReceiverState, Actions]:
    """Apply one event. A message with another ticket and a repeated event change nothing."""
    if isinstance(event, SenderMessage) and event.ticket != state.ticket:
        return state, ()
    match event:
        case Granted():
            return state._replace(is_granted=True), ()
        case ChunkReady():
            return _announced(state, event)
        case SlotTaken(chunk=chunk):
            return _called(state, chunk)
        case ChunkPosted():
            return _posted(state, event)
        case ReceiveDone(chunk=chunk):
            return _received(state, chunk)
        case PagesDigested(chunk=chunk, digests=digests):
            return _digested(state, chunk, digests)
        case Abort(reason=reason):
            return _aborted_by_sender(state, reason)
        case Cancelled(reason=reason):
            return _fail(state, FailureKind.CANCELLED, reason)
        case StreamLost(detail=detail):
            # Without the stream it is unknown whether the sender posted after ChunkGo.
            return _break(state, FailureKind.BROKEN, detail, (Stage.CALLED,))
        case ConnectionLost(detail=detail):
            return _break(state, FailureKind.BROKEN, detail, _MAYBE_WRITTEN)
        case ConnectionAborted() if state.is_aborting or state.is_stuck:
            state, actions = _leave(state, _MAYBE_WRITTEN)
            return state._replace(is_aborting=False, is_stuck=False), actions
        case DeadlinePassed(wait=wait) if wait == waiting_for(state):
            return _late(state, wait)
    return state, ()


def _announced(state: ReceiverState, ready: ChunkReady) -> tuple[ReceiverState, Actions]:
    if state.is_ended or ready.chunk < state.next_chunk:
        return state, ()
    end = ready.first_page + ready.num_pages
    if (
        not state.is_granted
        or ready.chunk != state.next_chunk
        or ready.first_page != state.next_page
        or ready.num_pages < 1
        or end > state.num_pages
        or ready.is_last != (end == state.num_pages)
    ):
        detail = (
            f"chunk {ready.chunk} announced pages [{ready.first_page}, {end}), "
            f"is_last {ready.is_last}; expected chunk {state.next_chunk} from page "
            f"{state.next_page}, at most to page {state.num_pages}, after the grant"
        )
        return _fail(state, FailureKind.VIOLATION, detail)
    state = state._replace(
        announced=(*state.announced, ready),
        next_chunk=ready.chunk + 1,
        next_page=end,
    )
    return _call_next(state)


def _call_next(state: ReceiverState) -> tuple[ReceiverState, Actions]:
    num_called = sum(c.stage in _CALLED_OR_WAITING for c in state.chunks)
    if not state.announced or num_called >= MAX_CALLED:
        return state, ()
    ready = state.announced[0]
    state = state._replace(
        announced=state.announced[1:], chunks=(*state.chunks, IncomingChunk(ready))
    )
    return state, (TakeSlot(ready.chunk, ready.num_pages),)


def _called(state: ReceiverState, chunk: int) -> tuple[ReceiverState, Actions]:
    waiting = _find(state, chunk, Stage.WAITING)
    if waiting is None:
        return state, ()
    state = _update(state, waiting._replace(stage=Stage.CALLED))
    return state, (Send(ChunkGo(state.ticket, chunk)),)


def _posted(state: ReceiverState, posted: ChunkPosted) -> tuple[ReceiverState, Actions]:
    called = _find(state, posted.chunk, Stage.CALLED)
    if called is None or state.is_aborting:
        return state, ()
    # Also after a failure: the sender's half is under way, and taking it keeps the connection.
    ready = called.ready
    post = PostReceive(posted.chunk, ready.first_page, ready.num_pages, posted.order)
    receiving = called._replace(stage=Stage.RECEIVING)
    num_digests = len(posted.digests) // DIGEST_BYTES
    if num_digests == ready.num_pages:
        return _update(state, receiving._replace(digests=posted.digests)), (post,)
    state = _update(state, receiving)  # without them
    detail = (
        f"digests of chunk {posted.chunk}: found {num_digests}; "
        f"allowed: {ready.num_pages}, one for each page"
    )
    state, failing = _fail(state, FailureKind.VIOLATION, detail)
    return state, (post, *failing)


def _received(state: ReceiverState, chunk: int) -> tuple[ReceiverState, Actions]:
    receiving = _find(state, chunk, Stage.RECEIVING)
    if receiving is None or state.is_aborting:
        return state, ()
    leave = LeaveSlot(chunk)
    if state.is_ended:
        return _remove(state, chunk), (leave,)
    state, called = _call_next(_update(state, receiving._replace(stage=Stage.RECEIVED)))
    # Chunks are committed in order, so that what is valid is always a prefix.
    is_next = state.chunks[0].chunk == chunk
    return state, (leave, *(_digest_next(state) if is_next else ()), *called)


def _digest_next(state: ReceiverState) -> Actions:
    if not state.chunks or state.chunks[0].stage is not Stage.RECEIVED:
        return ()
    ready = state.chunks[0].ready
    return (DigestPages(ready.chunk, ready.first_page, ready.num_pages),)


def _digested(
    state: ReceiverState, chunk: int, digests: tuple[bytes, ...]
) -> tuple[ReceiverState, Actions]:
    received = _find(state, chunk, Stage.RECEIVED)
    if received is None:
        return state, ()
    ready = received.ready
    told = received.digests
    if b"".join(digests) != told:
        wrong = [
            i
            for i, found in enumerate(digests)
            if found != told[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]
        ]
        detail = (
            f"chunk {chunk}: {len(wrong)} of {len(digests)} pages differ from their digests, "
            f"first page {ready.first_page + wrong[0]}"
        )
        return _fail(state, FailureKind.DIGEST, detail)
    num_committed = ready.first_page + ready.num_pages
    state = _remove(state, chunk)._replace(num_committed=num_committed)
    acknowledge = Send(ChunkAck(state.ticket, chunk))
    return state, (Commit(num_committed), acknowledge, *_digest_next(state))


def _aborted_by_sender(state: ReceiverState, reason: str) -> tuple[ReceiverState, Actions]:
    actions: Actions = ()
    if not state.is_aborting:
        # Abort follows all that the sender posted: what is called was not, and will not be.
        state, actions = _leave(state, (Stage.CALLED,))
    state, more = _fail(state, FailureKind.ABORTED, f"the sender aborted: {reason}")
    return state, actions + tuple(a for a in more if not isinstance(a, Send))


def _fail(state: ReceiverState, kind: FailureKind, detail: str) -> tuple[ReceiverState, Actions]:
    if state.is_ended:
        return state, ()
    # Slots first: sending takes time, in which one may come.
    state, actions = _leave(state, (Stage.WAITING,))
    chunks = tuple(c for c in state.chunks if c.stage in _MAYBE_WRITTEN)
    state = state._replace(failure=Failure(kind, detail), announced=(), chunks=chunks)
    return state, (*actions, Send(Abort(state.ticket, detail)))


def _break(
    state: ReceiverState, kind: FailureKind, detail: str, abort_in: tuple[Stage, ...]
) -> tuple[ReceiverState, Actions]:
    must_abort = not state.is_aborting and any(c.stage in abort_in for c in state.chunks)
    state, actions = _fail(state, kind, detail)
    if not must_abort:
        return state, actions
    return state._replace(is_aborting=True), (*actions, AbortConnection())


def _late(state: ReceiverState, wait: Wait) -> tuple[ReceiverState, Actions]:
    if wait.kind is WaitKind.ABORT:
        state, actions = _leave(state, _MAYBE_WRITTEN)
        return state._replace(is_aborting=False, is_stuck=True), actions
    detail = f"waiting for {wait.kind.value} of chunk {wait.chunk} took too long"
    return _break(state, FailureKind.TIMEOUT, detail, _MAYBE_WRITTEN)


def _leave(state: ReceiverState, stages: tuple[Stage, ...]) -> tuple[ReceiverState, Actions]:
    """Forget the chunks in these stages, and their slots."""
    leaving = tuple(LeaveSlot(c.chunk) for c in state.chunks if c.stage in stages)
    staying = tuple(c for c in state.chunks if c.stage not in stages)
    return state._replace(chunks=staying), leaving


def _first(state: ReceiverState, stage: Stage) -> IncomingChunk | None:
    return next((c for c in state.chunks if c.stage is stage), None)


def _find(state: ReceiverState, chunk: int, stage: Stage) -> IncomingChunk | None:
    return next((c for c in state.chunks if c.chunk == chunk and c.stage is stage), None)


def _update(state: ReceiverState, incoming: IncomingChunk) -> ReceiverState:
    chunks = tuple(incoming if c.chunk == incoming.chunk else c for c in state.chunks)
    return state._replace(chunks=chunks)


def _remove(state: ReceiverState, chunk: int) -> ReceiverState:
    return state._replace(chunks=tuple(c for c in state.chunks if c.chunk != chunk))
