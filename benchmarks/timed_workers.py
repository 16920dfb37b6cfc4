"""Runs cases on clusters whose workers write times to files of a folder while they serve."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.altered_workers import Alteration
from benchmarks.case_runs import Case, Clock, Run, run_chosen, selected
from benchmarks.run_arguments import (
    arguments,
    cluster_options,
    end_in_order,
    model_of,
    results_of,
)
from benchmarks.served_cluster import ClusterSpec
from benchmarks.serving_matrix import warm_up
from benchmarks.stream_statistics import Row


class Written:
    """What workers write to the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # |-> bytes of it

    def text(self) -> str:
        """Return what was written since the last call, file by file."""
        found = []
        for path in sorted(self._folder.iterdir()):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                found.append(file.read())
                self._read[path] = file.tell()
        return b"".join(found).decode()


Measure = Callable[[Written, Run], Row]  # reads what workers write meanwhile


class TimedCluster(NamedTuple):
    """A cluster with one decode worker, and what to measure on it."""

    name: str
    prefill: int  # workers
    cases: Mapping[str, Measure]


def run_timed(
    doc: str | None,
    program: str,
    clusters: Sequence[TimedCluster],
    alteration: Callable[[str], Alteration],
) -> None:
    """Run a benchmark from the command line.

    Args:
        doc: What it says of itself.
        program: Its name.
        clusters: One runs after the other; all their cases have names of their own.
        alteration: Of their workers, by the folder to which they write.
    """
    options = arguments(doc).parse_args()
    chosen = selected([name for each in clusters for name in each.cases], options.cases)
    if options.list:
        print("\n".join(chosen))
        return
    end_in_order()
    clock, model = Clock(options.deadline_s, options.seed), model_of(options)
    with tempfile.TemporaryDirectory() as folder:
        written = Written(Path(folder))
        specs = {
            each.name: ClusterSpec(
                model=model,
                prefill=each.prefill,
                decode=1,
                device=options.device,
                options=cluster_options(options),
                altered=alteration(folder),
            )
            for each in clusters
        }
        run_chosen(
            chosen,
            [
                Case(name=name, cluster=each.name, measure=partial(measure, written))
                for each in clusters
                for name, measure in each.cases.items()
            ],
            specs,
            results_of(options, program, specs),
            options=options,
            clock=clock,
            warm_up=warm_up,
        )
