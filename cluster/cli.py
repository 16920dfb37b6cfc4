"""The command line: pagewire serve, demo, generate, chat, status, doctor, version."""

import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cluster import client_commands
from cluster.capacity import context_remedy, read_model_needs
from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.devices import count_gpus, most_gpus
from cluster.early_interrupts import interrupts_end_at_once
from cluster.environment import prepare_local_ray
from cluster.errors import ClusterError, ConfigError, Interrupted
from cluster.flags import config_command, with_config_flags
from cluster.standard_output import guard_standard_output
from cluster.stop_signals import StopSignals
from cluster.strict_command import StrictCommand
from decode_worker.config import DecodeConfig
from observability.logs import configure_logging
from pagewire import ConnectionFailedError, InvalidRequestError, NotFoundError, PagewireError

# On CPUs a step of 2,048 tokens of a model of some billion weights takes longer than
# `router.stuck_after_s`, and its worker would count as dead.
CPU_STEP_TOKENS = 256

RAY_PERIOD_S = 1.0  # between two looks whether Ray's own processes run

LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}

EXIT_CODES = (
    "Exit codes: 0 all went well, which for serve is to be stopped when it was ready; 1 something "
    "did not, and standard error says what, unless the reader of the output left; 2 the command "
    "line, the configuration or the request was wrong, whether it was refused here or by the "
    "router; 129, 130, 143 SIGHUP, SIGINT or SIGTERM came before the end."
)

app = typer.Typer(
    help="Disaggregated LLM serving: a prefix is computed once, moved once, read once.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out = Console()

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def serve_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return short steps for workers on CPUs."""
    device = given.get("device", "auto")
    is_known = device == "auto" and "ray_address" not in given and most_gpus() == 0
    if device != "cpu" and not is_known:
        return {}
    steps = {"prefill_worker.max_step_tokens": CPU_STEP_TOKENS}
    if "decode_worker.max_running_sequences" not in given:
        # Of a full batch each sequence computes a token, too.
        batch = DecodeConfig().max_running_sequences
        steps["decode_worker.max_step_tokens"] = batch + CPU_STEP_TOKENS
    return steps


def serve(config: ClusterConfig) -> None:
    """Serve a checkpoint in the foreground until Ctrl-C, SIGTERM or its terminal closes."""
    prepare_local_ray()
    configure_logging(config.log_level, config.log_format)
    with StopSignals() as signals:
        from cluster.foreground import running_cluster  # imports Ray

        with running_cluster(config, signals, shows_worker_logs=True, say=_say) as cluster:
            if note := _context_note(config, cluster.device, cluster.context_tokens):
                _say(note)
            _say(
                f"ready: pagewire serves {config.model} on {_where(cluster.address)} "
                f"({cluster.device})"
            )
            while not signals.stopped.wait(RAY_PERIOD_S):
                cluster.local_ray.check()
            grace = f"running requests have {config.stop_grace_s:.0f} s"
            _say(f"stopping; {grace}; a second signal ends all at once")
        _say("stopped")


def demo_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return 2 + 2 workers, two on a GPU where there are fewer than four."""
    num_gpus = 0
    if given.get("device", "auto") != "cpu":
        with interrupts_end_at_once():  # it may import torch
            num_gpus = count_gpus()
    # All of a GPU's memory would be millions of the embedded model's pages.
    sizes = {"num_pages": 4096} if num_gpus >= 2 else serve_defaults({**given, "device": "cpu"})
    return {
        **sizes,
        # One GPU is not enough for two pools.
        "device": "cuda" if num_gpus >= 2 else "cpu",
        "prefill": 2,
        "decode": 2,
        "workers_per_gpu": 2 if 2 <= num_gpus < 4 else 1,
        "port": 0,
        "page_size": 16,
        "log_level": "warning",
        "stop_grace_s": 0.0,
        # The demo shows the transfer, so nothing is prefilled where it is decoded.
        "decode_worker.local_prefill_max_tokens": 0,
    }


def demo(config: ClusterConfig) -> None:
    """Start a cluster on this host, answer prompts that share a prefix, and account for them.

    Without --model it serves a small one with random weights.
    """
    from cluster.demo_model import demo_model_dir  # imports numpy, which only this command needs

    prepare_local_ray()
    configure_logging(config.log_level, config.log_format)
    is_embedded = config.model is None
    config = config.model_copy(update={"model": config.model or demo_model_dir()})
    name = "the embedded model (random weights)" if is_embedded else str(config.model)
    with StopSignals() as signals:
        from cluster.demo import run_demo
        from cluster.foreground import running_cluster  # imports Ray

        with running_cluster(config, signals, shows_worker_logs=False, say=_say) as cluster:
            _say(f"ready on {cluster.address} with {name}; workers compute on {cluster.device}")
            signals.run(run_demo(cluster.address, out))
        _say("stopped")


@app.command(cls=StrictCommand)
def doctor(
    config: Annotated[Path | None, typer.Option("--config", help="YAML file with options.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Checkpoint folder.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address for the router.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port for the router.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this host: Python, torch, CUDA, NCCL wheels, Triton, Ray, memory, port, model."""
    from cluster.doctor import examine
    from cluster.host_facts import collect_facts

    given = {"model": model, "host": host, "port": port}
    overrides = {name: value for name, value in given.items() if value is not None}
    with interrupts_end_at_once():
        facts = collect_facts()
    findings = examine(facts, load_config(config, overrides))
    if as_json:
        out.print_json(data=[asdict(each) for each in findings])
    else:
        width = max(len(each.check) for each in findings)
        for each in findings:
            style = LEVEL_STYLES[each.level]
            found = escape(f"{each.check:<{width}}  {each.found}")
            # Not wrapped: a remedy is to be copied.
            out.print(f"[{style}]{each.level:<4}[/]  {found}", soft_wrap=True)
            if each.remedy:
                out.print(f"      {'':<{width}}  → {escape(each.remedy)}", soft_wrap=True)
    if any(each.level == "fail" for each in findings):
        raise typer.Exit(1)


def print_version(is_asked: bool) -> None:
    """Print the version and end."""
    if is_asked:
        sys.stdout.write(f"pagewire {_version_of('pagewire')}\n")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options that need no command."""


@app.command()
def version() -> None:
    """Print the versions of Pagewire and of what it runs on."""
    for name in ("pagewire", "torch", "triton", "ray", "grpcio", "protobuf", "nccl4py"):
        sys.stdout.write(f"{name} {_version_of(name)}\n")


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


for each in (client_commands.generate, client_commands.chat, client_commands.status):
    app.command(cls=StrictCommand)(each)
app.command("serve", cls=config_command(serve_defaults))(with_config_flags(serve, serve_defaults))
app.command("demo", cls=config_command(demo_defaults))(with_config_flags(demo, demo_defaults))


def main() -> None:
    """Run; turn expected failures into lines and exit codes."""
    try:
        guard_standard_output()
        app()
    except Interrupted as interruption:
        sys.stderr.write(f"{interruption}\n")
        sys.exit(interruption.exit_code)
    except ConnectionFailedError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.write(
            "No router answers there now; `pagewire serve` starts one and restarts one that dies.\n"
        )
        sys.exit(1)
    except (ClusterError, PagewireError) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {line}\n")
        is_wrong_input = isinstance(error, ConfigError | InvalidRequestError | NotFoundError)
        sys.exit(2 if is_wrong_input else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _context_note(config: ClusterConfig, device: str, context_tokens: int) -> str:
    """Say that the pages do not hold the whole context, and what helps; empty: they do."""
    assert config.model is not None
    needs = read_model_needs(config.model, config, device)
    if context_tokens >= needs.context_tokens:
        return ""
    return (
        f"note: a request may have {context_tokens} tokens, the model could serve "
        f"{needs.context_tokens}; more with {context_remedy(needs, config, device)}"
    )


def _where(address: str) -> str:
    """Return an address, and for that of all interfaces also one to connect to."""
    host, _, port = address.rpartition(":")
    if host not in ("0.0.0.0", "[::]"):  # noqa: S104 - compared, not bound
        return address
    return f"{address}, for clients localhost:{port} or {socket.gethostname()}:{port}"


def _say(line: str) -> None:
    """Print one line at once and unwrapped, so that scripts can wait for it."""
    print(line, flush=True)
