"""A signal ends serve and demo at any moment of their start: one line, no traceback, no process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from cluster.demo_model import demo_model_dir
from cluster.errors import Interrupted
from cluster.stop_signals import StopSignals
from tests.support.processes import kill_session, processes_of_session, until


@contextmanager
def serving(*options):
    """Start serve with the embedded model in a session of its own."""
    command = [sys.executable, "-m", "cluster.cli", "serve", "--model", str(demo_model_dir())]
    server = subprocess.Popen(
        [*command, "--port", "0", "--device", "cpu", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with server:
        try:
            yield server
        finally:
            kill_session(server.pid)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("number", "after_s"),
    [(signal.SIGINT, 1.0), (signal.SIGTERM, 2.0), (signal.SIGINT, 4.0), (signal.SIGTERM, 4.0)],
    ids=str,
)
def test_a_signal_during_the_start_leaves_nothing(number, after_s):
    # More workers than can start within the longest delay.
    with serving("--prefill", "4", "--decode", "4") as server:
        time.sleep(after_s)
        assert processes_of_session(server.pid)
        server.send_signal(number)
        output, errors = server.communicate(timeout=30)
        left = processes_of_session(server.pid)

    assert server.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert f"stopped by {number.name} before it was done" in errors.splitlines()[-1]
    assert "ready" not in output
    assert left == {}


@pytest.mark.cluster
@pytest.mark.parametrize("is_ready", [False, True], ids=["starting", "ready"])
def test_a_second_signal_ends_it_at_once_and_leaves_nothing(is_ready):
    num_workers = "1" if is_ready else "4"
    with serving("--prefill", num_workers, "--decode", num_workers) as server:
        if is_ready:
            assert any(line.startswith("ready") for line in server.stdout)
        else:
            until(lambda: "ray::DashboardAgent" in str(processes_of_session(server.pid)))
        server.send_signal(signal.SIGINT)
        time.sleep(0.1)
        server.send_signal(signal.SIGINT)
        sent_at = time.monotonic()
        server.communicate(timeout=30)
        took_s = time.monotonic() - sent_at
        left = processes_of_session(server.pid)

    assert server.returncode == 130
    assert took_s < 5
    assert left == {}


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
