"""Places a cluster's processes in Ray: named actors that outlive their creator.

They are detached, so Ray's control store owns them: it restarts each one whenever its process dies,
with the arguments given here, and ends none because another one ended.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.certificates import gateway_client
from cluster.config import LOOPBACK, ClusterConfig
from cluster.deployment import Deployment
from cluster.devices import shared_gpu, visible_gpu
from cluster.environment import own_variables, worker_environment
from cluster.errors import StartError
from cluster.groups import closed_hosts, inside
from cluster.places import Amounts, Node, Place
from cluster.pool_config import pool_of, role_of
from cluster.ray_actors import NAMESPACE
from cluster.router_settings import router_settings
from decode_worker.actor import DecodeActor
from decode_worker.config import DecodeConfig
from http_gateway.actor import GatewayActor, GatewayStart
from llm_engine.model_files import model_name
from prefill_worker.actor import PrefillActor
from prefill_worker.config import PrefillConfig
from router.actor import RouterActor, RouterStart
from worker.actor import WorkerStart
from worker.own_host import HostOptions
from worker.settings import WorkerSettings

CONTROLLER_NAME = "pagewire-controller"
ROUTER_NAME = "router-0"
GATEWAY_NAME = "http-gateway"  # for users; its actors have numbers, as a successor starts beside it
FIRST_GATEWAY = f"{GATEWAY_NAME}-0"
HEAD_RESOURCE = "node:__internal_head__"  # as Ray names it
CLOSE_S = 10.0  # for Ray to answer
LEAST_SHARE = 0.0001  # of a resource that there is one of
CONTROL_GROUP = "control"  # has its own event loop, so it answers while the default one is stuck


def place(actor: type, name: str, options: Mapping[str, Any], start: Any) -> Any:
    """Make an actor, or return the one that has its name already.

    Args:
        actor: Its class.
        name: Its name in Ray.
        options: Ray's options for it; `get_if_exists: False` refuses an actor that exists already.
        start: The one argument of its constructor, kept by name because newer code may read it.
    """
    remote = ray.remote(  # type: ignore[call-overload] # Ray's hints lack concurrency_groups
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,  # replaying work is the router's decision
        concurrency_groups={CONTROL_GROUP: 2},
    )(actor)
    options = {"get_if_exists": True, **options}
    try:
        return remote.options(
            name=name, namespace=NAMESPACE, lifetime="detached", **options
        ).remote(start)
    except ValueError as error:
        if "already taken" in str(error):
            reason = "another Pagewire cluster runs on this Ray; `pagewire down` ends it"
            raise StartError(f"{name} exists already: {reason}") from error
        raise StartError(f"cannot start {name}: {error}") from error


def hosts_now() -> tuple[list[Node], Mapping[str, Amounts]]:
    """Return the hosts of the attached Ray, and the free resources of each, by node.

    A closed host has none.
    """
    nodes: list[Node] = ray.nodes()  # type: ignore[no-untyped-call]
    free: dict[str, Amounts] = available_resources_per_node()  # type: ignore[no-untyped-call]
    closed = closed_hosts()
    return nodes, {node_id: each for node_id, each in free.items() if node_id not in closed}


def close_host(node_id: str) -> None:
    """Have Ray start nothing more on a host, until its node there is started again.

    Raises:
        StartError: Ray refuses.
    """
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined] # as others
    is_accepted, why = client.drain_node(node_id, reason, "its host goes", 0, timeout=CLOSE_S)
    if not is_accepted:
        raise StartError(f"Ray does not close the host {node_id}: {why}; nothing has changed")


def needs_of(deployment: Deployment, worker_id: str) -> Amounts:
    """Return the amounts that Ray gives a worker, by resource."""
    asked = _resources(deployment, worker_id)
    needs = {"GPU": float(asked["num_gpus"]), **asked["resources"]}
    return {name: amount for name, amount in needs.items() if amount}


def place_worker(deployment: Deployment, worker_id: str, where: Place) -> Any:
    """Place a worker of either pool, in the group of its place if that has one."""
    config = deployment.config
    role = role_of(worker_id)
    start = WorkerStart(
        settings=_settings(deployment, worker_id),
        config=replace(
            _config_of(config, worker_id),
            transfer_deadlines=config.transfer,
            hash_key=deployment.secret.page_hash_key,
        ),
        keys=deployment.secret.keys_of(role, worker_id),
        controller_name=CONTROLLER_NAME,
    )
    return place(
        PrefillActor if role == "prefill" else DecodeActor,
        worker_id,
        {**_resources(deployment, worker_id), **_scheduling(where)},
        start,
    )


def _scheduling(where: Place) -> dict[str, Any]:
    """Return Ray's options for a place."""
    others = dict(where.resources)
    options = {"num_gpus": others.pop("GPU", 0), "resources": others}
    if where.group:
        options["scheduling_strategy"] = inside(where)
    elif where.node_id:  # of a worker that nothing limits, or that an older version has placed
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(where.node_id, soft=True)
    return options


def place_router(deployment: Deployment) -> Any:
    """Place the router."""
    config = deployment.config
    assert config.model is not None
    settings = router_settings(config, ROUTER_NAME, deployment.secret.router_keys(ROUTER_NAME))
    start = RouterStart(settings=settings, controller_name=CONTROLLER_NAME)
    return place(RouterActor, ROUTER_NAME, at_home(deployment), start)


def gateways(names: Iterable[str]) -> list[str]:
    """Return the gateways among actors; the last one is to stay, and others end."""
    own = [each for each in names if each.rpartition("-")[0] == GATEWAY_NAME]
    return sorted(own, key=_number)


def told_name(actor: str) -> str:
    """Return the name by which users know an actor."""
    return GATEWAY_NAME if gateways([actor]) else actor


def successor_of(gateway: str) -> str:
    """Return the name of the next gateway."""
    return f"{GATEWAY_NAME}-{_number(gateway) + 1}"


def _number(gateway: str) -> int:
    return int(gateway.rpartition("-")[2])


def place_gateway(
    deployment: Deployment, name: str = FIRST_GATEWAY, *, predecessor: str = ""
) -> Any:
    """Place an HTTP gateway, which takes over the listener of a predecessor if it has one."""
    config = deployment.config
    start = GatewayStart(
        config=config.http_gateway,
        host=config.host,
        network_interface=config.network_interface,
        port=config.http_port,
        log_level=config.log_level,
        log_format=config.log_format,
        router_name=ROUTER_NAME,
        tls=config.tls_settings,
        router_tls=gateway_client(config.tls_settings),
        tracing=config.tracing,
        predecessor=predecessor,
    )
    return place(GatewayActor, name, at_home(deployment), start)


def has_own_gpus(device: str, workers_per_gpu: int) -> bool:
    """Return whether Ray gives each worker a whole GPU."""
    return device == "cuda" and workers_per_gpu == 1


def home_resource() -> str:
    """Return the resource that only this process's Ray host has.

    A returning host is another node for Ray, but has the same resource; a replacement of Ray's head
    has the head's, whatever its address.
    """
    own_id = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    [own] = [each for each in nodes if each["NodeID"] == own_id]
    names: list[str] = [each for each in own["Resources"] if each.startswith("node:")]
    return HEAD_RESOURCE if HEAD_RESOURCE in names else names[0]


def at_home(deployment: Deployment) -> dict[str, Any]:
    """Return options of an actor that is reached at an address of the cluster's home."""
    return {
        "resources": {deployment.home_resource: LEAST_SHARE},
        **_environment(deployment, deployment.environment),
    }


def _resources(deployment: Deployment, worker_id: str) -> dict[str, Any]:
    """Return a worker's resources: a GPU, unless several share one; and its pool's unit."""
    config, device = deployment.config, deployment.device
    pool, _, index = worker_id.rpartition("-")
    variables = variables_of_workers(config, device, deployment.environment)
    has_own_gpu = has_own_gpus(device, config.workers_per_gpu)
    if device == "cuda" and not has_own_gpu:
        # Ray places fractions of a GPU wherever there is room, so workers of both pools would
        # end up on one. This way a restarted worker comes back to its own GPU.
        gpu = shared_gpu(pool, int(index), config.prefill, config.decode, config.workers_per_gpu)
        variables["CUDA_VISIBLE_DEVICES"] = visible_gpu(gpu, deployment.visible_gpus)
    return {
        "num_gpus": int(has_own_gpu),
        "resources": {
            **config.pool(pool).amounts,
            **({f"pagewire-{pool}": 1} if config.pool_resources else {}),
        },
        **_environment(deployment, variables),
    }


def variables_of_workers(
    config: ClusterConfig, device: str, forwarded: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that all workers of a cluster have in common."""
    interface = config.nccl_interface or config.network_interface
    return worker_environment(device, config.cpu_threads, forwarded, interface)


def _environment(deployment: Deployment, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's option for an actor with these variables; none if it inherits them."""
    inherited = deployment.inherited
    differing = {name: each for name, each in variables.items() if inherited.get(name) != each}
    return own_variables(differing)


def host_options(config: ClusterConfig, device: str) -> HostOptions:
    """Return the options that each worker's host resolves."""
    uses_nccl = device == "cuda" and config.prefill > 0
    return HostOptions(
        model_paths=config.model_paths or {},
        network_interface=config.network_interface,
        nccl_interface=config.nccl_interface if uses_nccl else "",
    )


def _config_of(config: ClusterConfig, worker_id: str) -> PrefillConfig | DecodeConfig:
    """Return the limits of a worker, with its pool's overrides."""
    own = config.pool(pool_of(worker_id)).max_step_tokens
    changes: dict[str, Any] = {} if own is None else {"max_step_tokens": own}
    if role_of(worker_id) == "prefill":
        return replace(config.prefill_worker, **changes)
    return replace(config.decode_worker, **changes)


def _settings(deployment: Deployment, worker_id: str) -> WorkerSettings:
    config = deployment.config
    assert config.model is not None
    is_decode = role_of(worker_id) == "decode"
    own = config.in_pool(pool_of(worker_id))
    return WorkerSettings(
        worker_id=worker_id,
        model_dir=config.model,
        served_model_name=config.served_model_name or model_name(config.model),
        device=deployment.device,
        dtype=config.dtype,
        num_seats=config.decode_worker.max_running_sequences if is_decode else 0,
        max_step_tokens=_config_of(config, worker_id).max_step_tokens,
        page_size=config.page_size,
        num_pages=own.num_pages,
        gpu_memory_fraction=own.gpu_memory_fraction,
        workers_per_gpu=config.workers_per_gpu,
        cpu_pages_bytes=own.cpu_pages_mib * 2**20,
        cpu_threads=config.cpu_threads,
        host="" if config.ray_address or config.network_interface else LOOPBACK,
        by_host=host_options(config, deployment.device),
        log_level=config.log_level,
        log_format=config.log_format,
        ports=config.free_ports,
        metrics_ports=config.metrics_ports,
        page_transport=config.page_transport,
        tls=config.tls_settings,
        tracing=config.tracing,
    )
