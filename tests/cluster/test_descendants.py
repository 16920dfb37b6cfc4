import signal
import subprocess
import sys
import time

import psutil
import pytest

from cluster.descendants import killing_those_asked
from cluster.local_ray import is_alive
from tests.support.processes import kill_session, processes_of_session
from tests.support.waiting import wait_until

# A child, a grandchild, and an orphan: a grandchild whose parent has ended.
START = """
import signal, subprocess, time
from cluster.descendants import no_descendant_left
from cli.stop_signals import StopSignals

def start():
    subprocess.Popen(["sh", "-c", "sleep 301 & sleep 302"])
    subprocess.run(["sh", "-c", "sleep 303 >/dev/null 2>&1 &"])
"""
LEAVES = "with no_descendant_left():\n    start()\n"
RAISES = LEAVES + "    raise SystemExit(7)\n"
WAITS = "with StopSignals(), no_descendant_left():\n    start()\n    time.sleep(300)\n"


@pytest.fixture
def started(request):
    process = subprocess.Popen(
        [sys.executable, "-c", START + request.param], start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            kill_session(process.pid)


def num_sleepers(process):
    commands = processes_of_session(process.pid).values()
    return sum(each.startswith("sleep") for each in commands)


@pytest.mark.parametrize(
    ("started", "code"),
    [(LEAVES, 0), (RAISES, 7)],
    indirect=["started"],
    ids=["leaves", "raises"],
)
def test_what_is_left_in_the_end_is_killed(started, code):
    assert started.wait(30) == code
    assert processes_of_session(started.pid) == {}


@pytest.mark.parametrize("started", [WAITS], indirect=True, ids=["waits"])
def test_a_second_signal_kills_all_before_the_process_ends(started):
    wait_until(lambda: num_sleepers(started) == 3)

    started.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert started.poll() is None
    assert num_sleepers(started) == 3
    started.send_signal(signal.SIGTERM)

    assert started.wait(30) == 128 + signal.SIGTERM
    assert processes_of_session(started.pid) == {}


# The shell and its child end with their input. What the child leaves is then one of ours.
REAPS = """
import subprocess, time, psutil
from cluster import descendants

looks = 0
children = psutil.Process.children

def noted(process, recursive=False):
    global looks
    found = children(process, recursive)
    looks += recursive and len(found) == 2
    return found

descendants.REAP_PERIOD_S = 0.01
psutil.Process.children = noted
with descendants.no_descendant_left():
    command = ["sh", "-c", "exec 3<&0; cat <&3 & read word; exit 7"]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE)
    deadline = time.monotonic() + 10
    while looks < 2:  # after the first one it is known to have been below
        time.sleep(0.01)
    shell.stdin.close()
    while len(left := children(psutil.Process(), True)) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    print([each.pid for each in left] == [shell.pid], shell.wait())
"""


def test_an_orphan_that_ends_is_reaped_but_a_child_is_left_to_who_waits_for_it():
    done = subprocess.run([sys.executable, "-c", REAPS], capture_output=True, text=True, timeout=30)

    assert (done.stdout, done.stderr) == ("True 7\n", "")


def test_a_child_that_blocks_sigterm_is_killed_once_it_is_asked_and_may_end():
    may_begin = []
    parent = [sys.executable, "-S", "-c", "import subprocess; subprocess.run(['sleep', '304'])"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with subprocess.Popen(parent) as asked, subprocess.Popen(["sleep", "305"]) as other:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        wait_until(psutil.Process(asked.pid).children)
        [below] = psutil.Process(asked.pid).children()
        with killing_those_asked(lambda: bool(may_begin)):
            asked.terminate()
            time.sleep(0.1)
            assert asked.poll() is None
            may_begin.append(True)

            assert asked.wait(5) == -signal.SIGKILL
        wait_until(lambda: not is_alive(below))
        assert other.poll() is None
        other.kill()
