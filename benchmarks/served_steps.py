"""Shows what a step of decode takes on the device of a worker that serves, and what lies between.

    python -m benchmarks.served_steps --model DIR --out benchmarks/results/served-steps-X.json

Cases STREAMS@CONTEXT are those of benchmarks.serving_matrix, on one decode worker without prefill
workers. Of steps with all streams: `ms` that the clients see; `busy_ms` of the device from the
start of a step's recording to its end, and `between_ms` from the end of the step before to that
start; `late` is the share of steps before which the device waited for more than 0.1 ms.
"""

import json
from collections.abc import Sequence
from functools import partial

from benchmarks.altered_workers import Alteration
from benchmarks.case_runs import CaseFailed, Run
from benchmarks.serving_matrix import AGGREGATED, DECODE, decode
from benchmarks.stream_statistics import Row, percentile
from benchmarks.timed_workers import Written, run_timed

LATE_MS = 0.1


def steps_of(text: str, num_rows: int) -> list[tuple[float, float]]:
    """Return the ms before and of each step with so many rows that follows one like it."""
    found, before = [], 0
    for line in text.splitlines():
        rows, *times = json.loads(line)
        if rows == before == num_rows:
            found.append((times[0], times[1]))
        before = rows
    return found


def summary(steps: Sequence[tuple[float, float]]) -> Row:
    """Return means, and how often the device waited."""
    count = len(steps)
    return {
        "num_steps": count,
        "busy_ms": round(sum(own for _, own in steps) / count, 3),
        "between_ms": round(sum(before for before, _ in steps) / count, 3),
        "between_ms_p50": round(percentile([before for before, _ in steps], 50), 3),
        "between_ms_p99": round(percentile([before for before, _ in steps], 99), 3),
        "late": round(sum(before > LATE_MS for before, _ in steps) / count, 4),
    }


def served(streams: int, context: int, written: Written, run: Run) -> Row:
    """Run a case of the matrix, and read what its worker wrote meanwhile."""
    written.text()
    row = decode(streams, context, run)
    steps = steps_of(written.text(), run.sizes.streams(streams))
    if not steps:
        raise CaseFailed("no step had all streams", row)
    return row | summary(steps)


def main() -> None:
    """Run from the command line."""
    run_timed(
        __doc__,
        "served_steps",
        {f"{streams}@{context}": partial(served, streams, context) for streams, context in DECODE},
        cluster=AGGREGATED,
        prefill=0,
        alteration=lambda folder: Alteration(times_steps_to=folder),
    )


if __name__ == "__main__":
    main()
