import os
import subprocess
import sys
import threading

import pytest

from cluster.errors import StartError
from cluster.local_head import (
    LocalHead,
    find_head,
    head_log,
    holding_head_file,
    how_head_ended,
    remove_head_left_behind,
)
from cluster.private_folder import RayToken, is_locked, private_folder

HEAD = LocalHead(pid=17, ray_address="127.0.0.1:6379", token_path="/tmp/token-1")


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def find_elsewhere():
    """Return what another process finds: a lock never stands in its holder's own way."""
    code = "from cluster.local_head import find_head; print(find_head())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_head_is_found_from_when_it_runs_until_it_ends_and_only_by_its_user():
    assert find_head() is None
    with holding_head_file() as file:
        assert find_elsewhere() == "None", "Ray does not run yet"
        file.publish(HEAD)
        assert find_elsewhere() == str(HEAD)
        [path] = private_folder().iterdir()
        assert path.stat().st_mode & 0o777 == 0o600

    assert find_head() is None
    assert not path.exists()


def test_a_second_head_is_refused():
    with holding_head_file() as file:
        file.publish(HEAD)
        with (
            pytest.raises(StartError, match="another `pagewire up` has started"),
            holding_head_file(),
        ):
            pass
        assert find_elsewhere() == str(HEAD), "the first one is still found"


def test_a_look_for_a_head_does_not_keep_one_from_starting():
    path = private_folder() / "head"
    path.touch()  # of a killed one
    looking = path.open()
    assert not is_locked(looking)
    done = threading.Timer(0.1, looking.close)  # a look's own lock ends with its file
    done.start()

    with holding_head_file() as file:
        file.publish(HEAD)
        assert find_elsewhere() == str(HEAD)
    done.join()


def test_what_a_killed_head_has_left_does_not_count():
    path = private_folder() / "head"
    code = (
        "import os; from tests.cluster.test_local_head import *\n"
        "with holding_head_file() as file: file.publish(HEAD); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, env=os.environ, timeout=60)
    assert path.read_text(), "it was killed after it had published itself"

    assert find_head() is None
    assert how_head_ended() == "process 17, which ran it, was killed"
    remove_head_left_behind()
    assert not path.exists()
    remove_head_left_behind()
    with holding_head_file() as file:
        assert find_elsewhere() == "None"
        file.publish(HEAD)
        assert find_elsewhere() == str(HEAD)


def test_of_a_head_that_runs_nothing_is_removed():
    token = RayToken(private_folder())
    with holding_head_file() as file:
        file.publish(HEAD)
        remove_head_left_behind()
        assert find_head() == HEAD
        assert len(list(private_folder().iterdir())) == 2, "its file and its token"

    token.remove()


def test_a_head_that_was_killed_leaves_no_token():
    code = (
        "import os; from cluster.private_folder import *\n"
        "token = RayToken(private_folder()); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, env=os.environ, timeout=60)
    assert list(private_folder().iterdir())

    remove_head_left_behind()

    assert not list(private_folder().iterdir())


def test_a_head_that_ended_by_itself_has_said_when_and_why():
    assert how_head_ended() == ""
    with holding_head_file() as file:
        head_log().write_text("(raylet) it has missed too many heartbeats\n")
        file.publish(HEAD)
        assert how_head_ended() == ""
    assert how_head_ended() == "", "`pagewire down` ended it"

    with head_log().open("a") as log:
        log.write("error: Ray's raylet on this host has ended\nits exit took a while\n")
    os.utime(head_log(), (1.8e9, 1.8e9))

    told = "it ended at 2027-01-15 08:00 UTC: Ray's raylet on this host has ended"
    assert how_head_ended() == told
    with holding_head_file() as file:
        file.publish(HEAD)
        assert how_head_ended() == "", "the next one runs"
