"""A full disk is told with its folder, before a cluster starts, and before it changes."""

import tempfile
from pathlib import Path

import pytest

from cluster.disk_room import ROOM_MIB, check_room
from cluster.errors import StartError
from tests.cluster.lasting_cluster import Host
from tests.support.disk import files_limited

FULL = "found a full disk (File too large); allowed: one with room for 16 MiB of sockets and logs; "


def test_a_folder_with_room_stays_as_it_is(tmp_path: Path) -> None:
    check_room(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_room_is_named_and_stays_as_it_is(tmp_path: Path) -> None:
    with files_limited((ROOM_MIB - 1) * 2**20), pytest.raises(StartError) as refused:
        check_room(tmp_path)

    assert str(refused.value).startswith(f"{tmp_path}: {FULL}free some space on its disk, or ")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_lack_of_room_is_left_to_whoever_writes(tmp_path: Path) -> None:
    check_room(tmp_path / "nowhere")


@pytest.mark.parametrize("command", ["up", "serve"])
def test_no_cluster_starts_on_a_full_disk(tmp_path: Path, command: str) -> None:
    host = Host(tmp_path)

    with files_limited(2**20):
        code, _, errors = host.run(command, "--config", str(host.config))

    assert (code, errors[: len(error := f"error: {host.private}: {FULL}")]) == (1, error)
    assert list(host.private.iterdir()) == []


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ray")
def test_a_cluster_on_a_full_disk_stays_as_it_is() -> None:
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder:  # sockets: short paths
        host = Host(Path(folder))
        try:
            code, _, errors = host.run("up", "--config", str(host.config))
            assert code == 0, errors
            for command in (("restart",), ("scale", "--decode", "2")):
                with files_limited(2**20):
                    code, output, errors = host.run(*command)

                [logs] = (host.private / "ray").glob("session_2*/logs")
                assert (code, output) == (1, "")
                assert errors.startswith(f"error: {logs}: {FULL}"), errors
        finally:
            code, output, errors = host.run("down", "--grace-s", "0")
        assert (code, output.splitlines()[-1]) == (0, "stopped"), errors
