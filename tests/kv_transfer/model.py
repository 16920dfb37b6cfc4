"""An explicit-state model of two attempts of one transfer, around the production state machines.

One page a chunk. Attempt 0 may fail at any point; attempt 1 then asks another sender for
what is not yet committed, into the same pages. The network keeps every message that was ever sent:
any of them may arrive at any machine of the right side, at any time, again and again, or never.
Posted receives may be written in any order, with right or wrong contents, until the receiver's
abort returned.

`explore` visits every reachable state within a budget of faults, `walk` one random path through a
larger model. Both raise Violation where an invariant breaks:

T1 a page is committed once          T2, T7 a committed page is right, and stays so
T3 what ended has nothing posted     T6 every wait has a deadline
T4, T5 stale, repeated and reordered messages are harmless: this network has all of them
no page's lease ends at the sender before the receiver has committed it, and nothing of a chunk is
sent before its digests are known.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kv_transfer import receiver_protocol as receiving
from kv_transfer import sender_protocol as sending
from kv_transfer.messages import Abort, ReceiverMessage, SenderMessage, Ticket
from kv_transfer.protocol import (
    AbortConnection,
    Cancelled,
    ConnectionAborted,
    DeadlinePassed,
    DigestPages,
    Failure,
    FailureKind,
    PagesDigested,
    Send,
    StreamLost,
)

GOOD, BAD = b"good" * 4, b"bad!" * 4
_SOME_FAILURE = Failure(FailureKind.ABORTED, "")
_LOST = Failure(FailureKind.BROKEN, "")


class Interned:
    """A machine's state or a message, one object for equal ones: hashed by identity."""

    __slots__ = ("state",)

    def __init__(self, state: Any) -> None:
        self.state = state


class Violation(Exception):
    """An invariant does not hold; the message is the trace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What the code around the machines does; each can be planted with a bug."""

    receiver_step: Callable[..., Any] = receiving.step
    sender_step: Callable[..., Any] = sending.step
    receiver_wait: Callable[..., Any] = receiving.waiting_for
    sender_wait: Callable[..., Any] = sending.waiting_for
    num_pages: int = 2
    has_quarantine: bool = True
    has_digest_check: bool = True
    has_ticket_fence: bool = True
    # Steps are pure, so each is computed once.
    states: dict[Any, Interned] = field(default_factory=dict)
    steps: dict[Any, tuple[Interned, tuple[Any, ...]]] = field(default_factory=dict)
    deliveries: dict[Any, tuple[tuple[str, Interned], ...]] = field(default_factory=dict)
    steps_alone: dict["World", tuple[tuple[str, "World"], ...]] = field(default_factory=dict)
    checked: set[Any] = field(default_factory=set)  # what of an attempt broke no invariant

    def intern(self, state: Any) -> Interned:
        # Texts and kinds of failures would only multiply equal states, unless a wait depends on it.
        if getattr(state, "failure", None) is not None:
            posted = (receiving.Stage.RECEIVING, sending.Stage.SENDING)
            is_posted = any(each.stage in posted for each in getattr(state, "chunks", ()))
            is_lost = is_posted and state.failure.kind is FailureKind.BROKEN
            state = state._replace(failure=_LOST if is_lost else _SOME_FAILURE)
        if isinstance(state, Abort):
            state = replace(state, reason="")
        return self.states.setdefault(state, Interned(state))

    def apply(
        self, step: Callable[..., Any], machine: Interned, event: object
    ) -> tuple[Interned, tuple[Any, ...]]:
        key = (machine, event)
        if key not in self.steps:
            plain = event.state if isinstance(event, Interned) else event
            state, actions = step(machine.state, plain)
            self.steps[key] = self.intern(state), actions
        return self.steps[key]

    def deliverable(
        self,
        step: Callable[..., Any],
        machine: Interned,
        network: frozenset[Interned],
        ticket: Ticket,
        kind: Any,
    ) -> tuple[tuple[str, Interned], ...]:
        """Return names and messages of a kind, those that a machine would not ignore."""
        key = (machine, network, ticket)
        if key not in self.deliveries:
            found = []
            for message in network:
                if not isinstance(message.state, kind):
                    continue
                addressed = message
                if not self.has_ticket_fence:
                    addressed = self.intern(replace(message.state, ticket=ticket))
                following, actions = self.apply(step, machine, addressed)
                if following is not machine or actions:
                    found.append((type(message.state).__name__, addressed))
            self.deliveries[key] = tuple(found)
        return self.deliveries[key]


class Attempt(NamedTuple):
    ticket: Ticket
    receiver: Interned
    sender: Interned | None  # None: crashed
    receiver_jobs: frozenset[Any]  # TakeSlot, "abort", DigestPages
    sender_jobs: frozenset[Any]  # "abort", SendDone, DigestPages
    posted_receives: frozenset[receiving.PostReceive]
    posted_sends: tuple[int, ...]  # chunks
    on_wire: frozenset[int]  # chunks that both sides posted: the write may land at any time


class World(NamedTuple):
    attempts: tuple[Attempt, ...]
    network: frozenset[Interned]
    pages: tuple[bytes, ...]  # contents at the receiver
    commits: tuple[int, ...]  # how often each page was committed
    faults: int  # that may still happen


def start(rules: Rules, faults: int) -> World:
    world = World((), frozenset(), (BAD,) * rules.num_pages, (0,) * rules.num_pages, faults)
    return _begin_attempt(rules, world)


def explore(rules: Rules, *, faults: int) -> int:
    """Visit all states, breadth first; return their number, or raise Violation."""
    first = start(rules, faults)
    before: dict[World, tuple[World | None, str]] = {first: (None, "start")}
    todo = deque([first])
    gc.disable()  # millions of tuples, no cycles
    try:
        while todo:
            world = todo.popleft()
            try:
                check(rules, world)
                for name, following in steps(rules, world):
                    if following is not world and following not in before:
                        before[following] = (world, name)
                        todo.append(following)
            except Violation as violation:
                raise Violation(f"{violation}: {' > '.join(_trace(before, world))}") from None
    finally:
        gc.enable()
    return len(before)


def walk(rules: Rules, choices: Iterable[int], *, faults: int) -> World:
    """Take one random path, checking every state of it; return its last state."""
    world = start(rules, faults)
    for choice in choices:
        following = [other for _, other in steps(rules, world) if other != world]
        if not following:
            break
        world = following[choice % len(following)]
        check(rules, world)
    return world


def settle(rules: Rules, world: World) -> World:
    """Let everything happen that can without another fault; deadlines pass last."""
    world = world._replace(faults=0)
    while True:
        check(rules, world)
        following = next((other for _, other in steps(rules, world) if other != world), None)
        following = following or _next_deadline(rules, world)
        if following is None:
            return world
        world = following


def _next_deadline(rules: Rules, world: World) -> World | None:
    for index, each in enumerate(world.attempts):
        wait = rules.receiver_wait(each.receiver.state)
        if wait is not None:
            return _receive_event(rules, world, index, DeadlinePassed(wait))
        if each.sender is not None:
            wait = rules.sender_wait(each.sender.state)
            if wait is not None:
                return _send_event(rules, world, index, DeadlinePassed(wait))
    return None


def check(rules: Rules, world: World) -> None:
    """Raise Violation if an invariant does not hold."""
    for page, count in enumerate(world.commits):
        if count > 1:
            raise Violation(f"T1 page {page} was committed {count} times")
        if count and world.pages[page] != GOOD:
            raise Violation(f"T2 page {page} is committed and wrong")
    for each in world.attempts:
        parts = each.receiver, each.sender, not each.posted_receives, not each.posted_sends
        if parts in rules.checked:
            continue
        receiver = each.receiver.state
        sender = each.sender.state if each.sender else None
        if receiver.is_quiescent and each.posted_receives:
            raise Violation("T3 the receiver calls itself quiescent while a receive is posted")
        if (
            not (receiver.is_finished or receiver.is_stuck)
            and rules.receiver_wait(receiver) is None
        ):
            raise Violation("T6 the receiver waits without a deadline")
        if sender is not None:
            if sender.is_ended and sender.is_quiescent and each.posted_sends:
                raise Violation("T3 the sender calls itself quiescent while a send is posted")
            if not (sender.is_finished or sender.is_stuck) and rules.sender_wait(sender) is None:
                raise Violation("T6 the sender waits without a deadline")
        rules.checked.add(parts)


def steps(rules: Rules, world: World) -> Iterator[tuple[str, World]]:
    """Yield everything that can happen next."""
    for index, each in enumerate(world.attempts):
        # What an attempt can do depends neither on the other one nor on how many faults are left.
        alone = world._replace(attempts=(each,), faults=min(world.faults, 1))
        following = rules.steps_alone.get(alone)
        if following is None:
            following = rules.steps_alone[alone] = tuple(_attempt_steps(rules, alone))
        before, behind = world.attempts[:index], world.attempts[index + 1 :]
        other_faults = world.faults - alone.faults
        for name, then in following:
            attempts = (*before, *then.attempts, *behind)
            faults = then.faults + other_faults
            yield f"{name}{index}", World(attempts, then.network, then.pages, then.commits, faults)
    last = world.attempts[-1].receiver.state
    may_reuse = last.is_quiescent or not rules.has_quarantine
    has_failed = last.failure is not None and sum(world.commits) < rules.num_pages
    if len(world.attempts) == 1 and has_failed and may_reuse:
        yield "retry", _begin_attempt(rules, world)


def _attempt_steps(rules: Rules, world: World) -> Iterator[tuple[str, World]]:
    """Yield what the only attempt of a world can do."""
    (each,) = world.attempts
    yield from _receiver_steps(rules, world, 0, each)
    if each.sender is not None:
        yield from _sender_steps(rules, world, 0, each)
    if each.on_wire:
        yield from _landings(rules, world, 0, each)


def _begin_attempt(rules: Rules, world: World) -> World:
    index = len(world.attempts)
    ticket = Ticket(
        transfer_id=b"t" * 16, attempt=index, sender_incarnation=index, receiver_incarnation=9
    )
    first_page = sum(world.commits)
    each = Attempt(
        ticket=ticket,
        receiver=rules.intern(
            receiving.begin(ticket, first_page=first_page, num_pages=rules.num_pages)
        ),
        sender=rules.intern(sending.begin(ticket)),
        receiver_jobs=frozenset(),
        sender_jobs=frozenset(),
        posted_receives=frozenset(),
        posted_sends=(),
        on_wire=frozenset(),
    )
    world = world._replace(attempts=(*world.attempts, each))
    return _send_event(rules, world, index, sending.GrantGiven())


def _receiver_steps(
    rules: Rules, world: World, index: int, each: Attempt
) -> Iterator[tuple[str, World]]:
    def event(world: World, event: object) -> World:
        return _receive_event(rules, world, index, event)

    for name, message in rules.deliverable(
        rules.receiver_step, each.receiver, world.network, each.ticket, SenderMessage
    ):
        yield f"deliver {name} to receiver ", event(world, message)
    for job in each.receiver_jobs:
        done = _update(world, index, receiver_jobs=each.receiver_jobs - {job})
        if isinstance(job, receiving.TakeSlot):
            yield "slot ", event(done, receiving.SlotTaken(job.chunk))
        elif job == "abort":
            gone = _update(done, index, posted_receives=frozenset(), on_wire=frozenset())
            yield "receiver abort returned ", event(gone, ConnectionAborted())
        else:
            page = world.pages[job.first_page] if rules.has_digest_check else GOOD
            yield "receiver digested ", event(done, PagesDigested(job.chunk, (page,)))
    receiver = each.receiver.state
    if world.faults and not (receiver.is_finished or receiver.is_stuck):
        fewer = world._replace(faults=world.faults - 1)
        wait = rules.receiver_wait(receiver)
        yield f"receiver deadline {wait.kind.value} ", event(fewer, DeadlinePassed(wait))
        if not receiver.is_ended:
            yield "receiver cancelled ", event(fewer, Cancelled(""))
            yield "receiver stream lost ", event(fewer, StreamLost(""))


def _sender_steps(
    rules: Rules, world: World, index: int, each: Attempt
) -> Iterator[tuple[str, World]]:
    def event(world: World, event: object) -> World:
        return _send_event(rules, world, index, event)

    assert each.sender is not None
    for name, message in rules.deliverable(
        rules.sender_step, each.sender, world.network, each.ticket, ReceiverMessage
    ):
        yield f"deliver {name} to sender ", event(world, message)
    sender, receiver = each.sender.state, each.receiver.state
    # Chunks are counted from 0, pages from the first that the attempt wants.
    next_page = receiver.next_page - receiver.next_chunk + sender.num_chunks
    if next_page < rules.num_pages and not sender.is_ended:
        is_last = next_page + 1 == rules.num_pages
        yield "computed ", event(world, sending.ChunkComputed(next_page, 1, is_last))
    for job in each.sender_jobs:
        done = _update(world, index, sender_jobs=each.sender_jobs - {job})
        if job == "abort":
            gone = _update(done, index, posted_sends=())
            yield "sender abort returned ", event(gone, ConnectionAborted())
        elif isinstance(job, DigestPages):
            yield "sender digested ", event(done, PagesDigested(job.chunk, (GOOD,)))
        else:
            yield "sent ", event(_sent(done, index, job.chunk), job)
    if world.faults and not sender.is_finished:
        fewer = world._replace(faults=world.faults - 1)
        if not sender.is_stuck:
            wait = rules.sender_wait(sender)
            yield f"sender deadline {wait.kind.value} ", event(fewer, DeadlinePassed(wait))
        if not sender.is_ended:
            yield "sender cancelled ", event(fewer, Cancelled(""))
        yield (
            "sender crashed ",
            _update(fewer, index, sender=None, sender_jobs=frozenset(), posted_sends=()),
        )


def _landings(rules: Rules, world: World, index: int, each: Attempt) -> Iterator[tuple[str, World]]:
    for post in each.posted_receives:
        if post.chunk not in each.on_wire:
            continue
        for content in (GOOD, BAD) if world.faults else (GOOD,):
            pages = list(world.pages)
            pages[post.first_page] = content
            landed = world._replace(pages=tuple(pages), faults=world.faults - (content is BAD))
            sent = each.sender_jobs
            if post.chunk in each.posted_sends:
                sent = sent | {sending.SendDone(post.chunk)}
            landed = _update(
                landed,
                index,
                posted_receives=each.posted_receives - {post},
                on_wire=each.on_wire - {post.chunk},
                sender_jobs=sent,
            )
            landed = _receive_event(rules, landed, index, receiving.ReceiveDone(post.chunk))
            yield f"{content.decode()} write landed ", landed


def _receive_event(rules: Rules, world: World, index: int, event: object) -> World:
    each = world.attempts[index]
    machine, actions = rules.apply(rules.receiver_step, each.receiver, event)
    if machine is not each.receiver:
        each = each._replace(receiver=machine)
    for action in actions:
        match action:
            case Send(message=message):
                world = world._replace(network=world.network | {rules.intern(message)})
            case receiving.TakeSlot():
                each = each._replace(receiver_jobs=each.receiver_jobs | {action})
            case receiving.LeaveSlot(chunk=chunk):
                waiting = {job for job in each.receiver_jobs if _is_for_slot(job, chunk)}
                each = each._replace(receiver_jobs=each.receiver_jobs - waiting)
            case receiving.PostReceive(chunk=chunk):
                each = each._replace(posted_receives=each.posted_receives | {action})
                if chunk in each.posted_sends:
                    each = each._replace(on_wire=each.on_wire | {chunk})
            case DigestPages():
                each = each._replace(receiver_jobs=each.receiver_jobs | {action})
            case AbortConnection():
                each = each._replace(receiver_jobs=each.receiver_jobs | {"abort"})
            case receiving.Commit(num_pages=num_pages):
                if any(page != GOOD for page in world.pages[:num_pages]):
                    raise Violation(f"T2 the first {num_pages} pages are committed, not all right")
                commits = list(world.commits)
                commits[num_pages - 1] += 1
                world = world._replace(commits=tuple(commits))
    return _with_attempt(world, index, each)


def _send_event(rules: Rules, world: World, index: int, event: object) -> World:
    each = world.attempts[index]
    assert each.sender is not None
    machine, actions = rules.apply(rules.sender_step, each.sender, event)
    if machine is not each.sender:
        each = each._replace(sender=machine)
    for action in actions:
        match action:
            case Send(message=message):
                world = world._replace(network=world.network | {rules.intern(message)})
            case sending.PostSend(chunk=chunk):
                if any(_is_digest(job, chunk) for job in each.sender_jobs):
                    raise Violation(f"chunk {chunk} is sent before its digests are known")
                each = each._replace(posted_sends=(*each.posted_sends, chunk))
                if any(post.chunk == chunk for post in each.posted_receives):
                    each = each._replace(on_wire=each.on_wire | {chunk})
            case DigestPages():
                each = each._replace(sender_jobs=each.sender_jobs | {action})
            case AbortConnection():
                each = each._replace(sender_jobs=each.sender_jobs | {"abort"})
            case sending.ReleasePages(first_page=page):
                if not world.commits[page]:
                    raise Violation(f"the lease of page {page} ended before it was committed")
    return _with_attempt(world, index, each)


def _is_for_slot(job: object, chunk: int) -> bool:
    return isinstance(job, receiving.TakeSlot) and job.chunk == chunk


def _is_digest(job: object, chunk: int) -> bool:
    return isinstance(job, DigestPages) and job.chunk == chunk


def _sent(world: World, index: int, chunk: int) -> World:
    posted = tuple(c for c in world.attempts[index].posted_sends if c != chunk)
    return _update(world, index, posted_sends=posted)


def _update(world: World, index: int, **changes: Any) -> World:
    return _with_attempt(world, index, world.attempts[index]._replace(**changes))


def _with_attempt(world: World, index: int, each: Attempt) -> World:
    attempts = world.attempts
    if each is attempts[index]:
        return world
    return World((*attempts[:index], each, *attempts[index + 1 :]), *world[1:])


def _trace(before: dict[World, tuple[World | None, str]], world: World) -> list[str]:
    names: list[str] = []
    at: World | None = world
    while at is not None:
        at, name = before[at]
        names.append(name)
    return names[::-1]
