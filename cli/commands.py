"""The command line: pagewire serve, up, down, scale, drain, generate, chat, status and others."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from cli.configured_command import ConfiguredCommand
from cli.find_router import found_router
from cluster.errors import ClusterError, ConfigError, Interrupted
from pagewire.cli.client_commands import JsonFlag, add_client_commands
from pagewire.cli.commands import EXIT_CODES, INSTALL_SERVER, make_app, print_versions, run
from pagewire.cli.early_interrupts import interrupts_end_at_once

ENGINE = ("ray", "safetensors", "torch", "triton")  # what the extra `engine` brings
LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


class Commands(TyperGroup):
    """Imports commands with a flag for each option only when they are used."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None; typer then suggests similar names among all."""
        if cmd_name not in self.commands:
            self._add_serving_commands()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands in the order of the help."""
        self._add_serving_commands()
        return super().list_commands(ctx)

    def _add_serving_commands(self) -> None:
        with interrupts_end_at_once():
            from cli import (
                gateway_command,
                lifecycle_commands,
                router_commands,
                serving_commands,
                tokens_command,
            )
        for each in (serving_commands, gateway_command, lifecycle_commands, router_commands):
            self.commands.update(get_group(each.app).commands)
        self.commands["tokens"] = get_group(tokens_command.app)


app = make_app(Commands, epilog=EXIT_CODES)


@app.command(cls=ConfiguredCommand)
def doctor(
    config: Annotated[Path | None, typer.Option("--config", help="YAML file with options.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Checkpoint folder or GGUF file.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address for the router.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port for the router.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check whether this host can run Pagewire.

    Checks Python, torch, CUDA, NCCL and its wheels, Triton, Ray, memory, the port and the model.
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
            # Not wrapped, so that a remedy can be copied.
            out.print(f"[{style}]{each.level:<4}[/]  {found}", soft_wrap=True)
            if each.remedy:
                out.print(f"      {'':<{width}}  → {escape(each.remedy)}", soft_wrap=True)
    if any(each.level == "fail" for each in findings):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the versions of Pagewire and its dependencies."""
    print_versions(("pagewire", "torch", "triton", "ray", "grpcio", "protobuf", "nccl4py"))


add_client_commands(app, found_router)


def main() -> None:
    """Run; turn expected failures into lines and exit codes."""
    try:
        run(
            app,
            remedy="No router answers there; `pagewire serve` and `pagewire up` start one, and "
            "restart one that dies.",
        )
    except Interrupted as interruption:
        sys.stderr.write(f"{interruption}\n")
        sys.exit(interruption.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in ENGINE:
            raise
        sys.stderr.write(f"error: this needs {error.name}: {INSTALL_SERVER}\n")
        sys.exit(2)
    except ClusterError as error:
        sys.stderr.writelines(f"error: {line}\n" for line in str(error).splitlines())
        sys.exit(2 if isinstance(error, ConfigError) else 1)
