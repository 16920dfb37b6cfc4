"""The pools of connections on both sides."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kv_transfer.connections import Accepted, AcceptedConnections, ConnectionPool
from kv_transfer.errors import ConnectionBroken, TransferTimeout, TransportRefused
from kv_transfer.proven_sockets import ProvenSockets
from kv_transfer.tcp import TcpTransport
from tests.kv_transfer.pair import KEY, RECEIVER, Workers, make_storage
from tests.support.loopback import LoopbackNetwork, LoopbackTransport
from tests.support.virtual_time import run_virtual


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


class OtherTransport(LoopbackTransport):
    name = "other"


def test_concurrent_callers_share_one_set_up() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())

        sides = await asyncio.gather(*(workers.connect() for _ in range(16)))

        assert workers.num_connects == 1
        assert len({id(side[0]) for side in sides}) == 1
        assert len({id(side[1]) for side in sides}) == 1

    run(scenario)


def test_a_broken_connection_is_made_anew() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())
        first, first_sending = await workers.connections()
        await first.abort()

        with pytest.raises(ConnectionBroken, match="Connect again"):
            workers.accepted.get(RECEIVER, first.connection_id)
        second, _ = await workers.connections()

        assert second is not first
        assert first_sending.is_broken
        assert not second.is_broken
        assert workers.num_connects == 2

    run(scenario)


def test_an_offer_is_withdrawn_also_if_the_call_fails_before_anybody_waits_for_it() -> None:
    async def scenario() -> None:
        transport = TcpTransport(make_storage(4, 1), ProvenSockets(host="127.0.0.1"))
        pool = ConnectionPool([transport], random_id=lambda: "c0", key_of=lambda *_: KEY)

        async def connect(connection_id: str, name: str, offer: bytes) -> None:
            raise ConnectionBroken("the channel was closed")

        with pytest.raises(ConnectionBroken, match="channel was closed"):
            await pool.get(("prefill-0", 1), connect, asyncio.get_running_loop().time() + 5)
        assert not transport._sockets._offers
        await transport.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["the call fails", "cancelled"])
def test_what_was_accepted_before_its_set_up_failed_is_aborted(is_cancelled: bool) -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())
        deadline = asyncio.get_running_loop().time() + 5
        closing: list[asyncio.Task[None]] = []

        async def connect(*offered: Any) -> None:
            await workers.accepting()(*offered)
            await asyncio.sleep(0.01)  # the receiver has accepted by now
            if is_cancelled:
                closing.append(asyncio.create_task(workers.pool.close()))
                await asyncio.sleep(60)
            raise ConnectionBroken("the answer was lost")

        with pytest.raises(ConnectionBroken):
            await workers.pool.get(("prefill-0", 7), connect, deadline)
        await asyncio.sleep(0.01)

        [accepted] = workers.receiver_transport._connections
        assert accepted.is_broken, "nobody else will ever abort it"

    run(scenario)


def test_dropping_aborts_both_views_of_the_connection() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())
        connection, _ = await workers.connections()

        workers.pool.drop(connection)
        workers.pool.drop(connection)
        await workers.pool.close()

        assert connection.is_broken
        with pytest.raises(ConnectionBroken):
            workers.accepted.get(RECEIVER, connection.connection_id)

    run(scenario)


def test_a_failed_set_up_fails_all_its_callers_and_the_next_call_tries_again() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())

        async def refuse(connection_id: str, transport_name: str, offer: bytes) -> None:
            await asyncio.sleep(0.1)
            raise ConnectionRefusedError("nobody there")

        results = await asyncio.gather(
            *(workers.pool.get(("prefill-0", 7), refuse, 5) for _ in range(3)),
            return_exceptions=True,
        )

        assert [type(result) for result in results] == [ConnectionRefusedError] * 3
        assert workers.network.offers == {}
        connection, _ = await workers.connections()
        assert not connection.is_broken

    run(scenario)


def test_a_set_up_that_hangs_ends_at_the_deadline() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())

        hang = workers.accepting(after_s=1000)
        with pytest.raises(TransferTimeout):
            await workers.pool.get(("prefill-0", 7), hang, 2)

        assert asyncio.get_running_loop().time() == pytest.approx(2)
        await workers.pool.close()

    run(scenario)


def test_a_peer_that_is_forgotten_during_the_set_up_fails_its_callers_and_cancels_nobody() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())

        hang = workers.accepting(after_s=1000)
        waiting = asyncio.create_task(workers.pool.get(("prefill-0", 7), hang, 50))
        await asyncio.sleep(0.1)
        workers.pool.forget(("prefill-0", 7))

        with pytest.raises(ConnectionBroken, match="dropped"):
            await waiting
        await workers.pool.close()

    run(scenario)


def test_one_caller_that_leaves_does_not_end_the_set_up_of_others() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())
        started = asyncio.Event()

        async def slow(*offered: Any) -> None:
            started.set()
            await workers.accepting(after_s=0.5)(*offered)

        leaving = asyncio.create_task(workers.pool.get(("prefill-0", 7), slow, 5))
        staying = asyncio.create_task(workers.pool.get(("prefill-0", 7), slow, 5))
        await started.wait()
        leaving.cancel()

        connection = (await staying).connection

        assert not connection.is_broken

    run(scenario)


def test_one_that_joined_a_set_up_of_less_time_begins_another_in_its_own() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())

        async def call(*offered: Any) -> None:
            await workers.accepting(after_s=0.5 if workers.num_connects else 1000)(*offered)

        peer_key = ("prefill-0", 7)
        first = asyncio.create_task(workers.pool.get(peer_key, call, 1.0))
        await asyncio.sleep(0.9)
        joined = [asyncio.create_task(workers.pool.get(peer_key, call, 1.9)) for _ in range(3)]
        late = asyncio.create_task(workers.pool.get(peer_key, call, 1.2))

        for each in (first, late):
            with pytest.raises(TransferTimeout):
                await each
        assert len({id(await each) for each in joined}) == 1
        assert workers.num_connects == 2
        assert asyncio.get_running_loop().time() == pytest.approx(1.5)

    run(scenario)


def test_the_next_transport_is_tried_when_the_sender_refuses_the_best() -> None:
    async def scenario() -> None:
        network = LoopbackNetwork()
        source, target = make_storage(4, 1), make_storage(4, 2)
        ids = iter("abc")
        pool = ConnectionPool(
            [OtherTransport(network, target), LoopbackTransport(network, target)],
            random_id=lambda: next(ids),
            key_of=lambda peer_key, connection_id: KEY,
        )
        accepted = AcceptedConnections([LoopbackTransport(network, source)], idle_s=60)
        tried = []

        async def call(connection_id: str, transport_name: str, offer: bytes) -> None:
            tried.append(transport_name)
            await accepted.connect(
                peer_key=RECEIVER,
                connection_id=connection_id,
                transport_name=transport_name,
                offer=offer,
                key=KEY,
                deadline=5,
            )

        connection = (await pool.get(("prefill-0", 7), call, 5)).connection

        assert tried == ["other", "loopback"]
        assert (
            accepted.get(RECEIVER, connection.connection_id).outgoing.connection.connection_id
            == connection.connection_id
        )

    run(scenario)


def test_a_connection_serves_only_the_receiver_that_made_it() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())
        connection, sending = await workers.connections()

        for other in (("decode-1", 9), ("decode-0", 10)):
            with pytest.raises(ConnectionBroken, match="call Connect first"):
                workers.accepted.get(other, connection.connection_id)

        found = workers.accepted.get(RECEIVER, connection.connection_id)
        assert found.outgoing.connection is sending

    run(scenario)


def test_sides_with_different_keys_are_not_connected() -> None:
    async def scenario() -> None:
        workers = Workers(LoopbackNetwork())

        with pytest.raises(ConnectionBroken, match="key"):
            await workers.pool.get(("prefill-0", 7), workers.accepting(key=bytes(32)), 5)

    run(scenario)


def test_of_two_connections_that_one_receiver_makes_under_one_id_one_is_kept() -> None:
    """Otherwise the other one would stay for ever, and a broken receiver could make many."""

    async def scenario() -> None:
        transport = TcpTransport(make_storage(4, 1), ProvenSockets(host="127.0.0.1"))
        accepted = AcceptedConnections([transport], idle_s=60)
        receivers = [
            TcpTransport(make_storage(4, 2), ProvenSockets(host="127.0.0.1")) for _ in range(2)
        ]
        deadline = asyncio.get_running_loop().time() + 5
        connects = (
            accepted.connect(
                peer_key=RECEIVER,
                connection_id="c",
                transport_name="tcp",
                offer=each.offer("c", KEY),
                key=KEY,
                deadline=deadline,
            )
            for each in receivers
        )
        results = asyncio.gather(*connects, return_exceptions=True)
        await asyncio.gather(*(each.accept("c", deadline) for each in receivers))

        refused = [each for each in await results if each is not None]

        assert [str(each) for each in refused] == ["connection 'c' exists already"]
        kept = [each for each in transport._connections._made if not each.is_broken]
        assert kept == [accepted.get(RECEIVER, "c").outgoing.connection]
        for each in (transport, *receivers):
            await each.close()

    asyncio.run(scenario())


def test_an_unknown_transport_or_connection_is_named() -> None:
    async def scenario() -> None:
        transport = LoopbackTransport(LoopbackNetwork(), make_storage(4, 1))
        accepted = AcceptedConnections([transport], idle_s=60)

        with pytest.raises(TransportRefused, match=r"'nccl' is not offered, only \['loopback'\]"):
            await accepted.connect(
                peer_key=RECEIVER,
                connection_id="x",
                transport_name="nccl",
                offer=b"",
                key=KEY,
                deadline=1,
            )
        with pytest.raises(ConnectionBroken, match="no connection 'x'"):
            accepted.get(RECEIVER, "x")

    run(scenario)


def test_what_a_sender_keeps_for_receivers_that_left_stays_bounded() -> None:
    """Two hundred come under new names and leave without a word."""
    idle_s = 20.0

    async def scenario() -> None:
        network = LoopbackNetwork()
        transport = LoopbackTransport(network, make_storage(4, 1))
        accepted = AcceptedConnections([transport], idle_s=idle_s)

        def num_kept() -> int:
            return sum(not each.is_broken for each in transport._connections)

        async def come(name: str) -> Accepted:
            receiver = LoopbackTransport(network, make_storage(4, 2))
            offer = receiver.offer(name, KEY)
            accepting = asyncio.create_task(receiver.accept(name, math.inf))
            await accepted.connect(
                peer_key=(name, 1),
                connection_id=name,
                transport_name=receiver.name,
                offer=offer,
                key=KEY,
                deadline=math.inf,
            )
            await accepting
            return accepted.get((name, 1), name)

        staying = await come("decode-0")
        with staying.users.one():
            for number in range(1, 201):
                gone = await come(f"decode-{number}")
                with gone.users.one():
                    await asyncio.sleep(idle_s / 4)
                assert num_kept() <= 6
            await asyncio.sleep(2 * idle_s)
            assert num_kept() == 1, "the one that is in use"
        await asyncio.sleep(2 * idle_s)

        assert num_kept() == 0
        with pytest.raises(ConnectionBroken, match="call Connect first"):
            accepted.get(("decode-0", 1), "decode-0")

    run(scenario)
