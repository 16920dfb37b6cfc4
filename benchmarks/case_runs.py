"""Runs cases on clusters one after another and writes what each measured, at once.

A run that is cut off has written all cases that had ended. Cases that were not reached before the
deadline are listed as not run, those that failed say why, and --resume takes up what is missing.
"""

import argparse
import fnmatch
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.client_processes import ClientProcesses, ClientsFailed
from benchmarks.prompts import Seeds, StreamSpec
from benchmarks.random_checkpoint import SHAPES, ensure_random_checkpoint
from benchmarks.served_cluster import OPTIONS, ClusterFailed, ClusterSpec, ServedCluster
from benchmarks.stream_statistics import Row, StreamRecord, work_done
from llm_engine.cached_folder import user_cache_dir
from pagewire import PagewireError

VERSIONS_OF = ("torch", "triton", "ray", "grpcio", "nccl4py", "nvidia-nccl-cu13", "pagewire")
START_TIMEOUT_S = 900.0
LOCAL_PREFILL = "decode_worker.local_prefill_max_tokens"
NVIDIA_SMI_TIMEOUT_S = 10.0


class CaseFailed(Exception):
    """A case ran, and what it shows is not what it must; `row` is what it measured all the same."""

    def __init__(self, why: str, row: Row | None = None) -> None:
        super().__init__(why)
        self.row = row or {}


class OutOfTime(Exception):
    """The deadline of the run has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Turns the sizes that name a case into those that are run."""

    tokens_by: int = 1  # divides lengths
    streams_by: int = 1
    repeats: int = 3
    steps: int = 192  # tokens of each stream whose steps are measured

    def tokens(self, count: int) -> int:
        """Return a length."""
        return max(count // self.tokens_by, min(count, 16))

    def streams(self, count: int) -> int:
        """Return a number of streams."""
        return max(count // self.streams_by, min(count, 2))


SCALES = {
    "full": Sizes(),
    "small": Sizes(tokens_by=16, streams_by=16, repeats=2, steps=24),
}


class Run:
    """What a case has at hand: a cluster, clients, seeds, and the time that is left."""

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
        return self.clients.begin(self.cluster.address, model.vocab_size, streams, left_s)

    def finish(self, *, may_fail: bool = False) -> list[StreamRecord]:
        """Wait for the streams that `begin` began; raises as `wave` does."""
        records = self.clients.finish()
        self._clock.left_s()
        errors = [each.error for each in records if each.error]
        if errors and not may_fail:
            raise CaseFailed(f"{len(errors)} of {len(records)} streams failed: {errors[0]}")
        return records

    def check_work(self, records: Sequence[StreamRecord]) -> Row:
        """Return what was done where; refuse work in a pool that must not do it.

        Raises:
            CaseFailed: A decode worker computed prompt tokens, or no page moved; without prefill
                workers: a page moved.
        """
        row = work_done(records)
        # More than 0 only by --option, for runs with the product's defaults.
        local = int(self.cluster.spec.options.get(LOCAL_PREFILL, 0))
        if not self.cluster.spec.is_disaggregated:
            if row["pages_moved"] or row["prefill_prompt_tokens"]:
                raise CaseFailed(f"pages moved without prefill workers: {row}")
        elif row["decode_prompt_tokens"] > local * row["requests"]:
            raise CaseFailed(f"a decode worker computed prompt tokens: {row}")
        elif not local and not row["bytes_moved"]:
            raise CaseFailed(f"no page moved: {row}")
        return row

    def until(self, is_true: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Wait until something holds; returns when it did. CaseFailed: not in time."""
        deadline = time.monotonic() + min(timeout_s, self._clock.left_s())
        while not is_true():
            if time.monotonic() > deadline:
                self._clock.left_s()
                raise CaseFailed(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(0.005)
        return time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Something to measure on one cluster, or without one that runs already."""

    name: str
    cluster: str = ""  # name of its cluster
    measure: Callable[[Run], Row] | None = None
    measure_start: Callable[["Clock"], Row] | None = None  # instead: starts clusters itself


Derive = Callable[[Mapping[str, Row]], list[Row]]


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


class ResultFile:
    """The JSON of a run, written anew after each case.

    Args:
        path: Where; None: nowhere.
        head: What the rows hold for.
        derive: Makes rows of those of several cases.
        resumes: Keep the rows that the file has, but for those that failed.

    Raises:
        ValueError: If the file to resume is of other hardware or configuration.
    """

    def __init__(self, path: Path | None, head: Row, *, derive: Derive, resumes: bool) -> None:
        self._path = path
        self._head = head
        self._derive = derive
        self._rows: dict[str, Row] = {}
        self._not_run: list[str] = []
        if resumes and path is not None and path.exists():
            self._resume(json.loads(path.read_text(encoding="utf-8")))

    def _resume(self, old: Row) -> None:
        for key in ("hardware", "configuration"):
            if old.get(key) != self._head[key]:
                raise ValueError(f"{self._path}: {key} is {old.get(key)}, now {self._head[key]}")
        commits = [old.get("commit"), *old.get("earlier_commits", [])]
        if earlier := [each for each in commits if each != self._head["commit"]]:
            self._head["earlier_commits"] = earlier
        self._rows = {
            row["case"]: row for row in old["cases"] if "error" not in row and "from" not in row
        }

    @property
    def num_failed(self) -> int:
        """Cases that have failed."""
        return sum("error" in row for row in self._rows.values())

    def has(self, case: str) -> bool:
        """Tell whether a case has been measured."""
        return case in self._rows

    def add(self, row: Row) -> None:
        """Take a case in, and write the file."""
        self._rows[row["case"]] = row
        shown = [f"{key} {value}" for key, value in row.items() if not isinstance(value, list)]
        say(f"{row['case']}: {', '.join(shown[1:])}")
        self.write()

    def leave_out(self, cases: Sequence[str]) -> None:
        """List cases that were not run, and write the file."""
        self._not_run = list(cases)
        if cases:
            say(f"not run: {' '.join(cases)}")
        self.write()

    def write(self) -> None:
        """Write what there is, whole or not at all."""
        if self._path is None:
            return
        measured = {name: row for name, row in self._rows.items() if "error" not in row}
        rows = [*self._rows.values(), *self._derive(measured)]
        content = self._head | {"not_run": self._not_run, "cases": rows}
        aside = self._path.with_suffix(".part")
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        aside.replace(self._path)


def say(line: str) -> None:
    """Tell how far the run is."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


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
    """Run cases, those of a cluster while it runs, and write each one's row.

    A case that fails has a row with its error; its cluster is then started anew for the next one.
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


class _Host:
    """Keeps one cluster running for cases in a row that want it, and the clients."""

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
    """Start a cluster, telling so; once more where Ray itself was too slow on a busy host."""
    say(f"starting {name}: {spec.prefill} prefill and {spec.decode} decode workers")
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


# What stands at the head of a file


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the arguments that runs of cases have in common."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns, as in 'decode/*'")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--resume", action="store_true", help="keep what --out has measured")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="of the whole run")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--model", type=Path, help="folder of its weights; default: in the cache")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the cluster's configuration (docs/configuration.md), in every cluster",
    )
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    parser.add_argument("--repeats", type=int, help="default: that of the scale")
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="", help="where there is no repository to ask")
    return parser


def end_in_order() -> None:
    """Have SIGTERM end the run as Ctrl-C does: clusters stopped, cases that were not run listed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes that a run was asked for."""
    sizes = SCALES[options.scale]
    return Sizes(
        tokens_by=sizes.tokens_by,
        streams_by=sizes.streams_by,
        repeats=options.repeats or sizes.repeats,
        steps=sizes.steps,
    )


def model_of(options: argparse.Namespace) -> Path:
    """Return the folder of the weights, written if it is not there; see --model."""
    folder: Path = options.model or user_cache_dir() / f"random-{options.shape}"
    say(f"weights: {ensure_random_checkpoint(options.shape, folder)}")
    return folder


def cluster_options(options: argparse.Namespace) -> Row:
    """Return the options of all clusters of a run; SystemExit: one is no NAME=VALUE."""
    import yaml

    found: Row = {
        "page_size": options.page_size,
        # Without it short remainders would be prefilled where they are decoded.
        LOCAL_PREFILL: 0,
    }
    for each in options.option:
        name, equals, value = each.partition("=")
        if not equals:
            raise SystemExit(f"--option {each}: not NAME=VALUE")
        found[name] = yaml.safe_load(value)
    return found


def configuration_of(
    options: argparse.Namespace, sizes: Sizes, clusters: Mapping[str, ClusterSpec]
) -> Row:
    """Return what the rows of a run depend on, beside hardware and versions."""
    return {
        "shape": options.shape,
        "device": options.device,
        "scale": options.scale,
        "repeats": sizes.repeats,
        "clients": options.clients,
        "seed": options.seed,
        "clusters": {
            name: {
                "prefill": spec.prefill,
                "decode": spec.decode,
                "options": {**OPTIONS, **spec.options},
                "altered": [name for name, is_so in asdict(spec.altered).items() if is_so],
            }
            for name, spec in clusters.items()
        },
    }


def head_of(options: argparse.Namespace, program: str, configuration: Row) -> Row:
    """Return what the rows of a run hold for."""
    words = [Path(word).name if "/" in word and "*" not in word else word for word in sys.argv[1:]]
    return {
        "command": " ".join([f"python -m {program}", *words]),  # folders are the host's own
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware(),
        "versions": versions(),
        "commit": options.commit or commit(),
        "configuration": configuration,
    }


def hardware() -> Row:
    """Return what this host has, by name."""
    gpus = [row.split(", ") for row in nvidia_smi("name", "driver_version")]
    found: Row = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    if gpus:
        found |= {"gpus": [name for name, _ in gpus], "driver": gpus[0][1]}
    return found


def versions() -> dict[str, str]:
    """Return the versions of what is installed of VERSIONS_OF."""
    found = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """Return the commit of this tree, with a + if it was changed since; unknown: no repository."""
    root = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(  # noqa: S603 - nothing of it comes from outside
            ["git", "-C", str(root), *words],  # noqa: S607 - whichever is installed
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        is_changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.proto")
        return git("rev-parse", "--short", "HEAD") + ("+" if is_changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def gpu_memory_mib() -> list[int]:
    """Return what is used of each GPU's memory, by anybody; [] without GPUs."""
    return [int(row) for row in nvidia_smi("memory.used")]


def num_gpus() -> int:
    """Return how many GPUs this host shows."""
    return len(nvidia_smi("name"))


def nvidia_smi(*fields: str) -> list[str]:
    """Return fields of each GPU, as text; [] where nothing tells."""
    try:
        done = subprocess.run(  # noqa: S603 - nothing of it comes from outside
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def drop_from_file_cache(folder: Path) -> None:
    """Have the files of a folder read from the disk next time."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_into_file_cache(folder: Path) -> None:
    """Read all files of a folder once."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
