"""Converts messages and tools of a chat from OpenAI's API to those of the client."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from http_gateway.answer_text import SPECIAL_MARKERS
from http_gateway.errors import refused
from http_gateway.fields import Fields, Unsupported, as_object, shown_json, shown_text
from pagewire import Model, SamplingOptions, forced_calls
from pagewire.chat_arguments import MAX_MESSAGES
from pagewire.shown import shown

MAX_PARTS = 10_000  # of a message
SPARE_LEVELS = 100  # more calls may be under way where the answer is written
EMPTY_ID = "an empty id"
_UNSUPPORTED = {
    "audio": Unsupported("there is no audio"),
    "function_call": Unsupported("it is deprecated; use tool_calls"),
    "refusal": Unsupported("templates know none", off=("",)),
}
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type |-> the field that holds its text
_FUNCTION_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
NAMES = {
    "prompt.chat.messages": "messages",
    "prompt.chat.tools_json": "tools",
    "prompt.chat.tools": "tools",
    "prompt.chat": "messages",
    "prompt": "messages",
    "input.chat.messages": "messages",
    "input.chat.tools_json": "tools",
    "input.chat.tools": "tools",
    "input.chat": "messages",
    "input.text": "prompt",
    "input": "prompt",
}


def check_count(path: str, values: Sequence[object], what: str, at_most: int) -> None:
    """Refuse an array of so many values that converting each would take long."""
    if len(values) > at_most:
        raise refused(path, f"{len(values)} {what}", f"at most {at_most}")


def read_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a request, which the client's validator then checks."""
    if not messages:
        raise refused("messages", "none", "at least one message")
    check_count("messages", messages, "messages", MAX_MESSAGES)
    return [_message(each, f"messages[{i}]") for i, each in enumerate(messages)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        shown: The tools as the template sees them.
        functions: Names of functions that may be called.
        must_call: Whether the answer must be calls.
        only: The function that must be called; None: any.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    functions: Sequence[str] = ()
    must_call: bool = False
    only: str | None = None

    def hold(
        self, options: SamplingOptions, names: dict[str, str], model: Model, *, is_parallel: bool
    ) -> None:
        """Constrain the answer to the calls that it must be, and keep the markers of calls in it.

        Raises:
            HttpError: It has another constraint: calls need their own.
        """
        if self.shown and options.get("constraint"):
            allowed = f"absent with {names['constraint']}, or tool_choice 'none'"
            raise refused("tools", "functions", allowed, code="unsupported_parameter")
        if self.must_call:
            names["constraint"], names["constraint.tool_calls"] = "tool_choice", "tools"
            options["constraint"] = forced_calls(
                model, self.shown, function=self.only, is_parallel=is_parallel
            )
        if self.shown and model.tool_call_format in SPECIAL_MARKERS:
            options["skip_special_tokens"] = False


def take_tools(fields: Fields, model: Model, *, is_flat: bool = False) -> Tools:
    """Take the tools of a request.

    Args:
        fields: The fields of the request.
        model: The served model.
        is_flat: Whether the fields of a function stand beside its type, in the tools and in
            tool_choice, as in /v1/responses.

    Raises:
        HttpError: Also if the model's calls could not be distinguished from its text.
    """
    choice = fields.take("tool_choice")
    only = None
    if isinstance(choice, dict):
        only = _chosen(Fields(choice, "tool_choice"), is_flat=is_flat)
    elif choice not in (None, "auto", "none", "required"):
        raise refused("tool_choice", shown(choice), "'auto', 'none', 'required', or a function")
    must_call = only is not None or choice == "required"
    given = fields.array("tools")
    functions = [
        _tool_name(each, f"tools[{i}]", is_flat=is_flat, may_be_strict=must_call)
        for i, each in enumerate(given)
    ]
    shown_tools = list(map(_chat_tool, given)) if is_flat else given
    if only is not None and only not in functions:
        allowed = f"one of the tools: {', '.join(functions)[:500] or 'there is none'}"
        raise refused("tool_choice", f"the function {shown(only)}", allowed)
    if must_call and not given:
        raise refused("tool_choice", shown(choice), "'auto' or 'none' without tools")
    if is_flat:
        _check_repeatable(given)
    if choice == "none" or not given:
        return Tools()
    if model.tool_call_format is None:
        found = "tools, but the model's chat template has no known format of calls"
        raise refused("tools", found, "none", code="unsupported_parameter")
    return Tools(shown=shown_tools, functions=functions, must_call=must_call, only=only)


def _check_repeatable(tools: list[Any]) -> None:
    """Refuse tools that the answer could not repeat as JSON."""
    deeper: Any = tools
    for _ in range(SPARE_LEVELS):
        deeper = [deeper]
    try:
        json.dumps(deeper, allow_nan=False)
    except RecursionError:
        raise refused("tools", "values nested too deeply", "values that JSON has") from None
    except ValueError as error:  # a number is too large for Python
        found = f"a value that is not JSON: {error}"
        raise refused("tools", found, "values that JSON has") from None


def _chosen(choice: Fields, *, is_flat: bool) -> str:
    """Return the name of the function in a tool_choice."""
    kind = choice.text("type")
    if kind != "function":
        raise choice.refused("type", shown_text(kind), "'function'")
    function = choice if is_flat else choice.object("function")
    name = function.text("name")
    function.refuse_others()
    choice.refuse_others()
    return name


def chat_field(field: str) -> str:
    """Return a request's name of a chat's field in gRPC."""
    for grpc_name, name in NAMES.items():
        if field.startswith(grpc_name):
            return name + field[len(grpc_name) :]
    return field


def _message(value: object, path: str) -> dict[str, Any]:
    fields = as_object(value, path)
    fields.refuse_unsupported(_UNSUPPORTED)
    fields.drop("annotations")  # of an answer that a client sends back
    message: dict[str, Any] = {"role": fields.text("role")}
    content = fields.take("content")
    message["name"] = fields.text("name")
    message["reasoning_content"] = fields.text("reasoning_content")
    if message["role"] == "tool":
        message["tool_call_id"] = fields.required_text("tool_call_id", empty=EMPTY_ID)
    else:
        message["tool_call_id"] = fields.text("tool_call_id")
    calls = fields.array("tool_calls")
    fields.refuse_others()
    if content is not None:
        message["content"] = content_text(content, f"{path}.content")
    message["tool_calls"] = [_call(each, f"{path}.tool_calls[{i}]") for i, each in enumerate(calls)]
    return message


def _call(value: object, path: str) -> dict[str, Any]:
    """Return a call in a message of the assistant."""
    fields = as_object(value, path)
    kind = fields.text("type", "function")
    if kind != "function":
        raise fields.refused("type", shown_text(kind), "'function'")
    function = fields.object("function")
    call = {
        "id": fields.required_text("id", empty=EMPTY_ID),
        "function": called_function(function),
    }
    fields.refuse_others()
    function.refuse_others()
    return call


def called_function(fields: Fields) -> dict[str, str]:
    """Return the name and the arguments of a call; the latter may be an empty text."""
    return {name: fields.required_text(name) for name in ("name", "arguments")}


def content_text(content: object, path: str, types: Mapping[str, str] = _TEXT_PARTS) -> str:
    """Return the text of a message, whose parts are joined as they are.

    Args:
        content: A text, or an array of parts.
        path: Its path in the request.
        types: Type of an allowed part |-> the field that holds its text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(path, shown_json(content), "a string, or an array of text parts")
    check_count(path, content, "parts", MAX_PARTS)
    return "".join(_part(each, f"{path}[{i}]", types) for i, each in enumerate(content))


def _part(value: object, path: str, types: Mapping[str, str]) -> str:
    fields = as_object(value, path)
    kind = fields.text("type")
    if kind not in types:
        allowed = f"{' or '.join(map(repr, types))}: this gateway takes text only"
        raise refused(f"{path}.type", shown_text(kind), allowed)
    text = fields.required_text(types[kind])
    fields.drop("annotations", "logprobs")
    fields.refuse_others()
    return text


def _tool_name(value: object, path: str, *, is_flat: bool, may_be_strict: bool) -> str:
    tool = as_object(value, path)
    kind = tool.text("type")
    if kind != "function":
        raise refused(f"{path}.type", shown_text(kind), "'function'")
    if is_flat:
        return _function_name(tool, may_be_strict=may_be_strict)
    function = tool.object("function")
    tool.refuse_others()
    return _function_name(function, may_be_strict=may_be_strict)


def _chat_tool(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form that templates know."""
    function = {name: each for name, each in flat.items() if name != "type" and each is not None}
    return {"type": "function", "function": function}


def _function_name(function: Fields, *, may_be_strict: bool) -> str:
    """Return the name of a function that a model may call, and check the rest of its fields."""
    name = function.text("name")
    function.text("description")
    function.object("parameters")
    is_strict = function.flag("strict")
    function.refuse_others()
    if not _FUNCTION_NAME.fullmatch(name):
        allowed = "1 to 128 letters, digits, or any of _ - . :"
        raise function.refused("name", shown_text(name), allowed)
    if is_strict and not may_be_strict:
        allowed = (
            "false, unless tool_choice demands a call: else arguments are what the model writes"
        )
        raise refused(function.name("strict"), "true", allowed, code="unsupported_parameter")
    return name
