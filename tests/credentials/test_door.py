"""Servers and channels over TLS on real sockets: who gets in, and what a renewal changes."""

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from credentials.config import TlsSettings
from credentials.door import ClusterLinks, Door, front_door, is_loopback_host
from credentials.errors import OpenInClear
from tests.support.certificates import Authority
from tests.support.distributions import PACKAGES, ROOT


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


@asynccontextmanager
async def echo(door: Door) -> AsyncIterator[str]:
    """A server that says each word back; yields its address."""

    async def say(words: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for word in words:
            yield word

    handler = grpc.stream_stream_rpc_method_handler(say)
    server = grpc.aio.server()
    service = grpc.method_handlers_generic_handler("Echo", {"Say": handler})
    server.add_generic_rpc_handlers((service,))
    port = door.add_port(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Conversation:
    """A call that stays open."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = channel.stream_stream("/Echo/Say")(timeout=10)

    async def say(self, word: bytes) -> bytes:
        await self._call.write(word)
        return bytes(await self._call.read())

    async def end(self) -> None:
        await self._call.done_writing()
        await self._call.read()


async def refusal(channel: grpc.aio.Channel) -> grpc.StatusCode:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Conversation(channel).say(b"x")
    code: grpc.StatusCode = caught.value.code()
    return code


def shown_by(address: str, settings: TlsSettings) -> tuple[str, ...]:
    """Return the names in the certificate that a server shows to a new connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(settings.inside.authority_file)
    context.load_cert_chain(settings.inside.certificate_file, settings.inside.key_file)
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port)), 5) as raw,
        context.wrap_socket(raw, server_hostname="pagewire") as secured,
    ):
        certificate: Any = secured.getpeercert()
    return tuple(name for _, name in certificate["subjectAltName"])


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_replaced_authority_also_ends_sessions_that_clients_have_kept(
    authority: Authority, version: ssl.TLSVersion
) -> None:
    """What a client keeps of its session would let it in without a look at its certificate."""
    inside = authority.inside()
    door = ClusterLinks(TlsSettings(inside=inside)).door
    serving = door.ssl_context("127.0.0.1")
    assert serving
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.minimum_version = client.maximum_version = version
    client.load_cert_chain(inside.certificate_file, inside.key_file)

    def talk(session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession | None]:
        ends = [ssl.MemoryBIO() for _ in range(4)]
        server = serving.wrap_bio(ends[0], ends[1], server_side=True)
        caller = client.wrap_bio(ends[2], ends[3], session=session)
        done: set[ssl.SSLObject] = set()
        while len(done) < 2:
            for each in (caller, server):
                with suppress(ssl.SSLWantReadError):
                    each.do_handshake()
                    done.add(each)
                ends[0].write(ends[3].read())
                ends[2].write(ends[1].read())
        server.write(b"word")
        ends[2].write(ends[1].read())
        assert caller.read() == b"word"
        return bool(caller.session_reused), caller.session

    _, session = talk(None)
    is_reused, _ = talk(session)
    assert not is_reused


def test_processes_of_a_cluster_know_each_other(authority: Authority) -> None:
    async def scenario() -> None:
        server, client = (ClusterLinks(TlsSettings(inside=authority.inside())) for _ in range(2))
        async with echo(server.door) as address, client.connect(address) as channel:
            assert await Conversation(channel).say(b"hello") == b"hello"

    run(scenario)


def test_who_has_no_certificate_or_one_of_another_authority_stays_outside(
    authority: Authority, tmp_path: Path
) -> None:
    def strangers(address: str) -> dict[str, grpc.aio.Channel]:
        other = Authority(tmp_path, "other")
        trusted, theirs = (Path(each.file).read_bytes() for each in (authority, other))
        pair = other.pair("pagewire")
        certificate, key = (Path(each).read_bytes() for each in pair)
        named = (("grpc.ssl_target_name_override", "pagewire"),)

        def channel(*credentials: bytes) -> grpc.aio.Channel:
            made = grpc.ssl_channel_credentials(*credentials)
            return grpc.aio.secure_channel(address, made, options=named)

        return {
            "in clear": grpc.aio.insecure_channel(address),
            "none": channel(trusted),
            "of another": channel(trusted, key, certificate),
            "who believes another": channel(theirs, key, certificate),
        }

    async def scenario() -> None:
        links = ClusterLinks(TlsSettings(inside=authority.inside()))
        async with echo(links.door) as address:
            for name, channel in strangers(address).items():
                assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE, name

    run(scenario)


def test_a_server_of_another_authority_or_name_gets_no_word(
    authority: Authority, tmp_path: Path
) -> None:
    async def scenario() -> None:
        other = Authority(tmp_path, "other")
        client = ClusterLinks(TlsSettings(inside=authority.inside()))
        settings = TlsSettings(front=authority.settings().front)  # of hosts, not of the cluster
        for door in (
            ClusterLinks(TlsSettings(inside=other.inside())).door,
            front_door(settings),
        ):
            async with echo(door) as address:
                assert await refusal(client.connect(address)) is grpc.StatusCode.UNAVAILABLE

    run(scenario)


def test_new_connections_show_a_renewed_certificate_while_old_streams_live(
    authority: Authority,
) -> None:
    async def scenario() -> None:
        pair = authority.pair("pagewire")
        settings = TlsSettings(inside=authority.inside(pair))
        server, client = ClusterLinks(settings), ClusterLinks(settings)
        async with echo(server.door) as address, client.connect(address) as channel:
            old = Conversation(channel)
            await old.say(b"before")
            assert await asyncio.to_thread(shown_by, address, settings) == ("pagewire",)

            authority.pair("pagewire", "renewed", replaces=pair)
            new = Conversation(channel)

            assert await new.say(b"new") == b"new"
            assert await old.say(b"old") == b"old"
            assert await asyncio.to_thread(shown_by, address, settings) == ("pagewire", "renewed")
            assert server.door.encryption().is_on
            await old.end()
            assert await new.say(b"still") == b"still"

    run(scenario)


def test_connections_replace_nothing_that_has_not_changed(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC frees what is replaced while other connections begin, which has ended the process."""
    made: list[Any] = []
    make = grpc.ssl_server_certificate_configuration

    def count(*arguments: Any, **named: Any) -> Any:
        made.append(make(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(grpc, "ssl_server_certificate_configuration", count)

    async def scenario() -> None:
        pair = authority.pair("pagewire")
        settings = TlsSettings(inside=authority.inside(pair))
        async with echo(ClusterLinks(settings).door) as address:
            for _ in range(5):
                await asyncio.to_thread(shown_by, address, settings)
            assert len(made) == 1
            authority.pair("pagewire", "renewed", replaces=pair)
            for _ in range(5):
                await asyncio.to_thread(shown_by, address, settings)
            assert len(made) == 2

    run(scenario)


def test_a_broken_renewal_leaves_server_and_channel_as_they_were(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        pair = authority.pair("pagewire")
        settings = TlsSettings(inside=authority.inside(pair))
        server, client = ClusterLinks(settings), ClusterLinks(settings)
        async with echo(server.door) as address:
            Path(pair.certificate_file).write_bytes(b"-----BEGIN CERTIFICATE-----\nMIIC")
            for _ in range(2):
                async with client.connect(address) as channel:
                    assert await Conversation(channel).say(b"x") == b"x"

    run(scenario)

    lines = [each for each in caplog.records if each.getMessage() == "renewal_refused"]
    assert len(lines) == 2, "one of the server, one of the client"
    assert all("holds no certificate" in str(vars(each)["fields"]) for each in lines)


def test_the_channel_of_a_renewed_pair_shows_the_new_one(authority: Authority) -> None:
    async def scenario() -> None:
        told: list[bytes] = []

        async def who(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
            told.extend(context.auth_context()["x509_subject_alternative_name"])
            return b""

        pair = authority.pair("pagewire", "first")
        links = ClusterLinks(TlsSettings(inside=authority.inside(pair)))
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(who)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("Echo", {"Who": handler}),)
        )
        port = links.door.add_port(server, "127.0.0.1", 0)
        await server.start()
        async with links.connect(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_unary("/Echo/Who")
            await ask(b"")
            authority.pair("pagewire", "second", replaces=pair)
            await ask(b"")
        await server.stop(None)

        assert told == [b"pagewire", b"first", b"pagewire", b"second"]

    run(scenario)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_no_server_listens_in_clear_for_other_hosts(host: str) -> None:
    async def scenario() -> None:
        server = grpc.aio.server()
        for option, door in (
            ("tls.certificate_file", ClusterLinks(TlsSettings()).door),
            ("front_tls.certificate_file", front_door(TlsSettings())),
        ):
            with pytest.raises(OpenInClear) as caught:
                door.add_port(server, host, 0)
            assert str(caught.value).startswith(f"{option}: found none; allowed: a certificate")
            assert f"connect to {host}; or none with insecure" in str(caught.value)
            with pytest.raises(OpenInClear):
                door.ssl_context(host)

    run(scenario)


def test_it_does_so_where_somebody_said_that_it_is_meant() -> None:
    async def scenario() -> None:
        server = grpc.aio.server()
        assert ClusterLinks(TlsSettings(insecure=True)).door.add_port(server, "0.0.0.0", 0)
        assert front_door(TlsSettings(insecure=True)).ssl_context("0.0.0.0") is None

    run(scenario)


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("localhost", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
    ],
)
def test_loopback_addresses_are_known_by_name_and_number(host: str, is_own: bool) -> None:
    assert is_loopback_host(host) == is_own


def test_nothing_listens_or_connects_in_clear_but_here() -> None:
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package.replace(".", "/")).glob("*.py"):
            for word in re.findall(r"add_insecure_port|insecure_channel", path.read_text()):
                found.setdefault(word, set()).add(str(path.relative_to(ROOT)))

    assert found["add_insecure_port"] == {"credentials/door.py", "benchmarks/stream_processes.py"}
    assert found["insecure_channel"] == {
        "credentials/door.py",
        "pagewire/routers.py",
        "cluster/ray_address.py",  # asks a Ray whether it is one
        "benchmarks/gateway.py",
        "benchmarks/stream_processes.py",
    }
