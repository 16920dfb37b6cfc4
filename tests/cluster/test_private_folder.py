import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import StartError
from cluster.private_folder import RayToken, private_folder, remove_left_behind
from tests.support.disk import files_limited


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"RAY_TMPDIR": str(tmp_path), "RAY_AUTH_TOKEN": "other"})
    return os.environ


def test_the_folder_is_its_owners_alone_and_stays(tmp_path):
    folder = private_folder()

    assert folder == tmp_path / f"pagewire-{os.geteuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder() == folder


@pytest.mark.parametrize("parent", ["there", "./there", "/tmp/là"])
def test_a_path_that_ray_does_not_take_is_refused_by_the_name_of_its_variable(monkeypatch, parent):
    monkeypatch.setitem(os.environ, "RAY_TMPDIR", parent)

    told = f"RAY_TMPDIR: found '{parent}'; allowed: an absolute path in ASCII"
    with pytest.raises(StartError, match=f"^{re.escape(told)}$"):
        private_folder()


def others_may_enter(path):
    path.mkdir()
    path.chmod(0o750)


def leads_elsewhere(path):
    target = path.parent / "elsewhere"
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def is_a_file(path):
    path.write_text("")


@pytest.mark.parametrize("make", [others_may_enter, leads_elsewhere, is_a_file])
def test_a_folder_that_others_could_use_is_refused(tmp_path, make):
    path = tmp_path / f"pagewire-{os.geteuid()}"
    make(path)

    with pytest.raises(StartError, match=str(path)):
        private_folder()


def test_a_folder_of_somebody_else_is_refused(monkeypatch):
    folder = private_folder()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    folder.rename(folder.with_name("pagewire-12345"))

    with pytest.raises(StartError, match="only user 12345 can enter"):
        private_folder()


def test_each_token_is_new_and_lies_in_a_file_that_ray_finds(environment):
    folder = private_folder()
    tokens = [RayToken(folder)]
    [path] = folder.iterdir()
    first = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(path)
    assert "RAY_AUTH_TOKEN" not in environment, "that of another cluster"

    tokens.append(RayToken(folder))

    assert len(list(folder.iterdir())) == 2, "the first is still in use"
    assert Path(environment["RAY_AUTH_TOKEN_PATH"]).read_text() != first
    for token in tokens:
        token.remove()
        token.remove()
    assert list(folder.iterdir()) == []
    assert "RAY_AUTH_TOKEN_PATH" not in environment


def test_the_token_of_a_process_that_was_killed_goes_with_the_next_start(environment):
    folder = private_folder()
    code = (
        "import os; from cluster.private_folder import *; RayToken(private_folder()); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], env=dict(environment) | {"PYTHONPATH": "."})
    [left_behind] = folder.glob("token-*")

    token = RayToken(folder)

    assert not left_behind.exists()
    token.remove()


def test_what_was_written_when_its_process_was_killed_goes_with_the_next_start():
    folder = private_folder()
    left_behind, written = folder / "new-1", folder / "new-2"
    left_behind.touch()
    with written.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        token = RayToken(folder)

    assert not left_behind.exists()
    assert written.exists(), "another process still writes it"
    token.remove()


def test_a_new_file_that_is_taken_for_one_left_behind_is_written_again(environment, monkeypatch):
    folder = private_folder()
    lock = fcntl.flock

    def lock_late(file, how):
        if how == fcntl.LOCK_EX:  # meanwhile another start removes what it takes for abandoned
            monkeypatch.setattr(fcntl, "flock", lock)
            remove_left_behind(folder, "new")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    token = RayToken(folder)

    [path] = folder.iterdir()
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(path)
    assert len(path.read_text()) == 64
    token.remove()


def test_what_cannot_be_written_names_the_folder_and_leaves_nothing():
    folder = private_folder()

    with (
        files_limited(16),
        pytest.raises(StartError, match=rf"^{folder} cannot be written: File too large; free "),
    ):
        RayToken(folder)

    assert list(folder.iterdir()) == []
