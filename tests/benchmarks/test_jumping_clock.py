"""That a wall clock jumps under a process that runs, and that no other clock notices."""

import os
import subprocess
import sys

import pytest

from benchmarks.jumping_clock import JumpingClock, why_no_clocks

pytestmark = pytest.mark.skipif(bool(why_no_clocks()), reason=why_no_clocks() or "it can")

PROGRAM = """
import asyncio, sys, threading, time

def look():
    print(time.time(), time.monotonic())
    sys.stdin.readline()

look()
look()
began = time.monotonic()
time.sleep(0.05)
asyncio.run(asyncio.sleep(0.05))
condition = threading.Condition()
with condition:
    condition.wait(0.05)
assert not threading.Semaphore(0).acquire(timeout=0.05)
print(time.monotonic() - began)
look()
"""


@pytest.fixture
def told(tmp_path):
    """Run PROGRAM under a clock that jumps an hour ahead, and two back; return what it says."""
    clock = JumpingClock(tmp_path, "host")
    with subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM],
        env={**os.environ, **clock.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        lines = []
        for seconds in (3600, -7200, 0):
            lines.append(process.stdout.readline())
            clock.jump(seconds)
            process.stdin.write("\n")
            process.stdin.flush()
            if seconds < 0:
                lines.append(process.stdout.readline())
    assert process.returncode == 0
    return [[float(each) for each in line.split()] for line in lines]


def test_the_wall_clock_jumps_and_nothing_waits_longer_or_shorter(told):
    (first, began), (ahead, soon), (waits_s,), (back, late) = told

    assert ahead - first == pytest.approx(3600, abs=30)
    assert back - first == pytest.approx(-3600, abs=30)
    assert 0 < soon - began < 30
    assert 0 < late - soon < 30
    assert 0.2 <= waits_s < 30
