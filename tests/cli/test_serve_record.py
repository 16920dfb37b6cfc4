"""What `pagewire serve` leaves for clients of this host while it serves; its cluster is a fake."""

import os
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli import foreground, serving_commands
from cluster import attach
from cluster.demo_model import demo_model_dir
from cluster.served import ServedCluster, served_clusters
from pagewire import Tls
from tests.support.certificates import Authority
from tests.support.command_line import run_main


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """The clusters that are found while `serve` serves: at each look at its Ray."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    seen = []

    def check():
        seen.append(served_clusters())
        os.kill(os.getpid(), signal.SIGTERM)

    cluster = SimpleNamespace(
        address="127.0.0.1:5",
        device="cpu",
        context_tokens=2**31,
        http_address="",
        local_ray=SimpleNamespace(check=check),
    )

    @contextmanager
    def running_cluster(*_, **__):
        yield cluster

    monkeypatch.setattr(foreground, "running_cluster", running_cluster)
    monkeypatch.setattr(attach, "router_token", lambda: "its-own")
    for name in ("prepare_ray", "configure_logging"):
        monkeypatch.setattr(serving_commands, name, lambda *_, **__: None)
    monkeypatch.setattr(serving_commands, "check_start", lambda *_: "cpu")
    monkeypatch.setattr(serving_commands, "RAY_PERIOD_S", 0.01)
    return seen


def test_serve_is_found_with_its_certificate_while_it_serves(seen, monkeypatch, tmp_path):
    certificate, key = Authority(tmp_path).pair("127.0.0.1")
    monkeypatch.chdir(tmp_path)
    files = ("--front-tls-certificate-file", os.path.relpath(certificate))
    files += ("--front-tls-key-file", os.path.relpath(key))

    result = run_main("serve", "--model", str(demo_model_dir()), *files)

    tls = Tls(authority_file=str(Path(certificate).absolute()), server_name="127.0.0.1")
    expected = ServedCluster(pid=os.getpid(), address="127.0.0.1:5", token="its-own", tls=tls)
    assert (result.returncode, seen) == (0, [[expected]]), result.stderr
    assert served_clusters() == []


def test_on_a_ray_of_somebody_else_it_is_found_there(seen):
    result = run_main("serve", "--model", str(demo_model_dir()), "--ray-address", "10.0.0.7:6379")

    assert (result.returncode, seen) == (0, [[]]), result.stderr
