"""Gives a command of the command line one flag for every configuration option."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from cluster.config import ClusterConfig
from cluster.config_file import Defaults, load_config, no_defaults
from cluster.config_options import ConfigOption, config_options

Command = Callable[[ClusterConfig], None]


def with_config_flags(command: Command, defaults: Defaults = no_defaults) -> Callable[..., None]:
    """Return a function for typer that reads file and flags and calls `command`.

    Args:
        command: What to run with the merged configuration.
        defaults: The command's own defaults; files and flags override them.
    """
    options = config_options()
    paths = {_name(path): path for path in options}

    def run(config: Path | None, **flags: Any) -> None:
        overrides = {paths[name]: value for name, value in flags.items() if value is not None}
        command(load_config(config, overrides, defaults))

    file_flag = Annotated[
        Optional[Path], typer.Option("--config", help="YAML file with options.")  # noqa: UP045
    ]
    parameters = [_parameter("config", file_flag)]
    for path, option in options.items():
        parameters.append(_parameter(_name(path), _flag(option)))
    # typer reads a command's options from its signature.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = command.__doc__
    return run


def _name(path: str) -> str:
    return path.replace(".", "__")


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _flag(option: ConfigOption) -> Any:
    spelling = option.flag
    if option.value_type is bool:
        spelling += f"/--no-{option.flag.removeprefix('--')}"
    shown = "" if option.default in (None, "") else f" (default: {option.default})"
    return Annotated[
        Optional[option.value_type],  # noqa: UP045 - the type is a value here
        typer.Option(
            spelling,
            help=option.description + shown,
            rich_help_panel=option.section or None,
        ),
    ]
