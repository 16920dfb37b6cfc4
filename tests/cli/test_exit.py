"""How the process of a command ends."""

import subprocess
import sys

import pytest

# As Ray's library has crashed while a process ended.
CRASHES = """
import atexit, ctypes, sys, types

libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
atexit.register(print, "handlers of Python ran", flush=True)
sys.modules["ray"] = types.ModuleType("ray")
sys.argv = ["pagewire", *{words}]
from cli.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("words", "exit_code", "told"),
    [(["tokens", "--help"], 0, "Usage:"), (["tokens", "new", "/", "--out", "x"], 2, "TENANT")],
)
def test_a_command_keeps_its_exit_code_though_libraries_crash_at_the_end(words, exit_code, told):
    program = CRASHES.format(words=words)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == exit_code, ended.stderr
    assert told in ended.stdout + ended.stderr
    assert "handlers of Python ran" in ended.stdout
