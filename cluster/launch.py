"""Starts a cluster through Ray and ends it.

cluster.preflight has already refused what needs no Ray to check (model folder, GPUs, port).
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import ray

from cluster.attach import AT_ONCE_S, ask_starting, attach_ray, check_log_room, named_actors
from cluster.certificates import check_links, own_client, with_absolute_files
from cluster.config import ClusterConfig
from cluster.controller import ClusterFacts, ControllerActor
from cluster.deployment import Deployment, secret_of
from cluster.descendants import killing_those_asked
from cluster.disk_room import check_room
from cluster.environment import forwarded_environment, inherited_by_processes
from cluster.errors import RayLost, StartError
from cluster.groups import look_at_groups, remove_groups, reserve
from cluster.host_memory import read_host_memory
from cluster.local_ray import LocalRay
from cluster.model_folder import check_model_files
from cluster.own_address import own_address
from cluster.placement import (
    CONTROL_GROUP,
    CONTROLLER_NAME,
    ROUTER_NAME,
    at_home,
    gateways,
    has_own_gpus,
    home_resource,
    hosts_now,
    needs_of,
    place,
    place_worker,
    variables_of_workers,
)
from cluster.places import Place, check_pool, choose_places
from cluster.pool_config import pool_of
from cluster.port_need import check_port_ranges
from cluster.preflight import choose_device
from cluster.private_folder import RayToken, private_folder
from cluster.ray_actors import NAMESPACE
from cluster.ray_hosts import check_hosts
from cluster.ray_node import only_what_a_cluster_uses
from cluster.ray_sessions import remove_ended_sessions, session_logs
from cluster.readiness import (
    LoadWatch,
    cluster_resources,
    num_unready,
    wait_ready,
    wait_until_served,
)
from cluster.scaling import is_worker, told_counts, worker_ids
from llm_engine.load_progress import ReportLoaded
from llm_engine.read_ahead import reading_ahead
from observability.logs import fields
from protos.addresses import is_loopback

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 * 2**20  # no data goes through Ray; this is about its minimum
PLACE_TIMEOUT_S = 30.0  # for an actor without GPU
STOP_MARGIN_S = 5.0  # also for GATEWAY_MARGIN_S, and then for the gateway to tell its clients
GATEWAY_MARGIN_S = 1.0  # to pass on what the router sends at the end of its grace
END_TIMEOUT_S = 10.0  # for Ray to end processes on request
END_PERIOD_S = 0.05  # between two looks whether it has
LOST_PERIOD_S = 0.2  # between two looks whether Ray still lives


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWatch:
    """Callbacks of a caller that waits for a start."""

    say: Callable[[str], None] = lambda line: None  # progress of a possible start
    # How far the weights of all workers are, again and again.
    show_loaded: ReportLoaded = lambda done_bytes, total_bytes: None
    check: Callable[[], None] = lambda: None  # called repeatedly; its errors end the wait

    def also(self, check: Callable[[], None]) -> "StartWatch":
        """Return one that makes a further check."""

        def both() -> None:
            self.check()
            check()

        return replace(self, check=both)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningCluster:
    """A cluster whose processes serve."""

    address: str  # of the router
    device: str
    actors: Mapping[str, Any]  # name |-> actor handle
    http_address: str = ""  # of the gateway; empty: there is no HTTP
    context_tokens: int = 0  # longest request that is served
    local_ray: LocalRay = field(default_factory=LocalRay)

    @property
    def workers(self) -> list[str]:
        """The names of all workers."""
        return [name for name in self.actors if is_worker(name)]

    @property
    def controller(self) -> Any:
        """The handle of the controller."""
        return self.actors[CONTROLLER_NAME]

    def pid(self, name: str) -> int:
        """Return the process id of an actor on its host."""
        # By name: the controller replaces actors that Ray has given up.
        actor: Any = ray.get_actor(name)
        call = actor.pid.options(concurrency_group=CONTROL_GROUP).remote()
        return int(ray.get(call, timeout=PLACE_TIMEOUT_S))

    def stop(self, grace_s: float) -> None:
        """Give running requests `grace_s` seconds, then end all processes.

        A Ray that has lost a process, perhaps to the same signal, would not answer; its remaining
        processes are left alone.
        """
        # In a thread of its own: a call to such a Ray can last for a minute.
        ended: Future[None] = Future()

        def end() -> None:
            try:
                end_cluster(grace_s)
                ended.set_result(None)
            except BaseException as error:
                ended.set_exception(error)

        try:
            if not self.local_ray.lost:
                threading.Thread(target=end, name="end-cluster", daemon=True).start()
                while not wait([ended], timeout=LOST_PERIOD_S).done and not self.local_ray.lost:
                    pass
                if ended.done():
                    ended.result()
                    shut_down_ray()
        finally:
            self.local_ray.close()


def start_cluster(
    config: ClusterConfig,
    device: str | None,
    *,
    shows_worker_logs: bool,
    watch: StartWatch = StartWatch(),
) -> RunningCluster:
    """Start everything, if need be a Ray, and wait until the router sees all workers ready.

    Args:
        config: The cluster to start.
        device: The device of the workers, as preflight.check_start returns it.
        shows_worker_logs: Pass the log lines of all processes on to standard error.
        watch: Gets progress.

    Raises:
        ClusterError: The problem and the remedy; nothing is left running.
    """
    with nullcontext() if device is None else weights_read_ahead(config):
        return _start_cluster(config, device, shows_worker_logs, watch)


def _start_cluster(
    config: ClusterConfig, device: str | None, shows_worker_logs: bool, watch: StartWatch
) -> RunningCluster:
    deadline = time.monotonic() + config.start_timeout_s
    if device is None:
        attach_ray(config.ray_address, shows_worker_logs=shows_worker_logs)
        local_ray = LocalRay()
    else:
        watch.say(starting(config, device))
        watch.check()
        num_gpus = config.num_workers("prefill") + config.num_workers("decode")
        num_gpus = num_gpus if has_own_gpus(device, config.workers_per_gpu) else 0
        environment = variables_of_workers(config, device, forwarded_environment())
        local_ray = start_local_ray(num_gpus, environment, shows_worker_logs=shows_worker_logs)
    try:
        if device is None:
            device = device_of_ray(config)
            watch.say(starting(config, device))
        watch = watch.also(local_ray.check)
        watch.check()
        is_own_ray = not config.ray_address
        cluster = deploy(config, device, deadline, watch, is_own_ray=is_own_ray)
    except BaseException:
        if not local_ray.lost:  # else it would not answer
            shut_down_ray()
        local_ray.close()
        raise
    return replace(cluster, local_ray=local_ray)


def deploy(
    config: ClusterConfig, device: str, deadline: float, watch: StartWatch, *, is_own_ray: bool
) -> RunningCluster:
    """Place a cluster on the attached Ray, and wait until the router sees all workers ready.

    Args:
        config, device: The cluster to start.
        deadline: By time.monotonic().
        watch: Gets progress.
        is_own_ray: The caller has started this Ray with `variables_of_workers`, and ends it, and
            with it all processes, when this raises.

    Raises:
        ClusterError: The problem and the remedy; nothing is left running on another owner's Ray.
    """
    assert config.model is not None
    check_log_room()
    # Processes of the cluster run in other folders than this one.
    config = with_absolute_files(replace(config, model=config.model.resolve()))
    environment = forwarded_environment()
    if config.ray_address:
        addresses = check_hosts(config, device, environment, watch.say, watch.check)
    else:
        addresses = [own_address(config)]
    check_links(config, device, addresses)
    if not config.pool_resources:  # else hosts may join later
        prefill, decode = config.num_workers("prefill"), config.num_workers("decode")
        check_port_ranges(config, device, prefill, decode, num_hosts=len(addresses))
    deployment = Deployment(
        config=config,
        device=device,
        # Actors get their keys as arguments, which only users of this Ray can read.
        secret=secret_of(config),
        home_resource=home_resource(),
        environment=environment,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        inherited=variables_of_workers(config, device, environment) if is_own_ray else {},
    )
    if config.pools and not config.pool_resources:  # no hosts join later
        _check_pools(deployment)
    options = {
        **at_home(deployment),
        "get_if_exists": False,
    }
    controller = place(ControllerActor, CONTROLLER_NAME, options, deployment)
    try:
        # Workers take longest to start, and need the controller only to ask what they were before.
        places = _place_workers(deployment)
        actors = _deployed(controller, watch, places)
        return wait_for_cluster(
            {**actors, CONTROLLER_NAME: controller}, config, device, deadline, watch
        )
    except RayLost:  # it would not answer
        raise
    except BaseException:
        if not is_own_ray:
            kill_cluster(controller)
        raise


def _check_pools(deployment: Deployment) -> None:
    """Refuse pools whose workers would not fit even on empty hosts."""
    config = deployment.config
    nodes, _ = hosts_now()
    names = worker_ids(config.workers_of_pools)
    for _, pool in groupby(names, key=pool_of):
        check_pool({name: needs_of(deployment, name) for name in pool}, nodes)


def find_cluster(facts: ClusterFacts, deadline: float, watch: StartWatch) -> RunningCluster:
    """Return the cluster on the attached Ray once its remaining workers are ready."""
    actors = named_actors()
    if ROUTER_NAME not in actors:  # its launcher died halfway
        _deployed(actors[CONTROLLER_NAME], watch)
        actors = named_actors()
    leaving = {*facts.workers.leaving, *gateways(actors)[:-1]}
    staying = {name: each for name, each in actors.items() if name not in leaving}
    return wait_for_cluster(staying, facts.config, facts.device, deadline, watch)


def _place_workers(deployment: Deployment) -> dict[str, Place]:
    """Place the workers of a cluster that has none; return their places by name."""
    config = deployment.config
    names = worker_ids(config.workers_of_pools)
    needs = {name: needs_of(deployment, name) for name in names}
    remove_groups(look_at_groups().unused)  # of a cluster whose end was cut short
    chosen = choose_places(needs, {}, *hosts_now())
    places = {name: reserve(name, where) for name, where in chosen.items()}
    for name, where in places.items():
        place_worker(deployment, name, where)
    return places


def _deployed(
    controller: Any, watch: StartWatch, places: Mapping[str, Place] = {}
) -> dict[str, Any]:
    """Have the controller start the other processes; returns all handles by name."""
    call = controller.deploy.remote(places)
    actors: dict[str, Any] = ask_starting(call, watch.say, watch.check)
    return actors


def wait_for_cluster(
    actors: Mapping[str, Any],
    config: ClusterConfig,
    device: str,
    deadline: float,
    watch: StartWatch,
) -> RunningCluster:
    """Wait until the router sees all workers among `actors` ready; say nothing if all are."""
    waiting = {name: actor for name, actor in actors.items() if name != CONTROLLER_NAME}
    num_missing = num_unready(waiting, AT_ONCE_S)
    say = watch.say if num_missing else lambda line: None
    processes = "process" if num_missing == 1 else "processes"
    say(f"Ray runs; waiting for {num_missing} {processes} to load and connect")
    loading = LoadWatch(actors[CONTROLLER_NAME], watch.show_loaded)

    def look() -> None:
        watch.check()
        loading.look()

    addresses = wait_ready(waiting, deadline, config.start_timeout_s, say, look)
    address, router = addresses[ROUTER_NAME], actors[ROUTER_NAME]
    workers = [name for name in actors if is_worker(name)]
    return RunningCluster(
        address=address,
        device=device,
        actors=actors,
        http_address=next((addresses[name] for name in gateways(addresses)), ""),
        context_tokens=wait_until_served(
            address, own_client(config.tls_settings), router, workers, deadline, watch.check
        ),
    )


def end_cluster(grace_s: float, begun: Callable[[], None] = lambda: None) -> None:
    """End the cluster on the attached Ray.

    Args:
        grace_s: Seconds for its running requests.
        begun: Called when the cluster has begun to stop.
    """
    timeout_s = grace_s + STOP_MARGIN_S
    if (controller := named_actors().get(CONTROLLER_NAME)) is not None:
        _wait_stopped([controller.close.remote()], timeout_s)
    begun()
    actors = named_actors()  # the controller has placed all that it ever will
    router = actors.get(ROUTER_NAME)
    stopping = [] if router is None else [router.stop.remote(grace_s)]
    for name in gateways(actors):
        stopping.append(actors[name].stop.remote(grace_s + GATEWAY_MARGIN_S))
    _wait_stopped(stopping, timeout_s)
    workers = [actor for name, actor in actors.items() if is_worker(name)]
    _wait_stopped([each.stop.remote(0.0) for each in workers], timeout_s)
    kill_cluster()


def _wait_stopped(calls: Iterable[Any], timeout_s: float) -> None:
    """Wait for the calls that stop processes; an actor without a process has nothing to stop."""
    deadline = time.monotonic() + timeout_s
    for call in calls:
        try:
            ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            pass  # Ray restarts it, or another `pagewire down` has ended it
        except ray.exceptions.RayError as error:  # the others may still stop in order
            log.warning("stop_incomplete", extra=fields(error=str(error)))


def kill_cluster(controller: Any = None) -> None:
    """End all processes of the cluster on the attached Ray at once; the controller last.

    Args:
        controller: If given, that of the cluster: one with another controller is left alone.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while (actors := named_actors()) and time.monotonic() < deadline:
        if controller is not None and actors.get(CONTROLLER_NAME, controller) != controller:
            return  # somebody has ended this cluster and started another one meanwhile
        for name in sorted(actors, key=lambda name: name == CONTROLLER_NAME):
            ray.kill(actors[name], no_restart=True)
        time.sleep(END_PERIOD_S)
    if actors:
        log.warning("processes_left", extra=fields(names=", ".join(actors)))
    remove_groups(look_at_groups().unused)


def weights_read_ahead(config: ClusterConfig) -> AbstractContextManager[None]:
    """Have this host read the weights while entered, as its workers will when they have started.

    Raises:
        ConfigError: The model cannot be served.
    """
    assert config.model is not None
    tensors = check_model_files(config.model).tensors.values()
    paths = dict.fromkeys(each.path for each in tensors)
    # Processes need memory, too.
    return reading_ahead(list(paths), read_host_memory().free_bytes // 2)


def start_local_ray(
    num_gpus: int, environment: Mapping[str, str] = {}, *, shows_worker_logs: bool
) -> LocalRay:
    """Start a Ray for one cluster: on the loopback address, with its own token.

    Args:
        num_gpus: GPUs that it may give to workers, one each.
        environment: Variables that all its processes inherit.
        shows_worker_logs: Pass the log lines of all processes on to standard error.

    Raises:
        StartError: It does not start, its disk is full, or other hosts could reach it.
    """
    folder = private_folder()
    check_room(folder)
    temp_dir = folder / "ray"
    remove_ended_sessions(temp_dir)
    token = RayToken(folder)
    # A signal to a whole process group or service would end Ray before the requests that run. Its
    # processes inherit the mask, as they do that of Ray for SIGINT; see shut_down_ray.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with inherited_by_processes(environment), only_what_a_cluster_uses():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                include_dashboard=False,
                # Actors ask for no CPUs: Ray's count limits nothing here, and hosts may have two.
                num_cpus=os.cpu_count(),
                num_gpus=num_gpus,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=shows_worker_logs,
                logging_level=logging.WARNING,
                _temp_dir=str(temp_dir),
            )
    except Exception as error:  # a node that starts too slowly raises just that
        token.remove()
        raise StartError(f"cannot start Ray on this host: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if not is_loopback(host):
        shut_down_ray()
        token.remove()
        raise StartError(f"Ray listens on {host}, which others reach; call prepare_ray earlier")
    return LocalRay(token, session_logs())


def shut_down_ray() -> None:
    """Leave the attached Ray, or end the one that was started here.

    Ray asks its processes to end by SIGTERM, and waits for each for a second. They block it.
    """
    worker = ray._private.worker.global_worker

    def has_left() -> bool:  # without its raylet, this process would wait for it
        return not hasattr(worker, "core_worker")

    with killing_those_asked(has_left):
        ray.shutdown()


def device_of_ray(config: ClusterConfig) -> str:
    """Return the workers' device on the attached Ray; PlacementError: it has too few GPUs."""
    if config.pool_resources:  # it is not "auto", and the number of GPUs is not known yet
        return config.device
    return choose_device(config, int(cluster_resources().get("GPU", 0)))


def starting(config: ClusterConfig, device: str) -> str:
    """Return the line that announces the start."""
    counts = told_counts(config.num_workers("prefill"), config.num_workers("decode"))
    return f"starting {counts} on {device}"
