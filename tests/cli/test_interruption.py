"""A signal ends serve and demo at any moment of their start: one line, no traceback, no process."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, nullcontext, suppress

import pytest

from cli import foreground
from cli.stop_signals import STOP_SIGNALS, StopSignals
from cluster.config import ClusterConfig
from cluster.demo_model import demo_model_dir
from cluster.errors import Interrupted, StartError
from pagewire import Client
from tests.support.processes import WAIT_S, kill_session, processes_of_session
from tests.support.rarely import rarely
from tests.support.waiting import wait_until
from tests.support.wall_clock import assert_within

in_turn = pytest.mark.xdist_group("ray")


@contextmanager
def serving(*options, **streams):
    """Start serve with the embedded model in a session of its own."""
    command = [sys.executable, "-m", "cli", "serve", "--model", str(demo_model_dir())]
    server = subprocess.Popen(
        [*command, "--port", "0", "--http-port", "0", "--device", "cpu", *options],
        text=True,
        start_new_session=True,
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams),
    )
    with server:
        try:
            yield server
        finally:
            kill_session(server.pid)


# Sends itself SIGINT at the import of one module, as Ctrl-C at that moment does.
IMPORT = """
import importlib.abc, os, signal, sys
from {entry} import main

class Interrupter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop()
sys.meta_path.insert(0, Interrupter())
main()
"""


@pytest.mark.parametrize(
    ("entry", "command", "module"),
    [
        ("cli.__main__", "doctor", "typer"),
        ("cli.__main__", "doctor", "torch"),
        ("cli.__main__", "serve", "cli.serving_commands"),
        ("cli.__main__", "status", "pagewire.cli.status"),
        ("cli.demo_model", "", "tokenizers"),  # of `make serve`
        *rarely(
            ("cli.__main__", "doctor", "pagewire.cli.client_commands"),
            ("cli.__main__", "doctor", "yaml"),
        ),
    ],
)
def test_an_interrupt_while_modules_are_imported_ends_it_in_silence(entry, command, module):
    program = IMPORT.format(entry=entry)
    result = subprocess.run(
        [sys.executable, "-c", program, command, module], capture_output=True, text=True, timeout=60
    )

    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@in_turn
@pytest.mark.thorough  # parts of it are shown without Ray, below and by test_descendants
@pytest.mark.parametrize(
    ("number", "line", "after_s"),
    [
        (signal.SIGTERM, "starting", 0.0),
        (signal.SIGTERM, "starting", 1.0),
        (signal.SIGINT, "Ray runs", 0.0),
    ],
    ids=str,
)
def test_a_signal_during_the_start_leaves_nothing(number, line, after_s):
    with serving("--prefill", "0", "--decode", "1") as server:
        assert any(each.startswith(line) for each in server.stdout)
        time.sleep(after_s)
        server.send_signal(number)
        output, errors = server.communicate(timeout=30)
        left = processes_of_session(server.pid)

    assert server.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert f"stopped by {number.name} before it was done" in errors.splitlines()[-1]
    assert "ready:" not in output
    if line == "Ray runs":  # before, it may end too soon for a word
        assert "stopping what has started" in output
    assert left == {}


def test_a_start_that_fails_since_a_signal_ended_ray_was_interrupted(monkeypatch):
    with StopSignals() as signals:

        def start(*_, **__):
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.stopped.wait(10)
            raise StartError("cannot start Ray on this host: its processes have ended")

        monkeypatch.setattr(foreground, "start_cluster", start)
        monkeypatch.setattr(foreground, "no_descendant_left", nullcontext)
        running = foreground.running_cluster(
            ClusterConfig(), "cpu", signals, shows_worker_logs=False, say=print
        )

        with pytest.raises(Interrupted, match="SIGTERM"), running:
            pass


@pytest.mark.thorough
@in_turn
def test_a_start_that_takes_too_long_is_explained_and_leaves_nothing():
    with serving("--prefill", "0", "--decode", "1", "--start-timeout-s", "1") as server:
        output, errors = server.communicate(timeout=60)
        left = processes_of_session(server.pid)

    assert server.returncode == 1
    assert re.search(r"^error: .*decode-0 not ready after 1 s;.* --start-timeout-s$", errors, re.M)
    assert "Traceback" not in errors
    assert "ready:" not in output
    assert left == {}


@in_turn
@pytest.mark.thorough  # test_descendants shows it without Ray
@pytest.mark.parametrize("is_ready", [False, True], ids=["starting", "ready"])
def test_a_second_signal_ends_it_at_once_and_leaves_nothing(is_ready):
    with serving("--prefill", "0", "--decode", "1") as server:
        if is_ready:
            assert any(line.startswith("ready") for line in server.stdout)
        else:
            wait_until(lambda: "ray::DashboardAgent" in str(processes_of_session(server.pid)))
        server.send_signal(signal.SIGINT)
        time.sleep(0.1)
        sent_at = time.monotonic()
        # Again, since two that come while it computes are noted as one.
        while server.poll() is None and time.monotonic() < sent_at + WAIT_S:
            server.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                server.wait(0.5)
        server.communicate(timeout=WAIT_S)
        took_s = time.monotonic() - sent_at
        left = processes_of_session(server.pid)

    assert server.returncode == 130
    assert_within(took_s, 5)
    assert left == {}


@pytest.mark.thorough
@in_turn
def test_a_signal_to_all_its_processes_ends_it_soon_and_leaves_nothing():
    """As `timeout` and service managers send it: Ray's processes end of it, too."""
    with serving("--prefill", "0", "--decode", "1") as server:
        assert any(line.startswith("ready") for line in server.stdout)
        sent_at = time.monotonic()
        os.killpg(server.pid, signal.SIGTERM)
        output, errors = server.communicate(timeout=100)
        took_s = time.monotonic() - sent_at
        left = processes_of_session(server.pid)

    assert server.returncode == 0, errors
    assert output.splitlines()[-1] == "stopped"
    assert "Traceback" not in errors
    assert_within(took_s, 30)  # Ray's own processes take ten seconds to end of it
    assert left == {}


@pytest.mark.thorough
@in_turn
def test_a_signal_while_a_worker_restarts_is_no_failure():
    with serving("--prefill", "0", "--decode", "2") as server:
        assert any(line.startswith("ready") for line in server.stdout)
        processes = processes_of_session(server.pid).items()
        worker = next(pid for pid, name in processes if name.startswith("ray::DecodeActor"))
        os.kill(worker, signal.SIGKILL)
        server.send_signal(signal.SIGINT)
        output, errors = server.communicate(timeout=60)

    assert server.returncode == 0, errors
    assert output.splitlines()[-1] == "stopped"
    assert "stop_incomplete" not in errors


@pytest.mark.thorough
@in_turn
def test_a_terminal_that_closes_ends_it_after_running_requests():
    near, far = pty.openpty()

    def control():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        fcntl.ioctl(far, termios.TIOCSCTTY, 0)

    streams = {"stdin": far, "stdout": far, "stderr": far, "preexec_fn": control}
    with serving("--prefill", "0", "--decode", "1", **streams) as server:
        os.close(far)
        output = ""
        while not (found := re.search(r"ready: .* on (\S+) \(cpu\)", output)):
            output += os.read(near, 4096).decode()
        with (
            Client(found[1]) as client,
            client.stream("x", max_tokens=200, ignore_eos=True) as stream,
        ):
            next(stream)
            os.close(near)
            os.killpg(server.pid, signal.SIGHUP)  # as a shell does to its jobs
            for _ in stream:
                pass

        assert stream.completion.usage.completion_tokens == 200
        assert server.wait(30) == 0
        left = processes_of_session(server.pid)

    assert left == {}


def test_a_signal_is_noted_and_raised_where_somebody_looks():
    with StopSignals() as signals:
        signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stopped.wait(1)
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            signals.check()

    assert caught.value.exit_code == 143


# Sends itself SIGINT before the n-th line that Python executes in a wait.
WAIT = """
import os, signal, sys

def interrupt(frame, event, _):
    global lines
    if event == "line":
        lines -= 1
        if lines == 0:
            os.kill(os.getpid(), signal.SIGINT)
    return interrupt

for n in range(1, 30):
    lines = n
    stopped = make()
    sys.settrace(interrupt)
    stopped.wait(0.001)
    sys.settrace(None)
    assert stopped.wait(10 if lines <= 0 else 0) == (lines <= 0)
print(lines)
"""
MAKE = {
    "of a server's command": "from cli.stop_signals import StopSignals\n"
    "make = lambda: StopSignals().__enter__().stopped",
    "of a client's command": "from pagewire.cli.client_commands import _stop_event as make",
}


@pytest.mark.parametrize("name", MAKE)
def test_a_signal_may_come_at_any_moment_of_a_wait_for_it(name):
    code = MAKE[name] + WAIT
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )

    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0, "the last signal came after the wait: none before was missed"


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


def test_what_runs_beside_a_wait_for_a_signal_has_ended_with_it(caplog):
    ends = []

    async def last(then):
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.05)
            ends.append(then)

    async def crash():
        os.kill(os.getpid(), signal.SIGINT)
        raise KeyError("a bug")

    async def wait(work):
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
        await signals.wait_beside(work, "work")
        ends.append("stopping")

    with StopSignals() as signals:
        asyncio.run(wait(last("cleaned up")))
    assert ends == ["cleaned up", "stopping"]
    assert not caplog.records

    with StopSignals() as signals:
        asyncio.run(signals.wait_beside(crash(), "work"))
    assert [(each.message, each.levelname) for each in caplog.records] == [
        ("task_crashed", "ERROR")
    ]


@pytest.fixture
def hangups(request):
    """Set how SIGHUP is handled; it may be ignored where the tests run."""
    before = signal.signal(signal.SIGHUP, request.param)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("hangups", [signal.SIG_DFL], indirect=True, ids=["terminal"])
@pytest.mark.usefixtures("hangups")
def test_a_terminal_that_closes_is_no_second_signal():
    with StopSignals() as signals:
        for number in (signal.SIGHUP, signal.SIGHUP):  # from the kernel and from the shell
            os.kill(os.getpid(), number)
            assert signals.stopped.wait(1)
        with pytest.raises(Interrupted, match="SIGHUP") as caught:
            signals.check()

    assert caught.value.exit_code == 129


@pytest.mark.parametrize("hangups", [signal.SIG_IGN], indirect=True, ids=["nohup"])
@pytest.mark.usefixtures("hangups")
def test_a_hangup_that_is_ignored_stays_so():
    with StopSignals() as signals:
        signals.install()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not signals.stopped.wait(0.1)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_handlers_are_given_back():
    before = [signal.getsignal(each) for each in STOP_SIGNALS]

    with StopSignals():
        assert before != [signal.getsignal(each) for each in STOP_SIGNALS]

    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
