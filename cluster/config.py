"""Configuration of a whole cluster, with its defaults.

The sections `tls`, `front_tls`, `http_gateway`, `router`, `prefill_worker`, `decode_worker` and
`transfer` are the configuration classes of those packages themselves, so that an option exists
once.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cluster.pool_config import SECTION as POOLS
from cluster.pool_config import PoolConfig, pool_key, pool_problems, role_of
from credentials.config import FrontTlsConfig, TlsConfig, TlsSettings
from decode_worker.config import DecodeConfig
from http_gateway.config import GatewayConfig
from kv_transfer.deadlines import TransferDeadlines
from observability.tracing import TracingConfig
from options.interfaces import is_interface
from options.kept_by_name import kept_by_name
from options.option import OptionName, WrongOption, WrongOptions, check_options, option
from options.ports import FreePorts, is_port_range
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig

LOOPBACK = "127.0.0.1"  # address of processes whose callers are all on one host
MAX_GRACE_S = 2_592_000  # 30 days; Ray raises OverflowError for far longer waits
MAX_MODEL_NAME_CHARS = 1024  # as protos/inference.proto says it


def _is_model(model: Any) -> bool:
    is_path = isinstance(model, str | Path) and model != ""  # "": this folder
    return model is None or (is_path and _is_utf8(str(model)))


def _is_utf8(text: str) -> bool:
    """Return whether Ray can carry a text; bytes of paths that are not UTF-8 are surrogates."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def _is_name(value: object) -> bool:
    """Return whether a value can be a line's part on terminals and in logs."""
    return (
        isinstance(value, str)
        and len(value) <= MAX_MODEL_NAME_CHARS
        and value.isprintable()
        and value == value.strip()
    )


def _are_model_paths(paths: Any) -> bool:
    return paths is None or (
        isinstance(paths, Mapping)
        and all(paths)
        and all(isinstance(each, str) and each.startswith("/") for each in paths.values())
    )


def _is_host(host: Any) -> bool:
    is_one_word = isinstance(host, str) and re.fullmatch(r"[^\s/]*", host)
    return bool(is_one_word) and (":" not in host or _is_ipv6(host))


def _is_ray_address(address: Any) -> bool:
    found = re.fullmatch(r"[^\s:/]+:(\d{1,5})|\[[0-9a-fA-F:]+\]:(\d{1,5})", str(address))
    return address in ("", "auto") or (found is not None and 0 < int(found[1] or found[2]) <= 65535)


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """All options. Times are seconds."""

    model: Path | None = option(
        None,
        "Checkpoint folder (config.json, safetensors, tokenizer.json), GGUF file, or folder with "
        "one.",
        accepts=_is_model,
        accepted="the path of a checkpoint folder or GGUF file, in UTF-8",
    )
    model_paths: Mapping[str, str] | None = option(
        None,
        "Paths of the model on hosts where it is not at the path of model: by the host's address "
        "or name, as Ray knows it, or by a custom resource of the host. The first matching entry "
        "applies. As a flag: HOST=PATH, once for each.",
        accepts=_are_model_paths,
        accepted="a mapping of addresses, names or resources of hosts to absolute paths, as in "
        "10.0.0.2: /models/llama, or 10.0.0.2=/models/llama as a flag",
    )
    served_model_name: str = option(
        "",
        "Name of the model; default: that of its folder or GGUF file.",
        accepts=_is_name,
        accepted=f"a text of at most {MAX_MODEL_NAME_CHARS} characters that can be printed, no "
        "blank at its ends",
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device of the workers; auto: CUDA if there is a GPU."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "auto", "Type of weights and pages; auto: the checkpoint's on CUDA, float32 on CPU."
    )
    prefill: int = option(
        1,
        "Number of prefill workers; 0: the decode workers compute the prompts.",
        at_least=0,
        at_most=1024,
    )
    decode: int = option(1, "Number of decode workers.", at_least=1, at_most=1024)
    workers_per_gpu: int = option(
        1,
        "Most workers that share a GPU of this host. Both pools share one if all workers fit on "
        "it; otherwise each GPU has workers of one pool.",
        at_least=1,
        at_most=16,
    )
    page_transport: Literal["auto", "nccl"] = option(
        "auto",
        "How pages move between workers of one host that have GPUs. auto: the receiver copies out "
        "of the sender's memory (CUDA IPC), or by NCCL where the host does not let it. nccl: as "
        "between hosts; not possible within one GPU.",
    )

    host: str = option(
        "127.0.0.1",
        "Address on which the router and the HTTP gateway listen. With network_interface the "
        "default is empty: that interface's address.",
        accepts=_is_host,
        accepted="a host name or an address, without a port; see port",
    )
    port: int = option(
        50051,
        "Port of the router; 0: a free one at each start, of port_range if that is given.",
        at_least=0,
        at_most=65535,
    )
    http_port: int = option(
        8000, "Port of the HTTP gateway beside the router; 0: none.", at_least=0, at_most=65535
    )

    controller_port: int = option(
        0,
        "Port on which the controller serves the list of workers to routers; 0: a free one. "
        "Routers outside Ray (pagewire router) connect to it; without ray_address only this host "
        "can.",
        at_least=0,
        at_most=65535,
    )
    port_range: str = option(
        "",
        "Range from which all servers take free ports, FIRST-LAST, as in 20000-20099; empty: any. "
        "A host needs one for each worker, one more for each decode worker that receives pages, "
        "and one each for the controller and a router whose controller_port or port is 0. Ports "
        "of the range that port, http_port, controller_port, router.metrics_port and "
        "worker_metrics_ports name are left to those servers. NCCL and Ray use other ports.",
        accepts=is_port_range,
        accepted="two ports of 1024 to 65535, the lower one first, as in 20000-20099",
    )
    worker_metrics_ports: str = option(
        "",
        "Range of the ports on which workers serve their own metrics to Prometheus, FIRST-LAST, "
        "as in 9401-9408; empty: none. A host needs one for each worker. A worker takes the lowest "
        "free one, on the address of its other ports. With TLS, Prometheus needs a certificate of "
        "tls.authority_file.",
        accepts=is_port_range,
        accepted="two ports of 1024 to 65535, the lower one first, as in 9401-9408",
    )
    network_interface: str = option(
        "",
        "Network interface, as in eth0. Workers and controller listen on their host's address "
        "there, IPv4 before IPv6, and are reached at it. NCCL uses it, too, unless nccl_interface "
        "or NCCL_SOCKET_IFNAME says otherwise. Empty: they use the address by which Ray knows the "
        "host, without ray_address the loopback address, and NCCL chooses.",
        accepts=is_interface,
        accepted="the name of one network interface, as in eth0",
    )
    nccl_interface: str = option(
        "",
        "Network interface for NCCL alone, as in ib0; empty: network_interface.",
        accepts=is_interface,
        accepted="the name of one network interface, as in ib0",
    )
    secret_file: str = option(
        "",
        "File with 32 random bytes or more, from which the keys of all processes are derived. "
        "Empty: each start draws a new secret; routers outside Ray then need new keys, too.",
    )

    insecure: bool = option(
        False,
        "Where other hosts can connect, let servers without TLS listen in clear, and let routers "
        "serve whoever connects. Otherwise servers there need TLS, and routers also a tenants file "
        "or front_tls.client_authority_file.",
    )

    page_size: Literal[16, 32, 64, 128] = option(64, "Token slots in a page.")
    num_pages: int = option(0, "Pages of each worker; 0: as many as its memory allows.", at_least=0)
    gpu_memory_fraction: float = option(
        0.85,
        "Share that pages get of the GPU memory left after the weights.",
        above=0,
        at_most=1,
    )
    cpu_pages_mib: int = option(
        256, "Memory for pages of each worker without a GPU, MiB.", at_least=1
    )
    cpu_threads: int = option(1, "Threads of each worker without a GPU.", at_least=1)

    ray_address: str = option(
        "",
        "Ray cluster to attach to, host:port or auto; empty: a local one, started by serve and up.",
        accepts=_is_ray_address,
        accepted="host:port of a Ray cluster, as in 10.0.0.1:6379, or auto",
    )
    pool_resources: bool = option(
        False,
        "Each worker takes one unit of its pool's custom resource, pagewire-prefill or "
        "pagewire-decode, of a host of the Ray cluster; hosts may join later.",
    )
    start_timeout_s: float = option(
        600.0, "Longest time until all workers are ready, including loading weights.", above=0
    )
    stop_grace_s: float = option(
        10.0,
        "Time for running requests to end when the cluster stops.",
        at_least=0,
        at_most=MAX_GRACE_S,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least severe log lines to write."
    )
    log_format: Literal["text", "json"] = option(
        "text",
        "Log lines for people (key=value) or for machines (JSON). In the output of pagewire serve, "
        "Ray puts the process's name before each line of another process, but not in the files of "
        "its session folder.",
    )

    tracing: TracingConfig = field(default_factory=TracingConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    front_tls: FrontTlsConfig = field(default_factory=FrontTlsConfig)
    http_gateway: GatewayConfig = field(default_factory=GatewayConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    prefill_worker: PrefillConfig = field(default_factory=PrefillConfig)
    decode_worker: DecodeConfig = field(default_factory=DecodeConfig)
    transfer: TransferDeadlines = field(default_factory=TransferDeadlines)
    pools: Mapping[str, PoolConfig] = field(default_factory=dict)  # by name

    @property
    def further_pools(self) -> dict[str, int]:
        """The number of workers of each further pool, by its key."""
        return {
            pool_key(name, each): 1 if each.workers is None else each.workers
            for name, each in self.pools.items()
            if each.role
        }

    def pool(self, key: str) -> PoolConfig:
        """Return the options of a pool; see pool_key."""
        found = (each for name, each in self.pools.items() if pool_key(name, each) == key)
        return next(found, PoolConfig())

    def pool_section(self, key: str) -> str:
        """Return the section of a pool's options, as in pools.small; see pool_key."""
        found = (name for name, each in self.pools.items() if pool_key(name, each) == key)
        return f"{POOLS}.{next(found, key)}"

    def in_pool(self, key: str) -> "ClusterConfig":
        """Return the configuration of a pool's workers, with their own memory for pages."""
        pool = self.pool(key)
        names = ("num_pages", "gpu_memory_fraction", "cpu_pages_mib")
        own = {name: each for name in names if (each := getattr(pool, name)) is not None}
        return replace(self, **own)

    @property
    def workers_of_pools(self) -> dict[str, int]:
        """The numbers of workers at the start, by the key of their pool."""
        return {"prefill": self.prefill, "decode": self.decode, **self.further_pools}

    def num_workers(self, role: str) -> int:
        """Return how many workers of a role there are at the start, in all pools."""
        pools = self.workers_of_pools.items()
        return sum(number for key, number in pools if role_of(key) == role)

    @property
    def free_ports(self) -> FreePorts:
        """The ports for servers to which no option gives one."""
        metrics = self.metrics_ports.of_range if self.metrics_ports else ()
        return FreePorts(self.port_range, self._fixed_ports.union(metrics))

    @property
    def metrics_ports(self) -> FreePorts | None:
        """The ports of the workers' metrics; None: they have none."""
        if not self.worker_metrics_ports:
            return None
        return FreePorts(
            self.worker_metrics_ports,
            self._fixed_ports,
            option="worker_metrics_ports",
            is_in_order=True,
        )

    @property
    def _fixed_ports(self) -> frozenset[int]:
        ports = (self.port, self.http_port, self.controller_port, self.router.metrics_port)
        return frozenset(ports)

    @property
    def tls_settings(self) -> TlsSettings:
        """The TLS options of all processes."""
        return TlsSettings(inside=self.tls, front=self.front_tls, insecure=self.insecure)

    def __post_init__(self) -> None:
        check_options(self)
        problems = [
            *self._problems_of_hosts(),
            *pool_problems(
                self.pools,
                num_prefill=self.prefill,
                ray_address=self.ray_address,
                device=self.device,
                workers_per_gpu=self.workers_per_gpu,
                max_running_sequences=self.decode_worker.max_running_sequences,
            ),
            *self._problems_of_tls(),
            *self._problems_of_ports(),
            *self._problems_of_times(),
        ]
        if problems:
            raise WrongOptions(problems)

    def _problems_of_hosts(self) -> Iterator[WrongOption]:
        if not self.host and not self.network_interface:
            allowed = "a host name or an address, without a port, or empty with {}"
            yield _wrong("host", self.host, allowed, "network_interface")
        if self.model_paths and not self.ray_address:
            allowed = "none without {}, because all workers are on one host"
            yield _wrong("model_paths", self.model_paths, allowed, "ray_address")
        if self.ray_address and self.workers_per_gpu > 1:
            allowed = "1 with {}, where Ray gives each worker a GPU of its own"
            yield _wrong("workers_per_gpu", self.workers_per_gpu, allowed, "ray_address")
        if self.device == "cpu" and self.workers_per_gpu > 1:
            allowed = "1 with {} cpu, where no worker has a GPU"
            yield _wrong("workers_per_gpu", self.workers_per_gpu, allowed, "device")
        if self.device == "cpu" and self.page_transport != "auto":
            allowed = "auto with {} cpu, where no worker has a GPU"
            yield _wrong("page_transport", self.page_transport, allowed, "device")
        if self.device == "cpu" and self.nccl_interface:
            allowed = "none with {} cpu, where no worker has a GPU"
            yield _wrong("nccl_interface", self.nccl_interface, allowed, "device")
        if self.pool_resources and not self.ray_address:
            allowed = "false without {}, because one host has both pools"
            yield _wrong("pool_resources", self.pool_resources, allowed, "ray_address")
        if self.pool_resources and self.device == "auto":
            allowed = "cpu or cuda with {}, because hosts may join later"
            yield _wrong("device", self.device, allowed, "pool_resources")

    def _problems_of_tls(self) -> Iterator[WrongOption]:
        knows_clients = self.router.tenants_file or self.front_tls.client_authority_file
        if self.insecure and self.tls.is_on and self.front_tls.is_on and knows_clients:
            allowed = (
                "false with the certificates of tls and front_tls, and a tenants file or "
                "front_tls.client_authority_file: it changes nothing"
            )
            yield _wrong("insecure", self.insecure, allowed)

    def _problems_of_ports(self) -> Iterator[WrongOption]:
        if self.http_port and self.http_port == self.port:
            allowed = "a port other than {}, which is the router's"
            yield _wrong("http_port", self.http_port, allowed, "port")
        for name in ("port", "http_port"):
            if self.controller_port and self.controller_port == getattr(self, name):
                allowed = "a port other than {}, where clients connect"
                yield _wrong("controller_port", self.controller_port, allowed, name)
        metrics_port = self.router.metrics_port
        for name in ("port", "http_port", "controller_port"):
            if metrics_port and metrics_port == getattr(self, name):
                yield _wrong("router.metrics_port", metrics_port, "a port other than {}", name)
        if self.worker_metrics_ports and self.router.tenants_file and not self.tls.is_on:
            yield _wrong(
                "worker_metrics_ports",
                self.worker_metrics_ports,
                "none with {} and without {}, because tenants may not see workers, and only a "
                "certificate keeps them out",
                "router.tenants_file",
                "tls.certificate_file",
            )

    def _problems_of_times(self) -> Iterator[WrongOption]:
        dead_after_s = self.router.dead_after_s
        for section in ("prefill_worker", "decode_worker"):
            heartbeat_s = getattr(self, section).heartbeat_s
            if dead_after_s < 2 * heartbeat_s:
                allowed = f"at least twice {{}}, which is {heartbeat_s!r}"
                option_name = f"{section}.heartbeat_s"
                yield _wrong("router.dead_after_s", dead_after_s, allowed, option_name)


def _wrong(name: str, found: object, allowed: str, *others: str) -> WrongOption:
    """Make a problem of an option's value; `allowed` has {} for each of the other options."""
    names = map(OptionName, others)
    return WrongOption(f"{{}}: found {{!r}}; allowed: {allowed}", OptionName(name), found, *names)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
