"""The client over TLS: against real servers, what it needs, and what it says when it lacks it."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pagewire
from credentials.config import TlsSettings
from credentials.door import front_door
from pagewire import (
    AsyncClient,
    Client,
    ConnectionFailedError,
    InvalidRequestError,
    Tls,
    TlsError,
)
from pagewire.tls import why_no_connection
from tests.pagewire.scripted_service import (
    STOP,
    hello,
    response,
    serving,
    serving_in_thread,
    usage,
)
from tests.support.certificates import Authority
from tests.support.command_line import run_main
from tests.support.wall_clock import assert_within

SOON_S = 8.0  # a client that waits for its deadline takes longer


def test_a_client_that_trusts_the_authority_is_answered(authority: Authority) -> None:
    door = front_door(replace(authority.settings()))
    with (
        serving_in_thread(hello, door) as (address, _),
        Client(address, tls=Tls(authority_file=authority.file)) as client,
    ):
        assert client.generate("x").text == "Hello"
        assert client.list_models()


def test_a_name_is_expected_where_the_address_is_another(authority: Authority) -> None:
    front = replace(authority.settings().front, **authority.pair("grpc.example.org")._asdict())
    with serving_in_thread(hello, front_door(TlsSettings(front=front))) as (address, _):
        tls = Tls(authority_file=authority.file)
        with Client(address, tls=tls) as client, pytest.raises(TlsError) as caught:
            client.generate("x")
        with Client(address, tls=replace(tls, server_name="grpc.example.org")) as client:
            assert client.generate("x").text == "Hello"

    assert "a certificate that is not trusted: IP address mismatch" in str(caught.value)
    assert "; connect by a name that it is for, or see tls.server_name" in str(caught.value)


def test_a_client_with_a_certificate_is_let_in_where_one_is_wanted(authority: Authority) -> None:
    with serving_in_thread(hello, front_door(authority.settings(asks_clients=True))) as served:
        tls = Tls(authority_file=authority.file, **authority.pair("somebody")._asdict())
        with Client(served[0], tls=tls) as client:
            assert client.generate("x").text == "Hello"


WANTS = (
    "requires from each client a certificate of an authority that it trusts; see tls.certificate"
)
FAULTS = {
    "in clear": "takes connections over TLS only, and this one is in clear; use tls=Tls()",
    "in clear where certificates are wanted": "takes connections over TLS only, and this one is in",
    "over TLS to a server in clear": "does not speak TLS, but this client does; connect without "
    "TLS",
    "who believes another authority": "a certificate that is not trusted: unable to get local "
    "issuer certificate; see tls.authority_file for the authority to trust",
    "who believes public authorities": "shows a certificate that is not trusted: ",
    "who expects another name": "certificate is not valid for 'other'; connect by a name that it "
    "is for, or see tls.server_name for the one to expect",
    "without a certificate": WANTS,
    "with one of another authority": WANTS,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", ["generate", "status"])
def test_what_is_wrong_between_client_and_router_is_told_soon(
    authority: Authority, tmp_path: Path, fault: str, method: str
) -> None:
    other = Authority(tmp_path, "other")
    tls: Tls | None = Tls(authority_file=authority.file)
    asks = fault in ("in clear where certificates are wanted", "without a certificate")
    settings = authority.settings(asks_clients=asks)
    match fault:
        case "in clear" | "in clear where certificates are wanted":
            tls = None
        case "over TLS to a server in clear":
            settings = TlsSettings()
        case "who believes another authority":
            tls = Tls(authority_file=other.file)
        case "who believes public authorities":
            tls = Tls()
        case "who expects another name":
            tls = Tls(authority_file=authority.file, server_name="other")
        case "with one of another authority":
            settings = authority.settings(asks_clients=True)
            tls = Tls(authority_file=authority.file, **other.pair("somebody")._asdict())

    async def ask() -> None:
        async with serving(hello, front_door(settings)) as (address, service):
            client = AsyncClient(address, default_timeout_s=60, tls=tls)
            async with client:
                began = time.monotonic()
                with pytest.raises(TlsError) as caught:
                    await (client.generate("x") if method == "generate" else client.status())
            assert_within(time.monotonic() - began, SOON_S)
            assert str(caught.value).startswith(f"the router at {address} ")
            assert FAULTS[fault] in str(caught.value)
            assert "--" not in str(caught.value), "flags are the commands' own"
            assert caught.value.field in str(caught.value)
            assert "\n" not in str(caught.value)
            assert not service.requests

    asyncio.run(ask())


@pytest.mark.parametrize("method", ["generate", "status"])
def test_a_router_that_is_not_trusted_keeps_no_call_from_another_one(
    authority: Authority, tmp_path: Path, method: str
) -> None:
    """Whoever has a dead router's address, or lets its certificate expire, stops that router."""
    stranger = Authority(tmp_path, "other").settings()
    tls = Tls(authority_file=authority.file)

    async def ask() -> None:
        async with (
            serving(hello, front_door(stranger)) as (first, one),
            serving(hello, front_door(stranger)) as (second, two),
            serving(hello, front_door(authority.settings())) as (trusted, _),
        ):
            async with AsyncClient([first, second, trusted], tls=tls) as client:
                for _ in range(2):  # the second call finds the right one at once
                    if method == "generate":
                        assert (await client.generate("x")).text == "Hello"
                    else:
                        await client.status()
            async with AsyncClient([first, second], default_timeout_s=60, tls=tls) as client:
                began = time.monotonic()
                with pytest.raises(TlsError, match="a certificate that is not trusted"):
                    await (client.generate("x") if method == "generate" else client.status())
            assert_within(time.monotonic() - began, SOON_S)
            assert not one.requests + two.requests

    asyncio.run(ask())


@pytest.mark.parametrize("method", ["generate", "status"])
def test_no_reason_is_looked_for_beyond_the_time_limit_of_the_call(method: str) -> None:
    """A stranger at a router's address can answer each look for it late."""

    async def refuse_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1) == b"\x16":  # of TLS, so it is no call
            await asyncio.sleep(0.9)
            writer.write(b"\x15\x03\x03\x00\x02\x02\x28")  # the alert handshake_failure
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(refuse_late, "127.0.0.1", 0) as server:
            _, port = server.sockets[0].getsockname()
            async with AsyncClient(f"127.0.0.1:{port}", default_timeout_s=0.3) as client:
                # Not the TlsError, which is known only after two seconds.
                with pytest.raises((pagewire.ConnectionFailedError, pagewire.TimeoutError)):
                    await (client.generate("x") if method == "generate" else client.status())

    asyncio.run(ask())


def test_a_certificate_that_is_trusted_itself_is_no_reason(authority: Authority) -> None:
    """As the cluster's own clients trust that of its routers alone."""
    settings = authority.settings()
    leaf = Tls(authority_file=settings.front.certificate_file).load().current()

    async def ask() -> None:
        async with serving(hello, front_door(settings)) as (address, _):
            assert await why_no_connection(address, leaf, "localhost") is None

    asyncio.run(ask())


def test_of_two_certificates_that_are_trusted_themselves_a_router_may_show_either(
    authority: Authority, tmp_path: Path
) -> None:
    """So its renewal cuts nobody off; see Renewal in docs/security.md."""
    settings = authority.settings()
    former = Path(settings.front.certificate_file).read_bytes()
    renewed = Path(authority.pair("localhost").certificate_file).read_bytes()
    trusted = tmp_path / "trusted.crt"
    tls = Tls(authority_file=trusted, server_name="localhost")

    with serving_in_thread(hello, front_door(settings)) as (address, _):
        for content, is_trusted in ((renewed, False), (renewed + former, True)):
            trusted.write_bytes(content)
            with Client(address, tls=tls) as client:
                if is_trusted:
                    assert client.generate("x").text == "Hello"
                    continue
                with pytest.raises(TlsError, match="not trusted"):
                    client.generate("x")


def test_a_server_of_https_is_told_from_a_router(authority: Authority) -> None:
    """Such as the HTTP gateway, whose port is taken for the router's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.pair("localhost"))

    async def greet_nobody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(greet_nobody, "127.0.0.1", 0, ssl=context) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            tls = Tls(authority_file=authority.file, server_name="localhost")
            async with AsyncClient(address, tls=tls) as client:
                with pytest.raises(ConnectionFailedError) as caught:
                    await client.status()
        told = f"something answers at {address}, but it is not a Pagewire router"
        assert caught.value.message == told
        assert caught.value.is_other

    asyncio.run(ask())


def test_a_router_that_ends_while_it_is_asked_is_no_reason(authority: Authority) -> None:
    pem = Tls(authority_file=authority.file).load().current()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.pair("localhost"))
    asked = 0

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        server.close()
        writer.close()

    async def ask() -> None:
        nonlocal server
        server = await asyncio.start_server(end, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        assert await why_no_connection(f"127.0.0.1:{port}", pem, "localhost") is None

    server: asyncio.Server
    asyncio.run(ask())
    assert asked == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"authority_file": "/nowhere"}, "tls.authority_file: /nowhere cannot be read: No such"),
        (
            {"certificate_file": "c"},
            "tls.key_file: found none; allowed: a file, as a certificate is",
        ),
        ({"key_file": "k"}, "tls.certificate_file: found none; allowed: a file, as a key is given"),
        ({"server_name": "a b"}, "tls.server_name: found 'a b'; allowed: a name of a host, or an"),
        ({"authority_file": __file__}, f"tls.authority_file: {__file__} holds no certificate in"),
        ({"authority_file": "a\0b"}, "tls.authority_file: a\0b cannot be read: "),
        ({"authority_file": 5}, "tls.authority_file: found 5 (int); allowed: a path, str or"),
        ({"authority_file": b"a"}, "tls.authority_file: found b'a' (bytes); allowed: a path, str"),
        ({"server_name": 5}, "tls.server_name: found 5 (int); allowed: a text"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_before_anything_is_sent(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Client("localhost:1", tls=Tls(**given))

    assert str(caught.value).startswith(told)
    assert caught.value.violations[0].field == told.partition(":")[0]


def test_tls_is_no_flag() -> None:
    with pytest.raises(InvalidRequestError, match=r"tls: found True; allowed: pagewire.Tls"):
        AsyncClient("localhost:1", tls=True)  # type: ignore[arg-type]


def test_a_client_goes_by_renewed_files_while_its_stream_goes_on(authority: Authority) -> None:
    async def slow(request: Any, context: Any) -> AsyncIterator[Any]:
        yield response("Hel", [1])
        await may_end.wait()
        yield response("lo", [2], first_index=1, finish_reason=STOP, usage=usage())

    async def scenario() -> None:
        settings = authority.settings(asks_clients=True)
        pair = authority.pair("first")
        tls = Tls(authority_file=authority.file, **pair._asdict())
        async with (
            serving(slow, front_door(settings)) as (address, service),
            AsyncClient(address, tls=tls) as client,
            client.stream("x") as stream,
        ):
            deltas = [await anext(stream)]
            authority.pair("second", replaces=pair)
            await client.list_models()
            may_end.set()
            deltas += [delta async for delta in stream]
        assert "".join(each.text for each in deltas) == "Hello"
        assert service.callers == [b"second"]

    may_end = asyncio.Event()
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_the_command_line_takes_files_and_tells_what_is_wrong(authority: Authority) -> None:
    with serving_in_thread(hello, front_door(authority.settings())) as (address, _):
        asked = ("generate", "x", "--address", address)
        answered = run_main(*asked, "--authority-file", authority.file)
        in_clear = run_main(*asked)
        public = run_main(*asked, "--tls")
        half = run_main(*asked, "--key-file", authority.file)
        certificate, _ = authority.pair("somebody")
        _, key = authority.pair("another")
        files = ("--certificate-file", certificate, "--key-file", key)
        others_key = run_main(*asked, *files)

    assert (answered.returncode, answered.stdout) == (0, "Hello\n")
    assert in_clear.returncode == public.returncode == 1
    assert in_clear.stderr == (
        f"error: the router at {address} takes connections over TLS only, and this one is in "
        "clear; use tls=Tls() (--tls)\n"
    )
    assert "shows a certificate that is not trusted" in public.stderr
    assert half.returncode == 2
    assert half.stderr.startswith("error: --certificate-file: found none; allowed: a file, as a ")
    assert others_key.returncode == 2
    assert others_key.stderr == (
        f"error: --key-file: {key} is not the key of {certificate}; allowed: that of its first "
        "certificate\n"
    )
