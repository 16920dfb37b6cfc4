"""A cluster on several hosts of one machine (hosts.py), each of which can fail independently.

    head    Ray's head, the controller and router-0
    worker hosts    a prefill and a decode worker each, in Ray
    edge    clients, a second router and a gateway, without Ray; and the Redis of Ray's state

On each host Ray is restarted when it ends, as a service manager would do.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.hosts import Host, hosts
from benchmarks.jumping_clock import JumpingClock
from protos.addresses import join_address

RAY = str(Path(sys.executable).with_name("ray"))
CLI = (sys.executable, "-m", "cli")
RAY_PORT, REDIS_PORT, RAYLET_PORT = 6379, 6380, 6381
ROUTER_PORT, CONTROLLER_PORT = 50051, 50052
NUM_HOSTS = 4
OBJECT_STORE_BYTES = 80_000_000  # about the least that Ray takes; nothing is stored in it
START_TIMEOUT_S = 180.0
PERIOD_S = 0.25  # between two checks
OPTIONS: Mapping[str, Any] = {
    "device": "cpu",
    "page_size": 16,
    "num_pages": 2048,
    "port": ROUTER_PORT,
    "http_port": 0,
    "controller_port": CONTROLLER_PORT,
    "pool_resources": True,  # so that workers come back on their own hosts
    "log_level": "info",
    "insecure": True,
    "decode_worker": {"local_prefill_max_tokens": 0},
}

PRINT_GROUPS = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
for each in ray.util.placement_group_table().values():
    if each["state"] != "REMOVED":
        print(each["name"])
"""


class CommandFailed(Exception):
    """A command of the product or of Ray did not do what it should."""


class HostedCluster:
    """Owns nothing but the commands; `hosted_cluster` makes one."""

    def __init__(
        self, machines: Sequence[Host], folder: Path, *, has_redis: bool, has_clocks: bool
    ) -> None:
        self.head, *self.worker_hosts, self.edge = machines
        self.addresses = [
            join_address(each.address, ROUTER_PORT) for each in (self.head, self.edge)
        ]
        self.vocab_size = 0  # of the model that is served
        self._folder = folder
        self._has_redis = has_redis
        self.config = folder / "cluster.yaml"
        self.start_s = 0.0  # that `pagewire up` took
        # name of a host |-> its wall clock
        self.clocks = {
            each.name: JumpingClock(folder, each.name) for each in machines if has_clocks
        }
        self._keys = folder / "router.keys"
        self._environment = {
            # What this process sets for a Ray of its own is not for these.
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            # As on a network with strangers: Ray admits only callers with this token.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # How long hosts of workers wait for a head that is gone.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
            # As the product starts a Ray of its own.
            "RAY_worker_niceness": "0",
            "RAY_prestart_worker_first_driver": "0",
            # How long Ray may take to start: other work may run beside it.
            "RAY_agent_register_timeout_ms": str(int(1000 * START_TIMEOUT_S)),
            "RAY_raylet_start_wait_time_s": str(int(START_TIMEOUT_S)),
        }
        self._running: dict[str, subprocess.Popen[str]] = {}

    def start(self, model: Path, options: Mapping[str, Any] = {}) -> None:
        """Start Ray everywhere, and the cluster; returns when it serves."""
        self.vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        count = len(self.worker_hosts)
        config = {
            **OPTIONS,
            "model": str(model),
            "host": self.head.address,
            "ray_address": self.ray_address,
            "prefill": count,
            "decode": count,
            **options,
        }
        self.config.write_text(json.dumps(config))
        if self._has_redis:
            listen = ["--bind", self.edge.address, "--port", str(REDIS_PORT)]
            redis = ["redis-server", *listen, "--save", "", "--protected-mode", "no"]
            self._keep(self.edge, "redis", redis)
        for host in (self.head, *self.worker_hosts):
            self.start_ray(host)
        for host in self.worker_hosts:
            _until_listens(host, RAYLET_PORT, f"Ray on {host.name}")
        self.bring_up()
        self.command(self.head, "router-keys", str(self._keys), "--ray-address", self.ray_address)
        self.start_router()
        self.until_whole()

    def start_ray(self, host: Host) -> None:
        """Run Ray on a host from now on, and restart it whenever it ends."""
        arguments = [
            f"--node-ip-address={host.address}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--node-manager-port={RAYLET_PORT}",
            "--num-cpus=2",
            "--include-log-monitor=false",  # it would take a twentieth of the time of all processes
            "--block",
        ]
        if host is self.head:
            arguments += ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        else:
            resources = json.dumps({"pagewire-prefill": 1, "pagewire-decode": 1})
            arguments += [f"--address={self.ray_address}", f"--resources={resources}"]
        keeps_state = host is self.head and self._has_redis
        redis = join_address(self.edge.address, REDIS_PORT)
        environment = {"RAY_REDIS_ADDRESS": redis} if keeps_state else {}
        self._keep(host, f"ray-{host.name}", [RAY, "start", *arguments], environment)
        if host is self.head:
            _until_listens(host, RAY_PORT, "Ray's head")

    def start_router(self) -> None:
        """Run the second router from now on, and restart it whenever it ends."""
        self._keep(
            self.edge,
            "router",
            [
                *CLI,
                "router",
                f"--config={self.config}",
                f"--controller={join_address(self.head.address, CONTROLLER_PORT)}",
                f"--keys={self._keys}",
                f"--host={self.edge.address}",
                f"--port={ROUTER_PORT}",
            ],
        )

    def restart_router(self) -> None:
        """Let the second router stop as an update does; returns when its successor listens."""
        [running] = [each for each in self.edge.processes("cli router") if each.name() != "sh"]
        running.terminate()
        running.wait(START_TIMEOUT_S)
        _until_listens(self.edge, ROUTER_PORT, "the second router")

    def start_gateway(self, port: int) -> None:
        """Serve HTTP in front of both routers, on the host of the second one."""
        routers = [f"--router={each}" for each in self.addresses]
        listen = ["--insecure", f"--host={self.edge.address}", f"--port={port}"]
        self._keep(self.edge, "gateway", [*CLI, "gateway", *routers, *listen])
        _until_listens(self.edge, port, "the gateway")

    def bring_up(self, *flags: str) -> None:
        """Start the product's processes; returns when they serve."""
        began = time.monotonic()
        self.command(self.head, "up", "--config", str(self.config), *flags)
        self.start_s = time.monotonic() - began

    def end(self) -> None:
        """End the product's processes, except the second router."""
        self.command(self.head, "down", "--grace-s", "0", "--ray-address", self.ray_address)

    def begin(self, host: Host, *arguments: str) -> "subprocess.Popen[str]":
        """Begin a command of the product on a host."""
        with (self._folder / f"{arguments[0]}.log").open("a") as log:
            return host.start(
                *CLI,
                *arguments,
                environment=self._environment_of(host),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def command(self, host: Host, *arguments: str) -> str:
        """Run a command of the product on a host; returns its output."""
        code, output, errors = host.run(
            *CLI, *arguments, timeout_s=START_TIMEOUT_S, environment=self._environment_of(host)
        )
        if code:
            raise CommandFailed(f"pagewire {' '.join(arguments)}: {code}: {output}{errors}")
        return output

    def status(self, router: int = 1) -> dict[str, Any]:
        """Return a router's status, by default the second's; CommandFailed: it does not run."""
        told = self.command(self.edge, "status", "--json", "--address", self.addresses[router])
        found: dict[str, Any] = json.loads(told)
        return found

    def workers(self, router: int = 1) -> list[dict[str, Any]]:
        """Return the workers in it; none: the router does not run."""
        try:
            found: list[dict[str, Any]] = self.status(router)["workers"]
        except CommandFailed:
            return []
        return found

    def places(self) -> list[str]:
        """Return the workers for which Ray's places were reserved, in the order of their names."""
        script = (sys.executable, "-c", PRINT_GROUPS, self.ray_address)
        code, output, errors = self.head.run(
            *script, timeout_s=START_TIMEOUT_S, environment=self._environment_of(self.head)
        )
        if code:
            raise CommandFailed(f"groups of Ray: {code}: {errors}")
        return sorted(each.rpartition("-")[0].partition("/")[2] for each in output.split())

    def sees_all(self, router: int = 1) -> bool:
        """Return whether a router runs and sees all workers ready."""
        ready = [each for each in self.workers(router) if each["state"] == "ready"]
        return len(ready) == 2 * len(self.worker_hosts)

    def is_whole(self) -> bool:
        """Return whether both routers run and see all workers ready."""
        return all(map(self.sees_all, (0, 1)))

    def until_whole(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait until both see all workers ready; return how many seconds it took."""
        return until(self.is_whole, timeout_s, "all workers ready at both routers")

    def _keep(
        self,
        host: Host,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] = {},
    ) -> None:
        log = (self._folder / f"{name}.log").open("a")
        script = 'while :; do "$@"; sleep 1; done'
        with log:
            self._running[name] = host.start(
                *("sh", "-c", script, "sh"),
                *command,
                environment={**self._environment_of(host), **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _environment_of(self, host: Host) -> Mapping[str, str]:
        clock = self.clocks.get(host.name)
        return {**self._environment, **(clock.environment if clock else {})}

    @property
    def ray_address(self) -> str:
        """The address of Ray's head, `host:port`."""
        return join_address(self.head.address, RAY_PORT)


@contextmanager
def hosted_cluster(
    model: Path,
    folder: Path,
    *,
    has_redis: bool,
    has_clocks: bool = False,
    ip_version: int = 4,
    options: Mapping[str, Any] = {},
) -> Iterator[HostedCluster]:
    """Yield a cluster that serves.

    Args:
        model: Folder of its model.
        folder: Takes its configuration and logs.
        has_redis: Without it the cluster ends with the host of Ray's head.
        has_clocks: The wall clock of each host can jump.
        ip_version: 4 or 6, of the hosts' addresses.
        options: Options of its configuration, besides OPTIONS.
    """
    with hosts(NUM_HOSTS, ip_version) as machines:
        cluster = HostedCluster(machines, folder, has_redis=has_redis, has_clocks=has_clocks)
        cluster.start(model, options)
        yield cluster


def _until_listens(host: Host, port: int, what: str) -> None:
    """Wait until a host takes connections at a port: a command that asks would take seconds."""

    def listens() -> bool:
        try:
            with host.network(), socket.create_connection((host.address, port), PERIOD_S):
                return True
        except OSError:
            return False

    until(listens, START_TIMEOUT_S, what)


def until(is_true: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait until a condition holds; returns the seconds it took. TimeoutError: not in time."""
    began = time.monotonic()
    while not is_true():
        if time.monotonic() > began + timeout_s:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(PERIOD_S)
    return time.monotonic() - began
