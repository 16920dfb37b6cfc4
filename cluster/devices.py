"""Resources of this host: GPUs and free ports.

The CUDA driver counts GPUs at once. torch, which takes seconds to import, is asked only where the
driver does not know.
"""

import ctypes
import errno
import itertools
import os
import re
import runpy
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path

from cluster.errors import ConfigError, PlacementError, StartError
from cluster.port_owner import port_owner

CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE = 0, 100  # as in cuda.h


def count_gpus() -> int:
    """Return the number of CUDA devices that this process may use."""
    if most_gpus() == 0 or not _torch_has_cuda():
        return 0
    if (counted := _count_by_driver()) is not None:
        return counted
    import torch

    return int(torch.cuda.device_count())


def _torch_has_cuda() -> bool:
    """Return whether torch is built for CUDA, as `torch.version.cuda` says it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is not None


def _count_by_driver() -> int | None:
    """Return the number of CUDA devices that the driver shows to this process; None: unknown.

    It applies CUDA_VISIBLE_DEVICES, and makes no context, so it takes no memory of a GPU.
    """
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        result = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    if result == CUDA_ERROR_NO_DEVICE:
        return 0
    return count.value if result == CUDA_SUCCESS else None


def most_gpus() -> int | None:
    """Return at least `count_gpus()`, but at once; None: unknown without torch."""
    num_devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if not num_devices:  # WSL has a driver without these files
        return None if shutil.which("nvidia-smi") else 0
    return most_visible(num_devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def most_visible(num_devices: int, visible: str | None) -> int:
    """Return how many devices CUDA_VISIBLE_DEVICES leaves: CUDA reads up to the first odd entry."""
    if visible is None:
        return num_devices
    is_device = re.compile(r"\s*(\d|GPU-|MIG-)").match
    return min(num_devices, len(list(itertools.takewhile(is_device, visible.split(",")))))


def resolve_device(asked: str, num_gpus: int) -> str:
    """Turn "auto" into "cuda" or "cpu"."""
    if asked != "auto":
        return asked
    return "cuda" if num_gpus else "cpu"


def shared_gpu(
    pool: str, index: int, num_prefill: int, num_decode: int, workers_per_gpu: int
) -> int:
    """Return which of a host's GPUs a worker uses if several workers share one.

    Both pools are on the first GPU if all workers fit there. Else no GPU has workers of both, so
    that one pool's steps do not wait for the other's.
    """
    if pool == "prefill" or num_prefill + num_decode <= workers_per_gpu:
        return index // workers_per_gpu
    return -(-num_prefill // workers_per_gpu) + index // workers_per_gpu


def gpus_needed(num_prefill: int, num_decode: int, workers_per_gpu: int) -> int:
    """Return how many GPUs the workers of a host use; see `shared_gpu`."""
    if num_prefill + num_decode <= workers_per_gpu:
        return 1
    return -(-num_prefill // workers_per_gpu) - (-num_decode // workers_per_gpu)


def visible_gpu(index: int, visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process that must see one GPU of `visible`.

    `visible` is the variable's value where the cluster was started; None: it was unset.
    """
    return str(index) if visible is None else visible.split(",")[index].strip()


def check_gpus(
    device: str, num_prefill: int, num_decode: int, workers_per_gpu: int, num_gpus: int
) -> None:
    """Refuse more workers than the GPUs take.

    Raises:
        PlacementError: Says how many GPUs are needed.
    """
    needed = gpus_needed(num_prefill, num_decode, workers_per_gpu)
    if device != "cuda" or needed <= num_gpus:
        return
    if not num_gpus:
        raise PlacementError("device: found 'cuda'; allowed: 'cpu', because there are no GPUs")
    shared = f", {workers_per_gpu} to a GPU," if workers_per_gpu > 1 else ""
    if num_gpus == 1 and num_prefill:
        allowed = (
            "--prefill 0 --decode 1, so that decode workers compute the prompts, --workers-per-gpu "
            f"{num_prefill + num_decode}, so that all share the GPU, or --device cpu"
        )
    else:
        allowed = "fewer workers, more on each GPU with --workers-per-gpu, or --device cpu"
    raise PlacementError(
        f"prefill, decode: found {num_prefill} and {num_decode} workers{shared} which need "
        f"{needed} GPUs; allowed: {allowed}, because there {'is' if num_gpus == 1 else 'are'} "
        f"{num_gpus}"
    )


def check_port_free(
    host: str,
    port: int,
    *,
    flag: str = "--port",
    zero: str = "take a free one",
    is_shared: bool = False,
) -> None:
    """Refuse a port that something else listens on; 0 is always free.

    Args:
        host, port: Where to listen.
        flag: The flag that sets the port.
        zero: The effect of `flag` 0.
        is_shared: Whether other processes that share the port may listen on it.

    Raises:
        PlacementError: The port is taken, or not allowed to this user.
        ConfigError: The host is not an address of this host.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
        reason = getattr(error, "strerror", None) or str(error)
        match getattr(error, "errno", None):
            case errno.EADDRINUSE:
                owner = port_owner(str(address[0]), port)
                raise PlacementError(
                    f"port {port} on {host} is in use{f' by {owner}' if owner else ''}; choose "
                    f"another with {flag}, or let {flag} 0 {zero}"
                ) from error
            case errno.EACCES:
                raise PlacementError(
                    f"port: found {port} on {host}; allowed: 1024 or more without root"
                ) from error
            case _:
                raise ConfigError(
                    f"host: found {host!r}; allowed: a name or an address of this host ({reason}); "
                    "give one with --host: 127.0.0.1 for clients here, 0.0.0.0 for all"
                ) from error


def port_lost(host: str, port: int) -> StartError:
    """Return the error of a port that was free and is not any more: another process was faster."""
    return StartError(f"cannot listen on port {port} of {host}")
