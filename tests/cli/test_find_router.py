"""Which router the client commands talk with, without being told: of `pagewire up` or `serve`."""

import json
import socket
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli import find_router as module
from cluster import attach, environment
from cluster.config import ClusterConfig
from cluster.errors import NotRunning
from cluster.local_head import LocalHead, head_log
from cluster.scaling import ClusterWorkers
from cluster.served import ServedCluster, published
from credentials.door import front_door
from pagewire import Tls
from pagewire.cli import client_commands
from tests.cli.client_commands import COMMANDS
from tests.pagewire.scripted_service import answer, serving_in_thread, tell
from tests.support.certificates import Authority
from tests.support.command_line import run_main

HEAD = LocalHead(pid=1, ray_address="127.0.0.1:1", token_path="/nowhere")


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host where `up` has started a cluster; to be changed."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    host = SimpleNamespace(
        head=HEAD,
        router_address="",
        token="",
        is_stopping=False,
        attached_to=[],
        config=ClusterConfig(),
        workers=ClusterWorkers(
            staying=frozenset({"decode-0"}),
            leaving=frozenset({"prefill-0"}),
            answering=frozenset({"decode-0"}),
        ),
        controller_silence="",
        router_silence="",
    )

    @contextmanager
    def attached(ray_address):
        host.attached_to.append(ray_address)
        if ray_address == "10.0.0.7:6379":
            raise NotRunning("no cluster runs on the Ray at 10.0.0.7:6379")
        call = (None, host.controller_silence) if host.controller_silence else (host, "")
        yield SimpleNamespace(facts=SimpleNamespace(remote=lambda: call))

    def router_calls():
        tls = host.config.tls_settings
        answers = {"wait_ready": host.router_address, "cluster_token": host.token}
        calls = {name: (answer, "") for name, answer in (answers | {"tls_settings": tls}).items()}
        if host.router_silence:
            calls["wait_ready"] = None, host.router_silence
        return calls

    monkeypatch.setattr(module, "find_head", lambda: host.head)
    monkeypatch.setattr(environment, "prepare_ray", lambda *, is_local: None)
    monkeypatch.setattr(attach, "attached", attached)
    monkeypatch.setattr(attach, "router_calls", router_calls)
    monkeypatch.setattr(attach, "look", lambda call, began_at, limit_s: call)
    return host


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_client_command_finds_the_cluster_that_up_has_started(host, command):
    with serving_in_thread(answer) as (host.router_address, _):
        result = run_main(*command, text="hello\n")

    assert (result.returncode, host.attached_to) == (0, [""]), result.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_client_command_looks_on_the_ray_that_it_is_given(host, command):
    result = run_main(*command, "--ray-address", "10.0.0.7:6379")

    assert (result.returncode, host.attached_to) == (1, ["10.0.0.7:6379"])
    assert result.stderr == "error: no cluster runs on the Ray at 10.0.0.7:6379\n"


@pytest.mark.parametrize("wrong", ["foo", "127.0.0.1", "localhost:99999"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_client_command_refuses_what_is_no_address_of_a_ray(host, command, wrong):
    result = run_main(*command, "--ray-address", wrong)

    assert (result.returncode, host.attached_to) == (2, [])
    told = f"error: --ray-address: found {wrong!r}; allowed: host:port of a Ray cluster, as in "
    assert result.stderr == f"{told}10.0.0.1:6379, or auto\n"


def test_an_address_that_is_given_counts_before_any_cluster(host):
    with serving_in_thread(answer) as (address, _):
        result = run_main("generate", "x", "--address", address)

    assert (result.returncode, host.attached_to) == (0, [])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_silence_of_a_router_that_is_being_stopped_is_explained(host, command):
    host.router_address, host.is_stopping = "127.0.0.1:1", True

    result = run_main(*command)

    explained = "error: the cluster is being stopped; run `pagewire down` again\n"
    assert (result.returncode, result.stderr) == (1, explained)


def test_status_tells_of_a_cluster_that_is_being_stopped_though_the_router_serves(host):
    host.is_stopping = True

    with serving_in_thread(answer) as (host.router_address, _):
        table = run_main("status", "--once").stdout
        fields = json.loads(run_main("status", "--json").stdout)

    assert table.splitlines()[-1] == "the cluster is being stopped; run `pagewire down` again"
    assert fields["is_stopping"]


def test_status_tells_of_workers_that_the_router_has_never_heard_of(host):
    host.workers = replace(host.workers, staying=host.workers.staying | {"decode-1"})
    told = "{} does not serve yet: it loads, or waits for a host with room"

    with serving_in_thread(answer) as (host.router_address, _):  # which sees decode-0 alone
        shown = run_main("status", "--once")
        fields = run_main("status", "--json")
        top = run_main("top", "--once", "--interval", "0.1")

    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (3, told.format("decode-1"))
    assert (fields.returncode, json.loads(fields.stdout)["starting"]) == (3, ["decode-1"])
    assert (top.returncode, told.format("decode-1") in top.stdout.splitlines()) == (3, True)


def test_a_live_view_tells_of_no_worker_that_starts_once_that_may_be_out_of_date(host, monkeypatch):
    host.workers = replace(host.workers, staying=host.workers.staying | {"decode-1"})
    with (
        serving_in_thread(answer) as (host.router_address, _),
        module.found_router(5.0) as client,
    ):
        assert client.status().starting == ("decode-1",)
        monkeypatch.setattr(module, "VIEW_LASTS_S", 0.0)
        assert client.status().starting == ()


@pytest.fixture(params=["actor", "address", "half-open"])
def silent_router(host, request, monkeypatch):
    """How the router of the host's cluster is silent: a part of what is told."""
    if request.param == "actor":
        host.router_silence = "no answer within 5 s"
        yield host.router_silence
    elif request.param == "address":
        host.router_address = "127.0.0.1:1"
        yield "no connection to 127.0.0.1:1: Connection refused"
    else:
        monkeypatch.setattr(client_commands, "ANSWER_TIMEOUT_S", 0.5)
        with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts, and says nothing
            host.router_address = f"127.0.0.1:{listening.getsockname()[1]}"
            yield host.router_address


def test_status_without_a_router_shows_what_the_controller_knows(host, silent_router):
    host.workers = replace(host.workers, staying=host.workers.staying | {"decode-1"})

    shown = run_main("status", "--once")
    fields = json.loads(run_main("status", "--json").stdout)

    assert (shown.returncode, shown.stderr) == (3, "")
    _, _, *workers = shown.stdout.splitlines()
    told = "".join(workers[3:])
    assert [line.split() for line in workers[:3]] == [
        ["decode-0", "alive"],
        ["decode-1", "silent"],
        ["prefill-0", "leaving"],
    ]
    assert told.startswith("the router does not answer: ")
    assert silent_router in told
    assert silent_router in fields["router_silence"]
    assert fields["active_requests"] is None
    assert {each["worker_id"]: each["state"] for each in fields["workers"]} == {
        "decode-0": "alive",
        "decode-1": "silent",
        "prefill-0": "leaving",
    }


def test_other_commands_without_a_router_fail(host):
    host.router_silence = "no answer within 30 s"

    for command in COMMANDS[:3]:
        result = run_main(*command, text="hello\n")
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.startswith(f"error: the router does not answer: {host.router_silence}")


def test_a_silent_controller_is_told_beside_the_routers_view_also_over_tls(host, tmp_path):
    settings = Authority(tmp_path).settings()
    host.config = ClusterConfig(tls=settings.inside, front_tls=settings.front)
    host.controller_silence = "no answer within 5 s"
    told = f"the controller does not answer: {host.controller_silence}"

    with serving_in_thread(answer, front_door(settings)) as (host.router_address, _):
        shown = run_main("status", "--once")
        fields = run_main("status", "--json")
        top = run_main("top", "--once", "--interval", "0.1")
        generated = run_main("generate", "x")

    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (3, told)
    assert "decode-0" in shown.stdout
    assert fields.returncode == 3
    assert json.loads(fields.stdout)["controller_silence"] == host.controller_silence
    assert top.returncode == 3
    assert told in top.stdout.splitlines()
    assert generated.returncode == 0


def test_a_live_view_tells_no_silence_of_a_controller_that_the_router_hears_again(
    host, monkeypatch
):
    host.controller_silence = "no answer within 5 s"
    with (
        serving_in_thread(answer) as (host.router_address, _),
        module.found_router(5.0) as client,
    ):
        assert client.status().controller_silence == host.controller_silence
        monkeypatch.setattr(module, "ROUTER_LEARNS_S", 0.0)
        assert client.status().controller_silence == ""


def test_status_fails_where_neither_router_nor_controller_answers(host):
    host.controller_silence, host.router_silence = "it has ended", "no answer within 5 s"

    result = run_main("status", "--once")

    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(
        "error: the cluster does not answer: its router: no answer within 5 s; its controller: it "
        "has ended; "
    )


def test_a_cluster_without_a_router_that_is_being_stopped_is_told_as_such(host):
    host.router_silence, host.is_stopping = "no answer within 5 s", True

    result = run_main("status", "--once")

    told = "error: the cluster is being stopped; run `pagewire down` again\n"
    assert (result.returncode, result.stderr) == (1, told)


def test_without_a_cluster_of_up_the_address_of_serve_is_tried(host):
    host.head = None

    assert module.find_router(None, "", 5.0) == module.FoundRouter(address="localhost:50051")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_end_of_the_last_cluster_of_up_is_told_where_no_router_answers(
    host, monkeypatch, command
):
    host.head = None
    monkeypatch.setattr(module, "DEFAULT_ADDRESS", "127.0.0.1:1")
    head_log().write_text("error: Ray's raylet on this host has ended; see the logs\n")

    result = run_main(*command)

    before, _, after = result.stderr.partition(": it ended at 20")
    assert (result.returncode, before) == (
        1,
        "error: no cluster runs on this host, and no router answers at 127.0.0.1:1; the Ray of the "
        "last `pagewire up`",
    )
    assert after.endswith(
        " UTC: Ray's raylet on this host has ended; see the logs; `pagewire up` starts another\n"
    )


def test_without_a_cluster_of_up_that_of_serve_is_found_with_what_it_takes(
    host, monkeypatch, tmp_path
):
    host.head = None
    monkeypatch.delenv("PAGEWIRE_TOKEN", raising=False)
    authority = Authority(tmp_path)
    with serving_in_thread(tell, front_door(authority.settings())) as (address, _):
        tls = Tls(authority_file=authority.file)
        with published(ServedCluster(pid=1, address=address, token="its-own", tls=tls)):
            assert run_main("generate", "x").stdout == "Bearer its-own\n"
            named = run_main("generate", "x", "--address", address)
            assert named.returncode == 1, "an address that is given may be anybody's"
    assert host.attached_to == []


def test_of_several_clusters_of_serve_one_is_to_be_chosen(host):
    host.head = None
    one, other = (
        ServedCluster(pid=1, address=address, token="", tls=None) for address in ("h:1", "h:2")
    )
    with published(one), published(other):
        result = run_main("status")

    told = "2 clusters run on this host; choose one with --address"
    serve = "(of `pagewire serve`)"
    assert result.returncode == 2
    assert result.stderr in {
        f"error: {told}: h:{first} {serve}, h:{second} {serve}\n" for first, second in ("12", "21")
    }


def test_of_a_cluster_of_up_and_one_of_serve_one_is_to_be_chosen(host):
    with (
        serving_in_thread(answer) as (host.router_address, _),
        published(ServedCluster(pid=1, address="h:1", token="", tls=None)),
    ):
        refused = run_main("status", "--once")
        named = run_main("status", "--once", "--address", host.router_address)
        on_its_ray = run_main("status", "--once", "--ray-address", HEAD.ray_address)

    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        "error: 2 clusters run on this host; choose one with --address: "
        f"{host.router_address} (of `pagewire up`), h:1 (of `pagewire serve`)\n"
    )
    assert (named.returncode, on_its_ray.returncode) == (0, 0)


def test_commands_call_with_the_token_of_the_cluster_unless_they_are_given_one(host, monkeypatch):
    host.token = "the-clusters-own"
    monkeypatch.delenv("PAGEWIRE_TOKEN", raising=False)
    with serving_in_thread(tell) as (host.router_address, _):
        assert run_main("generate", "x").stdout == "Bearer the-clusters-own\n"
        monkeypatch.setenv("PAGEWIRE_TOKEN", "another")
        assert run_main("generate", "x").stdout == "Bearer another\n"
        monkeypatch.delenv("PAGEWIRE_TOKEN")
        named = run_main("generate", "x", "--address", host.router_address)
        assert named.stdout == "nobody\n", "an address that is given may be anybody's"


@pytest.mark.parametrize("asks_clients", [False, True])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_client_command_needs_the_key_of_the_routers(host, tmp_path, command, asks_clients):
    settings = Authority(tmp_path).settings(asks_clients=asks_clients)
    host.config = ClusterConfig(tls=settings.inside, front_tls=settings.front)
    with serving_in_thread(answer, front_door(settings)) as (host.router_address, _):
        Path(host.config.front_tls.key_file).unlink()
        if not asks_clients:
            Path(host.config.tls.key_file).unlink()

        result = run_main(*command, text="hello\n")

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("section", "name", "content"),
    [
        ("tls", "key_file", "private key in PEM; allowed: a PEM file with a whole private key"),
        ("front_tls", "certificate_file", "certificate in PEM; allowed: a PEM file of whole cert"),
    ],
)
def test_a_broken_file_of_the_cluster_is_named_and_own_files_still_reach_the_router(
    host, tmp_path, section, name, content
):
    authority = Authority(tmp_path)
    settings = authority.settings(asks_clients=True)
    host.config = ClusterConfig(tls=settings.inside, front_tls=settings.front)
    broken = getattr(getattr(host.config, section), name)
    with serving_in_thread(answer, front_door(settings)) as (host.router_address, _):
        Path(broken).write_text("-")

        refused = run_main("status", "--once")
        own = authority.pair("somebody")
        files = ["--authority-file", authority.file, "--certificate-file", own.certificate_file]
        served = run_main("status", "--once", *files, "--key-file", own.key_file)

    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {section}.{name}: {broken} holds no {content}")
    assert refused.stderr.endswith(
        f"; the router at {host.router_address} may serve nevertheless, "
        "with the files as they were: mend them, or give your own, such as --authority-file\n"
    )
    assert served.returncode == 0, served.stderr
