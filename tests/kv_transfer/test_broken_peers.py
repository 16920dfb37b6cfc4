"""Random schedules of transfers over one connection, whose messages a broken peer mixes up.

It loses, repeats, delays and forges them, and tells one transfer what is meant for another, while
transfers are cancelled, streams cut, workers killed and the connection aborted. Whoever may reuse a
page does so at once: a copy that still reads or writes it is found.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kv_transfer import sender_protocol
from kv_transfer.driver import Driver
from kv_transfer.errors import ConnectionBroken, TransferError
from kv_transfer.messages import (
    ChunkAck,
    ChunkGo,
    ChunkPosted,
    ChunkReady,
    Granted,
    ReceiverMessage,
    SenderMessage,
)
from kv_transfer.order import WINDOW, Load
from tests.kv_transfer.pair import TICKET, Attempt, Stream, Workers, make_storage
from tests.support.loopback import FaultKind, LoopbackFault, LoopbackNetwork, planned
from tests.support.planted_bugs import Plant, Right, instead_of, no_digest_check
from tests.support.virtual_time import run_virtual

NUM_PAGES = 64
MAX_PAGES = 10  # of a transfer
REUSED, OWNED = 1, 2  # bytes of pages that have another owner: of the sender, of the receiver
LONG_S = 400.0  # more than all deadlines of a schedule

MIXED_UP = ("repeat", "late", "lose", "old")
FORGED = (*MIXED_UP, "forge", "forge", "forge", "cross")


class WildStream(Stream):
    """A stream that does something else with a part of its messages."""

    def __init__(
        self,
        rng: random.Random,
        part: float,
        kinds: tuple[str, ...],
        siblings: "list[WildStream]",
    ) -> None:
        super().__init__(rng.choice([0.0005, 0.01, 0.3]))
        self.rng, self.part, self.kinds = rng, part, kinds
        self.siblings = siblings  # those of the same side, with this one
        siblings.append(self)
        self._late: set[asyncio.Task[None]] = set()

    def send(self, message: Any) -> None:
        if self.is_cut or self.rng.random() >= self.part:
            super().send(message)
            return
        match self.rng.choice(self.kinds):
            case "repeat":
                for _ in range(self.rng.randint(2, 4)):
                    super().send(message)
            case "late":
                self._begin(self._send_late(message, self.rng.choice([0.003, 0.02, 0.3, 3])))
            case "old" if self.seen:
                super().send(message)
                self._begin(self._send_late(self.rng.choice(self.seen), 0.02))
            case "forge":
                super().send(forged(message, self.rng))
            case "cross":
                self._begin(self.rng.choice(self.siblings)._send_late(message, 0.001))
            case _:
                self.seen.append(message)  # and lost

    def _begin(self, sending: Any) -> None:
        task = asyncio.create_task(sending)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _send_late(self, message: object, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if not self.is_cut:
            assert self.deliver is not None
            self.deliver(message)


def forged(message: Any, rng: random.Random) -> SenderMessage | ReceiverMessage:
    """Return a message of the same side with one other field, or of another kind."""
    change = rng.choice([-1, 1, 2, 5])

    def other(name: str) -> Any:
        return replace(message, **{name: max(0, getattr(message, name) + change)})

    match message:
        case ChunkReady():
            is_last = replace(message, is_last=not message.is_last)
            return rng.choice([other("chunk"), other("first_page"), other("num_pages"), is_last])
        case ChunkPosted(digests=digests):
            told = rng.choice([digests[:-16], digests + b"d" * 16, b"d" * len(digests)])
            return rng.choice([other("chunk"), other("order"), replace(message, digests=told)])
        case ChunkGo() | ChunkAck():
            kind = rng.choice([ChunkGo, ChunkAck])
            return kind(message.ticket, max(0, message.chunk + rng.choice([-1, 0, 1])))
        case Granted():
            return Granted(replace(message.ticket, attempt=message.ticket.attempt + 1))
    return message


class Reusing(Attempt):
    """A transfer whose pages get other owners as soon as it lets them go."""

    schedule: "Schedule"

    def begin(self, schedule: "Schedule") -> None:
        self.schedule = schedule
        self.contents = self.workers.source.export_pages(self.source_pages)
        self.tasks = [asyncio.create_task(each()) for each in (self.receive, self.offer)]

    def on_commit(self, num_pages: int) -> None:
        last = self.committed[-1] if self.committed else self.first_page
        assert last < num_pages <= len(self.target_pages)
        assert not self.schedule.owned.intersection(self.target_pages), "committed after its end"
        if self.schedule.is_honest_sender:
            arrived = self.workers.target.export_pages(self.target_pages[last:num_pages])
            assert (arrived == self.contents[last:num_pages]).all(), "a wrong page was committed"
        super().on_commit(num_pages)

    def on_ack(self, first_page: int, num_pages: int) -> None:
        super().on_ack(first_page, num_pages)
        self._reuse(self.source_pages[first_page : first_page + num_pages])

    async def receive(self) -> None:
        try:
            await self.receiver.run()
            assert self.committed[-1] == len(self.target_pages)
        except TransferError:
            pass
        await self._let_go(self.receiver.driver, self._own)

    async def offer(self) -> None:
        computing = asyncio.create_task(self.compute())
        with contextlib.suppress(TransferError):
            await self.sender.run()
        computing.cancel()  # or it would hand over pages that have another owner
        await self._let_go(self.sender.driver, partial(self._reuse, self.source_pages))

    async def _let_go(self, driver: Driver[Any, Any, Any], then: Callable[[], None]) -> None:
        with contextlib.suppress(ConnectionBroken):  # an abort is overdue
            await driver.wait_quiescent()
        driver.call_when_quiescent(then)

    def _own(self) -> None:
        self.schedule.owned.update(self.target_pages)
        self.workers.target.slots[list(self.target_pages)] = OWNED

    def _reuse(self, page_ids: tuple[int, ...]) -> None:
        self.schedule.reused.update(page_ids)
        self.workers.source.slots[list(page_ids)] = REUSED


def pages_are_free_at_once(patch: pytest.MonkeyPatch) -> None:
    """Whoever fails does not wait until nothing is posted."""

    async def wait_quiescent(self: Driver[Any, Any, Any]) -> None:
        pass

    patch.setattr(Driver, "wait_quiescent", wait_quiescent)
    patch.setattr(Driver, "call_when_quiescent", lambda self, callback: callback())


@instead_of(sender_protocol, "_acked")
def acknowledged_means_sent(right: Right, state: Any, chunk: int) -> Any:
    """An acknowledgement ends the lease though the transport may still read the pages."""
    following, actions = right(state, chunk)
    outgoing = sender_protocol._find(state, chunk, sender_protocol.Stage.SENDING)
    if outgoing is None:
        return following, actions
    return following, (sender_protocol.ReleasePages(outgoing.first_page, outgoing.num_pages),)


class Schedule:
    """Transfers over one connection and what happens to them, in an order that a seed decides."""

    def __init__(self, seed: int, kinds: tuple[str, ...]) -> None:
        rng = self.rng = random.Random(seed)
        self.kinds = kinds
        self.broken = rng.choice(["sender", "receiver", "both", "nobody"])
        self.is_honest_sender = kinds is MIXED_UP or self.broken in ("receiver", "nobody")
        faults = [self._fault() for _ in range(40)]
        # Such a write reads the pages when it lands, which those of a real transport have left.
        self.reads_late = any(each.kind is FaultKind.LATE_WRITE for each in faults)
        network = LoopbackNetwork(
            fault_policy=planned(faults), hang_on_peer_death=rng.random() < 0.5
        )
        self.workers = Workers(network, num_pages=NUM_PAGES, seed=seed + 1)
        self.reused: set[int] = set()  # of the sender
        self.owned: set[int] = set()  # of the receiver
        self.attempts: list[Reusing] = []
        self.streams: dict[str, list[WildStream]] = {"sender": [], "receiver": []}  # from each side
        self._watch()

    async def run(self) -> None:
        self.sides = await self.workers.connect()
        same_ticket = self.rng.random() < 0.3
        sources, targets = (self.rng.sample(range(NUM_PAGES), NUM_PAGES) for _ in range(2))
        for index in range(self.rng.randint(1, NUM_PAGES // MAX_PAGES)):
            num_pages = self.rng.randint(1, MAX_PAGES)
            attempt = Reusing(
                self.workers,
                self.sides,
                source_pages=[sources.pop() for _ in range(num_pages)],
                target_pages=[targets.pop() for _ in range(num_pages)],
                chunk_pages=self.rng.randint(1, 4),
                compute_s=self.rng.choice([0.001, 0.01, 0.5]),
                ticket=TICKET if same_ticket else replace(TICKET, transfer_id=bytes([index] * 16)),
                digest_s=self.rng.choice([0, 0.001, 0.2]),
                streams=(self._stream("sender"), self._stream("receiver")),
            )
            attempt.begin(self)
            self.attempts.append(attempt)
            await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.05]))
        for _ in range(self.rng.randint(0, 3)):
            await asyncio.sleep(self.rng.choice([0, 0.001, 0.004, 0.02, 0.3]))
            self._happen(self.rng.choice(self.attempts))
        transfers = [task for each in self.attempts for task in each.tasks]
        _, hanging = await asyncio.wait(transfers, timeout=LONG_S)
        assert not hanging
        await asyncio.gather(*transfers)
        await asyncio.sleep(20)  # for overdue aborts, and messages that are late

        self._check_nothing_is_kept()
        await self._check_next_transfer()
        await self.workers.pool.close()
        await self.workers.accepted.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def _fault(self) -> LoopbackFault:
        kind = FaultKind.NONE
        if self.rng.random() < 0.1:
            kind = self.rng.choice(list(FaultKind))
        return LoopbackFault(
            kind=kind,
            delay_s=self.rng.choice([0, 0.001, 0.1, 0.5]),
            abort_s=0 if kind is FaultKind.NONE else self.rng.choice([0, 1, 6]),
        )

    def _watch(self) -> None:
        """Find copies of pages that have another owner."""
        source, target = self.workers.source, self.workers.target
        export_pages, import_pages = source.export_pages, target.import_pages

        def watched_export(page_ids: Any) -> Any:
            assert self.reads_late or not self.reused.intersection(page_ids), "read after its end"
            return export_pages(page_ids)

        def watched_import(page_ids: Any, contents: Any) -> None:
            assert not self.owned.intersection(page_ids), "written after its end"
            import_pages(page_ids, contents)

        source.export_pages = watched_export  # type: ignore[method-assign]
        target.import_pages = watched_import  # type: ignore[method-assign]

    def _stream(self, side: str) -> WildStream:
        part = self.rng.choice([0.05, 0.2, 0.5]) if self.broken in (side, "both") else 0
        return WildStream(self.rng, part, self.kinds, self.streams[side])

    def _happen(self, attempt: Reusing) -> None:
        incoming, outgoing = self.sides
        match self.rng.randrange(8):
            case 0:
                attempt.receiver.driver.cancel("cancelled")
            case 1:
                attempt.sender.driver.cancel("cancelled")
            case 2:
                attempt.to_receiver.is_cut = attempt.to_sender.is_cut = True
                for driver in (attempt.receiver.driver, attempt.sender.driver):
                    driver.stream_lost("cut")
            case 3:
                self.workers.sender_transport.kill()
            case 4:
                self.workers.receiver_transport.kill()
            case 5:
                self.workers.pool.drop(incoming.connection)
            case 6:
                self.aborting = asyncio.create_task(outgoing.connection.abort())

    def _check_nothing_is_kept(self) -> None:
        incoming, outgoing = self.sides
        for each in self.attempts:
            for driver in (each.receiver.driver, each.sender.driver):
                assert driver.is_over
                assert driver.is_quiescent
                assert not driver._jobs
                assert driver._bug is None
            assert not each.receiver._slots
            assert not each.receiver._slot_bytes
            assert not each.sender._orders
            assert self.owned.issuperset(each.target_pages)
            assert self.reused.issuperset(each.source_pages)
        assert incoming.load == outgoing.load == Load()
        assert incoming.slots._num_free == WINDOW
        assert not incoming._waiting

    async def _check_next_transfer(self) -> None:
        """Whatever was, the next transfer succeeds, over this connection if both think it good."""
        incoming, outgoing = self.sides
        workers = self.workers
        workers.network.fault_policy = planned(())
        for transport in (workers.sender_transport, workers.receiver_transport):
            transport._is_dead = False  # its process has started again
        if incoming.connection.is_broken or outgoing.connection.is_broken:
            workers.pool.drop(incoming.connection)
            self.sides = await workers.connect()
        self.reused, self.owned = set(), set()
        workers.source.slots[:] = make_storage(NUM_PAGES, 1).slots
        pages = self.rng.sample(range(NUM_PAGES), MAX_PAGES)
        following = Attempt(workers, self.sides, source_pages=pages, target_pages=pages)
        received, sent, _ = await following.run()
        assert (received, sent) == (following.receiver.stats, following.sender.stats)
        assert following.is_equal(MAX_PAGES)


def run_schedules(kinds: tuple[str, ...], num_seeds: int) -> None:
    for seed in range(num_seeds):
        try:
            run_virtual(Schedule(seed, kinds).run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("kinds", [MIXED_UP, FORGED], ids=["mixed up", "forged"])
def test_no_peer_takes_a_page_or_keeps_one(kinds: tuple[str, ...]) -> None:
    run_schedules(kinds, 250)


@pytest.mark.parametrize(
    ("plant", "kinds", "found"),
    [
        (no_digest_check, MIXED_UP, "a wrong page was committed"),
        (pages_are_free_at_once, MIXED_UP, "after its end"),
        (acknowledged_means_sent, FORGED, "read after its end"),
    ],
)
def test_schedules_find(
    plant: Plant, kinds: tuple[str, ...], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    with pytest.raises(Exception, match=found):
        run_schedules(kinds, 250)
