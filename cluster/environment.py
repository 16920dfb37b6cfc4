"""The environment variables that a cluster's processes are started with.

launch.py adds CUDA_VISIBLE_DEVICES where workers share a GPU. `prepare_local_ray` leaves alone what
is set already, such as RAY_AUTH_MODE and RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO by the Makefile.
"""

import os
import sys

# Of the launching process: what actors must see too, also those on a Ray that ran before.
FORWARDED_PREFIXES = ("NCCL_", "TRITON_", "CUDA_LAUNCH", "PAGEWIRE_", "GRPC_VERBOSITY")


def prepare_local_ray() -> None:
    """Set what a Ray that is started here and its processes read; call it before importing Ray."""
    # It listens on the loopback address only, and without it writes a token to the home folder.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Each line of a log is written, and in colour only where somebody looks.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # gRPC tells of each connection that a stopping server ends, as if something were wrong. Its
    # errors still come; it reads this where it is imported, so processes must start with it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Ray's workers give way to every other process of the host, but ours have deadlines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Or it would start a process for each core at once, and no task ever comes that would use one.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # The router gets no GPU and never asks for one; 0 says that hiding them is not needed.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def forwarded_environment() -> dict[str, str]:
    """Return the variables that every worker's and router's process is started with."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)
    }


def worker_environment(device: str, cpu_threads: int) -> dict[str, str]:
    """Return the variables that a worker's process is started with."""
    forwarded = forwarded_environment()
    if device == "cuda":
        # A kernel that is loaded lazily can deadlock with a transfer that waits for its peer.
        return {"CUDA_MODULE_LOADING": "EAGER", **forwarded}
    return {"OMP_NUM_THREADS": str(cpu_threads), "CUDA_VISIBLE_DEVICES": "", **forwarded}
