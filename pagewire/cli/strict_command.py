"""A command whose errors name its parameters as typed on the command line."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from pagewire import (
    AuthenticationError,
    InvalidRequestError,
    OverloadedError,
    PagewireError,
    RequestError,
    TlsError,
)
from pagewire.arguments import SAMPLING, TOKEN_VARIABLE, check_sampling, check_timeout_s

# A field of a request, or of `tls`, that a parameter of its name sets.
_FIELD = re.compile(r"(?:sampling\.|tls\.)?(\w+)(?:\.text|\[\d+\])?", re.ASCII)

# Names that commands have for the address of a router.
_OTHER_NAMES = {"--router": "--address", "--address": "--router"}


class StrictCommand(TyperCommand):
    """Refuses options given twice, says what is allowed, and names flags for a request's fields.

    If an option has two values, the parser would silently take the last. It would take an empty
    path, such as that of a shell's variable that is not set, for the current folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, but add these errors; all end with exit code 2."""
        try:
            given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        except Exception as error:  # an unknown option has a private class of typer
            other = _OTHER_NAMES.get(getattr(error, "option_name", ""))
            if any(other in each.opts for each in self.params):
                error.possibilities = [other]  # type: ignore[attr-defined]
            raise
        seen = set()
        parameter: Any  # of a private class of typer
        for parameter in order:
            is_option = parameter.param_type_name == "option"
            if is_option and parameter.name in seen and not parameter.multiple:
                raise typer.BadParameter("it is given twice", ctx=ctx, param=parameter)
            seen.add(parameter.name)
        try:
            left = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = (error.param and error.param.name) or ""
            if (found := given.get(name)) is not None:  # None: missing
                error.message = self.explain(name, found)
            raise
        for parameter in order:
            name = parameter.name
            if given[name] == "" and isinstance(ctx.params.get(name), Path):
                raise typer.BadParameter("found ''; allowed: a path", ctx=ctx, param=parameter)
        return left

    def explain(self, name: str, found: str) -> str:
        """Return what was found and what is allowed for a value of a wrong type or range.

        Args:
            name: The name of the parameter: `temperature`.
            found: As typed on the command line.
        """
        try:
            if name == "timeout_s":
                check_timeout_s(name, found)
            elif name in SAMPLING:
                check_sampling({name: found})
        except InvalidRequestError as error:
            return error.violations[0].description
        return f"found {found!r}; allowed: a number"  # a text is never wrong by itself

    def invoke(self, ctx: Any) -> Any:
        """Run as usual; the error of a refused request names flags."""
        try:
            return super().invoke(ctx)
        except PagewireError as error:
            error.args = (told_by_flags(error, self.params),)
            raise


def told_by_flags(error: PagewireError, parameters: Iterable[Any]) -> str:
    """Return an error's text, with --max-tokens for the wrong field sampling.max_tokens.

    Likewise `--stop` for `sampling.stop[0]`, and the argument `prompt` for `prompt.text`; an error
    of the token names the ways in which a command gets one, one of TLS adds the flag that may mend
    it, and one for want of room says when to try again.

    Args:
        error: The error of the client or the router, which name fields as in the request.
        parameters: The parameters of the command; fields that none of them sets keep their names.
    """
    spellings = {each.name: each.opts[0] for each in parameters}
    if isinstance(error, AuthenticationError) and "token_file" in spellings:
        return f"{error} (by {spellings['token_file']} or {TOKEN_VARIABLE})"
    if isinstance(error, TlsError):
        return told_with_flag(error, spellings.get(error.field.removeprefix("tls."), ""))
    told = str(error)
    if isinstance(error, RequestError) and error.violations:
        told = "\n".join(
            f"{_spelled(each.field, spellings)}: {each.description}" for each in error.violations
        )
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        return f"{told}; try again in {math.ceil(error.retry_after_s)} s"
    return told


def told_with_flag(error: TlsError, flag: str) -> str:
    """Return an error's text with a command's flag for the argument that may mend it, if any."""
    return f"{error} ({flag})" if flag else str(error)


def _spelled(field: str, spellings: Mapping[str, str]) -> str:
    named = _FIELD.fullmatch(field)
    return spellings.get(named[1], field) if named else field
