"""Shows what a step of decode takes on the device of a worker that serves, and what lies between.

    python -m benchmarks.served_steps --model DIR --out benchmarks/results/served-steps-X.json

Cases STREAMS@CONTEXT are those of benchmarks.serving_matrix, on one decode worker without prefill
workers. Of steps with all streams: `ms` that the clients see; `busy_ms` of the device from the
start of a step's recording to its end, and `between_ms` from the end of the step before to that
start; `late` is the share of steps before which the device waited for more than 0.1 ms.
"""

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.altered_workers import Alteration
from benchmarks.case_runs import Case, CaseFailed, Clock, Run, run_chosen, selected
from benchmarks.run_arguments import (
    arguments,
    cluster_options,
    end_in_order,
    model_of,
    results_of,
)
from benchmarks.served_cluster import ClusterSpec
from benchmarks.serving_matrix import AGGREGATED, DECODE, decode, warm_up
from benchmarks.stream_statistics import Row, percentile

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


def served(streams: int, context: int, folder: Path, run: Run) -> Row:
    """Run a case of the matrix, and read what its worker wrote meanwhile."""
    (path,) = folder.glob("*.steps")
    seen = path.stat().st_size
    row = decode(streams, context, run)
    with path.open(encoding="utf-8") as file:
        file.seek(seen)
        steps = steps_of(file.read(), run.sizes.streams(streams))
    if not steps:
        raise CaseFailed("no step had all streams", row)
    return row | summary(steps)


def main() -> None:
    """Run from the command line."""
    options = arguments(__doc__).parse_args()
    names = {f"{streams}@{context}": (streams, context) for streams, context in DECODE}
    chosen = selected(list(names), options.cases)
    if options.list:
        print("\n".join(chosen))
        return
    end_in_order()
    clock = Clock(options.deadline_s, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        spec = ClusterSpec(
            model=model_of(options),
            prefill=0,
            decode=1,
            device=options.device,
            options=cluster_options(options),
            altered=Alteration(times_steps_to=folder),
        )
        results = results_of(options, "served_steps", {AGGREGATED: spec})
        cases = [
            Case(name=name, cluster=AGGREGATED, measure=partial(served, *names[name], Path(folder)))
            for name in chosen
        ]
        run_chosen(
            chosen,
            cases,
            {AGGREGATED: spec},
            results,
            options=options,
            clock=clock,
            warm_up=warm_up,
        )


if __name__ == "__main__":
    main()
