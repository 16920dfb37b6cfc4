"""A signal ends serve and demo at any moment of their start: one line, no traceback, no process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.demo_model import demo_model_dir
from cluster.errors import Interrupted
from cluster.stop_signals import StopSignals

MARK = "PAGEWIRE_TEST_MARK"  # inherited by all processes of a cluster, workers included


def processes_with(mark):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
        except OSError:  # it ended, or is not ours
            continue
    return found


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("number", "after_s"),
    [(signal.SIGINT, 1.0), (signal.SIGTERM, 2.0), (signal.SIGINT, 4.0), (signal.SIGTERM, 4.0)],
    ids=str,
)
def test_a_signal_during_the_start_leaves_nothing(tmp_path, number, after_s):
    mark = f"{MARK}={tmp_path}"
    command = [sys.executable, "-m", "cluster.cli", "serve", "--model", str(demo_model_dir())]
    # More workers than can start within the longest delay.
    command += ["--port", "0", "--device", "cpu", "--prefill", "4", "--decode", "4"]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: str(tmp_path)},
    )
    time.sleep(after_s)
    assert processes_with(mark)
    server.send_signal(number)
    output, errors = server.communicate(timeout=30)

    assert server.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert f"stopped by {number.name} before it was done" in errors.splitlines()[-1]
    assert "ready" not in output
    until = time.monotonic() + 5
    while (left := processes_with(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def test_a_signal_is_noted_and_raised_where_somebody_looks():
    with StopSignals() as signals:
        signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stopped.wait(1)
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            signals.check()

    assert caught.value.exit_code == 143


def test_a_signal_cancels_what_is_running():
    ends = []

    async def work():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(10)
        finally:
            ends.append("cleaned up")

    with StopSignals() as signals, pytest.raises(Interrupted, match="SIGINT"):
        signals.run(work())

    assert ends == ["cleaned up"]


def test_handlers_are_given_back():
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    with StopSignals():
        pass

    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
