"""Starts a cluster through Ray and stops it: placement, deadlines, and a diagnosis when one passes.

What can be refused without Ray (model folder, GPUs, port) cluster.preflight has refused before.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig
from cluster.controller import ControllerActor
from cluster.devices import gpus_of_pools, visible_gpu
from cluster.environment import forwarded_environment, worker_environment
from cluster.errors import StartError
from cluster.local_ray import LocalRay
from cluster.preflight import choose_device
from cluster.private_folder import RayToken, private_folder
from cluster.ray_listeners import is_loopback
from credentials.secret import ClusterSecret
from decode_worker.actor import DecodeActor
from http_gateway.actor import GatewayActor
from llm_engine.load_progress import ReportLoaded
from llm_engine.model_files import model_name, text_folder
from observability.logs import fields
from pagewire import Client, ClusterStatus, PagewireError
from prefill_worker.actor import PrefillActor
from router.actor import RouterActor
from worker.process import WorkerSettings

log = logging.getLogger(__name__)

NAMESPACE = "pagewire"
CONTROLLER_NAME = "pagewire-controller"
ROUTER_NAME = "router-0"
GATEWAY_NAME = "http-gateway-0"
OBJECT_STORE_BYTES = 100 * 2**20  # no data goes through Ray; this is about its least
LOOPBACK = "127.0.0.1"
STATUS_PERIOD_S = 0.1
CHECK_PERIOD_S = 0.2  # between two looks whether the start is to be given up
PLACE_TIMEOUT_S = 30.0  # for an actor without GPU
STOP_MARGIN_S = 5.0
GATEWAY_MARGIN_S = 1.0  # to tell clients how the router ended their calls
CONTROL_GROUP = "control"  # has its own event loop, so it answers while the default one is stuck


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningCluster:
    """Handles of what was started."""

    address: str  # of the router
    device: str
    workers: Mapping[str, Any]  # worker_id |-> actor handle
    router: Any
    controller: Any
    gateway: Any = None  # None: there is no HTTP
    http_address: str = ""  # of the gateway
    context_tokens: int = 0  # longest request that is served; known when all are ready
    local_ray: LocalRay = field(default_factory=LocalRay)

    @property
    def actors(self) -> dict[str, Any]:
        """All handles by name, in the order in which they are to be stopped."""
        gateway = {} if self.gateway is None else {GATEWAY_NAME: self.gateway}
        return {
            **gateway,
            ROUTER_NAME: self.router,
            **self.workers,
            CONTROLLER_NAME: self.controller,
        }

    def pid(self, name: str) -> int:
        """Return the process id of an actor on its host."""
        call = self.actors[name].pid.options(concurrency_group=CONTROL_GROUP).remote()
        return int(ray.get(call, timeout=PLACE_TIMEOUT_S))

    def stop(self, grace_s: float) -> None:
        """Give running requests `grace_s` seconds, then end all processes.

        Of a Ray that has lost a process nobody would answer; what is left of it is left alone.
        """
        try:
            if not self.local_ray.lost:
                self._stop_all(grace_s)
        finally:
            self.local_ray.close()

    def _stop_all(self, grace_s: float) -> None:
        timeout_s = grace_s + STOP_MARGIN_S
        try:
            stopping = [self.router.stop.remote(grace_s)]
            if self.gateway is not None:
                stopping.append(self.gateway.stop.remote(grace_s + GATEWAY_MARGIN_S))
            ray.get(stopping, timeout=timeout_s)
            ray.get([each.stop.remote(0.0) for each in self.workers.values()], timeout=timeout_s)
        except ray.exceptions.RayError as error:
            log.warning("stop_incomplete", extra=fields(error=str(error)))
        for actor in self.actors.values():
            ray.kill(actor, no_restart=True)
        ray.shutdown()


def start_cluster(
    config: ClusterConfig,
    device: str | None,
    *,
    shows_worker_logs: bool,
    say: Callable[[str], None] = lambda line: None,
    show_loaded: ReportLoaded = lambda done_bytes, total_bytes: None,
    check: Callable[[], None] = lambda: None,
) -> RunningCluster:
    """Start everything and wait until the router sees all workers ready.

    Args:
        config: What to start.
        device: Of the workers, as preflight.check_start returns it.
        shows_worker_logs: Pass the log lines of all processes on to standard error.
        say: Told what happens, once it is known that it can.
        show_loaded: Told again and again how far the weights of all workers are.
        check: Called again and again; what it raises ends the start.

    Raises:
        ClusterError: What was wrong and what to do; nothing is left running.
    """
    deadline = time.monotonic() + config.start_timeout_s
    if device is None:
        _attach_ray(config, shows_worker_logs)
        local_ray = LocalRay()
    else:
        say(_starting(config, device))
        check()
        local_ray = start_local_ray(config, device, shows_worker_logs)
    try:
        if device is None:
            device = choose_device(config, int(_cluster_resources().get("GPU", 0)))
            say(_starting(config, device))
        check()
        cluster = _start_actors(config, device, deadline, say, show_loaded, check)
        context_tokens = _wait_until_served(cluster, deadline, check)
    except BaseException:
        ray.shutdown()
        local_ray.close()
        raise
    return replace(cluster, context_tokens=context_tokens, local_ray=local_ray)


def worker_ids(config: ClusterConfig) -> list[str]:
    """Return the names of all workers, prefill first."""
    prefill = [f"prefill-{index}" for index in range(config.prefill)]
    return prefill + [f"decode-{index}" for index in range(config.decode)]


def _attach_ray(config: ClusterConfig, shows_worker_logs: bool) -> None:
    try:
        ray.init(
            address=config.ray_address,
            namespace=NAMESPACE,
            log_to_driver=shows_worker_logs,
            logging_level=logging.WARNING,
        )
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise StartError(f"cannot attach to Ray at {config.ray_address}: {error}") from error
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        # Who reaches such a Ray runs code in it, and reads the keys that actors are given.
        log.warning("ray_takes_anybody", extra=fields(address=config.ray_address))


def start_local_ray(config: ClusterConfig, device: str, shows_worker_logs: bool) -> LocalRay:
    """Start a Ray for this cluster alone: on the loopback address, with a token of its own.

    Raises:
        StartError: It does not start, or others could reach it.
    """
    folder = private_folder()
    token = RayToken(folder)
    temp_dir = folder / "ray"
    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=False,
            # Actors ask for no CPUs: Ray's count limits nothing here, and hosts may have two.
            num_cpus=os.cpu_count(),
            num_gpus=config.prefill + config.decode if _has_own_gpus(config, device) else 0,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=shows_worker_logs,
            logging_level=logging.WARNING,
            _temp_dir=str(temp_dir),
        )
    except Exception as error:  # a node that starts too slowly raises just that
        token.remove()
        raise StartError(f"cannot start Ray on this host: {error}") from error
    local_ray = LocalRay(token, temp_dir / "session_latest" / "logs")
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if not is_loopback(host):
        ray.shutdown()
        local_ray.close()
        raise StartError(f"Ray listens on {host}, which others reach; call prepare_ray earlier")
    return local_ray


def _starting(config: ClusterConfig, device: str) -> str:
    prefill = f"{config.prefill} prefill and " if config.prefill else ""
    return f"starting {prefill}{config.decode} decode workers on {device}"


def _start_actors(
    config: ClusterConfig,
    device: str,
    deadline: float,
    say: Callable[[str], None],
    show_loaded: ReportLoaded,
    check: Callable[[], None],
) -> RunningCluster:
    assert config.model is not None
    controller = _place(ControllerActor, CONTROLLER_NAME, {}, config.log_level, config.log_format)
    hash_key = secrets.token_bytes(16)  # of page hashes, unknown to clients
    # Actors get their keys as arguments, which only who may use this Ray can read.
    secret = ClusterSecret.generate()
    workers = {}
    for worker_id in worker_ids(config):
        settings = _settings(config, worker_id, device)
        options = _resources(config, worker_id, device)
        if worker_id.startswith("prefill"):
            prefill = replace(
                config.prefill_worker, transfer_deadlines=config.transfer, hash_key=hash_key
            )
            keys = secret.keys_of("prefill", worker_id)
            workers[worker_id] = _place(
                PrefillActor, worker_id, options, settings, prefill, keys, CONTROLLER_NAME
            )
        else:
            decode = replace(
                config.decode_worker, transfer_deadlines=config.transfer, hash_key=hash_key
            )
            keys = secret.keys_of("decode", worker_id)
            workers[worker_id] = _place(
                DecodeActor, worker_id, options, settings, decode, keys, CONTROLLER_NAME
            )
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "scheduling_strategy": here,  # clients know it by an address of this host
        "runtime_env": {"env_vars": forwarded_environment()},
    }
    router = _place(
        RouterActor,
        ROUTER_NAME,
        options,
        replace(
            config.router,
            router_id=ROUTER_NAME,
            page_hash_key=hash_key,
            local_prefill_max_tokens=config.decode_worker.local_prefill_max_tokens,
            max_running_sequences=config.decode_worker.max_running_sequences,
        ),
        text_folder(config.model.resolve()),
        config.host,
        config.port,
        config.log_level,
        config.log_format,
        secret.keys_of("router", ROUTER_NAME),
        CONTROLLER_NAME,
    )
    actors = {ROUTER_NAME: router, **workers}
    gateway = None
    if config.http_port:
        gateway = actors[GATEWAY_NAME] = _place(
            GatewayActor,
            GATEWAY_NAME,
            options,
            config.http_gateway,
            config.host,
            config.http_port,
            config.log_level,
            config.log_format,
            ROUTER_NAME,
        )
    say(f"Ray runs; waiting for {len(actors)} processes to load and connect")
    watch = _LoadWatch(controller, show_loaded)

    def look() -> None:
        check()
        watch.look()

    addresses = _wait_ready(actors, deadline, config.start_timeout_s, say, look)
    return RunningCluster(
        address=addresses[ROUTER_NAME],
        device=device,
        workers=workers,
        router=router,
        controller=controller,
        gateway=gateway,
        http_address=addresses.get(GATEWAY_NAME, ""),
    )


def _has_own_gpus(config: ClusterConfig, device: str) -> bool:
    return device == "cuda" and config.workers_per_gpu == 1


def _resources(config: ClusterConfig, worker_id: str, device: str) -> dict[str, Any]:
    """Return what Ray gives a worker: a GPU, unless several share one."""
    variables = worker_environment(device, config.cpu_threads)
    has_own_gpu = _has_own_gpus(config, device)
    if device == "cuda" and not has_own_gpu:
        # Ray puts fractions of a GPU wherever there is room, so in time workers of both pools on
        # one. This way a worker that is started again comes back to its own GPU.
        pool, _, index = worker_id.partition("-")
        gpu = int(index) // config.workers_per_gpu
        if pool == "decode":
            gpu += gpus_of_pools(config.prefill, config.decode, config.workers_per_gpu)[0]
        variables["CUDA_VISIBLE_DEVICES"] = visible_gpu(gpu)
    return {
        "num_gpus": int(has_own_gpu),
        "runtime_env": {"env_vars": variables},
    }


def _settings(config: ClusterConfig, worker_id: str, device: str) -> WorkerSettings:
    assert config.model is not None
    model = config.model.resolve()
    is_decode = worker_id.startswith("decode")
    return WorkerSettings(
        worker_id=worker_id,
        model_dir=model,
        served_model_name=config.served_model_name or model_name(model),
        device=device,
        dtype=config.dtype,
        deterministic=config.deterministic,
        num_seats=config.decode_worker.max_running_sequences if is_decode else 0,
        page_size=config.page_size,
        num_pages=config.num_pages,
        gpu_memory_fraction=config.gpu_memory_fraction,
        workers_per_gpu=config.workers_per_gpu,
        cpu_pages_bytes=config.cpu_pages_mib * 2**20,
        cpu_threads=config.cpu_threads,
        host="" if config.ray_address else LOOPBACK,
        log_level=config.log_level,
        log_format=config.log_format,
    )


def _place(actor: type, name: str, options: Mapping[str, Any], *arguments: Any) -> Any:
    """Ask Ray for a named actor that is started again whenever its process dies."""
    remote = ray.remote(  # type: ignore[call-overload] # Ray's hints lack concurrency_groups
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,  # replaying work is the router's decision
        concurrency_groups={CONTROL_GROUP: 2},
    )(actor)
    try:
        return remote.options(name=name, **options).remote(*arguments)
    except ValueError as error:
        if "already taken" in str(error):
            reason = "another Pagewire cluster runs on this Ray; stop it first"
            raise StartError(f"{name} exists already: {reason}") from error
        raise StartError(f"cannot start {name}: {error}") from error


class _LoadWatch:
    """Asks the controller how far the weights are, and never waits for its answer."""

    def __init__(self, controller: Any, show_loaded: ReportLoaded) -> None:
        self._controller = controller
        self._show_loaded = show_loaded
        self._call = controller.loaded.remote()

    def look(self) -> None:
        """Show the latest answer, if one has come, and ask again."""
        done, _ = ray.wait([self._call], timeout=0)
        if not done:
            return
        with suppress(ray.exceptions.RayError):  # a controller that is started again is told again
            self._show_loaded(*ray.get(self._call))
        self._call = self._controller.loaded.remote()


def _wait_ready(
    actors: Mapping[str, Any],
    deadline: float,
    timeout_s: float,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> dict[str, str]:
    """Wait for each actor's address and tell of it; the first failure ends the wait."""
    names = {actor.wait_ready.remote(): name for name, actor in actors.items()}
    addresses: dict[str, str] = {}
    while waiting := [call for call, name in names.items() if name not in addresses]:
        check()
        done, _ = ray.wait(waiting, num_returns=1, timeout=CHECK_PERIOD_S)
        if not done and time.monotonic() < deadline:
            continue
        if not done:
            missing = [names[call] for call in waiting]
            raise StartError(_diagnosis(missing, timeout_s))
        name = names[done[0]]
        try:
            addresses[name] = ray.get(done[0])
        except ray.exceptions.RayError as error:
            raise StartError(f"{name} did not start: {_last_line(error)}") from error
        say(f"{name} is ready, {len(addresses)} of {len(names)}")
    return addresses


def _wait_until_served(cluster: RunningCluster, deadline: float, check: Callable[[], None]) -> int:
    """Return the longest context that all workers can serve."""
    status: ClusterStatus | None = None
    with Client(cluster.address, default_timeout_s=PLACE_TIMEOUT_S) as client:
        while time.monotonic() < deadline:
            check()
            try:
                status = client.status()
            except PagewireError as error:
                raise StartError(f"the router does not answer: {error}") from error
            ready = {each.worker_id for each in status.workers if each.state == "ready"}
            if ready >= cluster.workers.keys():
                return client.list_models()[0].max_context_tokens
            _refuse_misfits(ray.get(cluster.router.misfits.remote(), timeout=PLACE_TIMEOUT_S))
            time.sleep(STATUS_PERIOD_S)
    states = {each.worker_id: each.state for each in status.workers} if status else {}
    missing = [f"{each} is {states.get(each, 'unknown')}" for each in cluster.workers]
    raise StartError(f"the router does not see all workers ready: {', '.join(missing)}")


def _refuse_misfits(misfits: Mapping[str, str]) -> None:
    if misfits:
        reasons = "; ".join(f"{name} serves {reason}" for name, reason in misfits.items())
        raise StartError(f"all workers must serve one model, but {reasons}")


def _diagnosis(missing: list[str], timeout_s: float) -> str:
    gpus = ""
    if num_gpus := _cluster_resources().get("GPU", 0):
        free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        gpus = f" {free.get('GPU', 0):.0f} of {num_gpus:.0f} GPUs are free;"
    return (
        f"{', '.join(missing)} not ready after {timeout_s:.0f} s;{gpus} see the logs of the Ray "
        f"session ({ray.get_runtime_context().get_temp_dir()}/session_latest/logs on each host), "
        "or raise --start-timeout-s"
    )


def _cluster_resources() -> Mapping[str, float]:
    resources: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
