"""The environment variables of a cluster's processes.

placement.py adds CUDA_VISIBLE_DEVICES where workers share a GPU, and the path of Ray's token.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cluster.errors import ConfigError
from pagewire.arguments import TOKEN_VARIABLE

# Of the launching process: what actors must see too, also those on a Ray that ran before.
FORWARDED_PREFIXES = ("NCCL_", "TRITON_", "CUDA_LAUNCH", "PAGEWIRE_", "GRPC_VERBOSITY")
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
KEPT = {TOKEN_VARIABLE}  # of a client; Ray shows and logs what actors are started with


def prepare_ray(*, is_local: bool) -> None:
    """Set variables that Ray reads on import, so call it before that.

    Values that are set already stay, except those that keep strangers out of a Ray that is started
    here. A Ray that runs already (`is_local` False) is its owner's, and so is its authentication.
    """
    if is_local:
        # Ray's servers listen on the loopback address where that is the node's own, and it is where
        # Ray is told to form no clusters. The variable works on Linux, too.
        os.environ.update(RAY_AUTH_MODE="token", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
        # Nothing reads what Ray's processes tell of their tasks, and where Ray has died, those that
        # end would wait five seconds to tell the rest of it.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # A raylet that finds its object store or its agent not ready yet would wait for a second.
        # It gives up after ten seconds in the one case, and after thirty in the other, as before.
        os.environ.setdefault("RAY_raylet_client_connect_timeout_milliseconds", "20")
        os.environ.setdefault("RAY_raylet_client_num_connect_attempts", "500")
        os.environ.setdefault("RAY_agent_manager_retry_interval_ms", "100")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Every log line is written, in colour only on a terminal.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # gRPC logs each connection that a stopping server ends, as if something were wrong. Its
    # errors still come; it reads this where it is imported, so processes must start with it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Ray's workers yield to every other process of the host, but ours have deadlines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Otherwise it would start a process for each core at once, and no task would ever use one.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # The router gets no GPU and never asks for one; 0 says that hiding them is not needed.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@contextmanager
def inherited_by_processes(variables: Mapping[str, str]) -> Iterator[None]:
    """Have processes that this one starts while entered inherit these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def forwarded_environment() -> dict[str, str]:
    """Return the variables of this process that all processes of a cluster get."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in KEPT
    }


def own_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's option for an actor or a task with variables that its Ray does not have.

    Raises:
        ConfigError: Ray would try to start it for ever.
    """
    if not variables:
        return {}
    if re.search(r"[^\w@%+=:,./-]", sys.executable):
        raise ConfigError(
            f"path of the Python interpreter: found {sys.executable!r}; allowed: one without "
            "spaces or other characters that a shell interprets, because Ray does not quote it"
        )
    return {"runtime_env": {"env_vars": dict(variables)}}


def worker_environment(
    device: str, cpu_threads: int, forwarded: Mapping[str, str], nccl_interface: str = ""
) -> dict[str, str]:
    """Return the variables of a worker's process, including the forwarded ones.

    Args:
        nccl_interface: Binds NCCL unless a forwarded variable does; empty: none.
    """
    if device == "cuda":
        # Without = NCCL would also take interfaces whose names begin with this one.
        nccl = {NCCL_VARIABLE: f"={nccl_interface}"} if nccl_interface else {}
        # A kernel that is loaded lazily can deadlock with a transfer that waits for its peer.
        return {"CUDA_MODULE_LOADING": "EAGER", **nccl, **forwarded}
    return {"OMP_NUM_THREADS": str(cpu_threads), "CUDA_VISIBLE_DEVICES": "", **forwarded}
