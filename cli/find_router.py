"""Finds the router for a client command, in the same way for all of these commands."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.certificates import own_client
from cluster.config_file import load_config
from cluster.errors import ConfigError, NotRunning, StartError, Stopping
from cluster.local_head import find_head, how_head_ended
from cluster.served import ServedCluster, served_clusters
from credentials.config import TlsSettings
from pagewire import Client, ClusterStatus, ConnectionFailedError, Tls, errors
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
from pagewire.cli.controller_view import ControllerView, RouterSilent
from pagewire.cli.early_interrupts import interrupts_end_at_once
from pagewire.cli.token import TokenFileFlag, token_of

if TYPE_CHECKING:
    from cluster.controller import ClusterFacts  # imports Ray

ROUTER_LEARNS_S = 15.0  # after which a router knows by itself whether the controller is silent
VIEW_LASTS_S = 15.0  # after which a controller's answer may be out of date

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
    tls: Tls | None = None  # of a cluster of `pagewire serve`
    tls_settings: TlsSettings | None = None  # of a cluster on a Ray; None: not known
    view: ControllerView | None = None  # of the latter's controller; None: it does not answer
    controller_silence: str = ""  # why it does not
    cluster_end: str = ""  # how this host's last cluster ended by itself, if none is known to run

    @property
    def is_stopping(self) -> bool:
        """Whether its cluster is being stopped, if the controller answers."""
        return self.view is not None and self.view.is_stopping


def find_router(address: str | None, ray_address: str, timeout_s: float) -> FoundRouter:
    """Return the named router, or that of the cluster on a Ray, or that of this host's cluster.

    Args:
        address: The value of --address; takes precedence.
        ray_address: The value of --ray-address; empty: the Ray of `pagewire up`, if one runs.
        timeout_s: The longest wait for a router in Ray. The controller's is at most 5 s of it.

    Raises:
        ConfigError: That is no address of a Ray, or several clusters run here, and neither argument
            chooses one.
        NotRunning: No cluster runs on that Ray.
        Stopping: The router does not answer because its cluster stops.
        RouterSilent: The router does not answer, but the controller does.
        StartError: The Ray does not answer, or neither router nor controller does.
    """
    load_config(None, {"ray_address": ray_address})  # checks it
    if address is not None:
        return FoundRouter(address=address)
    served = [] if ray_address else served_clusters()
    if not ray_address and find_head() is None:
        return _only_one(served)
    with interrupts_end_at_once():
        from cluster.environment import prepare_ray

        prepare_ray(is_local=not ray_address)
        from cluster.attach import attached  # imports Ray

    with attached(ray_address) as controller:
        found = _ask_cluster(controller, timeout_s)
        if served:
            raise _several([f"{found.address} (of `pagewire up`)", *map(_name, served)])
        return found


def _ask_cluster(controller: Any, timeout_s: float) -> FoundRouter:
    """Ask controller and router at the same time, so that neither delays the other."""
    from cluster.attach import look, router_calls

    began_at = time.monotonic()
    facts_call, calls = controller.facts.remote(), router_calls()
    facts, controller_silence = look(facts_call, began_at, min(timeout_s, ANSWER_TIMEOUT_S))
    view = _view_of(facts) if facts else None
    reason = "" if calls else "there is none; run `pagewire up` again to place one"
    answers: dict[str, Any] = {}
    for method, call in calls.items():
        if not reason:
            answers[method], reason = look(call, began_at, timeout_s)
    if reason and view:
        raise Stopping if view.is_stopping else RouterSilent(reason, view)
    if reason:
        raise StartError(
            f"the cluster does not answer: its router: {reason}; its controller: "
            f"{controller_silence}; if they have ended, Ray starts them again by itself: try again "
            "in some seconds"
        )
    return FoundRouter(
        address=answers["wait_ready"],
        token=answers["cluster_token"],
        tls_settings=answers.get("tls_settings") or (facts and facts.config.tls_settings),
        view=view,
        controller_silence=controller_silence,
    )


def _view_of(facts: "ClusterFacts") -> ControllerView:
    workers = facts.workers
    states = {
        **dict.fromkeys(workers.leaving, "leaving"),
        **dict.fromkeys(workers.staying, "silent"),
        **dict.fromkeys(workers.answering, "alive"),
    }
    return ControllerView(workers=states, is_stopping=facts.is_stopping)


def _only_one(served: Sequence[ServedCluster]) -> FoundRouter:
    """Return the router of this host's `pagewire serve`, as far as one is known."""
    match served:
        case []:
            return FoundRouter(address=DEFAULT_ADDRESS, cluster_end=how_head_ended())
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
    timeout_s: float,
    address: AddressFlag = None,
    ray_address: RayAddressFlag = "",
    tls: TlsFlag = False,
    authority_file: AuthorityFlag = None,
    certificate_file: CertificateFlag = None,
    key_file: KeyFlag = None,
    server_name: ServerNameFlag = "",
    token_file: TokenFileFlag = None,
) -> Iterator[Client]:
    """Find a router and open a client of it.

    Without a given token, calls use the token of the cluster that was found.

    Raises:
        ClusterError: As find_router does. Also ConfigError: the cluster's certificate cannot be
            read here; Stopping: the router does not answer because its cluster stops; and
            NotRunning: because this host's last cluster has ended by itself.
        RouterSilent: As find_router does; the client's `status` raises it, too.
    """
    token = token_of(token_file)
    found = find_router(address, ray_address, timeout_s)
    files = tls_of(tls, authority_file, certificate_file, key_file, server_name)
    if files is None:
        files = _own_files(found)
    with _FoundClient(
        found,
        token=token or found.token,
        default_timeout_s=timeout_s,
        on_router_lost=tell_router_lost,
        tls=files,
    ) as client:
        try:
            yield client
        except ConnectionFailedError:
            if found.is_stopping:
                raise Stopping from None
            if found.cluster_end:
                raise NotRunning(
                    f"no cluster runs on this host, and no router answers at {found.address}; the "
                    f"Ray of the last `pagewire up`: {found.cluster_end}; `pagewire up` starts "
                    "another"
                ) from None
            raise


def _own_files(found: FoundRouter) -> Tls | None:
    if found.tls_settings is None:
        return found.tls
    try:
        return own_client(found.tls_settings)
    except ConfigError as error:  # a router keeps what it has read before
        raise ConfigError(
            f"{error}; the router at {found.address} may serve nevertheless, with the files as "
            "they were: mend them, or give your own, such as --authority-file"
        ) from error


class _FoundClient(Client):
    """Knows of a cluster what its router may not know, or learns later."""

    def __init__(self, found: FoundRouter, **options: Any) -> None:
        super().__init__(found.address, **options)
        self._found, self._found_at = found, time.monotonic()

    def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        found = self._found
        try:
            status = super().status(timeout_s=timeout_s)
        except (ConnectionFailedError, errors.TimeoutError) as error:
            if found.view is None or found.is_stopping:
                raise
            raise RouterSilent(str(error), found.view) from error
        silence = status.controller_silence
        age_s = time.monotonic() - self._found_at
        if age_s < ROUTER_LEARNS_S:
            silence = silence or found.controller_silence
        starting: tuple[str, ...] = ()
        if found.view and age_s < VIEW_LASTS_S and not status.is_partial:
            known = {each.worker_id for each in status.workers}
            silent = (name for name, state in found.view.workers.items() if state == "silent")
            starting = tuple(sorted(each for each in silent if each not in known))
        return replace(
            status,
            is_stopping=status.is_stopping or found.is_stopping,
            controller_silence=silence,
            starting=starting,
        )
