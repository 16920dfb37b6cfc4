"""The commands for routers outside Ray: pagewire router, which runs one, and router-keys."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from cli.flags import add_command, flag_parameter
from cli.stop_signals import StopSignals
from cluster.certificates import check_clients
from cluster.config import ClusterConfig
from cluster.deployment import secret_of
from cluster.devices import check_port_free, port_lost
from cluster.environment import prepare_ray
from cluster.errors import ConfigError, StartError
from cluster.own_address import with_own_host
from cluster.preflight import (
    check_all,
    check_encryption,
    check_metrics_port_free,
    check_traces,
)
from credentials.errors import KeyFileError
from credentials.key_file import read_router_keys, write_router_keys
from credentials.secret import RouterKeys
from observability.logs import configure_logging
from pagewire import InvalidRequestError
from pagewire.arguments import check_address
from pagewire.cli.standard_output import say

# Of all routers outside Ray: they share their keys.
ROUTERS_NAME = "routers"
# Options of a cluster that a router has, too, besides the section router.
OPTIONS = {
    *("model", "host", "network_interface", "port", "port_range", "insecure"),
    *("log_level", "log_format", "stop_grace_s"),
    *("decode_worker.local_prefill_max_tokens", "decode_worker.max_running_sequences"),
}

ControllerFlag = Annotated[
    str,
    typer.Option(
        "--controller", help="Address of the cluster's controller, host:port; see controller_port."
    ),
]
KeysFlag = Annotated[Path, typer.Option("--keys", help="File written by `pagewire router-keys`.")]
SharePortFlag = Annotated[
    bool,
    typer.Option(
        "--share-port/--no-share-port",
        help="Let more routers of this user share this port of the host; each gets a part of the "
        "connections.",
    ),
]
FileArgument = Annotated[Path, typer.Argument(help="File to write; only its owner may read it.")]


def router(config: ClusterConfig, controller: str, keys: Path, share_port: bool) -> None:
    """Run one more router of a running cluster.

    Ctrl-C or SIGTERM ends it. It needs neither Ray nor torch, only the model's tokenizer and the
    cluster's options in --config. It may start before the cluster, for which it waits without a
    limit; it is ready once a decode worker takes requests. A client that loses a router continues
    at another one.
    """
    if config.model is None:
        allowed = "a folder with the tokenizer, as in --model PATH"
        raise ConfigError(f"model: found none; allowed: {allowed}")
    try:
        check_address(controller)
        router_keys = read_router_keys(keys)
    except InvalidRequestError as error:
        raise ConfigError(f"--controller: {error.violations[0].description}") from error
    except KeyFileError as error:
        raise ConfigError(f"--keys: {error}") from error
    config = with_own_host(config)
    check_all(
        lambda: check_port_free(config.host, config.port, is_shared=share_port),
        lambda: check_metrics_port_free(config),
    )
    check_all(
        lambda: check_encryption(config, say),
        lambda: check_clients(config),
        lambda: check_traces(config.tracing),
    )
    configure_logging(config.log_level, config.log_format)
    with StopSignals() as signals:
        asyncio.run(_serve(config, controller, router_keys, share_port, signals))


async def _serve(
    config: ClusterConfig,
    controller: str,
    keys: RouterKeys,
    share_port: bool,
    signals: StopSignals,
) -> None:
    # Slow imports.
    from cluster.router_settings import router_settings
    from llm_engine.errors import EngineError
    from options.ports import NoPortFree
    from router.errors import ModelFolderError, PortTaken, TenantsFileError
    from router.process import RouterProcess

    async def find_controller() -> str:
        return controller

    name = f"router-{socket.gethostname()}-{os.getpid()}"
    try:
        settings = router_settings(config, name, keys, shares_port=share_port)
        process = RouterProcess(settings, find_controller)
        address = await process.start()
    except (ModelFolderError, TenantsFileError, EngineError) as error:
        raise ConfigError(str(error)) from error
    except (PortTaken, NoPortFree) as error:
        raise StartError(str(error)) from error
    except RuntimeError as error:
        raise port_lost(config.host, config.port) from error

    async def tell_ready() -> None:
        cluster = f"the cluster at {controller}"
        await process.wait_ready(lambda reason: say(f"waiting for {cluster}: {reason}"))
        say(f"ready: {name} on {address} for {cluster}")

    await signals.wait_beside(tell_ready(), "tell-ready")
    say(f"stopping; running requests have {config.stop_grace_s:.0f} s; a second signal ends them")
    await process.stop(config.stop_grace_s)
    say("stopped")


def router_keys(config: ClusterConfig, file: Path) -> None:
    """Write the keys that `pagewire router` needs.

    With them, a router proves that it belongs to a cluster. They come from the running cluster, or
    from the --secret-file with which it was started.
    """
    told = ""
    if config.secret_file:
        keys = secret_of(config).router_keys(ROUTERS_NAME)
    else:
        keys, controller = _of_running_cluster(config)
        told = f"; `pagewire router --controller {controller} --keys {file}` uses it"
    try:
        write_router_keys(file, keys)
    except KeyFileError as error:
        raise ConfigError(f"FILE: {error}") from error
    say(f"wrote {file}{told}")


def _of_running_cluster(config: ClusterConfig) -> tuple[RouterKeys, str]:
    prepare_ray(is_local=not config.ray_address)
    configure_logging("warning", "text")
    from cluster.attach import ask, attached  # imports Ray

    with attached(config.ray_address) as controller:
        return ask(controller.router_keys.remote(ROUTERS_NAME)), ask(controller.address.remote())


def _is_routers(path: str) -> bool:
    return path in OPTIONS or path.startswith(("router.", "tls.", "front_tls.", "tracing."))


def _finds_keys(path: str) -> bool:
    return path in ("ray_address", "secret_file")


app = typer.Typer(rich_markup_mode=None)
add_command(
    app,
    router,
    takes=_is_routers,
    own=[
        flag_parameter("controller", ControllerFlag),
        flag_parameter("keys", KeysFlag),
        flag_parameter("share_port", SharePortFlag, default=False),
    ],
)
add_command(
    app,
    router_keys,
    takes=_finds_keys,
    uses=_finds_keys,
    own=[flag_parameter("file", FileArgument)],
)
