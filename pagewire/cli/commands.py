"""The command line of a client: pagewire generate, chat, status, version."""

import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pagewire import ConnectionFailedError, InvalidRequestError, NotFoundError, PagewireError
from pagewire.cli.client_commands import add_client_commands, named_router
from pagewire.cli.standard_output import OutputLost, guard_standard_output

SUMMARY = "Disaggregated LLM serving: a prefix is computed once, moved once, read once."
# After \b, lines stay lines.
EXIT_CODES = """\b
Exit codes:
  0    success; of serve: stopped after it was ready
  1    failure, explained on standard error
  2    wrong command line, configuration or request
  3    of status and top --once: not everything answers; the output says what does not, and why
  129  ended early by SIGHUP
  130  ended early by SIGINT, as Ctrl-C sends
  143  ended early by SIGTERM
"""
SERVER_COMMANDS = (
    *("demo", "doctor", "down", "drain", "gateway", "move", "restart", "router", "router-keys"),
    *("scale", "serve", "tokens", "up"),
)
OTHER_REMEDY = (  # by the defaults of port and http_port
    "Name the router by --address; its port is 50051 by default, while 8000 is the HTTP gateway's."
)
INSTALL_SERVER = "`pip install . './server[engine]'` in Pagewire's repository"


class ClientCommands(TyperGroup):
    """Explains how to install the server's commands."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None for an unknown one."""
        if cmd_name in SERVER_COMMANDS:
            sys.stderr.write(f"error: `pagewire {cmd_name}` needs the server: {INSTALL_SERVER}\n")
            raise typer.Exit(2)
        return super().get_command(ctx, cmd_name)


def make_app(commands: type[TyperGroup], *, epilog: str) -> typer.Typer:
    """Return a command line without commands, with the options that all of them share."""
    return typer.Typer(
        cls=commands,
        callback=_options,
        help=SUMMARY,
        epilog=epilog,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its tables cut long flags, its boxes differ from all other errors
        add_completion=False,
    )


def print_versions(names: Iterable[str]) -> None:
    """Print the versions of distributions, one per line."""
    for name in names:
        sys.stdout.write(f"{name} {_version_of(name)}\n")


def run(app: Callable[[], None], *, remedy: str) -> None:
    """Run a command line; turn a client's expected failures into lines and exit codes.

    Args:
        app: The command line.
        remedy: Advice if no router answers.
    """
    try:
        guard_standard_output()
        app()
    except ConnectionFailedError as error:
        sys.stderr.write(f"error: {error}\n{OTHER_REMEDY if error.is_other else remedy}\n")
        sys.exit(1)
    except (OutputLost, PagewireError) as error:
        sys.stderr.writelines(f"error: {line}\n" for line in str(error).splitlines())
        sys.exit(2 if isinstance(error, InvalidRequestError | NotFoundError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def version() -> None:
    """Print the versions of Pagewire and its dependencies."""
    print_versions(("pagewire", "grpcio", "protobuf"))


def main() -> None:
    """Run the commands of a client."""
    run(app, remedy="No router answers there; name another one by --address.")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print_versions(["pagewire"])
        raise typer.Exit


def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options that need no command."""


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


app = make_app(
    ClientCommands,
    epilog=f"{', '.join(SERVER_COMMANDS)} need the server: {INSTALL_SERVER}.\n\n{EXIT_CODES}",
)
add_client_commands(app, named_router)
app.command()(version)
