"""Refuses impossible starts before anything runs.

Imports Ray only to look for one that runs: the import takes a second.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.capacity import (
    memory_remedy,
    memory_shortage,
    pages_of_worker,
    read_model_needs,
)
from cluster.certificates import check_certificates, check_clients
from cluster.config import LOOPBACK, ClusterConfig
from cluster.config_options import config_options
from cluster.deployment import secret_of
from cluster.devices import check_gpus, check_port_free, count_gpus, most_gpus, resolve_device
from cluster.errors import ConfigError, PlacementError
from cluster.host_memory import read_host_memory
from cluster.model_folder import check_kernels, check_model_files, check_model_folder
from cluster.own_address import check_interfaces, with_own_host
from cluster.port_need import check_port_ranges
from observability.tracing import TracingConfig, TracingUnavailable, check_tracing
from router.errors import TenantsFileError
from router.tenants.file import read_tenants


def check_start(
    config: ClusterConfig,
    say: Callable[[str], None] = lambda line: None,
    *,
    is_running: bool = False,
) -> str | None:
    """Refuse a configuration that cannot be started; the cheapest checks come first.

    Args:
        config: The cluster to start.
        say: Gets warnings.
        is_running: The cluster to replace still runs. Ports and memory, which it may hold, are not
            checked.

    Returns:
        The workers' device; None: that of a Ray cluster, whose GPUs only Ray knows.

    Raises:
        ClusterError: The problem and the remedy.
    """
    model = config.model
    if model is None:
        allowed = config_options()["model"].allowed()
        raise ConfigError(f"model: found none; allowed: {allowed}, as in --model PATH")
    check_interfaces(config)
    config = with_own_host(config)
    anywhere: tuple[Callable[[], object], ...] = (
        lambda: _check_tenants_file(config.router.tenants_file),
        lambda: check_traces(config.tracing),
        lambda: check_encryption(config, say),
        lambda: check_clients(config),
        lambda: secret_of(config),
        lambda: check_model_files(model),
    )
    if config.ray_address:
        from cluster.ray_address import check_ray_answers  # imports Ray

        check_all(*anywhere)
        check_model_folder(model)
        if config.device == "cuda":
            check_kernels(model)
        check_ray_answers(config.ray_address)
        return None
    ports: tuple[Callable[[], object], ...] = (
        lambda: check_port_free(config.host, config.port),
        lambda: check_http_port_free(config),
        lambda: check_metrics_port_free(config),
        lambda: check_port_free(LOOPBACK, config.controller_port, flag="--controller-port"),
    )
    check_all(*(() if is_running else ports), *anywhere, lambda: _check_most_gpus(config))
    check_model_folder(model)
    device = choose_device(config, 0 if config.device == "cpu" else count_gpus())
    check_port_ranges(config, device, config.num_workers("prefill"), config.num_workers("decode"))
    if device == "cuda":
        check_kernels(model)
    else:
        if config.workers_per_gpu > 1:
            say(f"note: workers_per_gpu is {config.workers_per_gpu}, but no worker has a GPU")
        if not is_running:
            _check_memory(config, say)
    return device


def check_growth(config: ClusterConfig, device: str, workers: Mapping[str, int]) -> None:
    """Refuse more workers than the only host of a running cluster, without GPUs, can ever hold.

    Args:
        config, device: Configuration and device of the cluster.
        workers: Numbers of workers, those that run included, by the key of their pool.

    Raises:
        ConfigError: The model can no longer be read.
        PlacementError: Says how many workers these are, what they need and what there is.
    """
    if config.ray_address or device != "cpu":
        return
    assert config.model is not None
    check_model_files(config.model)
    needs = read_model_needs(config.model, config, device)
    shortage = memory_shortage(needs, config, workers, read_host_memory())
    if shortage and shortage.is_hopeless:
        raise PlacementError(f"{shortage.found}; ask for fewer; nothing has changed")


def check_all(*checks: Callable[[], object]) -> None:
    """Run all checks of what a start needs; any other error than these two ends them at once.

    Raises:
        ConfigError: Has a line for each thing that is wrong or missing; at least one is wrong.
        PlacementError: Has a line for each thing that is missing.
    """
    errors: list[ConfigError | PlacementError] = []
    for check in checks:
        try:
            check()
        except (ConfigError, PlacementError) as error:
            errors.append(error)
    if errors:
        is_wrong = any(isinstance(each, ConfigError) for each in errors)
        lines = dict.fromkeys(map(str, errors))  # a wrong host is wrong for each port
        raise (ConfigError if is_wrong else PlacementError)("\n".join(lines))


def check_http_port_free(config: ClusterConfig) -> None:
    """Refuse a port of the gateway that something else listens on; see check_port_free."""
    zero = "start without HTTP"
    check_port_free(config.host, config.http_port, flag="--http-port", zero=zero)


def check_metrics_port_free(config: ClusterConfig) -> None:
    """Refuse a port of a router's metrics that something else listens on; see check_port_free."""
    flag, zero = "--router-metrics-port", "do without metrics"
    check_port_free(config.host, config.router.metrics_port, flag=flag, zero=zero)


def choose_device(config: ClusterConfig, num_gpus: int) -> str:
    """Return the workers' device on hosts with this many GPUs; PlacementError: too few."""
    device = resolve_device(config.device, num_gpus)
    num_prefill, num_decode = config.num_workers("prefill"), config.num_workers("decode")
    check_gpus(device, num_prefill, num_decode, config.workers_per_gpu, num_gpus)
    return device


def check_encryption(config: ClusterConfig, say: Callable[[str], None]) -> None:
    """Refuse as check_certificates does; say what clients may meet."""
    if problem := check_certificates(config):
        say(f"warning: {problem}")


def _check_most_gpus(config: ClusterConfig) -> None:
    """Refuse more workers than the GPUs that this host can have, without a look at torch."""
    if config.device != "cpu" and (most := most_gpus()) is not None:
        choose_device(config, most)


def _check_tenants_file(path: str) -> None:
    if not path:
        return
    try:
        read_tenants(Path(path))
    except TenantsFileError as error:
        raise ConfigError(str(error)) from error


def check_traces(tracing: TracingConfig) -> None:
    """Refuse traces without what sends them, with a ConfigError."""
    try:
        check_tracing(tracing)
    except TracingUnavailable as error:
        raise ConfigError(str(error)) from error


def _check_memory(config: ClusterConfig, say: Callable[[str], None]) -> None:
    """Refuse workers that this host can never hold, and warn if it may not hold them now."""
    assert config.model is not None
    needs = read_model_needs(config.model, config, "cpu")
    for key, number in config.workers_of_pools.items():
        own = config.in_pool(key)
        if number and not pages_of_worker(needs, own, None):
            name = "cpu_pages_mib" if own == config else f"{config.pool_section(key)}.cpu_pages_mib"
            least_mib = -(-needs.page_bytes // 2**20)
            raise ConfigError(
                f"{name}: found {own.cpu_pages_mib}; allowed: at least {least_mib}, which holds a "
                f"page of {needs.page_size} tokens of this model"
            )
    shortage = memory_shortage(needs, config, config.workers_of_pools, read_host_memory())
    if shortage and shortage.is_hopeless:
        raise PlacementError(f"{shortage.found}; try {memory_remedy(config)}")
    if shortage:
        say(f"warning: {shortage.found}; if workers die, try {memory_remedy(config)}")
