"""Pure state machine of a transfer's receiver (the decode worker).

Life of a chunk:
1. announced   ChunkReady came with the digests
2. WAITING     its turn for one of the connection's receive slots
3. CALLED      ChunkGo was sent; the sender may post its send
4. RECEIVING   ChunkPosted came; the receive is posted and writes into the pages
5. verifying   the slot is free for the next chunk; digests of what arrived are computed
6. committed   digests are equal: Commit, then ChunkAck

A failure in CALLED or RECEIVING does not end the machine: the pages may still be written. It stays
until the posted receive is over (then the connection is still good), or aborts the connection and
stays until abort returned. Only then is it quiescent, and the caller may reuse the pages. An
overdue abort makes it stuck: no caller should wait for it, but it may still return.
"""

import enum
from dataclasses import dataclass, replace

from kv_transfer.deadlines import Wait, WaitKind
from kv_transfer.messages import (
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


class Slot(enum.Enum):
    """The state of this transfer's receive slot of the connection."""

    IDLE = "idle"
    WAITING = "waiting"
    CALLED = "called"
    RECEIVING = "receiving"
    ABORTING = "aborting"
    STUCK = "stuck"  # abort did not return in time; the pages are lost until it does


@dataclass(frozen=True, slots=True)
class SlotTaken:
    """Event: a receive slot is ours."""


@dataclass(frozen=True, slots=True)
class ReceiveDone:
    """Event: the posted receive completed."""

    chunk: int


ReceiverEvent = SenderMessage | CommonEvent | SlotTaken | ReceiveDone


@dataclass(frozen=True, slots=True)
class TakeSlot:
    """Action: wait for a receive slot, then report SlotTaken."""


@dataclass(frozen=True, slots=True)
class LeaveSlot:
    """Action: give the slot back, or stop waiting for it."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverState:
    """One attempt. Invariant: num_committed <= next_page <= num_pages; all counts only grow."""

    ticket: Ticket
    num_pages: int  # of the whole sequence
    num_committed: int  # pages of the sequence that are valid; at first those that were cached
    next_page: int  # first page of the chunk that is announced next; at first num_committed
    next_chunk: int = 0
    is_granted: bool = False
    announced: tuple[ChunkReady, ...] = ()  # not yet called, in order
    slot: Slot = Slot.IDLE
    current: ChunkReady | None = None  # the chunk that waits for the slot or holds it
    verifying: tuple[ChunkReady, ...] = ()  # received, in order; the first is being digested
    failure: Failure | None = None

    @property
    def is_ended(self) -> bool:
        """True when the attempt's outcome is known."""
        return self.failure is not None or self.num_committed == self.num_pages

    @property
    def is_quiescent(self) -> bool:
        """True when no receive is posted, nor can one still become posted."""
        return self.slot in (Slot.IDLE, Slot.WAITING)

    @property
    def is_finished(self) -> bool:
        """True when no further event changes anything."""
        return self.is_ended and self.slot is Slot.IDLE

    @property
    def is_stuck(self) -> bool:
        """True when only an abort that is overdue can make it quiescent."""
        return self.slot is Slot.STUCK


def begin(ticket: Ticket, *, first_page: int, num_pages: int) -> ReceiverState:
    """Return the state of an attempt that wants the pages [first_page, num_pages)."""
    if not 0 <= first_page < num_pages:
        raise ValueError(f"first_page is {first_page}, must be in [0, {num_pages})")
    return ReceiverState(
        ticket=ticket, num_pages=num_pages, num_committed=first_page, next_page=first_page
    )


def waiting_for(state: ReceiverState) -> Wait | None:
    """Return what must happen before a deadline; None when it is finished or stuck."""
    chunk = state.current.chunk if state.current else 0
    match state.slot:
        case Slot.ABORTING:
            return Wait(kind=WaitKind.ABORT)
        case Slot.RECEIVING:
            return wait_for_posted(chunk, state.failure)
        case Slot.CALLED:
            return Wait(kind=WaitKind.POST, chunk=chunk)
    if state.is_ended:
        return None
    if state.slot is Slot.WAITING:
        return Wait(kind=WaitKind.SLOT, chunk=chunk)
    if state.verifying:
        return Wait(kind=WaitKind.DIGEST, chunk=state.verifying[0].chunk)
    if not state.is_granted:
        return Wait(kind=WaitKind.GRANT)
    return Wait(kind=WaitKind.CHUNK, chunk=state.next_chunk)


def step(state: ReceiverState, event: ReceiverEvent) -> tuple[ReceiverState, Actions]:
    """Apply one event. A message with another ticket and a repeated event change nothing."""
    if isinstance(event, SenderMessage) and event.ticket != state.ticket:
        return state, ()
    match event:
        case Granted():
            return replace(state, is_granted=True), ()
        case ChunkReady():
            return _announced(state, event)
        case SlotTaken() if state.slot is Slot.WAITING:
            assert state.current is not None
            go = ChunkGo(state.ticket, state.current.chunk)
            return replace(state, slot=Slot.CALLED), (Send(go),)
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
            return _break(state, FailureKind.BROKEN, detail, (Slot.CALLED,))
        case ConnectionLost(detail=detail):
            return _break(state, FailureKind.BROKEN, detail, (Slot.CALLED, Slot.RECEIVING))
        case ConnectionAborted() if state.slot is Slot.ABORTING:
            return replace(state, slot=Slot.IDLE, current=None), (LeaveSlot(),)
        case ConnectionAborted() if state.slot is Slot.STUCK:
            return replace(state, slot=Slot.IDLE), ()
        case DeadlinePassed(wait=wait) if wait == waiting_for(state):
            return _late(state, wait)
    return state, ()


def _announced(state: ReceiverState, ready: ChunkReady) -> tuple[ReceiverState, Actions]:
    if state.is_ended or ready.chunk < state.next_chunk:
        return state, ()
    end = ready.first_page + len(ready.digests)
    if (
        not state.is_granted
        or ready.chunk != state.next_chunk
        or ready.first_page != state.next_page
        or not ready.digests
        or end > state.num_pages
        or ready.is_last != (end == state.num_pages)
    ):
        detail = (
            f"chunk {ready.chunk} announced pages [{ready.first_page}, {end}), "
            f"is_last {ready.is_last}; expected chunk {state.next_chunk} from page "
            f"{state.next_page}, at most to page {state.num_pages}, after the grant"
        )
        return _fail(state, FailureKind.VIOLATION, detail)
    announced = (*state.announced, ready)
    state = replace(state, announced=announced, next_chunk=ready.chunk + 1, next_page=end)
    return _next_chunk(state)


def _next_chunk(state: ReceiverState) -> tuple[ReceiverState, Actions]:
    if state.slot is not Slot.IDLE or not state.announced:
        return state, ()
    current, *rest = state.announced
    state = replace(state, slot=Slot.WAITING, current=current, announced=tuple(rest))
    return state, (TakeSlot(),)


def _posted(state: ReceiverState, posted: ChunkPosted) -> tuple[ReceiverState, Actions]:
    current = state.current
    if state.slot is not Slot.CALLED or current is None or current.chunk != posted.chunk:
        return state, ()
    # Also after a failure: the sender's half is under way, and taking it keeps the connection.
    post = PostReceive(posted.chunk, current.first_page, len(current.digests), posted.order)
    return replace(state, slot=Slot.RECEIVING), (post,)


def _received(state: ReceiverState, chunk: int) -> tuple[ReceiverState, Actions]:
    current = state.current
    if state.slot is not Slot.RECEIVING or current is None or current.chunk != chunk:
        return state, ()
    state = replace(state, slot=Slot.IDLE, current=None)
    actions: Actions = (LeaveSlot(),)
    if state.is_ended:
        return state, actions
    if not state.verifying:
        actions += (_digest(current),)
    state = replace(state, verifying=(*state.verifying, current))
    state, more = _next_chunk(state)
    return state, actions + more


def _digest(ready: ChunkReady) -> DigestPages:
    return DigestPages(ready.chunk, ready.first_page, len(ready.digests))


def _digested(
    state: ReceiverState, chunk: int, digests: tuple[bytes, ...]
) -> tuple[ReceiverState, Actions]:
    if not state.verifying or state.verifying[0].chunk != chunk:
        return state, ()
    ready, *rest = state.verifying
    if digests != ready.digests:
        pairs = zip(digests, ready.digests, strict=True)
        wrong = [i for i, (found, announced) in enumerate(pairs) if found != announced]
        detail = (
            f"chunk {chunk}: {len(wrong)} of {len(digests)} pages differ from their digests, "
            f"first page {ready.first_page + wrong[0]}"
        )
        return _fail(state, FailureKind.DIGEST, detail)
    num_committed = ready.first_page + len(digests)
    state = replace(state, verifying=tuple(rest), num_committed=num_committed)
    actions: Actions = (Commit(num_committed), Send(ChunkAck(state.ticket, chunk)))
    if rest:
        actions += (_digest(rest[0]),)
    return state, actions


def _aborted_by_sender(state: ReceiverState, reason: str) -> tuple[ReceiverState, Actions]:
    actions: Actions = ()
    if state.slot is Slot.CALLED:
        # Abort follows all that the sender posted: this chunk was not, and will not be.
        state = replace(state, slot=Slot.IDLE, current=None)
        actions = (LeaveSlot(),)
    state, more = _fail(state, FailureKind.ABORTED, f"the sender aborted: {reason}")
    return state, actions + tuple(a for a in more if not isinstance(a, Send))


def _fail(state: ReceiverState, kind: FailureKind, detail: str) -> tuple[ReceiverState, Actions]:
    if state.is_ended:
        return state, ()
    actions: Actions = (Send(Abort(state.ticket, detail)),)
    if state.slot is Slot.WAITING:
        state = replace(state, slot=Slot.IDLE, current=None)
        actions = (LeaveSlot(), *actions)  # sending it takes time, in which a slot may come
    return replace(state, failure=Failure(kind, detail), announced=(), verifying=()), actions


def _break(
    state: ReceiverState, kind: FailureKind, detail: str, abort_in: tuple[Slot, ...]
) -> tuple[ReceiverState, Actions]:
    must_abort = state.slot in abort_in
    state, actions = _fail(state, kind, detail)
    if not must_abort:
        return state, actions
    return replace(state, slot=Slot.ABORTING), (*actions, AbortConnection())


def _late(state: ReceiverState, wait: Wait) -> tuple[ReceiverState, Actions]:
    if wait.kind is WaitKind.ABORT:
        return replace(state, slot=Slot.STUCK, current=None), (LeaveSlot(),)
    detail = f"waiting for {wait.kind.value} of chunk {wait.chunk} took too long"
    return _break(state, FailureKind.TIMEOUT, detail, (Slot.CALLED, Slot.RECEIVING))
