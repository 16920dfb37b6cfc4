"""The slots of a connection, of which each transfer gives back its own."""

import asyncio
from types import SimpleNamespace
from typing import Any

from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.messages import ChunkReady, Granted, Ticket
from kv_transfer.order import WINDOW, Incoming
from kv_transfer.receiver import Receiver
from tests.support.virtual_time import run_virtual


def test_a_slot_that_comes_while_the_other_side_is_told_of_the_end_is_given_back() -> None:
    async def main() -> None:
        connection: Any = SimpleNamespace(is_broken=False, connection_id="c")
        storage: Any = SimpleNamespace(page_bytes=4096)
        incoming = Incoming(connection)
        for _ in range(WINDOW):
            await incoming.slots.acquire()  # other transfers hold all

        async def send(message: object) -> None:
            await asyncio.sleep(0.001)  # as a write of gRPC

        ticket = Ticket(
            transfer_id=b"t" * 16, attempt=0, sender_incarnation=1, receiver_incarnation=2
        )
        receiver = Receiver(
            ticket=ticket,
            page_ids=[0],
            first_page=0,
            storage=storage,
            incoming=incoming,
            send=send,
            on_commit=lambda num_pages: None,
            deadlines=TransferDeadlines(),
        )
        receiver.driver.post(Granted(ticket))
        receiver.driver.post(ChunkReady(ticket, 0, 0, (b"d" * 32,), True))
        await asyncio.sleep(0.1)
        cancelling = asyncio.create_task(receiver.driver.cancel("the client left"))
        await asyncio.sleep(0.0005)  # the end is being told
        for _ in range(WINDOW):
            incoming.slots.release()
        await cancelling
        await receiver.driver.wait_quiescent()
        await asyncio.sleep(1)

        for _ in range(WINDOW):
            await asyncio.wait_for(incoming.slots.acquire(), 1)

    run_virtual(main())
