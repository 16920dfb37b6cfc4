"""Who is told to be on a port that a start needs."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from cluster import doctor
from cluster import port_owner as module
from cluster.config import ClusterConfig
from cluster.devices import check_port_free
from cluster.errors import PlacementError
from cluster.local_head import LocalHead
from cluster.port_owner import port_owner
from cluster.served import ServedCluster, published
from tests.pagewire.scripted_service import serving_in_thread

LISTENING = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


@pytest.fixture
def child() -> Iterator[tuple[int, int]]:
    """A process of this one that listens: its id, and the port."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTENING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()


def test_a_process_is_told_by_its_number_and_command(child):
    pid, port = child

    told = port_owner("127.0.0.1", port)

    command = shlex.join([sys.executable, "-c"])
    assert told.startswith(f"process {pid} ({command[:50]}")
    assert len(told) < 100
    assert told.endswith("...)")
    with pytest.raises(PlacementError) as refused:
        check_port_free("127.0.0.1", port)
    assert str(refused.value) == (
        f"port {port} on 127.0.0.1 is in use by {told}; choose another with --port, or let "
        "--port 0 take a free one"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_on_all_addresses_has_each_of_them(host):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        assert port_owner(host, taken.getsockname()[1]).startswith(f"process {os.getpid()} ")


def test_a_server_of_grpc_is_seen():
    async def never(request, context):
        yield

    with serving_in_thread(never) as (address, service):
        told = port_owner("127.0.0.1", int(address.rpartition(":")[2]))

    assert told.startswith(f"process {os.getpid()} ")
    assert service.num_statuses == 0, "it need not be asked"


def test_a_process_of_up_is_told_with_what_ends_it(child, monkeypatch):
    head = LocalHead(pid=os.getpid(), ray_address="127.0.0.1:1", token_path="/nowhere")
    monkeypatch.setattr(module, "find_head", lambda: head)

    assert port_owner("127.0.0.1", child[1]) == (
        "the cluster of `pagewire up`, which `pagewire down` ends"
    )


def test_doctor_finds_no_fault_in_a_port_of_an_own_cluster_whatever_it_speaks(child, monkeypatch):
    monkeypatch.setattr(module, "ROUTER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(doctor, "ROUTER_TIMEOUT_S", 0.1)
    config = ClusterConfig(port=child[1])
    with_http = ClusterConfig(port=0, http_port=child[1])
    others = doctor.check_port(config), doctor.check_http_port(with_http)
    head = LocalHead(pid=os.getpid(), ray_address="127.0.0.1:1", token_path="/nowhere")
    monkeypatch.setattr(module, "find_head", lambda: head)
    own = doctor.check_port(config), doctor.check_http_port(with_http)

    assert [each.level for each in others] == ["fail", "fail"]
    assert [each.level for each in own] == ["ok", "ok"]


def test_a_process_of_serve_is_told_with_what_ends_it(child):
    other = ServedCluster(pid=child[0] + 1, address="h:1", token="", tls=None)
    served = ServedCluster(pid=os.getpid(), address="127.0.0.1:50051", token="", tls=None)
    with published(other), published(served):
        told = port_owner("127.0.0.1", child[1])

    which = f"process {os.getpid()}, router at 127.0.0.1:50051"
    assert told == f"`pagewire serve` ({which}), which Ctrl-C ends"


def refuses(*_):
    raise psutil.AccessDenied


@pytest.mark.parametrize("look", [lambda *_: None, refuses])
def test_of_a_process_that_is_not_shown_the_port_is_asked(monkeypatch, look):
    async def never(request, context):
        yield

    monkeypatch.setattr(module, "_listener", look)
    with serving_in_thread(never) as (address, _):
        told = port_owner("127.0.0.1", int(address.rpartition(":")[2]))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(module, "ROUTER_TIMEOUT_S", 0.2)
        unknown = port_owner("127.0.0.1", taken.getsockname()[1])

    assert (told, unknown) == ("a Pagewire router of another user or container", "")


def test_a_port_that_only_its_owner_knows_is_in_use_all_the_same(monkeypatch):
    monkeypatch.setattr("cluster.devices.port_owner", lambda *_: "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PlacementError, match=re.escape(f"port {port} on 127.0.0.1 is in use;")):
            check_port_free("127.0.0.1", port)
