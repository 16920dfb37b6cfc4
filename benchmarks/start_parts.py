"""Where the time of a cluster's start goes, by the log lines of the worker that is ready last.

What precedes its process, and what follows it, is that of the command, of Ray and of the router.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.stream_statistics import Row

LOGGED = {"log_level": "debug", "log_format": "json"}  # options of clusters whose start is divided
# worker_begins and engine_imported say how old the process is, and so does worker_ready;
# engine_ready says how long its two parts took.
EVENTS = ("worker_begins", "engine_imported", "engine_ready", "worker_ready")

Steps = Mapping[str, Mapping[str, Any]]  # event |-> line of a log


def start_parts(logs: Path, launched_at: float, ready_s: float) -> Row:
    """Return the parts of a start, s, in their order; their sum is `ready_s`.

    Args:
        logs: Folder with the logs of workers, of a cluster with the options LOGGED.
        launched_at: When the start began, by time.time().
        ready_s: How long it took, s.

    Raises:
        ValueError: No worker has logged its whole start.
    """
    starts = [steps for steps in map(_steps, _texts(logs)) if len(steps) == len(EVENTS)]
    if not starts:
        raise ValueError(f"{logs}: found no worker's start; allowed: the logs of a start")
    last = max(starts, key=lambda steps: _at(steps["worker_ready"]))
    begins, imported, loaded, ready = (last[event] for event in EVENTS)
    ready_at_s = _at(ready) - launched_at
    parts = {
        "until_process": ready_at_s - ready["process_s"],
        "until_actor": begins["process_s"],
        "imports": imported["process_s"] - begins["process_s"],
        "weights": loaded["weights_s"],
        "kernels": loaded["warm_up_s"],
    }
    parts["rest_of_worker"] = ready_at_s - sum(parts.values())
    parts["until_served"] = ready_s - ready_at_s
    return {
        "last_worker": ready["worker_id"],
        "parts_s": {name: round(seconds, 2) for name, seconds in parts.items()},
    }


def _texts(logs: Path) -> Iterator[str]:
    for path in sorted(logs.glob("worker-*.err")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _steps(text: str) -> Steps:
    return {line["event"]: line for line in _lines(text.splitlines()) if line["event"] in EVENTS}


def _lines(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:  # of a library that writes its own
            continue
        if isinstance(found, dict) and "event" in found:
            yield found


def _at(line: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(line["at"]).timestamp()
