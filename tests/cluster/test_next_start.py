"""What a host tells of the code and the files that processes on it would start with."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.next_start import NextStart, next_start
from credentials.config import SERVER_NAME, TlsSettings
from protos.contract import CONTRACT_VERSION
from tests.support.certificates import Authority, Pair

ADDRESS = "10.0.0.2"
HOST = f"{socket.gethostname()} ({ADDRESS})"
FINE = NextStart(contract_version=CONTRACT_VERSION)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def look(settings: TlsSettings, *, is_home: bool = True, authority: bytes = b"") -> NextStart:
    return next_start(settings, ADDRESS, authority, is_home=is_home)


def inside_of(settings: TlsSettings) -> Pair:
    return Pair(settings.inside.certificate_file, settings.inside.key_file)


def front_of(settings: TlsSettings) -> Pair:
    return Pair(settings.front.certificate_file, settings.front.key_file)


def test_a_host_whose_files_are_fine_or_that_needs_none_tells_of_its_code(
    authority: Authority,
) -> None:
    settings, content = authority.settings(asks_clients=True), Path(authority.file).read_bytes()

    assert look(settings) == FINE
    assert look(settings, authority=content, is_home=False) == FINE
    assert look(TlsSettings()) == FINE


def test_files_within_the_cluster_that_have_expired_are_told_with_their_host(
    authority: Authority,
) -> None:
    settings = authority.settings()
    pair = authority.pair(SERVER_NAME, days=(-9, -2), replaces=inside_of(settings))

    found = look(settings)

    told = f"tls.certificate_file: on {HOST}, {pair.certificate_file} has expired, on "
    assert found.wrong_files.startswith(told)
    assert found.wrong_files.endswith("; allowed: a certificate that is valid now")
    assert replace(found, wrong_files="") == FINE


def test_files_for_clients_are_read_on_the_home_host_alone(authority: Authority) -> None:
    settings = authority.settings()
    _, key = front_of(settings)
    Path(key).write_bytes(b"-----BEGIN")

    assert look(settings, is_home=False) == FINE
    told = f"front_tls.key_file: on {HOST}, {key} holds no private key in PEM; allowed: "
    found = look(settings)
    assert found.wrong_front_files.startswith(told)
    assert replace(found, wrong_front_files="") == FINE


def test_a_missing_authority_is_told_by_the_option_of_each_side(authority: Authority) -> None:
    settings = authority.settings(asks_clients=True)
    Path(authority.file).unlink()

    found = look(settings)

    cannot = f"on {HOST}, {authority.file} cannot be read: No such file or directory; allowed: "
    assert found.wrong_files.startswith(f"tls.authority_file: {cannot}")
    assert found.wrong_front_files.startswith(f"front_tls.client_authority_file: {cannot}")


def test_files_of_another_cluster_are_told(tmp_path: Path, authority: Authority) -> None:
    other = TlsSettings(inside=Authority(tmp_path, "other").inside())

    found = look(other, authority=Path(authority.file).read_bytes(), is_home=False)

    told = f"{other.inside.certificate_file} is not from the authority of the router's host: "
    assert found.wrong_files.startswith(f"tls.certificate_file: on {HOST}, {told}")
