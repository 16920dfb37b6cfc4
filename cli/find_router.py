"""Finds the router for a client command, in the same way for all of these commands."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from cluster.certificates import own_client
from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.errors import ConfigError, StartError, Stopping
from cluster.local_head import find_head
from cluster.served import ServedCluster, served_clusters
from pagewire import Client, ClusterStatus, ConnectionFailedError, Tls
from pagewire.cli.client_commands import (
    ANSWER_TIMEOUT_S,
    DEFAULT_ADDRESS,
    AuthorityFlag,
    CertificateFlag,
    KeyFlag,
    ServerNameFlag,
    TlsFlag,
    tell_router_lost,
    tls_of,
)
from pagewire.cli.early_interrupts import interrupts_end_at_once
from pagewire.cli.token import TokenFileFlag, token_of

AddressFlag = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Address of the router, host:port. Default: the router of the cluster at "
        "--ray-address, else of the only one of `pagewire up` and `pagewire serve` on this host, "
        f"else {DEFAULT_ADDRESS}.",
    ),
]
RayAddressFlag = Annotated[
    str, typer.Option("--ray-address", help="Ray cluster on which the cluster runs.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRouter:
    """Address and cluster of a router, which may not answer."""

    address: str
    token: str = field(default="", repr=False)  # accepted by its cluster
    is_stopping: bool = False  # its cluster, if the controller answers
    config: ClusterConfig | None = None  # of its cluster; None: the controller does not answer
    tls: Tls | None = None  # of a cluster of `pagewire serve`


def find_router(address: str | None, ray_address: str) -> FoundRouter:
    """Return the named router, or that of the cluster on a Ray, or that of this host's cluster.

    Args:
        address: The value of --address; takes precedence.
        ray_address: The value of --ray-address; empty: the Ray of `pagewire up`, if one runs.

    Raises:
        ConfigError: That is no address of a Ray, or several clusters run here, and neither argument
            chooses one.
        NotRunning: No cluster runs on that Ray.
        StartError: The Ray does not answer, or the cluster has no router yet.
    """
    load_config(None, {"ray_address": ray_address})  # checks it
    if address:
        return FoundRouter(address=address)
    served = [] if ray_address else served_clusters()
    if not ray_address and find_head() is None:
        return _only_one(served)
    with interrupts_end_at_once():
        from cluster.environment import prepare_ray

        prepare_ray(is_local=not ray_address)
        from cluster.attach import ask, attached, router_address, router_token  # imports Ray

    with attached(ray_address) as controller:
        found = FoundRouter(address=router_address(), token=router_token())
        if served:
            raise _several([f"{found.address} (of `pagewire up`)", *map(_name, served)])
        with suppress(StartError):  # a router serves even while the controller does not answer
            facts = ask(controller.facts.remote(), ANSWER_TIMEOUT_S)
            found = replace(found, is_stopping=facts.is_stopping, config=facts.config)
        return found


def _only_one(served: Sequence[ServedCluster]) -> FoundRouter:
    """Return the router of this host's `pagewire serve`, as far as one is known."""
    match served:
        case []:
            return FoundRouter(address=DEFAULT_ADDRESS)
        case [only]:
            return FoundRouter(address=only.address, token=only.token, tls=only.tls)
        case several:
            raise _several([*map(_name, several)])


def _name(served: ServedCluster) -> str:
    return f"{served.address} (of `pagewire serve`)"


def _several(names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{len(names)} clusters run on this host; choose one with --address: {', '.join(names)}"
    )


@contextmanager
def found_router(
    address: AddressFlag = None,
    ray_address: RayAddressFlag = "",
    tls: TlsFlag = False,
    authority_file: AuthorityFlag = "",
    certificate_file: CertificateFlag = "",
    key_file: KeyFlag = "",
    server_name: ServerNameFlag = "",
    token_file: TokenFileFlag = None,
) -> Iterator[Client]:
    """Find a router and open a client of it, for short calls.

    Without a given token, calls use the token of the cluster that was found.

    Raises:
        NotRunning: As find_router does.
        StartError: As find_router does.
        ConfigError: The cluster's certificate cannot be read here, or as find_router does.
        Stopping: The router does not answer because its cluster stops.
    """
    token = token_of(token_file)
    found = find_router(address, ray_address)
    kind = _EndingClient if found.is_stopping else Client
    files = tls_of(tls, authority_file, certificate_file, key_file, server_name)
    if files is None:
        files = _own_files(found)
    with kind(
        found.address,
        token=token or found.token,
        default_timeout_s=ANSWER_TIMEOUT_S,
        on_router_lost=tell_router_lost,
        tls=files,
    ) as client:
        try:
            yield client
        except ConnectionFailedError:
            if found.is_stopping:
                raise Stopping from None
            raise


def _own_files(found: FoundRouter) -> Tls | None:
    if found.config is None:
        return found.tls
    try:
        return own_client(found.config.tls_settings)
    except ConfigError as error:  # a router keeps what it has read before
        raise ConfigError(
            f"{error}; the router at {found.address} may serve nevertheless, with the files as "
            "they were: mend them, or give your own, such as --authority-file"
        ) from error


class _EndingClient(Client):
    """Shows that a cluster stops, which its router learns after the controller, or never."""

    def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        return replace(super().status(timeout_s=timeout_s), is_stopping=True)
