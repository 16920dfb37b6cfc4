"""Folders of the cache are whole, whoever writes them, and whatever happened to them before."""

import os
import pwd
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_engine.cached_folder import DIGESTS, cached_folder, user_cache_dir
from llm_engine.errors import CacheUnusable


class Writer:
    """Writes two files and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, folder: Path) -> None:
        self.times += 1
        (folder / "a").write_text("first")
        (folder / "b").write_text("second")


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != DIGESTS}


WHOLE = {"a": "first", "b": "second"}


def test_a_folder_is_written_once(tmp_path: Path) -> None:
    write = Writer()

    folders = {cached_folder("it", write, cache_dir=tmp_path / "deep" / "cache") for _ in range(3)}

    assert write.times == 1
    assert [contents(folder) for folder in folders] == [WHOLE]
    assert os.listdir(tmp_path / "deep" / "cache") == ["it"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "a").write_text("fir"),
        lambda folder: (folder / "b").unlink(),
        lambda folder: (folder / DIGESTS).unlink(),
        lambda folder: (folder / DIGESTS).write_text("{"),
        lambda folder: (folder / DIGESTS).write_text("[]"),
    ],
)
def test_a_damaged_folder_is_written_anew(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write = Writer()
    folder = cached_folder("it", write, cache_dir=tmp_path)
    damage(folder)

    assert cached_folder("it", write, cache_dir=tmp_path) == folder
    assert write.times == 2
    assert contents(folder) == WHOLE
    assert os.listdir(tmp_path) == ["it"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        cached_folder("it", write, cache_dir=tmp_path)

    assert os.listdir(tmp_path) == []


def test_writers_at_once_agree(tmp_path: Path) -> None:
    """All have begun to write before the first is done, and one before that has left half."""
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "a").write_text("half")
    together = threading.Barrier(4, timeout=20)
    found: list[dict[str, str]] = []

    def write(folder: Path) -> None:
        Writer()(folder)
        together.wait()

    def take() -> None:
        found.append(contents(cached_folder("it", write, cache_dir=tmp_path)))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [WHOLE] * 4
    assert os.listdir(tmp_path) == ["it"]


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CacheUnusable, match=r"file/it: cannot be written: .* PAGEWIRE_CACHE_DIR"):
        cached_folder("it", Writer(), cache_dir=tmp_path / "file")


def test_the_users_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEWIRE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    found = [user_cache_dir()]
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    found.append(user_cache_dir())
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", "/scratch/pagewire")
    found.append(user_cache_dir())

    expected = [Path.home() / ".cache/pagewire", "/var/cache/me/pagewire", "/scratch/pagewire"]
    assert found == [Path(each) for each in expected]


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("PAGEWIRE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)

    with pytest.raises(CacheUnusable, match="set PAGEWIRE_CACHE_DIR"):
        cached_folder("it", Writer())
