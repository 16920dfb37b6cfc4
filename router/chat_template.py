"""Renders a chat with the model's own Jinja template, which is untrusted code from the folder.

The template runs in Jinja's immutable sandbox and sees plain values only. What it writes is
bounded, and what makes huge strings or numbers at one stroke (products, powers, padding) is
bounded or gone.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import ChatTemplateError, RefusedByTemplate

_MAX_EXPONENT = 64
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_PADDING_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs"}


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text.
        special_tokens: Name |-> text; the template sees them as variables (`bos_token`).
        max_chars: Most characters that a rendering may have.
        now: Date for `strftime_now`.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        max_chars: int,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        environment = _Sandbox(max_chars)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt text for a chat, up to where the assistant's answer begins.

        Raises:
            RefusedByTemplate: The template does not accept these messages, and says why.
            ChatTemplateError: The template failed or broke a rule of the sandbox.
        """
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            ):
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise ChatTemplateError(f"wrote more than {self._max_chars} characters")
                pieces.append(piece)
        except (ChatTemplateError, RefusedByTemplate):
            raise
        except Exception as error:  # the template is foreign code and may raise anything
            raise ChatTemplateError(f"failed: {type(error).__name__}: {error}") from error
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self._max_chars = max_chars
        del self.filters["center"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(right) <= _MAX_EXPONENT and abs(left) <= 2**32):
            raise SecurityError(f"a power of {left!r} by {right!r} is too large")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int):
                    if len(one) * other > self._max_chars:
                        raise SecurityError("a product is too large")
                elif isinstance(one, int) and one.bit_length() > 4096:
                    raise SecurityError("a product is too large")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format is too wide")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: object, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise RefusedByTemplate(message)
