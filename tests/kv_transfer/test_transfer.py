"""Sender and receiver over the loopback transport, in virtual time, with every fault."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kv_transfer import receiver_protocol as receiving
from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.driver import TransferStats
from kv_transfer.errors import (
    ConnectionBroken,
    DigestMismatch,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from kv_transfer.messages import Abort, ChunkGo, ChunkPosted, ChunkReady, Granted
from kv_transfer.order import Load
from kv_transfer.ordered_connection import NETWORK_CHUNK_BYTES
from kv_transfer.protocol import PagesDigested
from kv_transfer.receiver_protocol import Stage
from tests.kv_transfer.pair import DEADLINES, RECEIVER, TICKET, Attempt, Workers, shuffled
from tests.support.loopback import FaultKind, LoopbackFault, LoopbackNetwork, planned
from tests.support.virtual_time import run_virtual, wait_until


def network(*faults: LoopbackFault, hang_on_peer_death: bool = True) -> LoopbackNetwork:
    return LoopbackNetwork(fault_policy=planned(faults), hang_on_peer_death=hang_on_peer_death)


async def ten_pages(workers: Workers, **options: Any) -> Attempt:
    return Attempt(
        workers,
        await workers.connect(),
        source_pages=shuffled(10, 1),
        target_pages=shuffled(10, 2),
        **options,
    )


def has_chunk(attempt: Attempt, stage: Stage) -> bool:
    return any(each.stage is stage for each in attempt.receiver.driver.state.chunks)


def alter_second(attempt: Attempt, kind: type, alter: Callable[[Any], object]) -> None:
    """Let the receiver get another message in place of what the sender says of the second chunk."""
    deliver = attempt.receiver.driver.post

    def altered(message: Any) -> None:
        is_meant = isinstance(message, kind) and message.chunk == 1
        deliver(alter(message) if is_meant else message)

    attempt.to_receiver.deliver = altered


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


def test_pages_arrive_unchanged_and_are_committed_in_order() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers)

        received, sent, _ = await attempt.run()

        assert isinstance(received, TransferStats)
        assert isinstance(sent, TransferStats)
        assert received.pages_moved == sent.pages_moved == 10
        assert received.bytes_moved == sent.bytes_moved == 10 * workers.source.page_bytes > 0
        assert attempt.receiver.wire_s() > 0
        assert attempt.committed == [4, 8, 10]
        assert attempt.acked == [(0, 4), (4, 4), (8, 2)]
        assert attempt.is_equal(10)
        assert attempt.receiver.driver.is_quiescent
        assert attempt.sender.driver.is_quiescent

    run(scenario)


def test_only_the_wanted_pages_move() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers, first_page=7)
        before = workers.target.export_pages(attempt.target_pages[:7])

        received, _, _ = await attempt.run()

        assert isinstance(received, TransferStats)
        assert received.pages_moved == 3
        assert attempt.committed == [10]
        assert attempt.is_equal(10)
        assert (workers.target.export_pages(attempt.target_pages[:7]) == before).all()

    run(scenario)


def test_more_pages_than_the_connection_takes_at_a_time_move_as_several_chunks() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        workers.network.max_chunk_bytes = 4 * workers.source.page_bytes + 1
        attempt = await ten_pages(workers, chunk_pages=9)

        received, sent, _ = await attempt.run()

        assert isinstance(received, TransferStats)
        assert isinstance(sent, TransferStats)
        assert attempt.committed == [4, 8, 9, 10]
        assert attempt.acked == [(0, 4), (4, 4), (8, 1), (9, 1)]
        assert attempt.is_equal(10)

    run(scenario)


def test_a_page_that_is_more_than_the_connection_takes_at_a_time_moves_alone() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        workers.network.max_chunk_bytes = 1
        attempt = await ten_pages(workers, chunk_pages=10)

        await attempt.run()

        assert attempt.committed == list(range(1, 11))

    run(scenario)


def test_a_hundred_large_transfers_over_a_slow_network_miss_no_deadline() -> None:
    """Each has 1 GiB: 128 pages of 8 MiB, which a prefill worker hands over together."""

    async def scenario() -> None:
        net = network()
        workers = Workers(net, num_pages=128)
        part = 128 * workers.source.page_bytes / (1 << 30)  # of the bytes and of the rates
        net.bytes_per_s = 1e9 * part
        net.max_chunk_bytes = int(NETWORK_CHUNK_BYTES * part)
        assumed = TransferDeadlines().assumed_bytes_per_s
        deadlines = TransferDeadlines(assumed_bytes_per_s=assumed * part)
        sides = await workers.connect()
        attempts = [
            Attempt(
                workers,
                sides,
                source_pages=range(128),
                target_pages=range(128),
                chunk_pages=128,
                ticket=replace(TICKET, transfer_id=bytes([i]) * 16),
                deadlines=deadlines,
            )
            for i in range(100)
        ]

        connection_id = sides[0].connection.connection_id
        with workers.accepted.get(RECEIVER, connection_id).users.one():
            results = await asyncio.gather(*(attempt.run() for attempt in attempts))

        assert [error for each in results for error in each if isinstance(error, Exception)] == []

    run(scenario)


async def eight_attempts(workers: Workers, **options: Any) -> list[Attempt]:
    """Transfers of eight pages each that share one connection."""
    sides = await workers.connect()
    pages = shuffled(64, 3)
    return [
        Attempt(
            workers,
            sides,
            source_pages=pages[i * 8 : i * 8 + 8],
            target_pages=pages[i * 8 : i * 8 + 8],
            ticket=replace(TICKET, transfer_id=bytes([i]) * 16),
            **options,
        )
        for i in range(8)
    ]


def test_transfers_of_one_pair_share_the_connection_one_receive_at_a_time() -> None:
    async def scenario() -> None:
        net = network()
        net.latency_s = 0.05
        workers = Workers(net)
        attempts = await eight_attempts(workers, chunk_pages=2)

        await asyncio.gather(*(attempt.run() for attempt in attempts))

        assert workers.num_connects == 1
        assert all(attempt.is_equal(8) for attempt in attempts)
        assert net.copies == 32
        assert asyncio.get_running_loop().time() >= 32 * 0.05

    run(scenario)


def test_round_trips_of_several_transfers_overlap() -> None:
    async def scenario() -> None:
        net = network()
        net.latency_s = 0.0001
        attempts = await eight_attempts(Workers(net), chunk_pages=8, compute_s=0.0)
        for attempt in attempts:
            attempt.to_receiver.delay_s = attempt.to_sender.delay_s = 0.01
        started_at = asyncio.get_running_loop().time()

        await asyncio.gather(*(attempt.run() for attempt in attempts))

        assert all(attempt.is_equal(8) for attempt in attempts)
        # Granted and Ready, Go, Posted, Ack: four messages one after the other, and eight copies.
        assert asyncio.get_running_loop().time() - started_at < 4 * 0.01 + 8 * 0.0001 + 0.001

    run(scenario)


def test_the_next_chunk_of_a_transfer_is_called_while_one_is_received() -> None:
    async def scenario() -> None:
        copy_s, message_s = 0.025, 0.01
        net = network()
        net.latency_s = copy_s
        attempt = await ten_pages(Workers(net), chunk_pages=2, compute_s=0.0)
        attempt.to_receiver.delay_s = attempt.to_sender.delay_s = message_s
        started_at = asyncio.get_running_loop().time()

        await attempt.run()

        # Granted and Ready, Go, Posted, Ack: four messages one after the other, and five copies.
        took_s = asyncio.get_running_loop().time() - started_at
        assert took_s == pytest.approx(4 * message_s + 5 * copy_s, abs=0.001)
        # The second receive is posted while the first is under way: no time counts twice.
        assert attempt.receiver.wire_s() == pytest.approx(5 * copy_s, abs=0.001)

    run(scenario)


def test_digests_are_computed_while_the_receiver_is_asked_for_a_slot() -> None:
    async def took_s(digest_s: float) -> float:
        net = network()
        net.latency_s = 0.025
        attempt = await ten_pages(
            Workers(net), chunk_pages=10, compute_s=0.0, digest_s=digest_s / 2
        )
        attempt.to_receiver.delay_s = attempt.to_sender.delay_s = 0.01
        started_at = asyncio.get_running_loop().time()
        received, _, _ = await attempt.run()
        assert isinstance(received, TransferStats)
        return asyncio.get_running_loop().time() - started_at - digest_s / 2  # the receiver's

    # Granted and Ready, Go, Posted, Ack: four messages one after the other, and a copy. The
    # sender's digests take no time of their own, up to that of Ready and Go.
    for digest_s in (0.0, 0.01, 0.04):
        assert run_virtual(took_s(digest_s)) == pytest.approx(4 * 0.01 + 0.025, abs=0.001)
    assert run_virtual(took_s(0.06)) == pytest.approx(4 * 0.01 + 0.025 + 0.01, abs=0.001)


@pytest.mark.parametrize(("beyond_s", "is_late"), [(-0.01, False), (0.01, True)])
def test_slow_digests_of_a_called_chunk_are_waited_for_up_to_the_digest_deadline(
    beyond_s: float, is_late: bool
) -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers, digest_s=DEADLINES.digest_s + beyond_s)

        received, sent, _ = await attempt.run()
        await attempt.wait_quiescent()

        assert not attempt.receiver._incoming.connection.is_broken
        if is_late:
            assert isinstance(sent, TransferTimeout)
            assert str(sent) == "waiting for digest of chunk 0 took too long"
            assert isinstance(received, TransferAborted)
            assert attempt.committed == []
        else:
            assert isinstance(received, TransferStats)
            assert attempt.is_equal(10)

    run(scenario)


@pytest.mark.parametrize("is_called", [True, False])
def test_digests_that_never_end_are_named_whether_the_receiver_has_called_or_not(
    is_called: bool,
) -> None:
    async def scenario() -> None:
        attempt = await ten_pages(Workers(network()), digest_s=1000)
        attempt.to_sender.drop = lambda message: isinstance(message, ChunkGo) and not is_called

        _, sent, _ = await attempt.run()
        await attempt.wait_quiescent()

        assert str(sent) == "waiting for digest of chunk 0 took too long"

    run(scenario)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_sender_that_does_not_answer_is_waited_for_longer_before_a_failure_than_after_it(
    is_cancelled: bool,
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        attempt = await ten_pages(Workers(network()), chunk_pages=10)
        attempt.to_sender.is_cut = True
        running = asyncio.create_task(attempt.receiver.run())
        others = asyncio.gather(attempt.sender.run(), attempt.compute(), return_exceptions=True)
        await wait_until(lambda: has_chunk(attempt, Stage.CALLED))
        called_at = loop.time()
        limit_s = DEADLINES.digest_s + DEADLINES.post_s
        attempt.to_receiver.is_cut = True
        if is_cancelled:
            attempt.receiver.driver.cancel("the client left")
            limit_s = DEADLINES.post_s

        with pytest.raises(TransferAborted if is_cancelled else TransferTimeout):
            await running
        await attempt.receiver.driver.wait_quiescent()

        assert loop.time() - called_at == pytest.approx(limit_s, abs=0.01)
        assert attempt.receiver._incoming.connection.is_broken
        await others

    run(scenario)


def test_a_page_that_changes_after_its_digest_is_not_committed() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers, chunk_pages=10)
        attempt.to_sender.delay_s = 1.0  # of ChunkGo
        running = asyncio.create_task(attempt.run())
        await wait_until(lambda: any(c.digests for c in attempt.sender.driver.state.chunks))
        assert not attempt.sender.driver.state.chunks[0].is_called
        workers.source.slots[attempt.source_pages[3]] ^= 1

        received, *_ = await running
        await attempt.wait_quiescent()

        assert isinstance(received, DigestMismatch)
        assert "1 of 10 pages differ from their digests, first page 3" in str(received)
        assert attempt.committed == []

    run(scenario)


@pytest.mark.parametrize("num_digests", [1, 3, 5])
def test_a_chunk_with_a_wrong_number_of_digests_is_received_and_not_committed(
    num_digests: int,
) -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers)
        alter_second(
            attempt,
            ChunkPosted,
            lambda posted: replace(posted, digests=(posted.digests * 2)[: 16 * num_digests]),
        )

        received, sent, _ = await attempt.run()
        await attempt.wait_quiescent()

        assert type(received) is TransferError
        assert str(received) == (
            f"digests of chunk 1: found {num_digests}; allowed: 4, one for each page"
        )
        assert isinstance(sent, TransferAborted)
        assert attempt.committed in ([], [4])
        # What was posted has been taken, so that the next transfer can use the connection.
        assert not attempt.receiver._incoming.connection.is_broken
        assert attempt.receiver._incoming.load == Load()

    run(scenario)


def test_digests_beyond_the_pages_of_a_chunk_are_not_kept_while_it_is_received() -> None:
    """They were up to the size of a message, for each of the chunks on their way."""
    state = receiving.begin(TICKET, first_page=0, num_pages=2)
    for event in (
        Granted(TICKET),
        ChunkReady(TICKET, 0, 0, 2, True),
        receiving.SlotTaken(0),
        ChunkPosted(TICKET, 0, b"d" * 16000),
    ):
        state, actions = receiving.step(state, event)

    assert receiving.PostReceive(0, 0, 2, 0) in actions
    assert [(each.stage, each.digests) for each in state.chunks] == [(Stage.RECEIVING, b"")]


def test_announced_chunks_cost_the_events_of_others_nothing() -> None:
    """Each event looked at all of them: 8,192 of one page each took 40 s of the event loop."""
    state = receiving.begin(TICKET, first_page=0, num_pages=1000)
    state, _ = receiving.step(state, Granted(TICKET))
    for chunk in range(1000):
        state, _ = receiving.step(state, ChunkReady(TICKET, chunk, chunk, 1, chunk == 999))
        assert len(state.chunks) <= receiving.MAX_CALLED
    for chunk in range(1000):
        for event in (
            receiving.SlotTaken(chunk),
            ChunkPosted(TICKET, chunk, b"d" * 16, chunk),
            receiving.ReceiveDone(chunk),
            PagesDigested(chunk, (b"d" * 16,)),
        ):
            state, _ = receiving.step(state, event)
            assert len(state.chunks) <= receiving.MAX_CALLED + 1

    assert state.is_finished
    assert state.failure is None


@pytest.mark.parametrize(
    ("num_pages", "told"),
    [
        (0, "chunk 1 announced pages [4, 4), is_last False; expected chunk 1 from page 4"),
        (3, "digests of chunk 1: found 4; allowed: 3"),
        (5, "digests of chunk 1: found 4; allowed: 5"),
        (2**32 - 1, f"chunk 1 announced pages [4, {2**32 + 3}), is_last False"),
    ],
)
def test_an_announcement_of_a_wrong_number_of_pages_is_refused(num_pages: int, told: str) -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers)
        alter_second(attempt, ChunkReady, lambda ready: replace(ready, num_pages=num_pages))

        received, _, _ = await attempt.run()
        await attempt.wait_quiescent()

        assert type(received) is TransferError
        assert told in str(received)
        assert attempt.committed in ([], [4])

    run(scenario)


def test_receives_are_posted_in_the_order_of_the_sends_whoever_hears_of_them_first() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempts = await eight_attempts(workers, chunk_pages=2)
        rng = random.Random(5)
        for attempt in attempts:
            attempt.to_receiver.delay_s = rng.uniform(0.0, 0.02)
            attempt.to_sender.delay_s = rng.uniform(0.0, 0.02)

        results = await asyncio.gather(*(attempt.run() for attempt in attempts))

        assert all(isinstance(result, TransferStats) for result, *_ in results)
        assert all(attempt.is_equal(8) for attempt in attempts)
        numbers = [
            (attempt.to_receiver.delay_s, message.order)
            for attempt in attempts
            for message in attempt.to_receiver.seen
            if isinstance(message, ChunkPosted)
        ]
        assert sorted(order for _, order in numbers) == list(range(32))
        assert len({delay for delay, _ in numbers}) == 8, "some must have been overtaken"

    run(scenario)


@pytest.mark.parametrize(
    ("has_its_turn", "message"), [(False, "before this one failed"), (True, "is broken")]
)
def test_a_receive_that_is_cancelled_before_it_begins_ends_those_behind_it(
    has_its_turn: bool, message: str
) -> None:
    """Its pages come all the same, so that nobody behind it can take what is theirs."""

    async def scenario() -> None:
        workers = Workers(network())
        incoming, outgoing = await workers.connect()
        given_up, behind = (asyncio.create_task(incoming.receive(n, [n], 5.0)) for n in (1, 2))
        await asyncio.sleep(0)
        if has_its_turn:
            sending = asyncio.create_task(outgoing.connection.send([0], 5.0))
            await incoming.receive(0, [0], 5.0)
            await sending
        given_up.cancel()

        with pytest.raises(asyncio.CancelledError):
            await given_up
        async with asyncio.timeout(1.0):
            with pytest.raises(ConnectionBroken, match=message):
                await behind
            with pytest.raises(ConnectionBroken):
                await incoming.receive(3, [3], 5.0)

    run(scenario)


@pytest.mark.parametrize("what", ["cancelled", "stream lost"])
def test_a_transfer_that_ends_between_others_keeps_them_or_ends_them_soon(what: str) -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempts = await eight_attempts(workers, chunk_pages=2, compute_s=0.003)
        running = [asyncio.create_task(attempt.run()) for attempt in attempts]
        victim = attempts[3]
        await wait_until(lambda: has_chunk(victim, Stage.CALLED))
        if what == "cancelled":
            victim.receiver.driver.cancel("the client left")
        else:
            # The answer to ChunkGo is lost, and with it the number of a send.
            victim.to_receiver.is_cut = victim.to_sender.is_cut = True
            victim.receiver.driver.stream_lost("cut")
            victim.sender.driver.stream_lost("cut")

        async with asyncio.timeout(DEADLINES.transfer_s / 2):
            results = await asyncio.gather(*running)

        failed = [isinstance(received, TransferError) for received, *_ in results]
        assert failed[3]
        if what == "cancelled":
            assert sum(failed) == 1
            assert not victim.receiver._incoming.connection.is_broken
        for attempt in attempts:
            await attempt.wait_quiescent()
            num_pages = attempt.committed[-1] if attempt.committed else 0
            assert attempt.is_equal(num_pages)
        assert victim.receiver._incoming.load == Load()
        assert victim.sender._outgoing.load == Load()

    run(scenario)


def test_a_number_that_comes_twice_breaks_the_connection() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        incoming, outgoing = await workers.connect()
        sending = asyncio.create_task(outgoing.connection.send([1], 5.0))
        await incoming.receive(0, [1], 5.0)
        await sending

        with pytest.raises(ConnectionBroken, match="twice"):
            await incoming.receive(0, [1], 5.0)
        waiting = asyncio.create_task(incoming.receive(7, [1], 5.0))
        await asyncio.sleep(0)
        with pytest.raises(ConnectionBroken, match="twice"):
            await incoming.receive(7, [1], 5.0)
        await incoming.abort()
        with pytest.raises(ConnectionBroken, match="before this one failed"):
            await waiting

    run(scenario)


@pytest.mark.parametrize(
    "kind", [FaultKind.FLIP, FaultKind.SWAP, FaultKind.STALE, FaultKind.TRUNCATE]
)
def test_damaged_pages_are_never_committed(kind: FaultKind) -> None:
    async def scenario() -> None:
        healthy, damaged = LoopbackFault(), LoopbackFault(kind=kind)
        workers = Workers(network(healthy, damaged))
        attempt = await ten_pages(workers)

        received, sent, _ = await attempt.run()
        await attempt.wait_quiescent()

        assert workers.network.num_faults == 1
        assert isinstance(received, DigestMismatch)
        assert isinstance(sent, TransferAborted)
        assert attempt.committed == [4]
        assert not attempt.receiver._incoming.connection.is_broken

    run(scenario)


def test_without_digests_damage_would_be_committed() -> None:
    async def scenario() -> None:
        workers = Workers(network(LoopbackFault(kind=FaultKind.FLIP)))
        attempt = await ten_pages(workers)
        for storage in (workers.source, workers.target):
            storage.digest_pages = lambda page_ids: [b"b" * 16 for _ in page_ids]  # type: ignore[method-assign]

        received, _, _ = await attempt.run()

        assert isinstance(received, TransferStats)
        assert not attempt.is_equal(10)

    run(scenario)


@pytest.mark.parametrize(
    ("kind", "errors"),
    [
        (FaultKind.HANG, (TransferTimeout, ConnectionBroken)),
        (FaultKind.DROP, (TransferTimeout, ConnectionBroken)),
        (FaultKind.LATE_WRITE, (TransferTimeout, ConnectionBroken)),
        (FaultKind.BREAK, (ConnectionBroken,)),
    ],
)
@pytest.mark.parametrize("hang_on_peer_death", [True, False])
def test_a_stuck_transfer_ends_within_its_deadlines(
    kind: FaultKind, errors: tuple[type[TransferError], ...], hang_on_peer_death: bool
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        fault = LoopbackFault(kind=kind)
        workers = Workers(network(fault, hang_on_peer_death=hang_on_peer_death))
        attempt = await ten_pages(workers)

        received, sent, _ = await attempt.run()
        await attempt.wait_quiescent()

        assert workers.network.num_faults == 1
        assert isinstance(received, errors)
        assert isinstance(sent, TransferError)
        assert attempt.committed == []
        assert loop.time() < DEADLINES.transfer_s + DEADLINES.abort_s
        assert attempt.receiver._incoming.connection.is_broken

    run(scenario)


def test_a_late_write_lands_before_the_pages_are_quiescent_and_never_after() -> None:
    async def scenario() -> None:
        fault = LoopbackFault(kind=FaultKind.LATE_WRITE, abort_s=1.5)
        workers = Workers(network(fault))
        attempt = await ten_pages(workers)
        before = workers.target.export_pages(range(64))

        await attempt.run()
        assert not attempt.receiver.driver.is_quiescent
        assert (workers.target.export_pages(range(64)) == before).all()
        await attempt.receiver.driver.wait_quiescent()

        assert attempt.receiver.driver.is_quiescent
        after = workers.target.export_pages(range(64))
        assert not (after == before).all()
        await asyncio.sleep(60)
        assert (workers.target.export_pages(range(64)) == after).all()

    run(scenario)


def test_an_overdue_abort_keeps_the_pages_until_it_returns_but_frees_the_receive_slot() -> None:
    async def scenario() -> None:
        fault = LoopbackFault(kind=FaultKind.HANG, abort_s=100.0)
        workers = Workers(network(fault))
        sides = await workers.connect()
        attempt = Attempt(workers, sides, source_pages=shuffled(4, 1), target_pages=shuffled(4, 2))

        await attempt.run()
        freed: list[str] = []
        for name, side in (("receiver", attempt.receiver), ("sender", attempt.sender)):
            with pytest.raises(ConnectionBroken, match="restart"):
                await side.driver.wait_quiescent()
            assert not side.driver.is_quiescent
            side.driver.call_when_quiescent(partial(freed.append, name))
        assert sides[0].load == Load()
        await asyncio.sleep(90.0)
        assert freed == []

        await asyncio.sleep(10.0)

        assert sorted(freed) == ["receiver", "sender"]
        await attempt.wait_quiescent()
        attempt.receiver.driver.call_when_quiescent(partial(freed.append, "again"))
        assert freed[-1] == "again", "at once when it is quiet already"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario)


def test_a_killed_sender_costs_one_deadline_and_the_next_one_delivers() -> None:
    async def scenario() -> None:
        workers = Workers(network(LoopbackFault(), LoopbackFault(delay_s=0.5)))
        attempt = await ten_pages(workers)
        running = asyncio.create_task(attempt.receiver.run())
        computing = asyncio.create_task(attempt.compute())
        await asyncio.sleep(0.1)
        workers.sender_transport.kill()
        attempt.to_receiver.is_cut = attempt.to_sender.is_cut = True

        with pytest.raises((TransferTimeout, ConnectionBroken)):
            await running
        await attempt.receiver.driver.wait_quiescent()
        await computing

        assert attempt.committed == [4]
        healthy = Workers(network())
        healthy.source.slots[:] = workers.source.slots
        again = await ten_pages(healthy, first_page=4, ticket=replace(TICKET, attempt=1))
        received, _, _ = await again.run()
        assert isinstance(received, TransferStats)
        assert received.pages_moved == 6
        assert again.is_equal(10)

    run(scenario)


@pytest.mark.parametrize("after_s", [0.0005, 0.005, 0.0125, 0.0135, 0.0145, 0.02, 0.031])
@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_cancelling_at_any_point_frees_both_sides_at_once_and_keeps_the_connection(
    after_s: float, side: str
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        workers = Workers(network())
        attempt = await ten_pages(workers)
        running = asyncio.create_task(attempt.run())
        await asyncio.sleep(after_s)

        getattr(attempt, side).driver.cancel("the client left")
        await attempt.wait_quiescent()
        cancelled_after_s = loop.time() - after_s
        received, sent, _ = await running

        assert cancelled_after_s < 0.01
        assert isinstance(received, TransferAborted)
        assert isinstance(sent, TransferAborted)
        assert not attempt.receiver._incoming.connection.is_broken
        again = await ten_pages(workers, ticket=replace(TICKET, attempt=1))
        results = await again.run()
        assert isinstance(results[0], TransferStats)
        assert workers.num_connects == 1
        assert again.is_equal(10)

    run(scenario)


def test_cancelling_the_task_that_runs_the_receiver_cancels_the_attempt() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers)
        others = asyncio.gather(attempt.sender.run(), attempt.compute(), return_exceptions=True)
        running = asyncio.create_task(attempt.receiver.run())
        await asyncio.sleep(0.0125)

        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await attempt.wait_quiescent()

        assert isinstance((await others)[0], TransferAborted)

    run(scenario)


@pytest.mark.parametrize(
    ("lost", "error"),
    [
        (Granted, TransferError),
        (ChunkReady, TransferTimeout),
        (ChunkGo, TransferTimeout),
        (ChunkPosted, TransferTimeout),
    ],
)
def test_a_lost_message_ends_in_a_deadline(lost: type, error: type[TransferError]) -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers)
        attempt.to_receiver.drop = attempt.to_sender.drop = lambda m: isinstance(m, lost)

        received, sent, _ = await attempt.run()
        await attempt.wait_quiescent()

        assert isinstance(received, TransferError)
        assert isinstance(sent, TransferError)
        assert isinstance(received, error) or isinstance(sent, error)
        assert attempt.committed == []
        assert asyncio.get_running_loop().time() < 10

    run(scenario)


def test_a_lost_last_ack_does_not_undo_what_the_receiver_committed() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers, chunk_pages=10)
        attempt.to_sender.drop = lambda m: not isinstance(m, ChunkGo)

        received, sent, _ = await attempt.run()
        await attempt.wait_quiescent()

        assert isinstance(received, TransferStats)
        assert isinstance(sent, TransferTimeout)
        assert attempt.committed == [10]
        assert attempt.acked == []

    run(scenario)


def test_repeated_and_foreign_messages_change_nothing() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers)
        post_to_receiver, post_to_sender = attempt.receiver.driver.post, attempt.sender.driver.post
        foreign = replace(TICKET, attempt=5)

        def to_receiver(message: Any) -> None:
            for each in (replace(message, ticket=foreign), message, message):
                post_to_receiver(each)

        def to_sender(message: Any) -> None:
            for each in (replace(message, ticket=foreign), message, message):
                post_to_sender(each)

        attempt.to_receiver.deliver, attempt.to_sender.deliver = to_receiver, to_sender

        received, _, _ = await attempt.run()

        assert isinstance(received, TransferStats)
        assert received.pages_moved == 10
        assert workers.network.copies == 3
        assert attempt.committed == [4, 8, 10]

    run(scenario)


@pytest.mark.parametrize("how", ["done", "failed", "crashed"])
def test_messages_that_come_after_the_end_are_not_kept(how: str) -> None:
    async def scenario() -> None:
        attempt = await ten_pages(Workers(network()))
        if how == "failed":
            attempt.receiver.driver.cancel("the client left")
        if how == "crashed":
            attempt.receiver.driver._step = attempt.sender.driver._step = None  # type: ignore[assignment]
        await attempt.run()
        await asyncio.sleep(1)

        for driver in (attempt.receiver.driver, attempt.sender.driver):
            driver.post(Abort(TICKET, "again"))
            assert not driver._events

    run(scenario)


def test_a_closed_stream_ends_the_attempt() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers)
        running = asyncio.create_task(attempt.run())
        await asyncio.sleep(0.0115)
        attempt.to_sender.is_cut = attempt.to_receiver.is_cut = True
        attempt.sender.driver.stream_lost("the call ended")
        attempt.receiver.driver.stream_lost("the call ended")

        received, sent, _ = await running
        await attempt.wait_quiescent()

        assert isinstance(received, ConnectionBroken)
        assert isinstance(sent, ConnectionBroken)
        assert asyncio.get_running_loop().time() < 0.1

    run(scenario)


def test_a_receiver_that_leaves_with_all_pages_fails_no_sender_whose_send_ends_later() -> None:
    async def scenario() -> None:
        attempt = await ten_pages(Workers(network()), chunk_pages=10)
        connection = attempt.sender._outgoing.connection
        send = connection.send

        async def seen_late(page_ids: Sequence[int], seconds: float) -> None:
            await send(page_ids, seconds)
            await asyncio.sleep(1.5 * DEADLINES.lost_s)

        connection.send = seen_late  # type: ignore[method-assign]
        running = asyncio.create_task(attempt.run())
        await wait_until(lambda: attempt.sender.driver.state.is_acked)
        attempt.sender.driver.stream_lost("the receiver has left")

        _, sent, _ = await running

        assert isinstance(sent, TransferStats)
        assert attempt.acked == [(0, 10)]
        assert not connection.is_broken

    run(scenario)


@pytest.mark.parametrize("dead", ["sender", "receiver"])
def test_a_chunk_of_a_dead_peer_is_given_up_before_its_transfer_would_be_late(dead: str) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        deadlines = replace(DEADLINES, lost_s=0.5, transfer_s=60)
        workers = Workers(network(LoopbackFault(kind=FaultKind.HANG, abort_s=0.1)))
        attempt = await ten_pages(workers, deadlines=deadlines)
        running = asyncio.create_task(attempt.run())
        await wait_until(lambda: has_chunk(attempt, Stage.RECEIVING))
        died_at = loop.time()
        attempt.to_sender.is_cut = attempt.to_receiver.is_cut = True
        alive, other = attempt.sender.driver, attempt.receiver.driver
        if dead == "sender":
            alive, other = other, alive
        alive.stream_lost("the worker died")

        await alive.wait_quiescent()

        assert loop.time() - died_at == pytest.approx(deadlines.lost_s + 0.1, abs=0.01)
        other.stream_lost("its process goes on in this test")
        received, sent, *_ = await running
        assert isinstance(received, ConnectionBroken)
        assert isinstance(sent, ConnectionBroken)

    run(scenario)


def test_a_callback_that_raises_is_reported_and_ends_only_its_attempt() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        attempt = await ten_pages(workers)

        def refuse(num_pages: int) -> None:
            raise ValueError(f"no page {num_pages}")

        attempt.receiver._on_commit = refuse

        received, sent, _ = await attempt.run()
        await attempt.wait_quiescent()

        assert isinstance(received, ValueError)
        assert isinstance(sent, TransferAborted)
        assert attempt.receiver._incoming.load == Load()

    run(scenario)


def test_a_slow_prefill_is_waited_for_up_to_the_chunk_deadline() -> None:
    async def scenario(compute_s: float) -> object:
        workers = Workers(network())
        attempt = await ten_pages(workers, compute_s=compute_s)
        received, _, _ = await attempt.run()
        await attempt.wait_quiescent()
        return received

    assert isinstance(run_virtual(scenario(DEADLINES.chunk_s - 0.01)), TransferStats)
    assert isinstance(run_virtual(scenario(DEADLINES.chunk_s + 0.01)), TransferTimeout)


def test_an_attempt_that_wants_no_page_is_refused() -> None:
    async def scenario() -> None:
        workers = Workers(network())
        with pytest.raises(ValueError, match="first_page is 10"):
            await ten_pages(workers, first_page=10)

    run(scenario)


def test_nothing_is_left_running_after_a_transfer() -> None:
    async def scenario() -> None:
        workers = Workers(network(LoopbackFault(kind=FaultKind.HANG)))
        for number in range(3):
            attempt = await ten_pages(workers, ticket=replace(TICKET, attempt=number))
            await attempt.run()
            await attempt.wait_quiescent()
        await asyncio.sleep(1)

        assert workers.num_connects == 2
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario)
