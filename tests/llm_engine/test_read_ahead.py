import ctypes
import mmap
import os
import threading
import time

import pytest

from llm_engine import read_ahead as module
from llm_engine.read_ahead import reading_ahead

NUM_BYTES = 8 * 2**20
MUCH = 2**40


def num_cached(path):
    """Return how many pages of a file the kernel has in its cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        num_pages = -(-len(mapped) // mmap.PAGESIZE)
        in_core = (ctypes.c_ubyte * num_pages)()
        begin = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.byref(begin), ctypes.c_size_t(len(mapped)), in_core) == 0
        del begin
        return sum(each & 1 for each in in_core)


@pytest.fixture
def uncached(tmp_path):
    """A file that the next reader would have to read from the disk."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(NUM_BYTES))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if num_cached(path):
        pytest.skip("this file system keeps files in memory")
    return path


def test_a_file_is_in_the_kernels_cache_before_anybody_reads_it(uncached, tmp_path):
    with reading_ahead([tmp_path / "absent", uncached], MUCH):
        deadline = time.monotonic() + 30
        while num_cached(uncached) * mmap.PAGESIZE < NUM_BYTES:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def asked(monkeypatch):
    """Ranges that the kernel was asked for, as (begin, number of bytes)."""
    asked = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, begin, size, advice: asked.append((begin, size))
    )
    monkeypatch.setattr(module, "PIECE_BYTES", 40)
    return asked


def test_no_more_is_read_than_memory_holds(asked, tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(100))

    module._read_ahead([tmp_path / "a", tmp_path / "b"], 150, threading.Event())

    assert asked == [(0, 40), (40, 40), (80, 20), (0, 40), (40, 10)]


def test_a_start_that_has_ended_reads_no_further(asked, tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    has_ended = threading.Event()
    has_ended.set()

    module._read_ahead([tmp_path / "a"], MUCH, has_ended)

    assert asked == []
