"""Shows what a step of decode takes on the device of a worker that serves, and what lies between.

    python -m benchmarks.served_steps --model DIR --out benchmarks/results/served-steps-X.json

Cases STREAMS@CONTEXT are those of benchmarks.serving_matrix, on one decode worker without prefill
workers. Of steps with all streams: `ms` that the clients see; `busy_ms` of the device from the
start of a step's recording to its end, and `between_ms` from the end of the step before to that
start; `late` is the share of steps before which the device waited for more than 0.1 ms, `ahead`
that of steps launched before the tokens of the step before were read.
"""

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from benchmarks.altered_workers import Alteration
from benchmarks.case_runs import CaseFailed, Run
from benchmarks.serving_matrix import AGGREGATED, DECODE, decode
from benchmarks.stream_statistics import Row, percentile
from benchmarks.timed_workers import Written, run_timed

LATE_MS = 0.1


class Step(NamedTuple):
    """What a worker wrote of a step."""

    num_rows: int
    between_ms: float  # since the end of the step before
    busy_ms: float
    is_ahead: int  # 1: launched before the tokens of the step before were read


def steps_of(text: str, num_rows: int) -> list[Step]:
    """Return the steps with so many rows that follow one like them."""
    steps = [Step(*json.loads(line)) for line in text.splitlines()]
    return [
        step for before, step in pairwise(steps) if before.num_rows == step.num_rows == num_rows
    ]


def summary(steps: Sequence[Step]) -> Row:
    """Return means, and how often the device waited."""
    count = len(steps)
    between_ms = [step.between_ms for step in steps]
    return {
        "num_steps": count,
        "busy_ms": round(sum(step.busy_ms for step in steps) / count, 3),
        "between_ms": round(sum(between_ms) / count, 3),
        "between_ms_p50": round(percentile(between_ms, 50), 3),
        "between_ms_p99": round(percentile(between_ms, 99), 3),
        "late": round(sum(each > LATE_MS for each in between_ms) / count, 4),
        "ahead": round(sum(step.is_ahead for step in steps) / count, 4),
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
