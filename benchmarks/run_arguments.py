"""The arguments of a run of cases, and the file of its results: what its rows depend on."""

import argparse
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from benchmarks.checkpoint_shapes import SHAPES, ensure_random_checkpoint
from benchmarks.measured_host import add_commit, conditions
from benchmarks.result_file import Derive, ResultFile, say
from benchmarks.served_cluster import OPTIONS, ClusterSpec
from benchmarks.stream_statistics import Row
from llm_engine.cached_folder import user_cache_dir

LOCAL_PREFILL = "decode_worker.local_prefill_max_tokens"


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


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the arguments of all runs of cases."""
    parser = cluster_arguments(description)
    parser.add_argument(
        "--cases", nargs="+", default=["*"], help="patterns of cases to run, as in 'decode/*'"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    parser.add_argument(
        "--resume", action="store_true", help="keep the results in --out and measure the rest"
    )
    parser.add_argument(
        "--repeats", type=int, help="repetitions of a case; default: those of the scale"
    )
    return parser


def cluster_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the arguments of all runs on clusters."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--deadline-s", type=float, default=3600.0, help="deadline of the whole run"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument(
        "--model", type=Path, help="folder of the weights; default: one in the cache"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of every cluster's configuration, as `pagewire serve --help` lists them",
    )
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--seed", type=int, default=1)
    add_commit(parser)
    return parser


def end_in_order() -> None:
    """Have SIGTERM end the run as Ctrl-C does: clusters stopped, cases that were not run listed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the requested sizes of a run of cases."""
    sizes = SCALES[options.scale]
    return replace(sizes, repeats=options.repeats or sizes.repeats)


def model_of(options: argparse.Namespace) -> Path:
    """Return the folder of the weights, written if it is not there; see --model."""
    folder: Path = options.model or user_cache_dir() / f"random-{options.shape}"
    say(f"weights: {ensure_random_checkpoint(options.shape, folder)}")
    return folder


def cluster_options(options: argparse.Namespace) -> Row:
    """Return the options of all clusters of a run; SystemExit: one is not NAME=VALUE."""
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


def results_of(
    options: argparse.Namespace,
    program: str,
    clusters: Mapping[str, ClusterSpec],
    *,
    derive: Derive = lambda _: [],
) -> ResultFile:
    """Return the file of a run's results, resumed if asked for.

    Args:
        options: The parsed arguments.
        program: The name of the program's module.
        clusters: All clusters of the run, by name.
        derive: Makes rows of those of several cases.

    Raises:
        SystemExit: The file to resume is of other hardware or another configuration.
    """
    head = conditions(program, options.commit)
    repeats = sizes_of(options).repeats
    head["configuration"] = configuration_of(options, clusters) | {"repeats": repeats}
    try:
        return ResultFile(options.out, head, derive=derive, resumes=options.resume)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def configuration_of(options: argparse.Namespace, clusters: Mapping[str, ClusterSpec]) -> Row:
    """Return what the rows of a run depend on, besides hardware and versions."""
    return {
        "shape": options.shape,
        "device": options.device,
        "scale": options.scale,
        "clients": options.clients,
        "seed": options.seed,
        "clusters": {
            name: {
                "prefill": spec.prefill,
                "decode": spec.decode,
                "routers": spec.routers,
                "options": {**OPTIONS, **spec.options},
                "altered": [name for name, is_so in asdict(spec.altered).items() if is_so],
            }
            for name, spec in clusters.items()
        },
    }
