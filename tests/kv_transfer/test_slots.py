"""The slots of a connection, of which each transfer gives back its own."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import kv_transfer.receiver
from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.joining import JoinedDigests
from kv_transfer.messages import Abort, ChunkReady, Granted, Ticket
from kv_transfer.order import WINDOW, Incoming, Slots
from kv_transfer.receiver import Receiver
from kv_transfer.receiver_protocol import SlotTaken, step
from tests.support.virtual_time import run_virtual

TICKET = Ticket(transfer_id=b"t" * 16, attempt=0, sender_incarnation=1, receiver_incarnation=2)


def incoming_without_free_slots() -> Incoming:
    connection: Any = SimpleNamespace(is_broken=False, connection_id="c")
    incoming = Incoming(connection)
    for _ in range(WINDOW):
        incoming.slots.take(lambda: None)  # other transfers hold all
    return incoming


def waiting_receiver(incoming: Incoming) -> Receiver:
    """Return a receiver whose only chunk waits for a slot."""
    storage: Any = SimpleNamespace(page_bytes=4096)
    receiver = Receiver(
        ticket=TICKET,
        page_ids=[0],
        first_page=0,
        storage=storage,
        incoming=incoming,
        send=lambda message: None,
        on_commit=lambda num_pages: None,
        deadlines=TransferDeadlines(),
        digests=JoinedDigests(storage),
    )
    receiver.driver.post(Granted(TICKET))
    receiver.driver.post(ChunkReady(TICKET, 0, 0, 1, True))
    return receiver


def check_all_slots_come_back(incoming: Incoming, *, num_held: int) -> None:
    taken: list[int] = []
    for index in range(WINDOW):
        if index < num_held:
            incoming.slots.release()
        incoming.slots.take(partial(taken.append, index))
    assert taken == list(range(WINDOW))


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_slot_of_a_transfer_that_ends_is_given_back(comes_first: bool) -> None:
    async def main() -> None:
        incoming = incoming_without_free_slots()
        receiver = waiting_receiver(incoming)
        if comes_first:
            incoming.slots.release()
        receiver.driver.cancel("the client left")
        receiver.driver.post(Abort(TICKET, "it has posted nothing"))
        await receiver.driver.wait_quiescent()

        check_all_slots_come_back(incoming, num_held=WINDOW - comes_first)

    run_virtual(main())


@pytest.mark.parametrize("bug_at", [SlotTaken, Granted])
def test_a_slot_that_comes_to_a_transfer_that_a_bug_has_ended_is_given_back(
    bug_at: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_with_bug(state: Any, event: Any) -> Any:
        if isinstance(event, bug_at) and state.chunks:
            raise ZeroDivisionError
        return step(state, event)

    monkeypatch.setattr(kv_transfer.receiver, "step", step_with_bug)

    async def main() -> None:
        incoming = incoming_without_free_slots()
        receiver = waiting_receiver(incoming)
        if bug_at is Granted:
            receiver.driver.post(Granted(TICKET))
        incoming.slots.release()
        with pytest.raises(ZeroDivisionError):
            await receiver.run()
        assert (incoming.load.num_chunks, incoming.load.num_bytes) == (0, 0)

        check_all_slots_come_back(incoming, num_held=WINDOW - 1)

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


def test_an_error_of_who_gets_a_slot_stops_nobody_else() -> None:
    slots = Slots(1)
    with pytest.raises(ZeroDivisionError):
        slots.take(lambda: 1 // 0)
    taken: list[int] = []
    slots.take(lambda: taken.append(1))

    slots.release()

    assert taken == [1]
