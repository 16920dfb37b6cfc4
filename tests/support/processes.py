"""Which processes a started one has left behind.

Popen(start_new_session=True) makes a session with the process's own id, and no process of Ray
leaves it. (An inherited variable would not tell: Ray's agents write their names over theirs.)
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

WAIT_S = 30


def processes_of_session(session_id):
    """Return what runs in a session: process id |-> command line. Zombies run no more."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            state, *numbers = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(numbers[2]) == session_id and state != "Z":
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(folder.name)] = command[:80]
    return found


def kill_session(session_id):
    """Kill what runs in a session."""
    for process_id in processes_of_session(session_id):
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
