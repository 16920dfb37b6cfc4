"""Checks a cluster's certificates, and connects its own processes as clients."""

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from credentials.config import TlsSettings, path_here
from credentials.door import front_door, is_loopback_host
from credentials.errors import OpenInClear
from pagewire import Tls
from pagewire.protos.pem import (
    LivePeer,
    LivePem,
    PemError,
    PemFiles,
    a_name,
    is_for,
    read_names,
    read_pem,
)

ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


def check_certificates(config: ClusterConfig) -> str:
    """Refuse files that cannot be used, and ports that would be open in clear.

    Returns:
        A problem that clients may meet; empty: none is known here.

    Raises:
        ConfigError: Names the option and the file.
    """
    front = check_front(config)
    if config.front_tls.client_authority_file and not config.tls.is_on:
        raise ConfigError(
            "tls.certificate_file: found none; allowed: a file, as front_tls.client_authority_file "
            "is given, and the cluster's own processes are clients of its router, too"
        )
    own_authority(config)
    return front


def own_authority(config: ClusterConfig) -> bytes:
    """Return the authority of the cluster's processes as this host has it, in PEM.

    Returns:
        Empty if TLS is off.

    Raises:
        ConfigError: A file of this host cannot be used.
    """
    try:
        return read_pem(config.tls.files).authority if config.tls.is_on else b""
    except PemError as error:
        raise ConfigError(str(error)) from error


def check_front(config: ClusterConfig) -> str:
    """Do the part of check_certificates for clients alone."""
    try:
        front_door(config.tls_settings).check(config.host)
        front = read_pem(config.front_tls.files(config.tls)) if config.front_tls.is_on else None
    except (PemError, OpenInClear) as error:
        raise ConfigError(str(error)) from error
    if front is None or config.host in ANY_HOST or is_for(front, config.host):
        return ""
    return (
        f"front_tls.certificate_file: {path_here(config.front_tls.certificate_file)} is for "
        f"{', '.join(front.names) or 'no name'}, not for host, which is {config.host}; clients "
        "must expect another name"
    )


def check_clients(config: ClusterConfig) -> None:
    """Refuse routers that other hosts can use without credentials, unless `insecure` allows it.

    Raises:
        ConfigError: Names the options that would help.
    """
    if needs_tenants(config) and not config.router.tenants_file:
        raise ConfigError(
            "router.tenants_file: found none; allowed: a tenants file, or "
            "front_tls.client_authority_file, where other hosts can connect (host is "
            f"{config.host}); or insecure, if whoever can connect may use the model"
        )


def needs_tenants(config: ClusterConfig) -> bool:
    """Return whether only tenants' tokens keep strangers from using servers for clients."""
    asks_certificates = bool(config.front_tls.client_authority_file)
    return not (asks_certificates or config.insecure or is_loopback_host(config.host))


def check_links(config: ClusterConfig, device: str, addresses: Iterable[str]) -> None:
    """Refuse connections in clear between hosts unless an option allows them.

    Args:
        config, device: Configuration and device of the cluster.
        addresses: The addresses on which its workers and controller will listen.

    Raises:
        ConfigError: Names the option.
    """
    exposed = [each for each in addresses if not is_loopback_host(each)]
    if exposed and not config.tls.is_on and not config.insecure:
        raise ConfigError(str(OpenInClear("tls.certificate_file", exposed[0])))
    # On one host pages do not leave it, whatever the interface.
    moves_by_nccl = device == "cuda" and config.prefill > 0 and bool(config.ray_address)
    if exposed and config.tls.is_on and moves_by_nccl and not config.tls.allow_plain_nccl:
        raise ConfigError(
            "tls.allow_plain_nccl: found false; allowed: true, if the network between the hosts "
            "may carry pages in clear or encrypts by itself, because NCCL, which moves pages "
            "between GPUs, encrypts nothing"
        )


def own_client(settings: TlsSettings) -> Tls | None:
    """Return how the cluster's own processes connect to its routers; None: in clear.

    They read the routers' certificate and trust it alone. They read its key, too, if they may, to
    see whether routers can use both.

    Raises:
        ConfigError: It cannot be used, or the certificate that they show.
    """
    front, inside = settings.front, settings.inside
    if not front.is_on:
        return None
    try:
        names = read_names(front.certificate)
        if os.access(path_here(front.key_file), os.R_OK):
            read_pem(front.files(inside))
        if front.client_authority_file:
            read_pem(inside.files)  # by the names of these options, not those of Tls
    except PemError as error:
        raise ConfigError(str(error)) from error
    tls = Tls(
        authority_file=path_here(front.certificate_file),
        server_name=a_name(names),
    )
    if not front.client_authority_file:
        return tls
    return replace(
        tls,
        certificate_file=path_here(inside.certificate_file),
        key_file=path_here(inside.key_file),
    )


@dataclass(frozen=True, kw_only=True)
class GatewayTls(Tls):
    """Connect to routers of this host, and trust the certificate that they show, under its names.

    Routers keep their certificate if they cannot use a renewal. Then this side still trusts that
    one, too.
    """

    router_files: PemFiles

    def load(self) -> LivePem:
        """Read the files; errors are those of `Tls.load`, and PemError of the router's."""
        return LivePeer(self.router_files, super().load())


def gateway_client(settings: TlsSettings) -> Tls | None:
    """Return how a gateway of the cluster connects to its routers; as own_client."""
    tls = own_client(settings)
    if tls is None:
        return None
    files = settings.front.files(settings.inside)
    return GatewayTls(**{**vars(tls), "authority_file": ""}, router_files=files)


def client_hosts(config: ClusterConfig, host: str) -> tuple[str, ...]:
    """Return by which names clients reach a server that listens at a host, this host's first.

    Of a server on all interfaces, these are the names that its certificate is for.
    """
    if host.strip("[]") not in ANY_HOST:
        return (host,)
    names: tuple[str, ...] = ()
    # It may be in the middle of a renewal; the servers keep the one before it.
    with suppress(PemError):
        names = read_names(config.front_tls.certificate) if config.front_tls.is_on else ()
    ordered = sorted(
        (each for each in names if "*" not in each), key=lambda name: name != "localhost"
    )
    hosts = tuple(f"[{name}]" if ":" in name else name for name in ordered)
    return hosts or ("localhost", socket.gethostname())


def http_url(config: ClusterConfig, address: str) -> str:
    """Return the URL of an HTTP gateway that listens at `host:port`, for browsers on its host."""
    scheme = "https" if config.front_tls.is_on else "http"
    host, _, port = address.rpartition(":")
    return f"{scheme}://{client_hosts(config, host)[0]}:{port}"


def with_absolute_files(config: ClusterConfig) -> ClusterConfig:
    """Return a configuration for processes that run in other folders and on other hosts.

    Links are kept: a certificate's renewal may point them elsewhere.
    """

    def absolute(section: Any, path_of: Callable[[str], str] = str) -> Any:
        names = [name for name in section.__slots__ if name.endswith("_file")]
        given = {name: path for name in names if (path := getattr(section, name))}
        return replace(
            section, **{name: str(Path(path_of(path)).absolute()) for name, path in given.items()}
        )

    # Clients are served on this host alone, whose certificate commands on other hosts trust.
    front = absolute(config.front_tls, path_here)
    secret = config.secret_file and str(Path(config.secret_file).absolute())
    return replace(config, tls=absolute(config.tls), front_tls=front, secret_file=secret)
