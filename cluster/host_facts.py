"""Gathers facts about this host before anything is started on it."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cluster.host_memory import HostMemory, read_host_memory
from cluster.ray_listeners import RayListener, find_listeners
from pagewire import protos

Versions = Mapping[str, str]  # distribution name, lower case |-> version

SHM_PATH = "/dev/shm"  # noqa: S108 - the mount itself
GENCODE_PATTERN = re.compile(r"^# Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", re.MULTILINE)
GRPC_GENCODE_PATTERN = re.compile(r"^GRPC_GENERATED_VERSION = '([\d.]+)'", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """The input of the checks of cluster.doctor."""

    python: tuple[int, int, int]
    system: str  # "Linux"
    versions: Versions
    torch_cuda: str | None  # CUDA version that torch was built for; None: a CPU build
    torch_error: str  # why torch cannot be imported; empty if it can
    driver_gpus: int  # GPUs that the driver shows
    torch_gpus: int  # GPUs that torch can use
    compiler: str | None  # path of a C compiler
    shm_free_bytes: int | None  # None: there is no /dev/shm
    memory: HostMemory
    gpu_free_bytes: tuple[int, ...]  # of each GPU that torch can use
    ray_auth_mode: str  # RAY_AUTH_MODE of this environment; empty: unset
    ray_listeners: tuple[RayListener, ...]  # of Rays that run here, for other hosts
    protobuf_gencode: str  # version that wrote pagewire/protos/*_pb2.py
    grpc_gencode: str  # version that wrote pagewire/protos/*_pb2_grpc.py


def collect_facts() -> HostFacts:
    """Look at this host; imports torch, which takes seconds."""
    torch_cuda, gpu_free_bytes, torch_error = _ask_torch()
    generated = Path(protos.__file__).parent
    return HostFacts(
        python=sys.version_info[:3],
        system=platform.system(),
        versions=_versions(),
        torch_cuda=torch_cuda,
        torch_error=torch_error,
        driver_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        torch_gpus=len(gpu_free_bytes),
        compiler=shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"),
        shm_free_bytes=_free_bytes(Path(SHM_PATH)),
        memory=read_host_memory(),
        gpu_free_bytes=gpu_free_bytes,
        ray_auth_mode=os.environ.get("RAY_AUTH_MODE", "").lower(),
        ray_listeners=find_listeners(),
        protobuf_gencode=".".join(_written_by(generated / "common_pb2.py", GENCODE_PATTERN)),
        grpc_gencode=".".join(_written_by(generated / "worker_pb2_grpc.py", GRPC_GENCODE_PATTERN)),
    )


def _ask_torch() -> tuple[str | None, tuple[int, ...], str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, (), f"torch cannot be imported: {error}"
    gpu_free_bytes = []
    for gpu in range(torch.cuda.device_count()):
        with suppress(RuntimeError):  # it is broken, or another process has it to itself
            gpu_free_bytes.append(torch.cuda.mem_get_info(gpu)[0])
    return torch.version.cuda, tuple(gpu_free_bytes), ""


def _versions() -> Versions:
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        if name := distribution.metadata["Name"]:
            # The first on the path is the one that is imported.
            versions.setdefault(name.lower().replace("_", "-"), distribution.version)
    return versions


def _free_bytes(path: Path) -> int | None:
    if not path.is_dir():
        return None
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def _written_by(path: Path, pattern: re.Pattern[str]) -> tuple[str, ...]:
    found = pattern.search(path.read_text(encoding="utf-8"))
    assert found, f"{path} does not say which version wrote it"
    return found.groups()
