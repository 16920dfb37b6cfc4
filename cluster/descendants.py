"""Ends all descendants of this process.

Ray's processes end with their parent, but only those that Ray started here: processes of a killed
raylet live on, some of them forever.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
KILL_TIMEOUT_S = 2.0
LOOK_PERIOD_S = 0.01
REAP_PERIOD_S = 5.0


@contextmanager
def no_descendant_left() -> Iterator[None]:
    """Stay the ancestor of all descendants while entered, and kill the remaining ones at exit.

    Orphans that end meanwhile are reaped.
    """
    done = threading.Event()
    thread = threading.Thread(target=_reap_orphans, args=(done,), name="reap-orphans", daemon=True)
    _adopt_orphans(is_on=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        kill_descendants()
        _adopt_orphans(is_on=False)


def _reap_orphans(done: threading.Event) -> None:
    """Reap children that were further below when they were last seen, and have ended.

    Children that this process started itself are left to those who wait for their exit codes.
    """
    orphans: set[psutil.Process] = set()
    while not done.wait(REAP_PERIOD_S):
        with suppress(psutil.Error):
            below = set(psutil.Process().children(recursive=True))
            children = set(psutil.Process().children())
            orphans = (orphans & below) | (below - children)
            for each in orphans & children:
                with suppress(ChildProcessError):
                    os.waitpid(each.pid, os.WNOHANG)


def kill_descendants() -> None:
    """Kill all descendants, and those that they start meanwhile; return when none runs.

    It takes no lock, so that a signal's handler may call it. It waits no longer than KILL_TIMEOUT_S
    for the kernel.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (running := _running_descendants()) and time.monotonic() < deadline:
        for each in running:
            with suppress(psutil.Error):
                each.kill()
        time.sleep(LOOK_PERIOD_S)


@contextmanager
def killing_those_asked(may_begin: Callable[[], bool]) -> Iterator[None]:
    """While entered, kill each child that blocks SIGTERM and got one, with all below it.

    Args:
        may_begin: Returns False as long as the children are still needed.
    """
    done = threading.Event()

    def kill() -> None:
        while not done.wait(LOOK_PERIOD_S):
            for child in psutil.Process().children() if may_begin() else ():
                with suppress(psutil.Error):
                    if _is_asked(child):
                        for each in (child, *child.children(recursive=True)):
                            each.kill()

    thread = threading.Thread(target=kill, name="kill-asked", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_asked(process: psutil.Process) -> bool:
    """Return whether a SIGTERM waits for a process, as far as this host shows it."""
    with suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        pending = status.partition("\nShdPnd:")[2].split(maxsplit=1)[0]
        return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _running_descendants() -> list[psutil.Process]:
    running = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE:
                running.append(each)
    return running


def _adopt_orphans(*, is_on: bool) -> None:
    """Become the parent of each descendant whose own parent dies, so that it stays one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on))
