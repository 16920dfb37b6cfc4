"""Runs cases on one cluster whose workers write times to files of a folder while they serve."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

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


def run_timed(
    doc: str | None,
    program: str,
    cases: Mapping[str, Measure],
    *,
    cluster: str,
    prefill: int,
    alteration: Callable[[str], Alteration],
) -> None:
    """Run a benchmark from the command line.

    Args:
        doc: What it says of itself.
        program: Its name.
        cases: Name |-> what measures the case.
        cluster: Name of the cluster, which has one decode worker.
        prefill: Its prefill workers.
        alteration: Of its workers, by the folder to which they write.
    """
    options = arguments(doc).parse_args()
    chosen = selected(list(cases), options.cases)
    if options.list:
        print("\n".join(chosen))
        return
    end_in_order()
    clock = Clock(options.deadline_s, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        written = Written(Path(folder))
        clusters = {
            cluster: ClusterSpec(
                model=model_of(options),
                prefill=prefill,
                decode=1,
                device=options.device,
                options=cluster_options(options),
                altered=alteration(folder),
            )
        }
        run_chosen(
            chosen,
            [
                Case(name=name, cluster=cluster, measure=partial(measure, written))
                for name, measure in cases.items()
            ],
            clusters,
            results_of(options, program, clusters),
            options=options,
            clock=clock,
            warm_up=warm_up,
        )
