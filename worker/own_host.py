"""Differences between hosts, checked on each host before its worker loads weights.

The launcher checks all present hosts before it starts anything, so that one error lists all
problems. A worker checks again, because hosts join later.
"""

import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from credentials.config import TlsConfig
from credentials.door import is_loopback_host
from credentials.own_files import wrong_files
from llm_engine.errors import EngineError
from llm_engine.model_identity import ModelIdentity, read_identity
from options.interfaces import NoAddress, address_on
from options.kept_by_name import kept_by_name


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class HostOptions:
    """Options that are set once and have another effect on each host."""

    # address, name or resource of a host |-> path of the model there, if it differs
    model_paths: Mapping[str, str] = field(default_factory=dict)
    network_interface: str = ""  # empty: the host's address in Ray
    nccl_interface: str = ""  # empty: NCCL has none of its own, or is not used


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFound:
    """The findings on one host."""

    address: str  # address for other hosts; empty: a problem says why there is none
    model: Path
    problems: tuple[str, ...]  # each a sentence that names the host; none: a worker can start


def host_names(node: Mapping[str, Any]) -> frozenset[str]:
    """Return the names by which options select a host: address, name and resources.

    Args:
        node: As ray.nodes() describes it.
    """
    return frozenset({node["NodeManagerAddress"], node["NodeManagerHostname"], *node["Resources"]})


def model_on(model_paths: Mapping[str, str], model: Path, names: Collection[str]) -> Path:
    """Return the path of the model on a host: the first path for one of its names, or `model`.

    Args:
        names: The names of the host; see host_names.
    """
    return Path(next((path for name, path in model_paths.items() if name in names), model))


def look(
    options: HostOptions,
    model: Path,
    names: Collection[str],
    address: str,
    expected: ModelIdentity | None,
    tls: TlsConfig,
    authority: bytes = b"",
) -> HostFound:
    """Look at the host of this process; reads from its disk.

    Args:
        options: The options of the cluster.
        model: Path of the model unless the options name another one.
        names: The names of the host; see host_names.
        address: The host's address in Ray.
        expected: The model that must be there; None: any.
        tls: The TLS options within the cluster.
        authority: The authority that must cover this host's certificate, in PEM; empty: any.
    """
    problems = []
    host = f"{socket.gethostname()} ({address})"
    try:
        if interface := options.network_interface:
            ray_address, address = address, address_on(interface)
            if is_loopback_host(address) and not is_loopback_host(ray_address):
                problems.append(
                    f"network_interface: found {interface!r}, whose address on {host} is "
                    f"{address}, which no other host can reach; allowed: one that connects "
                    "the hosts"
                )
    except NoAddress as error:
        address = ""
        problems.append(str(error))
    try:
        if options.nccl_interface:
            address_on(options.nccl_interface, option="nccl_interface")
    except NoAddress as error:
        problems.append(str(error))
    if problem := wrong_files(tls, host, authority):
        problems.append(problem)
    model = model_on(options.model_paths, model, names)
    if expected is not None and (problem := _wrong_copy(host, model, expected)):
        problems.append(problem)
    return HostFound(address=address, model=model, problems=tuple(problems))


def _wrong_copy(host: str, model: Path, expected: ModelIdentity) -> str:
    """Say why the expected model is missing; empty: it is there."""
    remedy = "a copy of the model must be there, or at a path that model_paths names"
    try:
        if not model.exists():
            return f"{host} has nothing at {model}; {remedy}"
        differences = expected.differences(read_identity(model))
    except (EngineError, OSError) as error:
        return f"{host} has no usable model at {model}: {error}; {remedy}"
    if differences:
        return f"{host} has {differences} at {model} than the router's host; {remedy}"
    return ""
