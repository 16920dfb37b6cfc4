"""The command that runs an HTTP gateway by itself: pagewire gateway."""

import asyncio
from typing import Annotated

import typer

from cli.flags import flag_parameter, with_config_flags
from cli.stop_signals import StopSignals
from cluster.config import ClusterConfig
from cluster.devices import check_port_free
from cluster.errors import ConfigError
from observability.logs import configure_logging
from pagewire import InvalidRequestError
from pagewire.arguments import check_address
from pagewire.cli.standard_output import say

DEFAULT_PORT = 8000
# Options of a cluster that are a gateway's, too, besides the section http_gateway
OPTIONS = {"host", "log_level", "log_format", "stop_grace_s"}

RouterFlag = Annotated[
    list[str],
    typer.Option(
        "--router",
        metavar="<str>",
        help="Where a router is, host:port. Of several ones each goes on with the answers of one "
        "that is lost; give the flag for each.",
    ),
]
PortFlag = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Where clients connect; 0: a free port.")
]


def gateway(config: ClusterConfig, router: list[str], port: int) -> None:
    """Serve OpenAI's HTTP API before running routers, until Ctrl-C or SIGTERM.

    `pagewire serve` starts one by itself; see --http-port there.
    """
    try:
        for each in router:
            check_address(each)
    except InvalidRequestError as error:
        raise ConfigError(f"--router: {error.violations[0].description}") from error
    check_port_free(config.host, port)
    configure_logging(config.log_level, config.log_format)
    with StopSignals() as signals:
        asyncio.run(_serve(config, router, port, signals))


async def _serve(config: ClusterConfig, router: list[str], port: int, signals: StopSignals) -> None:
    from http_gateway.server import GatewayServer  # takes time to import

    async def find_routers() -> list[str]:
        return router

    server = GatewayServer(find_routers, config=config.http_gateway, host=config.host, port=port)
    address = await server.start()
    name = "router" if len(router) == 1 else "routers"
    say(f"ready: HTTP on http://{address}/v1 for the {name} at {', '.join(router)}")
    await asyncio.to_thread(signals.stopped.wait)
    say(f"stopping; running answers have {config.stop_grace_s:.0f} s; a second signal ends them")
    await server.stop(config.stop_grace_s)
    say("stopped")


def _takes(path: str) -> bool:
    return path in OPTIONS or path.startswith("http_gateway.")


OWN_FLAGS = ("router", "port")
with_flags = with_config_flags(
    gateway,
    takes=_takes,
    own=[
        flag_parameter("router", RouterFlag, ["localhost:50051"]),
        flag_parameter("port", PortFlag, DEFAULT_PORT),
    ],
)
