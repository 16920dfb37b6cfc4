"""Examines a host before a start: each check gives ok, warn or fail, and a remedy.

The checks are functions of facts, which host_facts.py gathers; so tests can plant each fault.
"""

import http.client
import re
import shlex
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.capacity import (
    ModelNeeds,
    context_remedy,
    memory_account,
    memory_remedy,
    memory_shortage,
    pages_of_worker,
    pool_remedy,
    read_model_needs,
)
from cluster.certificates import check_certificates, check_clients, own_client
from cluster.config import ClusterConfig
from cluster.config_options import ALL_OPTIONS
from cluster.devices import check_port_free, resolve_device
from cluster.errors import ConfigError, PlacementError
from cluster.host_facts import SHM_PATH, HostFacts
from cluster.model_folder import check_kernels, check_model_folder
from cluster.own_address import check_interfaces, with_own_host
from cluster.port_need import check_port_ranges
from cluster.port_owner import ROUTER_TIMEOUT_S, is_own_cluster, is_router
from cluster.preflight import check_http_port_free
from credentials.config import path_here
from credentials.door import is_loopback_host
from pagewire.protos.pem import client_context, read_pem, utc
from protos.addresses import join_address

Level = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)
MIN_SHM_BYTES = 256 * 2**20
SOON_S = 7 * 86_400  # that a certificate is still valid, and should have been renewed


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    found: str
    remedy: str = ""  # empty when all is well


def examine(facts: HostFacts, config: ClusterConfig) -> tuple[Finding, ...]:
    """Run all checks of a host for a configuration; none raises."""
    findings = [
        check_python(facts),
        check_torch(facts),
        check_nccl(facts),
        check_triton(facts),
        check_ray(facts),
        check_ray_access(facts, config.ray_address),
        check_gencode(facts),
        check_shared_memory(facts),
    ]
    network = check_network(config)
    if config.network_interface or config.nccl_interface:
        findings.append(network)
    if network.level == "ok":  # otherwise the address of the ports is unknown
        config = with_own_host(config)
        findings += [
            *check_tls(config),
            check_access(config),
            check_port(config),
            check_http_port(config),
        ]
    device = resolve_device(config.device, facts.torch_gpus)
    if config.port_range or config.worker_metrics_ports:
        findings.append(check_range(config, device))
    if config.model is not None:
        model = check_model(config.model, device)
        findings.append(model)
        if model.level == "ok":
            needs = read_model_needs(config.model, config, device)
            if device == "cpu":
                findings.append(check_memory(facts, config, needs))
            gpu_free_bytes = min(facts.gpu_free_bytes, default=0) if device == "cuda" else None
            findings.append(check_context(config, needs, gpu_free_bytes))
    return tuple(findings)


def check_python(facts: HostFacts) -> Finding:
    """Python is new enough and the system is Linux."""
    found = f"Python {'.'.join(map(str, facts.python))} on {facts.system}"
    if facts.python[:2] < MIN_PYTHON:
        remedy = "apt-get install python3.11 python3.11-venv; make demo BASE_PYTHON=python3.11"
        return Finding(check="python", level="fail", found=found, remedy=remedy)
    if facts.system != "Linux":
        remedy = "only Linux is tested; GPUs need it"
        return Finding(check="python", level="warn", found=found, remedy=remedy)
    return Finding(check="python", level="ok", found=found)


def check_torch(facts: HostFacts) -> Finding:
    """Torch can be imported and sees the GPUs that the driver shows."""
    if facts.torch_error:
        remedy = 'pip install --force-reinstall "torch>=2.10"'
        return Finding(check="torch", level="fail", found=facts.torch_error, remedy=remedy)
    build = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU only"
    found = f"torch {facts.versions.get('torch')} ({build}), {facts.torch_gpus} GPUs"
    if facts.driver_gpus > facts.torch_gpus:
        reason = "torch is a CPU build" if facts.torch_cuda is None else "torch cannot use them"
        return Finding(
            check="torch",
            level="warn",
            found=f"{found}; the driver shows {facts.driver_gpus}, {reason}",
            remedy='pip install --force-reinstall -e . -e "./server[cuda]"; if it says the driver '
            'is too old, pip install --force-reinstall -e . -e "./server[cuda12]"',
        )
    return Finding(check="torch", level="ok", found=found)


def check_nccl(facts: HostFacts) -> Finding:
    """Exactly one NCCL wheel is there, for the CUDA that torch was built for, and nccl4py."""
    wheels = {
        name: version
        for name, version in facts.versions.items()
        if re.fullmatch(r"nvidia-nccl-cu\d+", name)
    }
    found = ", ".join(f"{name} {version}" for name, version in sorted(wheels.items())) or "none"
    if facts.torch_cuda is None:
        if wheels:
            remedy = "harmless without GPUs"
            return Finding(check="nccl", level="ok", found=found, remedy=remedy)
        reason = "torch cannot be imported" if facts.torch_error else "torch is a CPU build"
        return Finding(check="nccl", level="ok", found=f"not needed: {reason}")
    wanted = f"nvidia-nccl-cu{facts.torch_cuda.split('.')[0]}"
    if len(wheels) > 1:
        return Finding(
            check="nccl",
            level="fail",
            found=f"{found}; they overwrite each other's libnccl.so.2",
            remedy=f"pip uninstall {' '.join(sorted(wheels))}; "
            f"pip install --force-reinstall {wanted}",
        )
    if wheels and wanted not in wheels:
        return Finding(
            check="nccl",
            level="fail",
            found=f"{found}, but torch is built for CUDA {facts.torch_cuda}",
            remedy=f"pip uninstall {next(iter(wheels))}; pip install --force-reinstall {wanted}",
        )
    if not wheels:
        remedy = f"pip install {wanted}, unless the system's libnccl is the one torch was built on"
        return Finding(check="nccl", level="warn", found="no NCCL wheel", remedy=remedy)
    if "nccl4py" not in facts.versions:
        remedy = 'pip install "nccl4py~=0.6.0"; without it pages cannot move between GPUs'
        return Finding(check="nccl", level="fail", found=f"{found}, no nccl4py", remedy=remedy)
    return Finding(check="nccl", level="ok", found=f"{found}, nccl4py {facts.versions['nccl4py']}")


def check_triton(facts: HostFacts) -> Finding:
    """With a GPU: Triton is there, and the C compiler that it calls for each kernel's launcher."""
    version = facts.versions.get("triton")
    needs_it = facts.torch_gpus > 0
    if version is None:
        return Finding(
            check="triton",
            level="fail" if needs_it else "ok",
            found="not installed",
            remedy='pip install "triton>=3.6"' if needs_it else "",
        )
    if facts.compiler is None:
        return Finding(
            check="triton",
            level="fail" if needs_it else "ok",
            found=f"triton {version}, no C compiler",
            # Triton compiles a launcher at the first use of each kernel.
            remedy="apt-get install gcc" if needs_it else "",
        )
    return Finding(check="triton", level="ok", found=f"triton {version}, {facts.compiler}")


def check_ray(facts: HostFacts) -> Finding:
    """Ray is there."""
    version = facts.versions.get("ray")
    if version is None:
        return Finding(
            check="ray", level="fail", found="not installed", remedy='pip install "ray>=2.60"'
        )
    return Finding(check="ray", level="ok", found=f"ray {version}")


def check_ray_access(facts: HostFacts, ray_address: str) -> Finding:
    """No Ray of this host, nor the one to attach to, runs code for callers without a token."""
    takes_token = [each for each in facts.ray_listeners if each.auth_mode == "token"]
    takes_anybody = [each for each in facts.ray_listeners if each.auth_mode != "token"]
    if takes_anybody:
        servers = ", ".join(f"{each.process} on {each.address}" for each in takes_anybody)
        return Finding(
            check="ray access",
            level="fail",
            found=f"whoever reaches this host can run code on it: {servers} asks for no token",
            remedy="ray stop; ray get-auth-token --generate; RAY_AUTH_MODE=token ray start ...",
        )
    if ray_address and facts.ray_auth_mode != "token":
        found = f"RAY_AUTH_MODE is {facts.ray_auth_mode or 'unset'}, ray_address is {ray_address}"
        remedy = "export RAY_AUTH_MODE=token, here and where that Ray is started"
        return Finding(check="ray access", level="warn", found=found, remedy=remedy)
    if facts.ray_auth_mode == "disabled":
        return Finding(
            check="ray access",
            level="warn",
            found="RAY_AUTH_MODE is disabled, so a Ray that `ray start` starts here admits anybody",
            remedy="unset RAY_AUTH_MODE; pagewire serve uses a token of its own in any case",
        )
    others = ", ".join(f"{each.process} on {each.address}" for each in takes_token)
    found = f"only with a token: {others}" if others else "no Ray of this host admits other hosts"
    return Finding(check="ray access", level="ok", found=found)


def check_gencode(facts: HostFacts) -> Finding:
    """The installed protobuf and grpcio are not older than those that wrote pagewire.protos."""
    for library, written_by in (
        ("protobuf", facts.protobuf_gencode),
        ("grpcio", facts.grpc_gencode),
    ):
        version = facts.versions.get(library)
        if version is None or _numbers(version) < _numbers(written_by):
            return Finding(
                check="generated code",
                level="fail",
                found=f"{library} {version or 'not installed'}, pagewire/protos needs {written_by}",
                remedy=f'pip install "{library}>={written_by}"',
            )
    found = f"protobuf {facts.versions['protobuf']}, grpcio {facts.versions['grpcio']}"
    return Finding(check="generated code", level="ok", found=found)


def check_shared_memory(facts: HostFacts) -> Finding:
    """Ray and NCCL have room in /dev/shm."""
    if facts.shm_free_bytes is None:
        remedy = f"mkdir {SHM_PATH}; mount -t tmpfs -o size=1g tmpfs {SHM_PATH}"
        return Finding(check=SHM_PATH, level="warn", found="is not there", remedy=remedy)
    found = f"{facts.shm_free_bytes / 2**20:.0f} MiB free"
    if facts.shm_free_bytes < MIN_SHM_BYTES:
        remedy = f"mount -o remount,size=1g {SHM_PATH}; in a container: docker run --shm-size=1g"
        return Finding(check=SHM_PATH, level="warn", found=found, remedy=remedy)
    return Finding(check=SHM_PATH, level="ok", found=found)


def check_network(config: ClusterConfig) -> Finding:
    """The chosen network interfaces exist and have addresses."""
    try:
        check_interfaces(config)
    except ConfigError as error:
        remedy = "`ip address` shows the interfaces of this host"
        return Finding(check="network", level="fail", found=str(error), remedy=remedy)
    names = [each for each in (config.network_interface, config.nccl_interface) if each]
    return Finding(check="network", level="ok", found=f"{' and '.join(names)} can be used")


def check_tls(config: ClusterConfig) -> tuple[Finding, ...]:
    """Connections of clients and within the cluster are encrypted, or stay on this host."""
    try:
        wrong_name = check_certificates(config)
    except ConfigError as error:
        remedy = f"see that option in {ALL_OPTIONS}"
        return (Finding(check="tls", level="fail", found=str(error), remedy=remedy),)
    findings = []
    for name, section, files in (
        ("clients", config.front_tls, config.front_tls.files(config.tls)),
        ("cluster", config.tls, config.tls.files),
    ):
        check = f"tls, {name}"
        if not section.is_on:
            findings.append(Finding(check=check, level="ok", found=_in_clear(config, name)))
            continue
        expires_at = read_pem(files).expires_at
        found = f"encrypted; {path_here(section.certificate_file)} is valid until {utc(expires_at)}"
        level: Level = "ok"
        remedy = ""
        if expires_at - time.time() < SOON_S:
            level, remedy = "warn", "renew it; running processes take the new one by themselves"
        elif name == "clients" and wrong_name:
            level, found, remedy = "warn", wrong_name, "pagewire generate --server-name NAME"
        findings.append(Finding(check=check, level=level, found=found, remedy=remedy))
    return tuple(findings)


def check_access(config: ClusterConfig) -> Finding:
    """Routers know their clients, or no other host can connect."""
    try:
        check_clients(config)
    except ConfigError as error:
        remedy = "pagewire tokens new NAME --out FILE"
        return Finding(check="access", level="fail", found=str(error), remedy=remedy)
    if config.router.tenants_file:
        found = f"tenants of {config.router.tenants_file}"
    elif authority := config.front_tls.client_authority_file:
        found = f"clients with a certificate of {path_here(authority)}"
    elif is_loopback_host(config.host):
        found = "whoever can connect, on this host alone"
    else:
        found = "whoever can connect, as insecure allows"
    return Finding(check="access", level="ok", found=found)


def _in_clear(config: ClusterConfig, name: str) -> str:
    if config.insecure:
        return "in clear, also to other hosts, as insecure allows"
    if name == "cluster" and config.ray_address:
        return "in clear; a start is refused where other hosts can connect"
    return "in clear, on this host alone"


def check_port(config: ClusterConfig) -> Finding:
    """The router's port is free, or already that of a running router."""
    host, port = config.host, config.port
    address = join_address(host, port)
    try:
        check_port_free(host, port)
    except ConfigError as error:
        remedy = "pagewire serve --host 127.0.0.1"
        return Finding(check="port", level="fail", found=str(error), remedy=remedy)
    except PlacementError as error:
        if _is_router(config, address) or is_own_cluster(host, port):
            found = f"a running Pagewire router has {address}; another one needs another --port"
            return Finding(check="port", level="ok", found=found)
        remedy = f"pagewire serve --port 0; `ss -ltnp 'sport = :{port}'` shows who listens there"
        return Finding(check="port", level="fail", found=str(error), remedy=remedy)
    if not port:
        found = f"a free one of {config.port_range}" if config.port_range else "any free one"
        return Finding(check="port", level="ok", found=f"{found}, on {host}")
    return Finding(check="port", level="ok", found=f"{address} is free")


def check_range(config: ClusterConfig, device: str) -> Finding:
    """Each range has a port for each server, even if one host has all servers."""
    prefill, decode = config.num_workers("prefill"), config.num_workers("decode")
    try:
        check_port_ranges(config, device, prefill, decode)
    except ConfigError as error:
        level: Level = "warn" if config.ray_address else "fail"  # other hosts may have some
        remedy = "a wider range, which pagewire up needs on each host"
        return Finding(check="port range", level=level, found=str(error), remedy=remedy)
    given = " and ".join(filter(None, (config.port_range, config.worker_metrics_ports)))
    return Finding(check="port range", level="ok", found=f"wide enough: {given}")


def check_http_port(config: ClusterConfig) -> Finding:
    """The gateway's port is free, or already that of a running gateway."""
    name, host, port = "http port", config.host, config.http_port
    address = join_address(host, port)
    if not port:
        return Finding(check=name, level="ok", found="no HTTP gateway is configured")
    try:
        check_http_port_free(config)
    except ConfigError as error:
        remedy = "pagewire serve --host 127.0.0.1"
        return Finding(check=name, level="fail", found=str(error), remedy=remedy)
    except PlacementError as error:
        if _is_gateway(config) or is_own_cluster(host, port):
            found = f"a running gateway has {address}; another one needs another --http-port"
            return Finding(check=name, level="ok", found=found)
        who = f"`ss -ltnp 'sport = :{port}'` shows who listens there"
        remedy = f"pagewire serve --http-port 0, which starts no gateway; {who}"
        return Finding(check=name, level="fail", found=str(error), remedy=remedy)
    return Finding(check=name, level="ok", found=f"{address} is free")


def check_model(model_dir: Path, device: str) -> Finding:
    """The model can be served on the workers' device."""
    try:
        check_model_folder(model_dir)
        if device == "cuda":
            check_kernels(model_dir)
    except ConfigError as error:
        has_gguf = model_dir.is_file() or any(model_dir.glob("*.gguf"))
        folder = shlex.quote(str(model_dir))
        remedy = "" if has_gguf else f"hf download ORGANISATION/MODEL --local-dir {folder}"
        return Finding(check="model", level="fail", found=str(error), remedy=remedy)
    return Finding(check="model", level="ok", found=f"{model_dir} can be served")


def check_memory(facts: HostFacts, config: ClusterConfig, needs: ModelNeeds) -> Finding:
    """Weights and pages of all workers fit into the memory of a host without GPUs."""
    shortage = memory_shortage(needs, config, config.workers_of_pools, facts.memory)
    if not shortage:
        found = memory_account(needs, config, config.workers_of_pools, facts.memory)
        return Finding(check="memory", level="ok", found=found)
    return Finding(
        check="memory",
        level="fail" if shortage.is_hopeless else "warn",
        found=shortage.found,
        remedy=f"pagewire serve {memory_remedy(config)}",
    )


def check_context(config: ClusterConfig, needs: ModelNeeds, gpu_free_bytes: int | None) -> Finding:
    """The pages of each worker hold the longest request that the model could serve."""
    pools = [key for key, number in config.workers_of_pools.items() if number]
    num_pages, key = min(
        (pages_of_worker(needs, config.in_pool(each), gpu_free_bytes), each) for each in pools
    )
    has_own = config.in_pool(key) != config
    tokens = num_pages * needs.page_size
    worker = f"a worker of pool {key!r}" if has_own else "a worker"
    found = (
        f"the pages of {worker} hold {tokens} tokens; the model's context is {needs.context_tokens}"
    )
    if tokens >= needs.context_tokens:
        return Finding(check="context", level="ok", found=found)
    device = "cpu" if gpu_free_bytes is None else "cuda"
    remedy = context_remedy(needs, config, device, "serve")
    if has_own:
        remedy = pool_remedy(needs, config, key)
    level: Level = "warn" if num_pages else "fail"
    return Finding(check="context", level=level, found=f"{found}; longer is refused", remedy=remedy)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _is_gateway(config: ClusterConfig) -> bool:
    """Return whether a gateway of Pagewire answers on the port of HTTP."""
    host, port = config.host, config.http_port
    connection = http.client.HTTPConnection(host, port, timeout=ROUTER_TIMEOUT_S)
    try:
        if tls := own_client(config.tls_settings):
            context = client_context(tls.load().current())
            context.check_hostname = False  # its certificate is not checked
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            connection = http.client.HTTPSConnection(
                host, port, timeout=ROUTER_TIMEOUT_S, context=context
            )
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status == 200 and response.getheader("x-request-id") is not None
    except (OSError, http.client.HTTPException, ConfigError):
        return False
    finally:
        connection.close()


def _is_router(config: ClusterConfig, address: str) -> bool:
    try:
        return is_router(address, own_client(config.tls_settings))
    except ConfigError:
        return False
