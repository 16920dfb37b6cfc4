"""Pages over real sockets on this host."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer.driver import TransferStats
from kv_transfer.errors import ConnectionBroken, DigestMismatch, TransferError
from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.tcp import TcpConnection, TcpTransport
from tests.kv_transfer.pair import Attempt, Workers, make_storage, shuffled

ROOT = Path(__file__).parents[2]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


class Pair:
    def __init__(self) -> None:
        self.source, self.target = make_storage(64, 1), make_storage(64, 2)
        self.sender = TcpTransport(self.source, host="127.0.0.1")
        self.receiver = TcpTransport(self.target, host="127.0.0.1")

    async def connect(self, connection_id: str = "c0") -> tuple[TcpConnection, TcpConnection]:
        offer = self.receiver.offer(connection_id)
        receiving, sending = await asyncio.gather(
            self.receiver.accept(connection_id, soon()),
            self.sender.connect(connection_id, offer, soon()),
        )
        return receiving, sending


@asynccontextmanager
async def a_pair() -> AsyncIterator[Pair]:
    pair = Pair()
    try:
        yield pair
    finally:
        await pair.sender.close()
        await pair.receiver.close()


def test_a_failed_accept_does_not_end_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, iter(range(2))

        async def fail_at_first(sock: Any) -> Any:
            if next(failures, None) is not None:
                raise OSError("too many open files")
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", fail_at_first)
        async with a_pair() as pair:
            receiving, _ = await pair.connect()

            assert not receiving.is_broken

    run(scenario)


@pytest.mark.parametrize("pages_at_once", [1, 3, 1000])
def test_pages_arrive_in_order(pages_at_once: int) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            receiving._pages_at_once = sending._pages_at_once = pages_at_once
            for seed in range(3):
                from_pages, to_pages = shuffled(10, seed), shuffled(10, seed + 50)

                await asyncio.gather(
                    sending.send(from_pages, soon()), receiving.receive(to_pages, soon())
                )

                sent = pair.source.export_pages(from_pages)
                assert (sent == pair.target.export_pages(to_pages)).all()

    run(scenario)


def test_whole_transfers_run_over_tcp_and_find_damage() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            workers = Workers(LoopbackNetwork())
            workers.source, workers.target = pair.source, pair.target
            sides = (receiving, asyncio.Lock(), sending)
            good = Attempt(
                workers, sides, source_pages=shuffled(10, 1), target_pages=shuffled(10, 2)
            )
            received, sent, _ = await good.run()
            assert isinstance(received, TransferStats)
            assert isinstance(sent, TransferStats)
            assert received.bytes_moved == 10 * pair.source.page_bytes
            assert good.is_equal(10)

            def export(page_ids: Any) -> Any:
                contents = type(pair.source).export_pages(pair.source, page_ids)
                return contents ^ np.uint8(1)

            pair.source.export_pages = export  # type: ignore[method-assign]
            bad = Attempt(
                workers, sides, source_pages=shuffled(10, 3), target_pages=shuffled(10, 4)
            )
            received, _, _ = await bad.run()
            await bad.wait_quiescent()
            assert isinstance(received, DigestMismatch)
            assert bad.committed == []

    run(scenario)


def test_a_wrong_secret_is_refused_and_the_right_one_still_works() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = pair.receiver.offer("c0")
            accepting = asyncio.create_task(pair.receiver.accept("c0", soon()))
            fields = json.loads(offer)
            forged = json.dumps(fields | {"secret": "00" * 32}).encode()

            with pytest.raises(ConnectionBroken, match="refused"):
                await pair.sender.connect("c0", forged, soon())
            with pytest.raises(ConnectionBroken, match="refused"):
                await pair.sender.connect("c1", offer, soon())
            assert not accepting.done()
            sending = await pair.sender.connect("c0", offer, soon())
            receiving = await accepting

            await asyncio.gather(sending.send([1], soon()), receiving.receive([2], soon()))
            assert (pair.source.export_pages([1]) == pair.target.export_pages([2])).all()

    run(scenario)


def test_an_offer_is_good_for_one_connection() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = pair.receiver.offer("c0")
            accepting = asyncio.create_task(pair.receiver.accept("c0", soon()))
            await pair.sender.connect("c0", offer, soon())
            await accepting

            with pytest.raises(ConnectionBroken, match="refused"):
                await pair.sender.connect("c0", offer, soon())

    run(scenario)


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"[]",
        b'{"host": "x"}',
        b'{"host": "127.0.0.1", "port": 0, "secret": "00"}',
        b'{"host": "127.0.0.1", "port": 1, "secret": "zz"}',
    ],
)
def test_a_malformed_offer_is_named(offer: bytes) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            with pytest.raises(ConnectionBroken, match="offer"):
                await pair.sender.connect("c0", offer, soon())

    run(scenario)


def test_strangers_do_not_disturb_the_listener() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            port = json.loads(pair.receiver.offer("c0"))["port"]
            for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(greeting)
                writer.close()

            receiving, sending = await pair.connect("c1")

            await asyncio.gather(sending.send([1], soon()), receiving.receive([2], soon()))

    run(scenario)


def test_nobody_connecting_ends_at_the_deadline() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            pair.receiver.offer("c0")

            with pytest.raises(ConnectionBroken, match="in time"):
                await pair.receiver.accept("c0", soon(0.05))

    run(scenario)


def test_a_receive_without_a_send_ends_at_the_deadline_and_writes_nothing() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            before = pair.target.slots.copy()

            with pytest.raises(ConnectionBroken, match="deadline"):
                await receiving.receive([1, 2], soon(0.05))
            await receiving.abort()

            assert receiving.is_broken
            with pytest.raises(ConnectionBroken):
                await sending.send(list(range(64)) * 1000, soon(2))
            assert (pair.target.slots == before).all()

    run(scenario)


def test_abort_ends_a_posted_receive_at_once() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, _ = await pair.connect()
            posted = asyncio.create_task(receiving.receive([1, 2], soon(10)))
            await asyncio.sleep(0.05)
            started_at = time.monotonic()

            await receiving.abort()

            with pytest.raises(ConnectionBroken):
                await posted
            assert time.monotonic() - started_at < 1

    run(scenario)


def test_abort_waits_for_a_copy_into_the_pages_that_is_under_way() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            finished = []

            def slow_import(page_ids: Any, contents: Any) -> None:
                time.sleep(0.2)
                finished.append(page_ids)

            pair.target.import_pages = slow_import  # type: ignore[method-assign]
            posted = asyncio.create_task(receiving.receive([1, 2], soon(0.1)))
            await sending.send([1, 2], soon())
            with pytest.raises(ConnectionBroken):
                await posted
            assert not finished

            await receiving.abort()

            assert finished == [[1, 2]]

    run(scenario)


def test_sides_that_disagree_about_the_number_of_pages_break() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()

            results = await asyncio.gather(
                sending.send([1, 2, 3], soon()),
                receiving.receive([1, 2], soon()),
                return_exceptions=True,
            )

            assert isinstance(results[1], ConnectionBroken)
            assert "frame (0, 3" in str(results[1])

    run(scenario)


KILLED_SENDER = """
import asyncio, sys
from kv_transfer.tcp import TcpTransport
from tests.kv_transfer.pair import make_storage

async def main():
    transport = TcpTransport(make_storage(64, 1), host="127.0.0.1")
    loop = asyncio.get_running_loop()
    connection = await transport.connect("c0", sys.argv[1].encode(), loop.time() + 5)
    export = connection._storage.export_pages
    def stall(page_ids):
        if page_ids != [0]:
            print("sending", flush=True)
            import time; time.sleep(60)
        return export(page_ids)
    connection._storage.export_pages = stall
    connection._pages_at_once = 1
    await connection.send([0, 1], loop.time() + 60)

asyncio.run(main())
"""


@pytest.mark.cluster
def test_a_killed_sender_breaks_the_receive_at_once() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = pair.receiver.offer("c0").decode()
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED_SENDER, offer],
                cwd=ROOT,
                stdout=subprocess.PIPE,
            )
            try:
                receiving = await pair.receiver.accept("c0", soon(15))
                posted = asyncio.create_task(receiving.receive([5, 6], soon(15)))
                assert process.stdout is not None
                line = await asyncio.to_thread(process.stdout.readline)
                assert line == b"sending\n"
                process.kill()
                started_at = time.monotonic()

                with pytest.raises(TransferError):
                    await posted
                await receiving.abort()

                assert time.monotonic() - started_at < 2
            finally:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()

    run(scenario)
