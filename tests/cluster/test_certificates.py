"""What is refused before a cluster starts, and how its own processes get to its router."""

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.certificates import (
    check_certificates,
    check_clients,
    check_links,
    client_hosts,
    gateway_client,
    http_url,
    own_client,
    with_absolute_files,
)
from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.demo_model import demo_model_dir
from cluster.doctor import check_access, check_tls
from cluster.errors import ConfigError
from credentials.config import HOST, FrontTlsConfig, TlsSettings
from credentials.door import front_door
from pagewire import Client, Tls
from pagewire.protos.pem import utc
from tests.pagewire.scripted_service import response, serving_in_thread
from tests.support.certificates import Authority, Pair
from tests.support.command_line import run_main

ANY_PORTS = ("--port", "0", "--http-port", "0")  # another server of this host may have the usual


def config_of(authority: Authority, *, asks_clients: bool = False, **options: Any) -> ClusterConfig:
    settings = authority.settings(asks_clients=asks_clients)
    return ClusterConfig(tls=settings.inside, front_tls=settings.front, **options)


@pytest.mark.parametrize(
    ("address", "host"),
    [("0.0.0.0:8", "localhost:8"), ("[::]:8", "localhost:8"), ("[fd00::1]:8", "[fd00::1]:8")],
)
def test_the_url_of_a_gateway_can_be_opened(address: str, host: str, authority: Authority) -> None:
    assert http_url(ClusterConfig(), address) == f"http://{host}"
    assert http_url(config_of(authority), address) == f"https://{host}"


def test_clients_are_told_the_names_of_the_certificate(authority: Authority) -> None:
    config = config_of(authority)
    pair = authority.pair("*.example.org", "llm.example.org", "fd00::1", "localhost")
    front = replace(config.front_tls, **pair._asdict())
    named = replace(config, front_tls=front)
    half_renewed = replace(config, front_tls=replace(front, key_file=config.front_tls.key_file))

    expected = ("localhost", "llm.example.org", "[FD00:0:0:0:0:0:0:1]")  # no pattern
    assert client_hosts(named, "0.0.0.0") == expected
    assert client_hosts(half_renewed, "0.0.0.0") == expected
    assert client_hosts(config, "10.0.0.1") == ("10.0.0.1",)
    assert client_hosts(ClusterConfig(), "[::]") == ("localhost", socket.gethostname())


def test_certificates_that_fit_are_taken(authority: Authority) -> None:
    assert check_certificates(config_of(authority, host="127.0.0.1")) == ""
    assert check_certificates(config_of(authority, host="0.0.0.0")) == ""
    assert check_certificates(ClusterConfig()) == ""


def test_a_host_that_the_certificate_is_not_for_is_told(authority: Authority) -> None:
    config = config_of(authority, host="127.0.0.2")

    assert check_certificates(config) == (
        f"front_tls.certificate_file: {config.front_tls.certificate_file} is for localhost, "
        "127.0.0.1, not for host, which is 127.0.0.2; clients must expect another name"
    )
    (clients, inside) = check_tls(config)
    assert (clients.level, inside.level) == ("warn", "ok")


def test_a_front_that_other_hosts_reach_is_refused_in_clear() -> None:
    config = ClusterConfig(host="0.0.0.0")

    with pytest.raises(ConfigError, match=r"^front_tls.certificate_file: found none; allowed"):
        check_certificates(config)
    assert check_certificates(replace(config, insecure=True)) == ""


def test_a_front_that_anyone_may_use_is_refused_where_other_hosts_can_connect(
    authority: Authority,
) -> None:
    config = config_of(authority, host="0.0.0.0")

    with pytest.raises(ConfigError) as refusal:
        check_clients(config)
    assert str(refusal.value) == (
        "router.tenants_file: found none; allowed: a tenants file, or "
        "front_tls.client_authority_file, where other hosts can connect (host is 0.0.0.0); or "
        "insecure, if whoever can connect may use the model"
    )
    access = check_access(config)
    assert (access.level, access.found) == ("fail", str(refusal.value))
    tenants = replace(config.router, tenants_file="/tenants.yaml")
    for allowed, found in (
        (config_of(authority, host="127.0.0.1"), "whoever can connect, on this host alone"),
        (
            config_of(authority, host="0.0.0.0", asks_clients=True),
            f"clients with a certificate of {authority.file}",
        ),
        (replace(config, router=tenants), "tenants of /tenants.yaml"),
        (replace(config, insecure=True), "whoever can connect, as insecure allows"),
    ):
        check_clients(allowed)
        access = check_access(allowed)
        assert (access.level, access.found) == ("ok", found)


def test_certificates_of_clients_are_wanted_only_where_the_cluster_has_some(
    authority: Authority,
) -> None:
    config = replace(config_of(authority, asks_clients=True), tls=ClusterConfig().tls)

    with pytest.raises(
        ConfigError, match=r"tls.certificate_file: found none; allowed: a file, as fr"
    ):
        check_certificates(config)


FAR, NEAR = ["10.0.0.10", "10.0.0.11"], ["127.0.0.1"]


def test_workers_that_other_hosts_reach_are_refused_in_clear() -> None:
    config = ClusterConfig(ray_address="auto")

    with pytest.raises(ConfigError, match=r"^tls.certificate_file: found none; .* to 10.0.0.10"):
        check_links(config, "cpu", FAR)
    check_links(config, "cpu", NEAR)
    check_links(replace(config, insecure=True), "cuda", FAR)
    with pytest.raises(ConfigError, match=r"^tls.certificate_file: found none; .* to 10.0.0.10"):
        check_links(ClusterConfig(network_interface="eth0"), "cpu", FAR)


def test_nccl_between_hosts_is_refused_until_somebody_says_that_it_is_meant(
    authority: Authority,
) -> None:
    config = config_of(authority, ray_address="auto")

    with pytest.raises(ConfigError, match=r"^tls.allow_plain_nccl: found false; allowed: true"):
        check_links(config, "cuda", FAR)
    check_links(config, "cpu", FAR)
    check_links(config, "cuda", NEAR)
    check_links(replace(config, prefill=0), "cuda", FAR)
    check_links(replace(config, ray_address="", network_interface="eth0"), "cuda", FAR)
    check_links(replace(config, tls=replace(config.tls, allow_plain_nccl=True)), "cuda", FAR)


@pytest.mark.parametrize("asks_clients", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ["grpc.example.org"],
        ["*.example.org"],
        ["10.1.2.3"],
        ["operator@example.org", "grpc.example.org"],  # the first is no host's
    ],
)
def test_processes_of_the_cluster_get_to_its_router_whatever_its_names(
    authority: Authority, names: list[str], asks_clients: bool
) -> None:
    async def never(request: Any, context: Any) -> Any:
        yield response()

    config = config_of(authority, asks_clients=asks_clients)
    front = replace(config.front_tls, **authority.pair(*names)._asdict())
    config = replace(config, front_tls=front)
    with (
        serving_in_thread(never, front_door(config.tls_settings)) as (address, _),
        Client(address, tls=own_client(config.tls_settings)) as client,
    ):
        assert client.list_models()


def test_in_clear_they_need_nothing() -> None:
    assert own_client(TlsSettings()) is None


def test_files_are_found_from_other_folders_and_links_stay(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What renews a mounted Secret leads the link elsewhere.
    pair = authority.pair("localhost")
    for path, link in zip(pair, ("front.crt", "front.key"), strict=True):
        (tmp_path / link).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    overrides = {
        "front_tls.certificate_file": "front.crt",
        "front_tls.key_file": "front.key",
        "secret_file": "secret",
    }

    config = with_absolute_files(load_config(None, overrides))

    assert config.front_tls.certificate_file == str(tmp_path / "front.crt")
    assert config.front_tls.key_file == str(tmp_path / "front.key")
    assert config.front_tls.client_authority_file == config.tls.key_file == ""
    assert config.secret_file == str(tmp_path / "secret"), "`up` elsewhere may mean another one"
    assert with_absolute_files(ClusterConfig()) == ClusterConfig()


def test_files_with_the_name_of_a_host_are_those_of_the_host_that_reads_them(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = FrontTlsConfig(certificate_file=f"{tmp_path}/{HOST}.crt", key_file=f"{tmp_path}/{HOST}")
    tls = authority.inside_by_host("gpu-a", "gpu-b")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-a")
    authority.pair("localhost", replaces=Pair(f"{tmp_path}/gpu-a.crt", f"{tmp_path}/gpu-a"))

    config = with_absolute_files(ClusterConfig(tls=tls, front_tls=front, host="127.0.0.2"))

    assert check_certificates(config).startswith(
        f"front_tls.certificate_file: {tmp_path}/gpu-a.crt is for localhost, not for host"
    )
    (clients, inside) = check_tls(replace(config, host="localhost"))
    assert clients.found.startswith(f"encrypted; {tmp_path}/gpu-a.crt is valid until ")
    assert inside.found.startswith(f"encrypted; {tmp_path}/authority-gpu-a.crt is valid until ")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-b")
    asked = replace(config.front_tls, client_authority_file=authority.file)
    assert own_client(replace(config, front_tls=asked).tls_settings) == Tls(
        authority_file=f"{tmp_path}/gpu-a.crt",  # the router's
        certificate_file=f"{tmp_path}/authority-gpu-b.crt",
        key_file=f"{tmp_path}/authority-gpu-b.key",
        server_name="localhost",
    )


def test_serve_ends_with_one_line_that_names_option_and_file(
    authority: Authority, tmp_path: Path
) -> None:
    tls = authority.inside()
    flags = (
        *("--tls-certificate-file", tls.certificate_file),
        *("--tls-authority-file", Authority(tmp_path, "other").file),
        *("--model", str(demo_model_dir())),
        *ANY_PORTS,
    )

    half = run_main("serve", *flags)
    foreign = run_main("serve", *flags, "--tls-key-file", tls.key_file)

    assert half.returncode == foreign.returncode == 2
    assert half.stderr == (
        "error: tls.key_file: found none; allowed: a file, as --tls-certificate-file and "
        "--tls-authority-file are given\n"
    )
    assert foreign.stderr.startswith(
        f"error: tls.certificate_file: {tls.certificate_file} is not from "
    )
    assert foreign.stderr.endswith("; allowed: a certificate of that authority, with its chain\n")
    assert foreign.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "up"])
def test_all_that_is_missing_where_other_hosts_can_connect_is_named_before_a_start(
    authority: Authority, command: str
) -> None:
    flags = (command, "--model", str(demo_model_dir()), "--host", "0.0.0.0", *ANY_PORTS)
    front = authority.settings().front
    files = ("--front-tls-certificate-file", front.certificate_file)

    in_clear = run_main(*flags)
    over_tls = run_main(*flags, *files, "--front-tls-key-file", front.key_file)

    assert in_clear.returncode == over_tls.returncode == 2
    clear, open_to_all = in_clear.stderr.splitlines()
    assert "front_tls.certificate_file: found none; allowed: a certificate" in clear
    assert over_tls.stderr.startswith("error: router.tenants_file: found none; allowed: a tenants ")
    assert over_tls.stderr.count("\n") == 1
    assert open_to_all in over_tls.stderr


def test_doctor_tells_what_is_encrypted_and_until_when(authority: Authority) -> None:
    config = config_of(authority)

    found = check_tls(config)

    assert [each.check for each in found] == ["tls, clients", "tls, cluster"]
    assert [each.level for each in found] == ["ok", "ok"]
    assert found[0].found.startswith(f"encrypted; {config.front_tls.certificate_file} is valid")
    assert f"until {utc(time.time() + 30 * 86_400)[:10]}" in found[1].found
    assert [each.found for each in check_tls(ClusterConfig())] == [
        "in clear, on this host alone"
    ] * 2


def test_doctor_warns_before_a_certificate_expires_and_fails_after(authority: Authority) -> None:
    def found(days: tuple[float, float]) -> tuple[str, str]:
        inside = authority.inside(authority.pair("pagewire", days=days))
        finding = check_tls(ClusterConfig(tls=inside))[-1]
        return finding.level, f"{finding.found} {finding.remedy}"

    level, told = found((-1, 3))
    assert (level, "running processes take the new one" in told) == ("warn", True)
    level, told = found((-9, -1))
    assert level == "fail"
    assert told.startswith("tls.certificate_file: ")
    assert "has expired" in told
    assert told.endswith("see that option in `pagewire serve --help`")


def test_a_gateway_trusts_what_its_router_shows_whatever_becomes_of_its_own_files(
    authority: Authority,
) -> None:
    settings = authority.settings(asks_clients=True)
    shown = Pair(settings.front.certificate_file, settings.front.key_file)
    tls = gateway_client(settings)
    assert tls is not None
    live = tls.load()
    first = live.current()
    assert live.current() is first
    Path(settings.inside.key_file).write_bytes(b"-----BEGIN PRIVATE KEY-----\nMIGH")
    assert live.current() is first

    authority.pair("renewed", replaces=shown)

    second = live.current()
    assert (second.authority, second.other_name) == (
        Path(shown.certificate_file).read_bytes(),
        "renewed",
    )
    assert (second.certificate, second.key) == (first.certificate, first.key)
    authority.pair("late", replaces=shown, days=(-2, -1))
    assert live.current() is second
