"""How the targets that run a cluster end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the interpreter does that `make PY=...` is given: as a cluster that a signal ends. That takes
# a while: GNU make reports an error if a process ends before make has seen the same signal.
SERVED = """#!{python} -IS
import signal, sys, time
signal.signal(signal.SIGINT, lambda number, frame: sys.exit(time.sleep(1)))
print("ready", *sys.argv[1:], flush=True)
signal.pause()
"""


@pytest.mark.skipif(not shutil.which("make"), reason="this host has no make")
@pytest.mark.parametrize("target", ["serve", "demo"])
def test_ctrl_c_ends_a_served_cluster_without_a_word_of_make(target, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text(SERVED.format(python=sys.executable))
    interpreter.chmod(0o755)
    # The make that may run these tests hands on its variables and its job server.
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    process = subprocess.Popen(
        ["make", "--silent", target, f"PY={interpreter}", "MODEL=m"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    ready = process.stdout.readline()

    os.killpg(process.pid, signal.SIGINT)  # as a terminal does

    assert process.communicate(timeout=30)[0] == ""
    assert ready == f"ready -m cli {target} --model m\n"
