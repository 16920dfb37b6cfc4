"""Runs cases one after another, each on the cluster that it needs.

An interrupted run has written all finished cases. Cases not reached before the deadline are listed
as not run, and failed ones give the reason.
"""

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.client_processes import ClientProcesses, ClientsFailed
from benchmarks.prompts import Seeds, StreamSpec
from benchmarks.result_file import ResultFile, say
from benchmarks.run_arguments import LOCAL_PREFILL, Sizes, sizes_of
from benchmarks.served_cluster import ClusterFailed, ClusterSpec, ServedCluster
from benchmarks.stream_statistics import Row, StreamRecord, work_done
from decode_worker.config import DecodeConfig
from pagewire import PagewireError

START_TIMEOUT_S = 900.0


class CaseFailed(Exception):
    """A case ran, but its result is not the required one; `row` has its measurements."""

    def __init__(self, why: str, row: Row | None = None) -> None:
        super().__init__(why)
        self.row = row or {}


class OutOfTime(Exception):
    """The deadline of the run has passed."""


class Run:
    """The resources of a case: a cluster, clients, seeds, and the time that is left."""

    def __init__(
        self, cluster: ServedCluster, clients: ClientProcesses, sizes: Sizes, clock: "Clock"
    ) -> None:
        self.cluster = cluster
        self.clients = clients
        self.sizes = sizes
        self._clock = clock
        self.seeds = clock.seeds

    def wave(self, streams: Sequence[StreamSpec], *, may_fail: bool = False) -> list[StreamRecord]:
        """Read streams to their end.

        Raises:
            CaseFailed: If a stream fails, unless it may.
            OutOfTime: If the run's deadline passes.
        """
        self.begin(streams)
        return self.finish(may_fail=may_fail)

    def begin(self, streams: Sequence[StreamSpec]) -> float:
        """Begin to read streams; returns when they begin."""
        model = self.cluster.model
        left_s = self._clock.left_s()
        return self.clients.begin(
            self.cluster.addresses, model.vocab_size, streams, left_s, spreads=True
        )

    def finish(self, *, may_fail: bool = False) -> list[StreamRecord]:
        """Wait for the streams that `begin` began; raises as `wave` does."""
        records = self.clients.finish()
        self._clock.left_s()
        errors = [each.error for each in records if each.error]
        if errors and not may_fail:
            raise CaseFailed(f"{len(errors)} of {len(records)} streams failed: {errors[0]}")
        return records

    def check_work(self, records: Sequence[StreamRecord]) -> Row:
        """Return the work by pool; refuse work in a pool that must not do it.

        Raises:
            CaseFailed: A decode worker computed more prompt tokens than its option allows, or,
                where it allows none, no page moved; without prefill workers: a page moved.
        """
        row = work_done(records)
        default = DecodeConfig().local_prefill_max_tokens
        local = int(self.cluster.spec.options.get(LOCAL_PREFILL, default))
        if not self.cluster.spec.is_disaggregated:
            if row["pages_moved"] or row["prefill_prompt_tokens"]:
                raise CaseFailed(f"pages moved without prefill workers: {row}")
        elif row["decode_prompt_tokens"] > local * row["requests"]:
            raise CaseFailed(f"a decode worker computed prompt tokens: {row}")
        elif not local and not row["bytes_moved"]:
            raise CaseFailed(f"no page moved: {row}")
        return row

    def check_waves(self, waves: Sequence[Sequence[StreamRecord]]) -> Row:
        """Return the work of several waves together; raises as `check_work` does."""
        return self.check_work([record for records in waves for record in records])

    def check_all_moved(self, work: Row, length: int) -> None:
        """Refuse work in which not all pages of each prompt of so many tokens moved."""
        pages = -(-length // self.cluster.model.page_size)
        if work["pages_moved"] != work["requests"] * pages:
            raise CaseFailed(
                f"{work['pages_moved']} pages moved, not {work['requests']} times {pages}"
            )

    def until(self, is_true: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Wait until a condition holds; returns when it did. CaseFailed: not in time."""
        deadline = time.monotonic() + min(timeout_s, self._clock.left_s())
        while not is_true():
            if time.monotonic() > deadline:
                self._clock.left_s()
                raise CaseFailed(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(0.005)
        return time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A measurement on one cluster, or without a running one."""

    name: str
    cluster: str = ""  # name of its cluster
    measure: Callable[[Run], Row] | None = None
    measure_start: Callable[["Clock"], Row] | None = None  # instead: starts clusters itself


class Clock:
    """The deadline of a run, and its seeds."""

    def __init__(self, deadline_s: float, seed: int) -> None:
        self._ends_at = time.monotonic() + deadline_s
        self.seeds = Seeds(seed * 1_000_000)

    def left_s(self) -> float:
        """Return the seconds that are left; OutOfTime: none."""
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise OutOfTime
        return left_s


def run_cases(
    cases: Sequence[Case],
    clusters: Mapping[str, ClusterSpec],
    results: ResultFile,
    *,
    sizes: Sizes,
    clock: Clock,
    num_clients: int,
    warm_up: Callable[[Run], object],
) -> None:
    """Run cases, grouped by cluster, and write each one's row.

    A failed case has a row with its error; its cluster is then restarted for the next one.
    """
    left = [case for case in cases if not results.has(case.name)]
    host = _Host(clusters, clock, sizes=sizes, num_clients=num_clients, warm_up=warm_up)
    try:
        while left:
            clock.left_s()
            try:
                row = host.measure(left[0])
            except (CaseFailed, ClientsFailed, ClusterFailed, PagewireError) as error:
                clock.left_s()  # it may only have been the end of the time
                row = error.row if isinstance(error, CaseFailed) else {}
                row = {**row, "error": f"{type(error).__name__}: {error}"}
                host.close()
            on = {"cluster": left[0].cluster} if left[0].cluster else {}
            results.add({"case": left[0].name, **on, **row})
            left.pop(0)
    except OutOfTime:
        say("the deadline has passed")
    finally:
        results.leave_out([case.name for case in left])
        host.close()


def run_chosen(
    chosen: Sequence[str],
    cases: Sequence[Case],
    clusters: Mapping[str, ClusterSpec],
    results: ResultFile,
    *,
    options: argparse.Namespace,
    clock: Clock,
    warm_up: Callable[[Run], object],
) -> None:
    """Run the cases of these names, with the sizes and clients of the command line.

    Raises:
        SystemExit: A case failed; the others have run.
    """
    run_cases(
        [case for case in cases if case.name in chosen],
        clusters,
        results,
        sizes=sizes_of(options),
        clock=clock,
        num_clients=options.clients,
        warm_up=warm_up,
    )
    if results.num_failed:
        sys.exit(1)


class _Host:
    """Keeps the clients, and one cluster for consecutive cases that need it."""

    def __init__(
        self,
        clusters: Mapping[str, ClusterSpec],
        clock: Clock,
        *,
        sizes: Sizes,
        num_clients: int,
        warm_up: Callable[[Run], object],
    ) -> None:
        self._clusters = clusters
        self._clock = clock
        self._sizes = sizes
        self._num_clients = num_clients
        self._warm_up = warm_up
        self._running = ""  # name of the cluster
        self._run: Run | None = None

    def measure(self, case: Case) -> Row:
        """Run a case on its cluster."""
        if self._run is not None and self._running != case.cluster:
            self.close()
        if case.measure_start is not None:
            return case.measure_start(self._clock)
        assert case.measure, "a case that starts nothing itself"
        if self._run is None:
            self._running = case.cluster
            cluster = start(self._clusters[case.cluster], case.cluster, self._clock)
            clients = ClientProcesses(self._num_clients)
            self._run = Run(cluster, clients, self._sizes, self._clock)
            self._warm_up(self._run)
        return case.measure(self._run)

    def close(self) -> None:
        """End the cluster and the clients, which may still read."""
        if self._run is not None:
            self._run.clients.close()
            self._run.cluster.close()
        self._run = None


def start(spec: ClusterSpec, name: str, clock: Clock) -> ServedCluster:
    """Start a cluster with a message; retry once if Ray itself was too slow on a busy host."""
    routers = f", {spec.routers} routers" if spec.routers > 1 else ""
    say(f"starting {name}: {spec.prefill} prefill and {spec.decode} decode workers{routers}")
    try:
        cluster = ServedCluster(spec, min(START_TIMEOUT_S, clock.left_s()))
    except ClusterFailed as error:
        if "cannot start Ray" not in str(error):
            raise
        say(str(error))
        cluster = ServedCluster(spec, min(START_TIMEOUT_S, clock.left_s()))
    say(f"{name} serves after {cluster.ready_s:.1f} s")
    return cluster


def selected(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match a pattern; SystemExit: one matches none."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"--cases {pattern}: matches none of {' '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in patterns)]
