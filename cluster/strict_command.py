"""A command that refuses options given twice and shows the value that it cannot read."""

from typing import Any

import typer
from typer.core import TyperCommand


class StrictCommand(TyperCommand):
    """Of two values for one option the parser would take the last, in silence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, with these two errors added; both end with exit code 2."""
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        seen = set()
        parameter: Any  # typer has a class of its own for it, which it does not show
        for parameter in order:
            is_option = parameter.param_type_name == "option"
            if is_option and parameter.name in seen and not parameter.multiple:
                raise typer.BadParameter("it is given twice", ctx=ctx, param=parameter)
            seen.add(parameter.name)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and error.param.name in given:
                error.message = f"found {given[error.param.name]!r}: {error.message}"
            raise
