"""What a run of a benchmark depends on: command, hardware, versions, commit, file cache."""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from benchmarks.stream_statistics import Row

VERSIONS_OF = ("torch", "triton", "ray", "grpcio", "nccl4py", "nvidia-nccl-cu13", "pagewire")
NVIDIA_SMI_TIMEOUT_S = 10.0


def conditions(program: str, commit_of: str = "") -> Row:
    """Return how and where a program of this folder runs: the head of its results.

    Args:
        program: The name of its module.
        commit_of: The commit to record; empty: that of this tree.
    """
    # Without folders, which differ from host to host.
    words = [Path(word).name if Path(word).parent.is_dir() else word for word in sys.argv[1:]]
    return {
        "command": " ".join([f"python -m benchmarks.{program}", *words]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit_of or commit(),
    }


def hardware() -> Row:
    """Return what this host has, by name."""
    gpus = [row.split(", ") for row in nvidia_smi("name", "driver_version")]
    found: Row = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    if gpus:
        found |= {"gpus": [name for name, _ in gpus], "driver": gpus[0][1]}
    return found


def in_short(found: Row | str) -> str:
    """Return what a result file says of its hardware, in a few words; old files have these."""
    if isinstance(found, str):
        return found
    if gpus := found.get("gpus"):
        return f"{len(gpus)} {gpu_model(found)}{'s' if len(gpus) > 1 else ''}"
    return f"{found['cores']} CPU cores"


def gpu_model(found: Row) -> str:
    """Return the model of a result file's GPUs, such as H200."""
    model: str = found["gpus"][0].removeprefix("NVIDIA ").split()[0]
    return model


def versions() -> dict[str, str]:
    """Return the versions of what is installed of VERSIONS_OF."""
    found = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def add_commit(parser: argparse.ArgumentParser) -> None:
    """Let a command be told the commit that `conditions` records."""
    parser.add_argument(
        "--commit", default="", help="commit to record; default: that of this repository"
    )


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


def gpu_memory_of(names: Mapping[int, str]) -> dict[str, int]:
    """Return the GPU memory, MiB, of named processes by name; {} without GPUs.

    Args:
        names: Process id |-> name. Processes that use no GPU are left out.
    """
    found: dict[str, int] = {}
    for row in nvidia_smi("pid", "used_memory", of="compute-apps"):
        pid, mib = row.split(", ")
        if int(pid) in names and mib.isdecimal():
            name = names[int(pid)]
            found[name] = found.get(name, 0) + int(mib)
    return found


def num_gpus() -> int:
    """Return how many GPUs CUDA shows."""
    return len(nvidia_smi("name"))


def nvidia_smi(*fields: str, of: str = "gpu") -> list[str]:
    """Return fields of each GPU or process that CUDA shows, as text; [] if there are none."""
    words = ["nvidia-smi", f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        words.append(f"--id={visible}")
    try:
        done = subprocess.run(  # noqa: S603 - nothing of it comes from outside
            words,
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
