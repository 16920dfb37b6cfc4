"""Converts the input of /v1/responses to messages of a chat."""

import re
from dataclasses import dataclass, field
from typing import Any

from http_gateway.errors import refused
from http_gateway.fields import Fields, as_object
from http_gateway.messages import EMPTY_ID, called_function, check_count, content_text
from pagewire.arguments import check_text
from pagewire.chat_arguments import MAX_MESSAGES
from pagewire.shown import shown, shown_with_type

MAX_ITEMS = 3 * MAX_MESSAGES  # a message of the assistant, its reasoning and a call are three
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ITEMS = "'message', 'reasoning', 'function_call' or 'function_call_output'"
_OF_MESSAGE = re.compile(
    r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?(.*)", re.DOTALL
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a message comes from.

    Attributes:
        path: Of the item that began it, or of what else it is.
        calls: Paths of the items that are its calls.
    """

    path: str
    calls: list[str] = field(default_factory=list)


def input_field(name: str, sources: list[Source]) -> str:
    """Return a request's name of a field of its messages; any other name stays as it is."""
    if not name.startswith("messages"):
        return name
    found = _OF_MESSAGE.fullmatch(name)
    if found is None or int(found[1]) >= len(sources) or found[3] == ".tool_calls":
        return "input"  # of several items, or none
    source = sources[int(found[1])]
    path = source.path if found[2] is None else source.calls[int(found[2])]
    return path + found[3] if path.startswith("input[") else path


def input_messages(instructions: str, value: object, sources: list[Source]) -> list[dict[str, Any]]:
    """Return the messages of an input, instructions first; `sources` gets that of each."""
    messages: list[dict[str, Any]] = []
    if check_text("instructions", instructions):
        messages.append({"role": "system", "content": instructions})
        sources.append(Source(path="instructions"))
    if isinstance(value, str) and value:
        sources.append(Source(path="input"))
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        found = "none" if value in (None, "", []) else shown_with_type(value)
        raise refused("input", found, "a string, or an array of items")
    check_count("input", value, "items", MAX_ITEMS)
    turns = _Turns(messages, sources)
    for index, each in enumerate(value):
        path = f"input[{index}]"
        turns.add(as_object(each, path), path)
    if not messages:
        raise refused("input", "no message", "at least one")
    return messages


class _Turns:
    """Combines items: reasoning and calls belong to one message of the assistant."""

    def __init__(self, messages: list[dict[str, Any]], sources: list[Source]) -> None:
        self._messages = messages
        self._sources = sources
        self._reasoning = ""  # of the message that follows

    def add(self, item: Fields, path: str) -> None:
        """Add the item at a path of the request."""
        kind = item.text("type", "message")
        item.drop("id", "status", "phase")
        match kind:
            case "message":
                self._add_message(item, path)
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                self._add_call(item, path)
            case "function_call_output":
                output = content_text(item.take("output"), item.name("output"), _TEXTS)
                call_id = item.required_text("call_id", empty=EMPTY_ID)
                message = {"role": "tool", "tool_call_id": call_id, "content": output}
                self._append(message, path)
            case _:
                raise item.refused("type", shown(kind), _ITEMS)
        item.refuse_others()

    def _add_message(self, item: Fields, path: str) -> None:
        role = item.text("role")
        content = content_text(item.take("content"), item.name("content"), _TEXTS)
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            message |= self._take_reasoning()
        self._append(message, path)

    def _add_reasoning(self, item: Fields) -> None:
        item.drop("summary", "encrypted_content")
        types = {"reasoning_text": "text"}
        self._reasoning += content_text(item.array("content"), item.name("content"), types)

    def _add_call(self, item: Fields, path: str) -> None:
        call = {
            "id": item.required_text("call_id", empty=EMPTY_ID),
            "type": "function",
            "function": called_function(item),
        }
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": ""}
            self._append(last, path)
        last |= self._take_reasoning()
        last.setdefault("tool_calls", []).append(call)
        self._sources[-1].calls.append(path)

    def _append(self, message: dict[str, Any], path: str) -> None:
        self._messages.append(message)
        self._sources.append(Source(path=path))

    def _take_reasoning(self) -> dict[str, str]:
        reasoning, self._reasoning = self._reasoning, ""
        return {"reasoning_content": reasoning} if reasoning else {}
