"""How the log lines of workers divide a start."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.start_parts import start_parts

LAUNCHED_AT = 1_800_000_000.0


def write_log(logs: Path, worker_id: str, process_at_s: float, imported_s: float) -> None:
    """Write a worker's log, whose process begins so long after the launch."""

    def line(event: str, age_s: float, **fields: object) -> str:
        at = datetime.fromtimestamp(LAUNCHED_AT + process_at_s + age_s, UTC)
        return json.dumps({"at": at.isoformat(), "event": event, **fields})

    begins, ready = 1.0, imported_s + 2.0
    lines = [
        "a line of Ray's",
        line("worker_begins", begins, worker_id=worker_id, process_s=begins),
        line("engine_imported", imported_s, worker_id=worker_id, process_s=imported_s),
        line("engine_ready", imported_s + 1.5, weights_s=0.75, warm_up_s=0.5),
        json.dumps(["no object"]),
        line("worker_ready", ready, worker_id=worker_id, process_s=ready),
    ]
    (logs / f"worker-{worker_id}.err").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_the_parts_of_the_worker_that_is_ready_last_add_up_to_the_start(tmp_path: Path) -> None:
    write_log(tmp_path, "prefill-0", process_at_s=2.0, imported_s=3.0)
    write_log(tmp_path, "decode-0", process_at_s=2.5, imported_s=4.0)
    (tmp_path / "worker-router.err").write_text('{"event": "router_listens"}\n', encoding="utf-8")

    found = start_parts(tmp_path, LAUNCHED_AT, ready_s=9.0)

    assert found["last_worker"] == "decode-0"
    assert found["parts_s"] == {
        "until_process": 2.5,
        "until_actor": 1.0,
        "imports": 3.0,
        "weights": 0.75,
        "kernels": 0.5,
        "rest_of_worker": 0.75,
        "until_served": 0.5,
    }
    assert sum(found["parts_s"].values()) == 9.0


def test_logs_without_a_whole_start_are_refused(tmp_path: Path) -> None:
    (tmp_path / "worker-0.err").write_text('{"event": "worker_begins"}\n', encoding="utf-8")

    with pytest.raises(ValueError, match="found no worker's start"):
        start_parts(tmp_path, LAUNCHED_AT, ready_s=9.0)
