"""Commands for a cluster that outlives them: pagewire up, down, scale, move and others."""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Optional

import typer

from cli.flags import add_command, flag_parameter
from cli.serving_commands import context_note, serve_defaults, serving_where
from cli.stop_signals import StopSignals
from cluster.config import MAX_GRACE_S, ClusterConfig
from cluster.environment import prepare_ray
from cluster.errors import ConfigError, NotRunning, StartError, Stopping
from cluster.interruption import NOTHING_CHANGED, told_at_interrupt
from observability.logs import configure_logging
from pagewire.cli.standard_output import say

GRACE_HELP = (
    "Time for running requests to end; when a worker leaves, unfinished ones continue elsewhere. "
    "Default: the cluster's stop_grace_s."
)
PrefillFlag = Annotated[
    Optional[int],  # noqa: UP045 - the type is a value here
    typer.Option("--prefill", help="New number of prefill workers."),
]
DecodeFlag = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--decode", help="New number of decode workers."),
]
PoolFlag = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--pool",
        metavar="<name=number>",
        help="Number of workers to have in a pool of the section pools; once for each pool.",
    ),
]


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("it is not finite")  # the command says what is allowed
    return value


GraceFlag = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--grace-s", min=0.0, max=MAX_GRACE_S, callback=_finite, help=GRACE_HELP),
]
NamesArgument = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(help="Names of workers, router-0 or http-gateway.", metavar="NAME"),
]
DrainedArgument = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(help="Name of a worker, as in `pagewire status`.", metavar="WORKER"),
]
HereFlag = Annotated[
    bool,
    typer.Option(
        "--here",
        help="All workers of this host. They start elsewhere when there is room; Ray starts "
        "nothing more here until its node is started again.",
    ),
]
WorkerArgument = Annotated[str, typer.Argument(help="Name of a worker, as in `pagewire status`.")]

ToFlag = Annotated[
    str,
    typer.Option("--to", metavar="<pool>", help="prefill, decode, or a pool of the section pools."),
]


def up(config: ClusterConfig) -> None:
    """Start a cluster that outlives this command.

    Waits until it serves. If it already runs with this configuration, says so, and how it has been
    scaled since; other options are an error. `pagewire down` ends it.
    """
    prepare_ray(is_local=not config.ray_address)
    configure_logging(config.log_level, config.log_format)
    with StopSignals() as signals:
        from cli.bring_up import bring_up  # imports Ray

        cluster = bring_up(config, signals, say)
    if note := context_note(config, cluster.device, cluster.context_tokens, "up"):
        say(note)
    there = f" --ray-address {config.ray_address}" if config.ray_address else ""
    say(f"ready: {serving_where(config, cluster)}; `pagewire down{there}` ends it")


def down(config: ClusterConfig, grace_s: float | None) -> None:
    """End the cluster that `pagewire up` started.

    If none runs, that is not an error.
    """
    end = "stopped"
    try:
        with _running(config) as controller:
            from cluster.attach import ask
            from cluster.launch import end_cluster

            if grace_s is None:
                with told_at_interrupt(NOTHING_CHANGED):
                    grace_s = ask(controller.facts.remote()).config.stop_grace_s
            with told_at_interrupt(str(Stopping())):
                stopping = f"stopping; running requests have {grace_s:g} s"
                end_cluster(grace_s, lambda: say(stopping))
    except NotRunning as error:
        end = str(error)
    except StartError as error:
        if config.ray_address:
            raise
        say(f"{error}; ending it anyway")
    if not config.ray_address:
        with told_at_interrupt(str(Stopping())):
            from cli.bring_up import end_head

            end_head()
    say(end)


def scale(
    config: ClusterConfig,
    prefill: int | None,
    decode: int | None,
    pool: list[str] | None,
    grace_s: float | None,
) -> None:
    """Add or remove workers while the cluster serves.

    Workers that leave finish their requests first.
    """
    wanted: dict[str, int] = {
        role: number
        for role, number in (("prefill", prefill), ("decode", decode))
        if number is not None
    }
    for each in pool or ():
        name, _, number = each.partition("=")
        if not re.fullmatch(r"-?\d{1,9}", number):
            raise ConfigError(
                f"--pool: found {each!r}; allowed: a pool and the number of its workers, as in "
                "small=4"
            )
        if name in wanted:
            raise ConfigError(
                f"--pool: found {each!r}, but {name} is given twice; allowed: each pool once"
            )
        wanted[name] = int(number)
    if not wanted:
        raise ConfigError(
            "--prefill, --decode, --pool: found none of them; allowed: at least one, with the "
            "number of workers to have"
        )
    with _running(config) as controller:
        from cluster.scale_out import scale_cluster

        scale_cluster(controller, wanted, grace_s, say)


def drain(config: ClusterConfig, worker: str | None, here: bool, grace_s: float | None) -> None:
    """Let a worker finish its requests and leave.

    With --here, drain all workers of this host before it is removed; they start again elsewhere.
    """
    if here is (worker is not None):
        found = f"{worker!r} and --here" if here else "none of them"
        raise ConfigError(
            f"WORKER, --here: found {found}; allowed: one of them, the name of a worker or --here"
        )
    with _running(config) as controller:
        from cluster.scale_out import drain_host, drain_worker

        if worker is None:
            drain_host(controller, grace_s, say)
        else:
            drain_worker(controller, worker, grace_s, say)


def move(config: ClusterConfig, worker: str, to: str, grace_s: float | None) -> None:
    """Move a worker's GPU or host to another pool.

    The worker finishes its requests and leaves; one of the other pool takes its place. No request
    fails.
    """
    with _running(config) as controller:
        from cluster.scale_out import move_worker

        move_worker(controller, worker, to, grace_s, say)


def restart(config: ClusterConfig, names: list[str] | None, grace_s: float | None) -> None:
    """Restart workers, router and gateway one by one.

    Without NAME, all of them. Each starts with the current code and model files. Requests on a
    worker have --grace-s to end there, then continue elsewhere. Streams of the router continue at
    another one, or at the same one when it is back. Another gateway takes over from the running
    one, whose answers have --grace-s to end: no HTTP request is refused.
    """
    with _running(config) as controller:
        from cluster.rolling import restart_cluster

        restart_cluster(controller, names or (), grace_s, say)


@contextmanager
def _running(config: ClusterConfig) -> Iterator[Any]:
    """Attach to the running cluster while entered; yields its controller's handle."""
    prepare_ray(is_local=not config.ray_address)
    configure_logging("warning", "text")
    from cluster.attach import attached

    with ExitStack() as stack:
        with told_at_interrupt(NOTHING_CHANGED):
            controller = stack.enter_context(attached(config.ray_address))
        yield controller


def _finds(path: str) -> bool:
    """Return whether an option tells where a running cluster is."""
    return path == "ray_address"


app = typer.Typer(rich_markup_mode=None)
add_command(app, up, serve_defaults)
_GRACE = flag_parameter("grace_s", GraceFlag, None)
for _command, *_own in (
    (down,),
    (
        scale,
        flag_parameter("prefill", PrefillFlag, None),
        flag_parameter("decode", DecodeFlag, None),
        flag_parameter("pool", PoolFlag, None),
    ),
    (
        drain,
        flag_parameter("worker", DrainedArgument, None),
        flag_parameter("here", HereFlag, False),
    ),
    (move, flag_parameter("worker", WorkerArgument), flag_parameter("to", ToFlag)),
    (restart, flag_parameter("names", NamesArgument, None)),
):
    add_command(app, _command, takes=_finds, uses=_finds, own=[*_own, _GRACE])
