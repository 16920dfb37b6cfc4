"""Files for TLS: each thing that can be wrong with them is told, and a renewal is noticed."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from credentials.config import FrontTlsConfig, TlsConfig, TlsSettings
from options.option import WrongOptions
from pagewire.protos.pem import (
    RETRY_S,
    LivePem,
    PemError,
    PemFile,
    client_context,
    is_for,
    read_pem,
    server_context,
)
from tests.support.certificates import Authority, Pair

ROOT = Path(__file__).parents[2]


def encrypt(path: str) -> None:
    key = serialization.load_pem_private_key(Path(path).read_bytes(), None)
    Path(path).write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )


def cut(path: str) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:200])


def missing(tls: TlsConfig, _: Authority) -> TlsConfig:
    return replace(tls, certificate_file="/nowhere/tls.crt")


def folder(tls: TlsConfig, _: Authority) -> TlsConfig:
    return replace(tls, key_file="/tmp")


def half_certificate(tls: TlsConfig, _: Authority) -> TlsConfig:
    cut(tls.certificate_file)
    return tls


def half_key(tls: TlsConfig, _: Authority) -> TlsConfig:
    cut(tls.key_file)
    return tls


def half_authority(tls: TlsConfig, _: Authority) -> TlsConfig:
    cut(tls.authority_file)
    return tls


def not_text(tls: TlsConfig, _: Authority) -> TlsConfig:
    Path(tls.authority_file).write_bytes(b"\x30\x82\xff")
    return tls


def empty(tls: TlsConfig, _: Authority) -> TlsConfig:
    Path(tls.authority_file).write_bytes(b"")
    return tls


def others_key(tls: TlsConfig, authority: Authority) -> TlsConfig:
    return replace(tls, key_file=authority.pair("pagewire").key_file)


def encrypted_key(tls: TlsConfig, _: Authority) -> TlsConfig:
    encrypt(tls.key_file)
    return tls


def expired(_: TlsConfig, authority: Authority) -> TlsConfig:
    return authority.inside(authority.pair("pagewire", days=(-9, -1)))


def early(_: TlsConfig, authority: Authority) -> TlsConfig:
    return authority.inside(authority.pair("pagewire", days=(1, 9)))


def others_authority(tls: TlsConfig, _: Authority) -> TlsConfig:
    other = Authority(Path(tls.authority_file).parent, "other")
    return replace(tls, authority_file=other.file)


def authority_first(tls: TlsConfig, authority: Authority) -> TlsConfig:
    chain = Path(tls.certificate_file)
    chain.write_bytes(Path(authority.file).read_bytes() + chain.read_bytes())
    return tls


def others_name(_: TlsConfig, authority: Authority) -> TlsConfig:
    return authority.inside(authority.pair("worker.example.org"))


def endless(tls: TlsConfig, _: Authority) -> TlsConfig:
    return replace(tls, authority_file="/dev/zero")


READABLE = "a PEM file that this user can read"
VALID = "a certificate that is valid now"
WHOLE = "a PEM file of whole certificates"
WHOLE_KEY = "a PEM file with a whole private key"

# What is planted, the option, the beginning of what is found, and what is allowed.
FAULTS: list[tuple[Callable[[TlsConfig, Authority], TlsConfig], str, str, str]] = [
    (missing, "certificate_file", "{} cannot be read: No such file or directory", READABLE),
    (folder, "key_file", "{} cannot be read: Is a directory", READABLE),
    (half_certificate, "certificate_file", "{} holds no certificate in PEM", WHOLE),
    (half_key, "key_file", "{} holds no private key in PEM", WHOLE_KEY),
    (half_authority, "authority_file", "{} holds no certificate in PEM", WHOLE),
    (not_text, "authority_file", "{} holds no certificate in PEM", WHOLE),
    (empty, "authority_file", "{} holds no certificate in PEM", WHOLE),
    (
        endless,
        "authority_file",
        "{} has more than 1048576 bytes",
        "a PEM file of at most that size",
    ),
    (others_key, "key_file", "{} is not the key of ", "that of its first certificate"),
    (authority_first, "key_file", "{} is not the key of ", "that of its first certificate"),
    (encrypted_key, "key_file", "{} is encrypted", "a key without a passphrase"),
    (expired, "certificate_file", "{} has expired, on 20", VALID),
    (early, "certificate_file", "{} is not valid before 20", VALID),
    (
        others_authority,
        "certificate_file",
        "{} is not from ",
        "a certificate of that authority, with its chain",
    ),
    (
        others_name,
        "certificate_file",
        "{} is for worker.example.org, not for pagewire (tls.serv",
        "a certificate with that name",
    ),
]


@pytest.mark.parametrize(
    ("plant", "option", "found", "allowed"), FAULTS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_fault_is_told_with_option_and_file(
    authority: Authority,
    plant: Callable[[TlsConfig, Authority], TlsConfig],
    option: str,
    found: str,
    allowed: str,
) -> None:
    tls = plant(authority.inside(), authority)

    with pytest.raises(PemError) as caught:
        read_pem(tls.files)

    expected = f"tls.{option}: {found.format(getattr(tls, option))}"
    assert str(caught.value).startswith(expected), caught.value
    assert str(caught.value).endswith(f"; allowed: {allowed}")
    assert "PRIVATE" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_certificate_says_is_read(authority: Authority) -> None:
    front = authority.settings().front

    pem = read_pem(front.files(TlsConfig()))

    assert pem.names == ("localhost", "127.0.0.1")
    assert is_for(pem, "localhost")
    assert is_for(pem, "127.0.0.1")
    assert not is_for(pem, "127.0.0.2")
    assert not is_for(pem, "example.org")
    assert repr(pem).count("PRIVATE") == 0


def test_a_chain_with_an_intermediate_is_believed(tmp_path: Path) -> None:
    root = Authority(tmp_path)
    between = Authority(tmp_path, "between", root=root)

    tls = replace(between.inside(), authority_file=root.file)

    assert read_pem(tls.files).names == ("pagewire",)


def test_files_may_have_comments_in_any_script(authority: Authority) -> None:
    tls = authority.inside()
    for each in (tls.authority_file, tls.certificate_file):
        Path(each).write_bytes("# Főtanúsítvány\n".encode() + Path(each).read_bytes())

    pem = read_pem(tls.files)

    assert server_context(pem).get_ca_certs() == client_context(pem).get_ca_certs() != []


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: TlsConfig(certificate_file="a", authority_file="c"),
            "key_file: found none; allowed: a file, as certificate_file and authority_file are "
            "given",
        ),
        (
            lambda: TlsConfig(authority_file="c"),
            "certificate_file and key_file: found none; allowed: files, as authority_file is given",
        ),
        (
            lambda: TlsConfig(server_name=".x"),
            "server_name: found '.x'; allowed: a host name, such as pagewire",
        ),
        (
            lambda: FrontTlsConfig(key_file="b"),
            "certificate_file: found none; allowed: a file, as key_file is given",
        ),
        (
            lambda: FrontTlsConfig(client_authority_file="c"),
            "certificate_file: found none; allowed: a file, as client_authority_file is given",
        ),
    ],
)
def test_half_of_the_files_or_a_wrong_name_is_refused(
    make: Callable[[], object], told: str
) -> None:
    with pytest.raises(WrongOptions) as caught:
        make()

    assert str(caught.value) == told


def test_clients_of_the_front_may_be_of_either_authority(tmp_path: Path) -> None:
    inside, clients = Authority(tmp_path, "inside"), Authority(tmp_path, "clients")
    settings = TlsSettings(inside=inside.inside(), front=clients.settings(asks_clients=True).front)

    pem = read_pem(settings.front.files(settings.inside))

    both = [Path(each.file).read_bytes().strip() for each in (clients, inside)]
    assert all(each in pem.authority for each in both)


class Renewed:
    """Files in use, and the errors that were told."""

    def __init__(self, authority: Authority) -> None:
        self.pair = authority.pair("pagewire")
        self.told: list[str] = []
        self.live = LivePem(
            authority.inside(self.pair).files, lambda error: self.told.append(str(error))
        )


def test_a_renewal_is_noticed_and_else_nothing_is_read_again(authority: Authority) -> None:
    renewed = Renewed(authority)
    first = renewed.live.current()

    assert renewed.live.current() is first
    authority.pair("pagewire", "second", replaces=renewed.pair)
    second = renewed.live.current()

    assert second.names == ("pagewire", "second")
    assert renewed.live.current() is second
    assert not renewed.told


def test_a_renewal_that_is_half_written_changes_nothing_and_is_told_once(
    authority: Authority,
) -> None:
    renewed = Renewed(authority)
    first = renewed.live.current()
    next_pair = authority.pair("pagewire", "second")

    Path(next_pair.certificate_file).replace(renewed.pair.certificate_file)
    for _ in range(3):
        assert renewed.live.current() is first
    Path(next_pair.key_file).replace(renewed.pair.key_file)

    assert renewed.live.current().names == ("pagewire", "second")
    (told,) = renewed.told
    assert told.startswith(f"tls.key_file: {renewed.pair.key_file} is not the key of ")


def test_a_renewal_that_has_expired_or_is_gone_changes_nothing(authority: Authority) -> None:
    renewed = Renewed(authority)
    first = renewed.live.current()

    authority.pair("pagewire", days=(-9, -1), replaces=renewed.pair)
    assert renewed.live.current() is first
    Path(renewed.pair.key_file).unlink()
    assert renewed.live.current() is first

    assert [each.split(" ")[0] for each in renewed.told] == [
        "tls.certificate_file:",
        "tls.key_file:",
    ]


def test_a_renewal_that_is_early_is_used_once_it_is_valid(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.protos.pem.RETRY_S", 0.0)
    renewed = Renewed(authority)
    first, now = renewed.live.current(), time.time()
    with monkeypatch.context() as slow:  # this host's clock, behind that of the issuer
        slow.setattr(time, "time", lambda: now - 3600)
        authority.pair("pagewire", "second", days=(-0.01, 1), replaces=renewed.pair)
        for _ in range(3):
            assert renewed.live.current() is first

    second = renewed.live.current()
    assert second.names == ("pagewire", "second")
    assert renewed.live.current() is second
    (told,) = renewed.told
    assert "is not valid before" in told


def test_a_renewal_that_becomes_readable_is_used(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    # To mend a file's owner or mode changes neither its content nor the time of its last change.
    renewed = Renewed(authority)
    first = renewed.live.current()
    with monkeypatch.context() as denying:
        denying.setattr("pagewire.protos.pem._read", _deny)
        authority.pair("pagewire", "second", replaces=renewed.pair)
        assert renewed.live.current() is first
    assert renewed.live.current() is first, "not at each connection"

    later = time.monotonic() + RETRY_S
    monkeypatch.setattr(time, "monotonic", lambda: later)

    assert renewed.live.current().names == ("pagewire", "second")
    (told,) = renewed.told
    assert "Permission denied" in told


def _deny(file: PemFile, *, is_secret: bool = False) -> bytes:
    raise PemError(file.option, f"{file.path} cannot be read: Permission denied", READABLE)


def test_a_link_that_leads_elsewhere_is_a_renewal(authority: Authority, tmp_path: Path) -> None:
    # As Kubernetes renews a mounted Secret: the folder behind a link is another one.
    for number, names in enumerate((("pagewire",), ("pagewire", "second"))):
        made = tmp_path / f"version-{number}"
        made.mkdir()
        pair = authority.pair(*names)
        for path, name in zip(pair, ("tls.crt", "tls.key"), strict=True):
            Path(path).rename(made / name)
    (tmp_path / "data").symlink_to("version-0")
    pair = Pair(str(tmp_path / "data" / "tls.crt"), str(tmp_path / "data" / "tls.key"))
    live = LivePem(authority.inside(pair).files)
    assert live.current().names == ("pagewire",)

    (tmp_path / "data.new").symlink_to("version-1")
    (tmp_path / "data.new").replace(tmp_path / "data")

    assert live.current().names == ("pagewire", "second")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_commands_of_the_documentation_make_what_fits(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(openssl .*?)```", text, re.DOTALL)
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)

    tls = TlsConfig(
        certificate_file=str(tmp_path / "tls.crt"),
        key_file=str(tmp_path / "tls.key"),
        authority_file=str(tmp_path / "authority.crt"),
    )
    assert read_pem(tls.files).names == ("pagewire",)
    front = FrontTlsConfig(
        certificate_file=str(tmp_path / "front.crt"), key_file=str(tmp_path / "front.key")
    )
    assert read_pem(front.files(tls)).names == ("llm.example.org", "localhost")
