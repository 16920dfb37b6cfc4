"""The slots of a connection, of which each transfer gives back its own."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.messages import Abort, ChunkReady, Granted, Ticket
from kv_transfer.order import WINDOW, Incoming, Slots
from kv_transfer.receiver import Receiver
from tests.support.virtual_time import run_virtual


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_slot_of_a_transfer_that_ends_is_given_back(comes_first: bool) -> None:
    async def main() -> None:
        connection: Any = SimpleNamespace(is_broken=False, connection_id="c")
        storage: Any = SimpleNamespace(page_bytes=4096)
        incoming = Incoming(connection)
        for _ in range(WINDOW):
            incoming.slots.take(lambda: None)  # other transfers hold all

        ticket = Ticket(
            transfer_id=b"t" * 16, attempt=0, sender_incarnation=1, receiver_incarnation=2
        )
        receiver = Receiver(
            ticket=ticket,
            page_ids=[0],
            first_page=0,
            storage=storage,
            incoming=incoming,
            send=lambda message: None,
            on_commit=lambda num_pages: None,
            deadlines=TransferDeadlines(),
        )
        receiver.driver.post(Granted(ticket))
        receiver.driver.post(ChunkReady(ticket, 0, 0, (b"d" * 32,), True))
        if comes_first:
            incoming.slots.release()
        receiver.driver.cancel("the client left")
        receiver.driver.post(Abort(ticket, "it has posted nothing"))
        await receiver.driver.wait_quiescent()

        taken = []
        for index in range(WINDOW):
            if not comes_first or index:
                incoming.slots.release()
            incoming.slots.take(partial(taken.append, index))
        assert taken == list(range(WINDOW))

    run_virtual(main())


def test_slots_go_to_those_who_have_waited_longest() -> None:
    slots = Slots(2)
    taken: list[str] = []
    waiting = {name: partial(taken.append, name) for name in "abcde"}
    for each in waiting.values():
        slots.take(each)
    assert taken == ["a", "b"]
    slots.withdraw(waiting["c"])
    slots.release()
    slots.release()
    assert taken == ["a", "b", "d", "e"]


def test_many_may_give_their_slots_back_as_soon_as_they_get_them() -> None:
    slots = Slots(1)
    slots.take(lambda: None)
    for _ in range(5000):
        slots.take(slots.release)
    slots.take(slots.release)
    slots.release()

    taken: list[int] = []
    slots.take(lambda: taken.append(1))
    assert taken == [1]
