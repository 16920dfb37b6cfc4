"""Gives a command one flag for each configuration option."""

import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from cli.configured_command import ConfiguredCommand
from cluster.config_file import Defaults, load_config, no_defaults
from cluster.config_options import ConfigOption, config_options

Command = Callable[..., None]  # given the configuration, and the command's own flags by name


def add_command(
    app: typer.Typer,
    command: Command,
    defaults: Defaults = no_defaults,
    *,
    takes: Callable[[str], bool] = lambda path: True,
    uses: Callable[[str], bool] = lambda path: True,
    own: Sequence[inspect.Parameter] = (),
) -> None:
    """Add a command, named as its function, that reads file and flags.

    Args:
        app: Gets the command.
        command: To run with the merged configuration.
        defaults: The command's own defaults; files and flags override them.
        takes: Returns whether the option with a path is a flag of the command.
        uses: Returns whether the command uses an option of the file; others may have wrong values.
        own: Flags that are not options of the configuration.
    """
    kind = _command_class(defaults, {each.name for each in own})
    name = command.__name__.replace("_", "-")
    app.command(name, cls=kind)(_with_config_flags(command, defaults, takes, uses, own))


def flag_parameter(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    """Return a parameter of a command; without a default it is required."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _with_config_flags(
    command: Command,
    defaults: Defaults,
    takes: Callable[[str], bool],
    uses: Callable[[str], bool],
    own: Sequence[inspect.Parameter],
) -> Callable[..., None]:
    """Return a function for typer that reads file and flags and calls `command`."""
    options = {path: option for path, option in config_options().items() if takes(path)}
    paths = {_name(path): path for path in options}

    def run(config: Path | None, **flags: Any) -> None:
        given = {each.name: flags.pop(each.name) for each in own}
        overrides = {
            paths[name]: _mapping(value) if options[paths[name]].is_mapping else value
            for name, value in flags.items()
            if value is not None
        }
        command(load_config(config, overrides, defaults, uses), **given)

    file_flag = Annotated[
        Optional[Path], typer.Option("--config", help="YAML file with options.")  # noqa: UP045
    ]
    parameters = [*own, flag_parameter("config", file_flag, None)]
    for path, option in options.items():
        parameters.append(flag_parameter(_name(path), _flag(option), None))
    # typer reads a command's options from its signature.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = command.__doc__
    return run


def _command_class(defaults: Defaults, own: Collection[str]) -> type[ConfiguredCommand]:
    """Return the class of a command whose help shows its own defaults on this host.

    Flags that are not options of the configuration keep their help; `own` are their names.
    """

    class ConfigCommand(ConfiguredCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            chosen = defaults({})  # not earlier: it may look for GPUs, which takes seconds
            shown = {
                _name(path): option.description + _default(chosen.get(path, option.default))
                for path, option in config_options().items()
                if path not in own
            }
            each: Any  # typer does not export the class of options
            for each in self.params:
                each.help = shown.get(each.name, each.help)
            super().format_help(ctx, formatter)

        def format_options(self, ctx: Any, formatter: Any) -> None:
            """List the options by section."""
            rows: dict[str, list[Any]] = {}
            each: Any
            for each in self.get_params(ctx):
                rows.setdefault(each.rich_help_panel or "Options", []).append(
                    each.get_help_record(ctx)
                )
            for section, records in rows.items():
                with formatter.section(section):
                    formatter.write_dl(records)

    return ConfigCommand


def _default(value: Any) -> str:
    return "" if value in (None, "") else f" (default: {value})"


def _name(path: str) -> str:
    return path.replace(".", "__")


def _mapping(entries: Sequence[str]) -> dict[str, str] | str:
    """Parse words of the form NAME=TEXT; return one without =, which no option accepts."""
    if wrong := [each for each in entries if "=" not in each]:
        return wrong[0]
    parts = [each.partition("=") for each in entries]
    return {name: text for name, _, text in parts}


def _flag(option: ConfigOption) -> Any:
    value_type = list[str] if option.is_mapping else option.value_type
    spelling = option.flag
    if option.value_type is bool:
        spelling += f"/--no-{option.flag.removeprefix('--')}"
    return Annotated[
        Optional[value_type],  # noqa: UP045 - the type is a value here
        typer.Option(
            spelling,
            metavar="<name=text>" if option.is_mapping else None,
            help=option.description,
            rich_help_panel=option.section or None,
        ),
    ]
