"""Pages over TLS on real sockets: nothing of them is on the wire, and strangers stay outside."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from credentials.config import TlsSettings
from credentials.door import ClusterLinks
from kv_transfer.errors import ConnectionBroken
from kv_transfer.page_socket import PIECE_BYTES, PageSocket, PageTls, TlsSocket
from tests.kv_transfer.pair import KEY, shuffled
from tests.kv_transfer.tcp_pair import Pair, a_pair, page_tls, run, soon, wire_tap
from tests.support.certificates import Authority


async def tapped(pair: Pair) -> list[bytes]:
    """Move pages past an observer; return what the sender sent."""
    port = json.loads(pair.receiver.offer("c0", KEY))["port"]
    tap, tapped_port, sent = await wire_tap(port)
    offer = json.dumps({"host": "127.0.0.1", "port": tapped_port}).encode()
    receiving, sending = await asyncio.gather(
        pair.receiver.accept("c0", soon()), pair.sender.connect("c0", offer, KEY, soon())
    )
    await asyncio.gather(sending.send([1, 2], 5.0), receiving.receive([3, 4], 5.0))
    assert (pair.source.export_pages([1, 2]) == pair.target.export_pages([3, 4])).all()
    tap.close()
    return sent


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_an_observer_sees_no_page_and_no_word_of_the_handshake(
    authority: Authority, is_encrypted: bool
) -> None:
    async def scenario() -> None:
        tls = page_tls(authority) if is_encrypted else None
        async with a_pair("127.0.0.1", tls, tls) as pair:
            sent = b"".join(await tapped(pair))

            page = pair.source.export_pages([1]).tobytes()
            assert len(page) > 32
            for secret in (page, page[:16], page[-16:], b"PWHELLO2", b"PWFRAME1"):
                assert (secret in sent) is not is_encrypted

    run(scenario)


def test_pages_arrive_in_order_in_pieces_of_any_size(authority: Authority) -> None:
    async def scenario() -> None:
        tls = page_tls(authority)
        async with a_pair("127.0.0.1", tls, tls) as pair:
            receiving, sending = await pair.connect()
            for seed in range(3):
                from_pages, to_pages = shuffled(10, seed), shuffled(10, seed + 50)
                await asyncio.gather(
                    sending.send(from_pages, 5.0), receiving.receive(to_pages, 5.0)
                )
                sent = pair.source.export_pages(from_pages)
                assert (sent == pair.target.export_pages(to_pages)).all()

            # More than any buffer between them holds.
            large = bytes(range(256)) * (3 * PIECE_BYTES // 256 * 4 + 1)
            _, got = await asyncio.gather(
                sending._wire.send(large), receiving._wire.receive(len(large))
            )
            assert got == large

    run(scenario)


def test_other_tasks_have_their_turn_between_pieces_though_the_network_takes_and_has_all(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: dict[PageSocket, bytearray] = {}  # |-> for the other side

    async def send(self: PageSocket, data: bytes) -> None:
        waiting.setdefault(self, bytearray()).extend(data)

    async def receive_some(self: PageSocket, view: memoryview) -> int:
        (arrived,) = (waiting.setdefault(each, bytearray()) for each in sides if each is not self)
        while not arrived:
            await asyncio.sleep(0)
        num_bytes = min(len(view), len(arrived))
        view[:num_bytes] = arrived[:num_bytes]
        del arrived[:num_bytes]
        return num_bytes

    async def turns_during(operation: Coroutine[Any, Any, Any]) -> int:
        task = asyncio.create_task(operation)
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        task.result()
        return num_turns

    monkeypatch.setattr(PageSocket, "send", send)
    monkeypatch.setattr(PageSocket, "_receive_some", receive_some)
    tls, unused = page_tls(authority), socket.socket()
    sides = [TlsSocket(unused, tls, is_server=is_server) for is_server in (False, True)]
    num_pieces = 8

    async def scenario() -> None:
        await asyncio.gather(*(each.shake_hands() for each in sides))
        large = bytes(num_pieces * PIECE_BYTES)

        assert await turns_during(sides[0].send(large)) >= num_pieces
        assert await turns_during(sides[1].receive(len(large))) >= num_pieces

    run(scenario)
    unused.close()


def test_both_sides_use_version_1_3(authority: Authority) -> None:
    async def scenario() -> None:
        tls = page_tls(authority)
        async with a_pair("127.0.0.1", tls, tls) as pair:
            for each in await pair.connect():
                assert each._wire._tls.version() == "TLSv1.3"  # type: ignore[attr-defined]

            port = pair.receiver._sockets._listener.getsockname()[1]  # type: ignore[union-attr]
            older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
            older.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", port, ssl=older)

    run(scenario)


@pytest.mark.parametrize("who", ["in clear", "of another authority", "without a certificate"])
def test_a_sender_that_is_no_worker_is_not_let_in_though_it_knows_the_key(
    authority: Authority, tmp_path: Path, who: str
) -> None:
    async def scenario() -> None:
        receiver_tls = page_tls(authority)
        stranger: PageTls | None = None
        if who == "of another authority":
            stranger = page_tls(Authority(tmp_path, "other"))
        if who == "without a certificate":
            stranger = Nameless(authority)
        async with a_pair("127.0.0.1", stranger, receiver_tls) as pair:
            offer = pair.receiver.offer("c0", KEY)
            accepting = asyncio.create_task(pair.receiver.accept("c0", soon(0.5)))

            with pytest.raises(ConnectionBroken):
                await pair.sender.connect("c0", offer, KEY, soon())
            with pytest.raises(ConnectionBroken, match="in time"):
                await accepting

    run(scenario)


def test_a_receiver_that_is_no_worker_is_told_nothing(authority: Authority, tmp_path: Path) -> None:
    async def scenario() -> None:
        impostor = page_tls(Authority(tmp_path, "other"))
        async with a_pair("127.0.0.1", page_tls(authority), impostor) as pair:
            offer = pair.receiver.offer("c0", KEY)

            with pytest.raises(ConnectionBroken, match="certificate verify failed"):
                await pair.sender.connect("c0", offer, KEY, soon())

    run(scenario)


def test_the_proof_of_the_key_is_wanted_within_tls_too(authority: Authority) -> None:
    async def scenario() -> None:
        tls = page_tls(authority)
        async with a_pair("127.0.0.1", tls, tls) as pair:
            offer = pair.receiver.offer("c0", KEY)

            with pytest.raises(ConnectionBroken, match="not genuine"):
                await pair.sender.connect("c0", offer, bytes(32), soon())

    run(scenario)


def test_a_connection_goes_by_the_files_as_they_are_then(authority: Authority) -> None:
    async def scenario() -> None:
        pair_files = authority.pair("pagewire")
        tls = ClusterLinks(TlsSettings(inside=authority.inside(pair_files))).page_tls
        async with a_pair("127.0.0.1", tls, tls) as pair:
            old = await pair.connect("c0")
            authority.pair("pagewire", "renewed", replaces=pair_files)
            new = await pair.connect("c1")

            names = [
                [name for _, name in each._wire._tls.getpeercert()["subjectAltName"]]  # type: ignore[attr-defined]
                for each in (*old, *new)
            ]
            assert names == [["pagewire"]] * 2 + [["pagewire", "renewed"]] * 2
            for receiving, sending in (old, new):
                await asyncio.gather(sending.send([1], 5.0), receiving.receive([2], 5.0))

    run(scenario)


def test_to_abort_ends_what_waits(authority: Authority) -> None:
    async def scenario() -> None:
        tls = page_tls(authority)
        async with a_pair("127.0.0.1", tls, tls) as pair:
            receiving, sending = await pair.connect()
            waiting = asyncio.create_task(receiving.receive([1], 30.0))
            await asyncio.sleep(0)

            await sending.abort()

            with pytest.raises(ConnectionBroken, match="closed"):
                await waiting

    run(scenario)


def test_who_ends_tls_but_not_its_socket_breaks_the_connection(authority: Authority) -> None:
    async def scenario() -> None:
        tls = page_tls(authority)
        async with a_pair("127.0.0.1", tls, tls) as pair:
            receiving, sending = await pair.connect()
            waiting = asyncio.create_task(receiving.receive([1], 5.0))
            assert isinstance(sending._wire, TlsSocket)

            with contextlib.suppress(ssl.SSLWantReadError):  # it does not wait for the answer
                sending._wire._tls.unwrap()
            await sending._wire._flush()

            with pytest.raises(ConnectionBroken, match="closed the encrypted connection"):
                await waiting

    run(scenario)


class Nameless:
    """One who believes the authority and has no certificate of it."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def server(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        raise NotImplementedError

    def client(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self._authority.file)
        return context.wrap_bio(incoming, outgoing, server_hostname="pagewire")
