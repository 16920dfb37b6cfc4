"""A command whose errors speak of its parameters as they stand on the command line."""

import re
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand

from pagewire import InvalidRequestError, PagewireError
from pagewire.arguments import check_sampling, check_timeout_s


class StrictCommand(TyperCommand):
    """Refuses options given twice, tells what is allowed, and names flags for a request's fields.

    Of two values for one option the parser would take the last, in silence.
    """

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
            name = (error.param and error.param.name) or ""
            if (found := given.get(name)) is not None:  # None: it is missing
                error.message = self.explain(name, found)
            raise

    def explain(self, name: str, found: str) -> str:
        """Return what was found and what is allowed for a value that is no number.

        Args:
            name: Of the parameter: `temperature`.
            found: What stands on the command line.
        """
        try:
            if name == "timeout_s":
                check_timeout_s(name, found)
            else:
                check_sampling({name: found})
        except InvalidRequestError as error:
            return error.violations[0].description
        return f"found {found!r}"

    def invoke(self, ctx: Any) -> Any:
        """Run as usual; a refused request is told by flags."""
        try:
            return super().invoke(ctx)
        except PagewireError as error:
            error.args = (told_by_flags(error, self.params),)
            raise


def told_by_flags(error: PagewireError, parameters: Iterable[Any]) -> str:
    """Return an error's lines, with --max-tokens for sampling.max_tokens where they begin with it.

    The same for `--stop` and `sampling.stop[0]`, and for the argument `prompt` and `prompt.text`.

    Args:
        error: Of the client or of the router, whose fields are named as in the request.
        parameters: Of the command; fields that none of them sets keep their names.
    """
    spellings = {each.name: each.opts[0] for each in parameters}
    return re.sub(
        r"^(?:sampling\.|tls\.)?(\w+)(?:\.text|\[\d+\])?(?=:)",
        lambda field: spellings.get(field[1], field[0]),
        str(error),
        flags=re.MULTILINE,
    )
