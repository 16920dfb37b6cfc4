"""The command line: pagewire serve, up, down, scale, drain, generate, chat, status and others."""

import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from cli import client_commands
from cli.early_interrupts import interrupts_end_at_once
from cli.standard_output import guard_standard_output
from cli.strict_command import StrictCommand
from cluster.errors import ClusterError, ConfigError, Interrupted
from pagewire import ConnectionFailedError, InvalidRequestError, NotFoundError, PagewireError

LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}

EXIT_CODES = (
    "Exit codes: 0 all went well, which for serve is to be stopped when it was ready; 1 something "
    "did not, and standard error says what, unless the reader of the output left; 2 the command "
    "line, the configuration or the request was wrong, whether it was refused here or by the "
    "router; 129, 130, 143 SIGHUP, SIGINT or SIGTERM came before the end."
)


class Commands(TyperGroup):
    """Imports commands with a flag for each option only where they are asked for."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None; what a slip may mean is then looked for among all."""
        if cmd_name not in self.commands:
            self._add_serving_commands()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, as the help shows them."""
        self._add_serving_commands()
        return super().list_commands(ctx)

    def _add_serving_commands(self) -> None:
        with interrupts_end_at_once():
            from cli import lifecycle_commands, serving_commands
        for each in (serving_commands, lifecycle_commands):
            self.commands.update(get_group(each.app).commands)


app = typer.Typer(
    cls=Commands,
    help="Disaggregated LLM serving: a prefix is computed once, moved once, read once.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags, its boxes are unlike all other errors
    add_completion=False,
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(cls=StrictCommand)
def doctor(
    config: Annotated[Path | None, typer.Option("--config", help="YAML file with options.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Checkpoint folder or GGUF file.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address for the router.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port for the router.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this host: torch, CUDA, NCCL, Triton, Ray, memory, model.

    Also Python, the port, and whether NCCL's wheels are mixed.
    """
    given = {"model": model, "host": host, "port": port}
    overrides = {name: value for name, value in given.items() if value is not None}
    with interrupts_end_at_once():
        from rich.console import Console
        from rich.markup import escape

        from cluster.config_file import load_config
        from cluster.doctor import examine
        from cluster.host_facts import collect_facts

        merged = load_config(config, overrides)  # first: the facts take seconds
        facts = collect_facts()
    out = Console()
    findings = examine(facts, merged)
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
