"""Checks the messages and tools of a chat before anything is sent; see pagewire.arguments. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from pagewire.arguments import check_items, check_text, did_you_mean, refused
from pagewire.shown import shown, shown_with_type
from pagewire.types import Message, ToolCall

MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool")  # of OpenAI's API
ALLOWED_ROLES = f"{', '.join(map(repr, ROLES))}, or a role that the model's template names"
_TEXTS = ("content", "reasoning_content", "tool_call_id", "name")
_KEYS = ("role", *_TEXTS, "tool_calls")


def check_messages(field: str, value: object) -> list[Message]:
    """Return the messages of a chat; each may be a Message or a mapping in OpenAI's format."""
    if isinstance(value, Message):
        raise refused(field, "one Message", "a sequence of messages")
    messages = check_items(field, value, "a sequence of messages")
    if not messages:
        raise refused(field, "none", "at least one message")
    if len(messages) > MAX_MESSAGES:
        raise refused(field, f"{len(messages)} messages", f"at most {MAX_MESSAGES}")
    return [_message(f"{field}[{i}]", each) for i, each in enumerate(messages)]


def check_tools(field: str, value: object) -> str:
    """Return tools as JSON, in the order of their keys; empty: there are none."""
    if value is None:
        return ""
    tools = check_items(field, value, "a sequence of mappings")
    for i, each in enumerate(tools):
        if not isinstance(each, Mapping):
            raise refused(f"{field}[{i}]", shown_with_type(each), "a mapping that describes a tool")
    if not tools:
        return ""
    try:
        return check_text(field, json.dumps(tools, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise refused(field, "values nested too deeply", "values that JSON has") from None
    except (TypeError, ValueError) as error:
        raise refused(field, f"a value that is not JSON: {error}", "values that JSON has") from None


def _message(field: str, value: object) -> Message:
    if isinstance(value, Message):
        given: dict[str, Any] = {name: getattr(value, name) for name in _KEYS}
    elif isinstance(value, Mapping):
        _check_keys(field, value)
        given = {name: each for name, each in value.items() if each is not None}
    else:
        raise refused(field, shown_with_type(value), "a Message, or a mapping of role and content")
    role = check_text(f"{field}.role", given.get("role", ""))
    if not role:  # the router checks the others: it knows the template
        raise refused(f"{field}.role", "none", ALLOWED_ROLES)
    tool_calls = check_items(f"{field}.tool_calls", given.get("tool_calls", ()), "a sequence")
    if not tool_calls and "content" not in given:
        raise refused(f"{field}.content", "none", "a text; only tool calls can do without")
    texts = {name: check_text(f"{field}.{name}", given.get(name, "")) for name in _TEXTS}
    calls = tuple(_tool_call(f"{field}.tool_calls[{i}]", each) for i, each in enumerate(tool_calls))
    return Message(role=role, tool_calls=calls, **texts)


def _check_keys(field: str, value: Mapping[Any, Any]) -> None:
    # An unknown key would otherwise be ignored silently.
    if unknown := [each for each in value if each not in _KEYS]:
        near = did_you_mean(unknown[0], _KEYS)
        found = f"the unknown key {shown(unknown[0])}{near}"
        raise refused(field, found, f"the keys {', '.join(_KEYS)}")


def _tool_call(field: str, value: object) -> ToolCall:
    if isinstance(value, ToolCall):
        call_id: object = value.id
        owner, function = field, {"name": value.name, "arguments": value.arguments}
    else:
        call = _mapping(field, value, {"id", "type", "function"})
        if call.get("type", "function") != "function":
            raise refused(f"{field}.type", shown(call["type"]), "function")
        call_id, owner = call.get("id", ""), f"{field}.function"
        function = _mapping(owner, call.get("function"), {"name", "arguments"})
    name, arguments = function.get("name"), function.get("arguments", "")
    return ToolCall(
        id=check_text(f"{field}.id", call_id),
        name=check_text(f"{owner}.name", name, empty="an empty name"),
        arguments=check_text(f"{owner}.arguments", arguments),
    )


def _mapping(field: str, value: object, keys: set[str]) -> dict[str, Any]:
    allowed = f"a mapping with the keys {', '.join(sorted(keys))}"
    if not isinstance(value, Mapping):
        raise refused(field, shown_with_type(value), allowed)
    if unknown := [each for each in value if each not in keys]:
        near = did_you_mean(unknown[0], keys)
        raise refused(field, f"the unknown key {shown(unknown[0])}{near}", allowed)
    return dict(value)
