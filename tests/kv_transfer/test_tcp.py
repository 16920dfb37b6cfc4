"""Pages over real sockets on this host."""

import asyncio
import gc
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.errors import ConnectionBroken, TransferError
from kv_transfer.proven_sockets import (
    CHALLENGE_BYTES,
    MAX_GREETINGS,
    MAX_ID_BYTES,
    PROOF_BYTES,
    ProvenSockets,
)
from options.ports import FreePorts
from tests.kv_transfer.pair import KEY, check_order, check_whole_transfers, damage_exports
from tests.kv_transfer.tcp_pair import a_pair, run, soon, wire_tap
from tests.support.ipv6 import needs_ipv6
from tests.support.waiting import until
from tests.support.wall_clock import assert_within

ROOT = Path(__file__).parents[2]


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

            await check_order(pair, receiving, sending)

    run(scenario)


def test_whole_transfers_run_over_tcp_and_find_damage() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            damage = partial(damage_exports, pair.source)

            await check_whole_transfers(pair, receiving, sending, damage)

    run(scenario)


def test_an_abort_whose_caller_leaves_goes_on() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, _ = await pair.connect()
            may_end = asyncio.Event()

            async def copy(function: Any) -> None:
                await may_end.wait()

            receiving._run_blocking = copy
            copying = asyncio.ensure_future(receiving._touch(lambda: None))
            await asyncio.sleep(0)
            leaving = asyncio.create_task(receiving.abort())
            await asyncio.sleep(0.01)
            leaving.cancel()
            may_end.set()
            await copying

            await until(lambda: receiving._wire._socket.fileno() == -1)

    run(scenario)


def test_closing_aborts_each_connection_though_the_abort_of_another_hangs() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            (hanging, _), (receiving, _) = [await pair.connect(each) for each in ("c0", "c1")]
            may_end = asyncio.Event()

            async def copy(function: Any) -> None:
                await may_end.wait()

            hanging._run_blocking = copy
            copying = asyncio.ensure_future(hanging._touch(lambda: None))
            await asyncio.sleep(0)
            closing = asyncio.create_task(pair.receiver.close())

            await until(lambda: receiving._wire._socket.fileno() == -1)
            assert receiving.is_broken
            assert not closing.done()
            may_end.set()
            await copying
            await asyncio.wait_for(closing, 5)

    run(scenario)


OTHER_KEY = bytes(32)


def test_a_wrong_key_or_id_is_refused_and_the_right_one_still_works() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = pair.receiver.offer("c0", KEY)
            accepting = asyncio.create_task(pair.receiver.accept("c0", soon()))

            with pytest.raises(ConnectionBroken, match=r"refused .* not genuine"):
                await pair.sender.connect("c0", offer, OTHER_KEY, soon())
            with pytest.raises(ConnectionBroken, match=r"refused .* closed"):
                await pair.sender.connect("c1", offer, KEY, soon())
            with pytest.raises(ConnectionBroken, match="found 70000 bytes; allowed: at most 256"):
                await pair.sender.connect("c" * 70000, offer, KEY, soon())
            assert not accepting.done()
            sending = await pair.sender.connect("c0", offer, KEY, soon())
            receiving = await accepting

            await asyncio.gather(sending.send([1], 5.0), receiving.receive([2], 5.0))
            assert (pair.source.export_pages([1]) == pair.target.export_pages([2])).all()

    run(scenario)


def test_what_an_observer_saw_of_a_handshake_opens_nothing() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            port = json.loads(pair.receiver.offer("c0", KEY))["port"]
            tap, tapped_port, sent = await wire_tap(port)
            tapped = json.dumps({"host": "127.0.0.1", "port": tapped_port}).encode()
            accepting = asyncio.create_task(pair.receiver.accept("c0", soon()))
            sending = await pair.sender.connect("c0", tapped, KEY, soon())
            await (await accepting).abort()
            await sending.abort()
            handshake = b"".join(sent)
            assert KEY not in handshake

            pair.receiver.offer("c0", KEY)
            accepting = asyncio.create_task(pair.receiver.accept("c0", soon(0.3)))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(handshake)

            answer = await reader.read()  # until the receiver closes
            assert len(answer) == CHALLENGE_BYTES + PROOF_BYTES, "nothing was accepted"
            with pytest.raises(ConnectionBroken, match="in time"):
                await accepting
            writer.close()
            tap.close()

    run(scenario)


def test_a_sender_sends_no_page_to_a_receiver_that_does_not_know_the_key() -> None:
    async def scenario() -> None:
        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            hello = await reader.read(1000)
            writer.write(hello[10:42] + bytes(PROOF_BYTES) + b"\x01")  # reflects the challenge

        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with a_pair() as pair:
            offer = json.dumps({"host": "127.0.0.1", "port": port}).encode()

            with pytest.raises(ConnectionBroken, match="not genuine"):
                await pair.sender.connect("c0", offer, KEY, soon())
        server.close()

    run(scenario)


def test_strangers_that_stay_silent_keep_no_place_from_a_sender() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            port = json.loads(pair.receiver.offer("c0", KEY))["port"]
            strangers = [
                await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_GREETINGS + 20)
            ]
            while len(pair.receiver._sockets._greetings) < MAX_GREETINGS:
                await asyncio.sleep(0.01)

            receiving, sending = await pair.connect("c1")

            assert len(pair.receiver._sockets._greetings) <= MAX_GREETINGS
            assert await asyncio.wait_for(strangers[0][0].read(), 10) == b"", "the oldest left"
            await asyncio.gather(sending.send([1], 5.0), receiving.receive([2], 5.0))
            for _, writer in strangers:
                writer.close()

    run(scenario)


def test_strangers_who_come_all_at_once_are_no_more_than_the_limit_either() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            port = json.loads(pair.receiver.offer("c0", KEY))["port"]
            # All of them wait to be accepted before the first one is.
            strangers = [
                socket.create_connection(("127.0.0.1", port), timeout=5)
                for _ in range(MAX_GREETINGS + 50)
            ]
            most = 0
            for _ in range(20 * len(strangers)):
                await asyncio.sleep(0)
                most = max(most, len(pair.receiver._sockets._greetings))

            assert most == MAX_GREETINGS
            for stranger in strangers[:50]:
                assert stranger.recv(1) == b"", "the oldest are let go"
            for stranger in strangers:
                stranger.close()

    run(scenario)


@needs_ipv6
def test_pages_move_over_ipv6() -> None:
    async def scenario() -> None:
        async with a_pair("::1") as pair:
            receiving, sending = await pair.connect()
            await asyncio.gather(sending.send([1], 5.0), receiving.receive([2], 5.0))
            assert (pair.source.export_pages([1]) == pair.target.export_pages([2])).all()
        nobody = json.dumps({"host": "::1", "port": 1}).encode()
        with pytest.raises(ConnectionBroken, match=r"no TCP connection to \[::1\]:1: "):
            await pair.sender.connect("c0", nobody, KEY, soon())

    run(scenario)


@pytest.mark.parametrize(
    "change",
    [
        {"port": float("inf")},
        {"port": 0},
        {"port": 2**40},
        {"port": True},
        {"port": [[]]},
        {"host": None},
        {"host": ""},
        {"host": "\0"},
        {"host": "a" * 300},
        {"host": ".".join(["a" * 64] * 2)},
    ],
    ids=lambda change: str(change)[:24],
)
def test_an_offer_with_a_field_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = json.dumps(json.loads(pair.receiver.offer("c0", KEY)) | change).encode()
            with pytest.raises(ConnectionBroken):
                await pair.sender.connect("c0", offer, KEY, soon())

    run(scenario)


@pytest.mark.parametrize(
    "offer",
    [
        b"[" * 100_000,
        b"{" * 1000,
        b"\xff",
        b"[]",
        b"1e999",
        b"",
        b'{"host": "h"}',
        b'{"host": "h", "port": "x"}',
    ],
    ids=len,
)
def test_bytes_that_are_no_offer_are_refused(offer: bytes) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            with pytest.raises(ConnectionBroken, match="not one of TCP"):
                await pair.sender.connect("c0", offer, KEY, soon())

    run(scenario)


def test_an_offer_is_good_for_one_connection() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = pair.receiver.offer("c0", KEY)
            accepting = asyncio.create_task(pair.receiver.accept("c0", soon()))
            await pair.sender.connect("c0", offer, KEY, soon())
            await accepting

            with pytest.raises(ConnectionBroken, match="refused"):
                await pair.sender.connect("c0", offer, KEY, soon())

    run(scenario)


def test_pages_come_in_at_a_port_of_the_range_and_a_full_one_ends_an_attempt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def scenario() -> None:
            sockets = ProvenSockets(host="127.0.0.1", ports=FreePorts(f"{port}-{port}"))
            with pytest.raises(ConnectionBroken, match="all ports are taken"):
                sockets.offer("c0", KEY)
            taken.close()
            assert json.loads(sockets.offer("c0", KEY))["port"] == port
            await sockets.close()

        run(scenario)


@pytest.mark.parametrize("port", [0, 70000])
def test_a_port_that_cannot_be_is_named(port: int) -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = json.dumps({"host": "127.0.0.1", "port": port}).encode()
            with pytest.raises(ConnectionBroken, match=f"the offer names port {port}"):
                await pair.sender.connect("c0", offer, KEY, soon())

    run(scenario)


def test_strangers_do_not_disturb_the_listener() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            port = json.loads(pair.receiver.offer("c0", KEY))["port"]
            long_id = struct.pack("!8sH32s", b"PWHELLO2", MAX_ID_BYTES + 1, b"") + b"c" * 65535
            for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, long_id):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(greeting)
                writer.close()

            receiving, sending = await pair.connect("c1")

            await asyncio.gather(sending.send([1], 5.0), receiving.receive([2], 5.0))

    run(scenario)


def test_nobody_connecting_ends_at_the_deadline() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            pair.receiver.offer("c0", KEY)

            with pytest.raises(ConnectionBroken, match="in time"):
                await pair.receiver.accept("c0", soon(0.05))

    run(scenario)


def test_a_receive_without_a_send_ends_at_the_deadline_and_writes_nothing() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            before = pair.target.slots.copy()

            with pytest.raises(ConnectionBroken, match="deadline"):
                await receiving.receive([1, 2], 0.05)
            await receiving.abort()

            assert receiving.is_broken
            with pytest.raises(ConnectionBroken):
                await sending.send(list(range(64)) * 1000, 2.0)
            assert (pair.target.slots == before).all()

    run(scenario)


def test_abort_ends_a_posted_receive_at_once() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, _ = await pair.connect()
            posted = asyncio.create_task(receiving.receive([1, 2], 10.0))
            await asyncio.sleep(0.05)
            started_at = time.monotonic()

            await receiving.abort()

            with pytest.raises(ConnectionBroken):
                await posted
            assert_within(time.monotonic() - started_at, 1)

    run(scenario)


def test_abort_waits_for_a_copy_into_the_pages_that_is_under_way() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            is_copying, may_end = threading.Event(), threading.Event()
            finished = []

            def slow_import(page_ids: Any, contents: Any) -> None:
                is_copying.set()
                assert may_end.wait(10)
                finished.append(page_ids)

            pair.target.import_pages = slow_import  # type: ignore[method-assign]
            posted = asyncio.create_task(receiving.receive([1, 2], 1.0))
            await sending.send([1, 2], 5.0)
            await until(is_copying.is_set)
            with pytest.raises(ConnectionBroken):
                await posted
            aborting = asyncio.create_task(receiving.abort())
            await asyncio.sleep(0.05)
            assert not aborting.done()
            assert not finished
            may_end.set()

            await aborting

            assert finished == [[1, 2]]

    run(scenario)


def test_a_copy_that_fails_after_its_deadline_is_no_error_that_nobody_reads() -> None:
    async def scenario() -> None:
        unread: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unread.append(what))
        async with a_pair() as pair:
            receiving, sending = await pair.connect()
            may_end = threading.Event()

            def failing_import(page_ids: Any, contents: Any) -> None:
                assert may_end.wait(10)
                raise RuntimeError("an illegal memory access was encountered")

            pair.target.import_pages = failing_import  # type: ignore[method-assign]
            sent = asyncio.create_task(sending.send([1, 2], 5.0))
            with pytest.raises(ConnectionBroken):
                await receiving.receive([1, 2], 0.1)
            may_end.set()
            await receiving.abort()
            await sent

        gc.collect()
        assert not unread

    run(scenario)


def test_sides_that_disagree_about_the_number_of_pages_break() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()

            results = await asyncio.gather(
                sending.send([1, 2, 3], 5.0),
                receiving.receive([1, 2], 5.0),
                return_exceptions=True,
            )

            assert isinstance(results[1], ConnectionBroken)
            assert str(results[1]) == (
                "frame: found (b'PWFRAME1', 0, 3, 64); allowed: (b'PWFRAME1', 0, 2, 64)"
            )

    run(scenario)


def test_what_is_no_frame_breaks_the_connection_and_is_shown() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            receiving, sending = await pair.connect()

            await sending._wire.send(struct.pack("!8sQIQ", b"PWIPCFR1", 0, 1, 64))

            with pytest.raises(ConnectionBroken, match=r"found \(b'PWIPCFR1', .* \(b'PWFRAME1', "):
                await receiving.receive([1], 5.0)

    run(scenario)


KILLED_SENDER = """
import asyncio, sys
from kv_transfer.proven_sockets import ProvenSockets
from kv_transfer.tcp import TcpTransport
from tests.kv_transfer.tcp_pair import a_pair, run, soon, wire_tap
from tests.kv_transfer.pair import make_storage

async def main():
    transport = TcpTransport(make_storage(64, 1), ProvenSockets(host="127.0.0.1"))
    loop = asyncio.get_running_loop()
    key, offer = bytes(range(32)), sys.argv[1].encode()
    connection = await transport.connect("c0", offer, key, loop.time() + 5)
    export = connection._storage.export_pages
    def stall(page_ids):
        if page_ids != [0]:
            print("sending", flush=True)
            import time; time.sleep(60)
        return export(page_ids)
    connection._storage.export_pages = stall
    connection._pages_at_once = 1
    await connection.send([0, 1], 60.0)

asyncio.run(main())
"""


@pytest.mark.cluster
def test_a_killed_sender_breaks_the_receive_at_once() -> None:
    async def scenario() -> None:
        async with a_pair() as pair:
            offer = pair.receiver.offer("c0", KEY).decode()
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED_SENDER, offer],
                cwd=ROOT,
                stdout=subprocess.PIPE,
            )
            try:
                receiving = await pair.receiver.accept("c0", soon(15))
                posted = asyncio.create_task(receiving.receive([5, 6], 15.0))
                assert process.stdout is not None
                line = await asyncio.to_thread(process.stdout.readline)
                assert line == b"sending\n"
                process.kill()
                started_at = time.monotonic()

                with pytest.raises(TransferError):
                    await posted
                await receiving.abort()

                assert_within(time.monotonic() - started_at, 2)
            finally:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()

    run(scenario)
