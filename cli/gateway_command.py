"""The command that runs a separate HTTP gateway: pagewire gateway."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cli.flags import add_command, flag_parameter
from cli.stop_signals import StopSignals
from cluster.certificates import check_front, http_url, needs_tenants
from cluster.config import ClusterConfig
from cluster.devices import check_port_free, port_lost
from cluster.errors import ConfigError
from cluster.own_address import with_own_host
from cluster.preflight import check_traces
from credentials.door import front_door, is_loopback_host
from observability.logs import configure_logging
from observability.open_files import raise_file_limit
from observability.serving_process import settle_process
from observability.tracing import stop_tracing
from pagewire import InvalidRequestError, PagewireError, Tls, TlsError
from pagewire.arguments import check_address
from pagewire.cli.client_commands import tls_of
from pagewire.cli.standard_output import say
from pagewire.cli.strict_command import told_with_flag
from protos.addresses import split_address

DEFAULT_PORT = 8000
# Options of a cluster that a gateway has, too, besides whole sections
OPTIONS = {"host", "network_interface", "insecure", "log_level", "log_format", "stop_grace_s"}

RouterFlag = Annotated[
    list[str],
    typer.Option(
        "--router",
        metavar="<str>",
        help="Address of a router, host:port. May be repeated: answers of a lost router continue "
        "at another one.",
    ),
]
PortFlag = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port for clients; 0: a free port.")
]
RouterTlsFlag = Annotated[
    bool,
    typer.Option("--router-tls", help="Connect to the routers over TLS; implied by flags below."),
]
RouterAuthorityFlag = Annotated[
    Path | None,
    typer.Option(
        "--router-authority-file", help="Authority of the router, PEM. Default: public ones."
    ),
]
RouterCertificateFlag = Annotated[
    Path | None,
    typer.Option("--router-certificate-file", help="Certificate to show to the router, PEM."),
]
RouterKeyFlag = Annotated[
    Path | None, typer.Option("--router-key-file", help="Its private key, PEM.")
]
RouterServerNameFlag = Annotated[
    str,
    typer.Option(
        "--router-server-name",
        help="Name in the router's certificate; empty: the host of --router.",
    ),
]


def gateway(
    config: ClusterConfig,
    router: list[str],
    port: int,
    router_tls: bool,
    router_authority_file: Path | None,
    router_certificate_file: Path | None,
    router_key_file: Path | None,
    router_server_name: str,
) -> None:
    """Serve OpenAI's HTTP API in front of running routers.

    Ctrl-C or SIGTERM ends it. It is ready once a router has a decode worker that takes requests,
    and waits for that without a limit. Where other hosts can connect, it also waits until the
    routers have a tenants file, unless --front-tls-client-authority-file or --insecure is given.
    `pagewire serve` starts its own gateway; see --http-port there.
    """
    try:
        for each in router:
            check_address(each)
    except InvalidRequestError as error:
        raise ConfigError(f"--router: {error.violations[0].description}") from error
    tls = tls_of(
        router_tls,
        router_authority_file,
        router_certificate_file,
        router_key_file,
        router_server_name,
    )
    try:
        if tls:
            tls.load()
    except InvalidRequestError as error:
        wrong = error.violations[0]
        raise ConfigError(f"{_flag(wrong.field)}: {wrong.description}") from error
    if tls is None:
        _check_in_clear(config, router)
    config = with_own_host(config)
    check_port_free(config.host, port)
    check_traces(config.tracing)
    if wrong_name := check_front(config):
        say(f"warning: {wrong_name}")
    configure_logging(config.log_level, config.log_format)
    raise_file_limit(config.http_gateway.max_connections)
    with StopSignals() as signals:
        asyncio.run(_serve(config, router, tls, port, signals))


def _check_in_clear(config: ClusterConfig, routers: list[str]) -> None:
    """Refuse to connect to other hosts in clear if the file of options encrypts the cluster.

    Its section `tls` is for routers, workers and controller; a gateway is a router's client.
    """
    if config.insecure or not config.tls.is_on:
        return
    if remote := [each for each in routers if not is_loopback_host(split_address(each)[0])]:
        raise ConfigError(
            "tls.certificate_file: found a file, which encrypts no connection of a gateway, and no "
            f"flag that encrypts those to {', '.join(remote)}; allowed: "
            "--router-authority-file, --router-tls for a public authority, or insecure"
        )


async def _serve(
    config: ClusterConfig,
    router: list[str],
    router_tls: Tls | None,
    port: int,
    signals: StopSignals,
) -> None:
    from http_gateway.server import GatewayServer, trace_gateway  # take time to import

    async def find_routers() -> list[str]:
        return router

    server = GatewayServer(
        find_routers,
        config=config.http_gateway,
        host=config.host,
        port=port,
        door=front_door(config.tls_settings),
        router_tls=router_tls,
        needs_tenants=needs_tenants(config),
    )
    trace_gateway(config.tracing)
    try:
        address = await server.start()
    except OSError as error:
        raise port_lost(config.host, port) from error
    settle_process()
    name = "router" if len(router) == 1 else "routers"
    routers = f"the {name} at {', '.join(router)}"

    async def tell_ready() -> None:
        await server.wait_ready(lambda error: say(f"waiting for {routers}: {_told(error)}"))
        url = http_url(config, address)
        say(f"ready: HTTP on {url}/v1, chat page at {url}/, for {routers}")

    await signals.wait_beside(tell_ready(), "tell-ready")
    say(f"stopping; running answers have {config.stop_grace_s:.0f} s; a second signal ends them")
    await server.stop(config.stop_grace_s)
    await asyncio.to_thread(stop_tracing)
    say("stopped")


def _told(error: PagewireError) -> str:
    if isinstance(error, TlsError) and error.field:
        return told_with_flag(error, _flag(error.field))
    return error.message


def _flag(field: str) -> str:
    """Return the flag for the client's argument `tls`, or a field of it."""
    return f"--router-{field.removeprefix('tls.').replace('_', '-')}"


def _takes(path: str) -> bool:
    return path in OPTIONS or path.startswith(("http_gateway.", "front_tls.", "tracing."))


app = typer.Typer(rich_markup_mode=None)
add_command(
    app,
    gateway,
    takes=_takes,
    own=[
        flag_parameter("router", RouterFlag, ["localhost:50051"]),
        flag_parameter("port", PortFlag, DEFAULT_PORT),
        flag_parameter("router_tls", RouterTlsFlag, default=False),
        flag_parameter("router_authority_file", RouterAuthorityFlag, None),
        flag_parameter("router_certificate_file", RouterCertificateFlag, None),
        flag_parameter("router_key_file", RouterKeyFlag, None),
        flag_parameter("router_server_name", RouterServerNameFlag, ""),
    ],
)
