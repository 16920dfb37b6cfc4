"""Shows what a step of decode takes on the device of a worker that serves, and what lies between.

    python -m benchmarks.served_steps --model DIR --out benchmarks/results/served-steps-X.json

Cases STREAMS@CONTEXT and shared/STREAMS,SHARED,OWN are those of benchmarks.serving_matrix, on one
decode worker without prefill workers, and pools/... beside one. Of steps with all streams: `ms`
that the clients see; `busy_ms` of the device from the start of a step's recording to its end, and
`between_ms` from the end of the step before to that start; `late` is the share of steps before
which the device waited for more than 0.1 ms, `ahead` that of steps launched before the tokens of
the step before were read.
"""

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from benchmarks.altered_workers import Alteration
from benchmarks.case_runs import CaseFailed, Run
from benchmarks.serving_matrix import AGGREGATED, DECODE, DISAGGREGATED, SHARED, decode
from benchmarks.stream_statistics import Row, percentile
from benchmarks.timed_workers import Measure, TimedCluster, Written, run_timed

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


def served(streams: int, own: int, written: Written, run: Run, *, shared: int = 0) -> Row:
    """Run a case of the matrix, and read what its decode worker wrote meanwhile."""
    written.text()
    row = decode(streams, own, run, shared=shared)
    steps = steps_of(written.text(), run.sizes.streams(streams))
    if not steps:
        raise CaseFailed("no step had all streams", row)
    return row | summary(steps)


def main() -> None:
    """Run from the command line."""
    cases: dict[str, Measure] = {
        f"{streams}@{context}": partial(served, streams, context) for streams, context in DECODE
    }
    cases |= {
        f"shared/{streams},{shared},{own}": partial(served, streams, own, shared=shared)
        for streams, shared, own in SHARED
    }
    run_timed(
        __doc__,
        "served_steps",
        [
            TimedCluster(AGGREGATED, 0, cases),
            TimedCluster(DISAGGREGATED, 1, {f"pools/{name}": case for name, case in cases.items()}),
        ],
        lambda folder: Alteration(times_steps_to=folder),
    )


if __name__ == "__main__":
    main()
