import os
import socket
import tempfile
from pathlib import Path

import pytest

from cluster.ray_sessions import remove_ended_sessions

NO_PROCESS = 2**22 + 1  # more than any process id


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as path:  # sockets: short paths
        yield Path(path)


def session(folder, day, pid, *, listener=None):
    path = folder / f"session_2026-01-0{day}_12-00-00_000000_{pid}"
    (path / "sockets").mkdir(parents=True)
    (path / "logs").mkdir()
    (path / "logs" / "gcs_server.out").write_text("a line")
    if listener:
        listener.bind(str(path / "sockets" / "raylet"))
        listener.listen()
    return path


def test_all_sessions_but_the_last_one_go_when_nobody_uses_them(folder):
    *_, last = [session(folder, day, NO_PROCESS) for day in (1, 2, 3)]
    latest = folder / "session_latest"
    latest.symlink_to(last)

    remove_ended_sessions(folder)

    assert set(folder.iterdir()) == {last, latest}
    assert (latest / "logs" / "gcs_server.out").read_text() == "a line"


def test_a_session_stays_while_its_starter_lives_or_ray_listens_there(folder):
    with socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as raylet:
        killed = session(folder, 1, NO_PROCESS, listener=gone)
        gone.close()  # its file stays, as after SIGKILL
        starts = session(folder, 2, os.getpid())
        left = session(folder, 3, NO_PROCESS, listener=raylet)
        last = session(folder, 4, NO_PROCESS)
        of_today = session(folder, 5, os.getpid())

        remove_ended_sessions(folder)

        assert not killed.exists()
        assert set(folder.iterdir()) == {starts, left, last, of_today}


def test_a_session_goes_whose_starter_had_the_id_of_a_younger_process(folder):
    # As in a container that is started again, whose first process is 1 each time.
    old = session(folder, 1, os.getpid())
    os.utime(old, (0, 0))
    last = session(folder, 2, NO_PROCESS)

    remove_ended_sessions(folder)

    assert set(folder.iterdir()) == {last}


def test_a_link_to_a_session_that_is_gone_goes_so_that_ray_makes_a_new_one(folder):
    latest = folder / "session_latest"
    latest.symlink_to(folder / "session_2026-01-01_12-00-00_000000_1")

    remove_ended_sessions(folder)

    assert not latest.is_symlink()


def test_where_no_ray_has_run_there_is_nothing_to_remove(tmp_path):
    remove_ended_sessions(tmp_path / "ray")
