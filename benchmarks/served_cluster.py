"""A cluster in a process of its own, so that one run can start several, one after another.

The process ends its cluster when it is told to, when it gets SIGTERM, and when its parent has died.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Self

from benchmarks.altered_workers import Alteration
from pagewire import Client, ClusterStatus

STOP_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 10.0
ROOT = Path(__file__).resolve().parent.parent
# What is not measured must not get in the way of what is.
OPTIONS: Mapping[str, Any] = {
    "port": 0,
    "http_port": 0,
    "log_level": "warning",
    # Prompts come all at once, which a service for people would refuse.
    "router.max_expected_wait_s": 3600.0,
}


class ClusterFailed(Exception):
    """A cluster did not start, or its process has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """What to start."""

    model: Path
    prefill: int
    decode: int
    device: str  # as in ClusterConfig
    options: Mapping[str, Any] = field(default_factory=dict)  # beside OPTIONS, which they override
    altered: Alteration = field(default_factory=Alteration)
    routers: int = 1  # the cluster's own, and more

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts are computed elsewhere than answers."""
        return self.prefill > 0


class ServedCluster:
    """Owns the process; use it with `with`. It serves when the constructor returns.

    Raises:
        ClusterFailed: Raised by the constructor, and by all methods when the process has ended.
    """

    def __init__(self, spec: ClusterSpec, start_timeout_s: float) -> None:
        self.spec = spec
        self.addresses: list[str] = []  # of the cluster's own router, then of more
        self.logs = Path()  # folder of its processes' logs
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.launched_at, began = time.time(), time.monotonic()
        self._process: SpawnProcess = context.Process(target=_serve, args=(spec, theirs))
        self._process.start()
        theirs.close()
        self._client: Client | None = None
        try:
            self.addresses, self.device, self.logs = self._hear(start_timeout_s)
            self.ready_s = time.monotonic() - began  # from the launch of the process
            for address in self.addresses[1:]:
                _wait_for_model(address, start_timeout_s)
            self._client = Client(self.addresses[0], default_timeout_s=STATUS_TIMEOUT_S)
            self.model = self._client.list_models()[0]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client(self) -> Client:
        """A client for questions besides what is measured."""
        assert self._client, "the cluster serves"
        return self._client

    @property
    def address(self) -> str:
        """The address of the cluster's own router."""
        return self.addresses[0]

    def status(self) -> ClusterStatus:
        """Ask the router."""
        return self.client.status()

    def pid(self, worker_id: str) -> int:
        """Return the process id of a worker, another one after each start."""
        try:
            self._pipe.send(worker_id)
        except OSError as error:
            raise ClusterFailed("the cluster's process has ended") from error
        return int(self._hear(STATUS_TIMEOUT_S))

    def close(self) -> None:
        """Stop everything; a cluster that still starts is killed."""
        if self._client is None:
            self._process.terminate()
        else:
            self._client.close()
        self._pipe.close()  # which tells it to stop
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _hear(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise ClusterFailed(f"the cluster's process said nothing for {timeout_s:.0f} s")
            heard = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ClusterFailed("the cluster's process has ended") from error
        if isinstance(heard, Exception):
            raise ClusterFailed(str(heard)) from heard
        return heard


def _serve(spec: ClusterSpec, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # The workers must import what this process runs.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    from cluster.descendants import no_descendant_left
    from cluster.environment import prepare_ray
    from cluster.errors import ClusterError

    prepare_ray(is_local=True)
    with no_descendant_left():
        try:
            _start_and_stop(spec, pipe)
        except ClusterError as error:
            with suppress(OSError):
                pipe.send(ClusterFailed(str(error)))


def _start_and_stop(spec: ClusterSpec, pipe: Connection) -> None:
    import cluster.launch  # imports Ray, so after prepare_ray
    from cluster.config_file import load_config
    from cluster.preflight import check_start

    values = {
        **OPTIONS,
        "model": spec.model,
        "prefill": spec.prefill,
        "decode": spec.decode,
        "device": spec.device,
        **spec.options,
    }
    config = load_config(None, values)
    with spec.altered.in_launcher():
        running = cluster.launch.start_cluster(config, check_start(config), shows_worker_logs=False)
    try:
        with _more_routers(spec.routers - 1, config, running) as more:
            pipe.send(([running.address, *more], running.device, running.local_ray.logs))
            while True:
                pipe.send(running.pid(pipe.recv()))
    except (EOFError, OSError):  # the parent wants no more, or is gone
        pass
    finally:
        running.stop(0.0)


@contextmanager
def _more_routers(count: int, config: Any, running: Any) -> Iterator[list[str]]:
    if not count:
        yield []
        return
    import ray

    from benchmarks.more_routers import more_routers
    from cli.router_commands import ROUTERS_NAME
    from cluster.router_settings import router_settings

    keys = ray.get(running.controller.router_keys.remote(ROUTERS_NAME))
    controller = ray.get(running.controller.address.remote())
    settings = router_settings(config, ROUTERS_NAME, keys)
    with more_routers(count, settings, controller) as addresses:
        yield addresses


def _wait_for_model(address: str, timeout_s: float) -> None:
    """Wait until a router knows a worker's model."""
    deadline = time.monotonic() + timeout_s
    with Client(address, default_timeout_s=STATUS_TIMEOUT_S) as client:
        while not client.list_models():
            if time.monotonic() > deadline:
                raise ClusterFailed(f"the router at {address} knows no model")
            time.sleep(0.1)
