"""The record of a cluster of `pagewire serve`, for clients of the same user."""

import os
import subprocess
import sys

import pytest

from cluster import attach
from cluster.errors import NotRunning
from cluster.local_head import head_log
from cluster.private_folder import private_folder
from cluster.served import ServedCluster, published, served_clusters
from pagewire import Tls

PLAIN = ServedCluster(pid=17, address="127.0.0.1:50051", token="", tls=None)
CLOSED = ServedCluster(
    pid=18,
    address="127.0.0.1:50061",
    token="a-token",
    tls=Tls(authority_file="/etc/tls/ca.pem", server_name="router.example.org"),
)


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def test_clusters_are_found_while_they_are_published_and_only_by_their_user():
    assert served_clusters() == []
    with published(PLAIN):
        assert served_clusters() == [PLAIN]
        with published(CLOSED):
            assert sorted(served_clusters(), key=lambda each: each.pid) == [PLAIN, CLOSED]
            modes = {path.stat().st_mode & 0o777 for path in private_folder().iterdir()}
            assert modes == {0o600}
        assert served_clusters() == [PLAIN]

    assert list(private_folder().iterdir()) == []
    assert "a-token" not in repr(CLOSED)


def test_what_a_killed_serve_has_left_does_not_count_and_goes_with_the_next_one():
    code = "import os; from tests.cluster.test_served import *\nwith published(PLAIN): os._exit(9)"
    subprocess.run([sys.executable, "-c", code], check=False, env=os.environ, timeout=60)
    assert len(list(private_folder().iterdir())) == 1

    assert served_clusters() == []
    with published(CLOSED):
        assert len(list(private_folder().iterdir())) == 1


def test_commands_for_a_cluster_of_up_say_how_its_ray_has_ended():
    head_log().write_text("error: Ray's raylet on this host has ended\n")

    with pytest.raises(NotRunning) as refused:
        attach.attached("").__enter__()
    assert "on this host; the Ray of the last one: it ended at 20" in str(refused.value)
    assert str(refused.value).endswith(" UTC: Ray's raylet on this host has ended")


def test_commands_for_a_cluster_of_up_say_that_serve_runs_one():
    told = "^no cluster that `pagewire up` started runs on this host"
    with (
        pytest.raises(NotRunning, match=f"{told}; give --ray-address for one"),
        attach.attached(""),
    ):
        pass
    with (
        published(PLAIN),
        published(CLOSED),
        pytest.raises(NotRunning) as refused,
        attach.attached(""),
    ):
        pass
    assert "; `pagewire serve` runs one at 127.0.0.1:500" in str(refused.value)
    assert " and 127.0.0.1:500" in str(refused.value)
    assert str(refused.value).endswith("start one that can be changed with `pagewire up`")
