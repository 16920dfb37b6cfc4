"""Renders a chat with the model's own Jinja template, which is untrusted code from the folder.

The template runs in Jinja's immutable sandbox and sees only plain values. Its output is bounded,
and operations that make huge strings or numbers at once (products, powers, padding) are bounded or
removed. That is the inner wall: a template can still take much time and memory, so routers render
in a child process with limits (router/chat_renderer.py). Compilation happens there, too, because
Jinja then evaluates constants.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import ChatTemplateError, RefusedByTemplate, RenderingTooLong, WrongTools

MAX_SOURCE_CHARS = 1_000_000
_MAX_EXPONENT = 64
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_PADDING_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs"}


class ChatTemplate:
    """A chat template, parsed at construction and compiled at its first use.

    Args:
        source: Jinja text.
        special_tokens: Name |-> text; the template sees them as variables (`bos_token`).
        max_chars: Most characters that a rendering may have.
        now: Date for `strftime_now`.

    Raises:
        ChatTemplateError: The text is not a template.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        max_chars: int,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.max_chars = max_chars
        environment = _Sandbox(max_chars)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._environment = environment
        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(f"has {len(source)} characters, at most {MAX_SOURCE_CHARS}")
        try:
            environment.parse(source)
        except Exception as error:  # besides Jinja's own, those of depth and of huge numbers
            raise ChatTemplateError(f"does not compile: {_in_words(error)}") from error

    def compile(self) -> None:
        """Compile the template, which may take any amount of time and memory.

        Raises:
            ChatTemplateError: It names a filter or a test that does not exist.
        """
        _ = self._compiled

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools_json: str = "",
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt text for a chat, by default up to where the assistant's answer begins.

        Half a character, which a model may have written into a call's arguments, stands there as
        the escape that it was.

        Args:
            messages: As transformers passes them to a template: role, content, and a message's
                other fields (tool_calls, tool_call_id, name, reasoning_content), except that call
                arguments are text. The template sees their object, or the text if it is not JSON.
            tools_json: Functions that the model may call, in the format of OpenAI's API: a JSON
                array of objects; empty: none.
            add_generation_prompt: Whether the beginning of the assistant's answer is appended.

        Raises:
            WrongTools: tools_json is not such an array.
            RefusedByTemplate: The template rejects these messages, with a reason.
            ChatTemplateError: The template failed or broke a rule of the sandbox.
            MemoryError: It needed more memory than the process may use.
        """
        tools = _tools(tools_json)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._compiled.generate(
                messages=[_as_template_sees(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            ):
                pieces.append(piece.encode(errors="backslashreplace").decode())
                num_chars += len(pieces[-1])
                if num_chars > self.max_chars:
                    raise RenderingTooLong(f"wrote more than {self.max_chars} characters")
        except (ChatTemplateError, RefusedByTemplate, MemoryError):
            raise
        except Exception as error:  # the template is foreign code and may raise anything
            raise ChatTemplateError(f"failed: {_in_words(error)}") from error
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> Template:
        try:
            return self._environment.from_string(self.source)
        except MemoryError:
            raise
        except Exception as error:
            raise ChatTemplateError(f"does not compile: {_in_words(error)}") from error


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

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)  # variables set inside end with it


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters. The order of arguments is that of transformers.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _as_template_sees(message: Mapping[str, Any]) -> dict[str, Any]:
    seen = dict(message)
    if "tool_calls" in seen:
        seen["tool_calls"] = [
            {**call, "function": _with_object(call["function"])} for call in seen["tool_calls"]
        ]
    return seen


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function whose arguments are an object, if they are one; models write other text."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else dict(function)


def _tools(tools_json: str) -> list[dict[str, Any]] | None:
    if not tools_json:
        return None
    try:
        tools = json.loads(tools_json)
    except RecursionError:
        raise WrongTools("values nested too deeply") from None
    except ValueError as error:
        raise WrongTools(f"not JSON: {error}") from None
    if isinstance(tools, list) and all(isinstance(each, dict) for each in tools):
        return tools or None
    raise WrongTools("another value")


def _raise_exception(message: str) -> NoReturn:
    raise RefusedByTemplate(message)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
