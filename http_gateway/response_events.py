"""The items of a response and their events, in the order in which text comes.

An item is open until the next one begins: reasoning, the message, or a call of a function. Items
and events are those of OpenAI's API; `response` has all items that events have reported.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from http_gateway.errors import HttpError
from http_gateway.parts import CallArguments, CallBegins, Content, Part, Reasoning
from http_gateway.sse import compact, json_bytes

_PART_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}
_DELTAS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


class ResponseBuilder:
    """Builds one response.

    Args:
        head: id, object, created_at and model.
        echoed: Fields of the request that the response repeats.
    """

    def __init__(self, head: dict[str, Any], echoed: dict[str, Any]) -> None:
        self._head = head
        self._echoed = echoed
        self._status = "in_progress"
        self._incomplete: dict[str, str] | None = None
        self._error: dict[str, str] | None = None
        self._usage: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # the last item
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._logprobs: list[dict[str, Any]] = []  # of the message
        self._textless: list[dict[str, Any]] = []  # logprobs of tokens whose text is yet to come
        self._sequence = 0

    def response(self) -> dict[str, Any]:
        """Return the response as far as it is built."""
        return {
            **self._head,
            "status": self._status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": self._incomplete,
            **self._echoed,
            "output": self._items,
            "background": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": self._usage,
        }

    def begin(self) -> str:
        """Return the events with which a stream begins."""
        return self._with_response("response.created") + self._with_response("response.in_progress")

    def add(
        self, parts: Sequence[Part], logprobs: Sequence[dict[str, Any]], finish: str | None
    ) -> str:
        """Take new text; return its events.

        Args:
            parts: Parts of the text.
            logprobs: The logprobs of the tokens; none of tokens of reasoning.
            finish: Why the text ends here; None: it goes on.
        """
        events = ""
        logprobs = [*self._textless, *logprobs]
        self._textless = [] if parts else logprobs
        for part in parts:
            match part:
                case Reasoning(text):
                    events += self._text("reasoning", text, ())
                case Content(text):
                    events += self._text("message", text, logprobs)
                    logprobs = []
                case CallBegins():
                    events += self._begin_call(part)
                case CallArguments(_, text):
                    events += self._arguments(text)
        if finish == "length":
            self._incomplete = {"reason": "max_output_tokens"}
        if finish and not self._items:  # an empty answer is an empty message
            events += self._open("message")
        return events

    def end(self, usage: dict[str, Any]) -> str:
        """End the response; return the last events."""
        self._usage = usage
        self._completed_at = int(time.time())
        self._status = "incomplete" if self._incomplete else "completed"
        return self._close(self._status) + self._with_response(f"response.{self._status}")

    def fail(self, error: HttpError) -> bytes:
        """End the response with an error; return the last event."""
        self._status = "failed"
        self._error = {"code": "server_error", "message": error.message}
        return json_bytes(self._with_response("response.failed"))

    def _text(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> str:
        events = self._open(kind)
        self._pieces.append(text)
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            self._logprobs += logprobs
            fields["logprobs"] = list(logprobs)
        return events + self._of_item(f"{_DELTAS[kind]}.delta", content_index=0, **fields)

    def _begin_call(self, part: CallBegins) -> str:
        item = {
            "type": "function_call",
            "id": _item_id("fc"),
            "call_id": part.call_id,
            "name": part.name,
            "arguments": "",
            "status": "in_progress",
        }
        return self._close("completed") + self._add_item(item)

    def _arguments(self, text: str) -> str:
        self._pieces.append(text)
        return self._of_item("response.function_call_arguments.delta", delta=text)

    def _open(self, kind: str) -> str:
        """Begin an item with text, unless it is the open one."""
        if self._is_open and self._items[-1]["type"] == kind:
            return ""
        events = self._close("completed")
        if kind == "reasoning":
            item: dict[str, Any] = {"type": kind, "id": _item_id("rs"), "summary": []}
        else:
            item = {"type": kind, "id": _item_id("msg"), "role": "assistant"}
        events += self._add_item({**item, "content": [], "status": "in_progress"})
        return events + self._of_item(
            "response.content_part.added", content_index=0, part=self._part(kind, "")
        )

    def _close(self, status: str) -> str:
        """End the open item, if any."""
        if not self._is_open:
            return ""
        self._is_open = False
        item, text = self._items[-1], "".join(self._pieces)
        self._pieces = []
        kind = item["type"]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            done = "response.function_call_arguments.done"
            events = self._of_item(done, name=item["name"], arguments=text)
        else:
            part = self._part(kind, text)
            item["content"] = [part]
            fields: dict[str, Any] = {"text": text}
            if kind == "message":
                fields["logprobs"] = part["logprobs"]
            events = self._of_item(f"{_DELTAS[kind]}.done", content_index=0, **fields)
            events += self._of_item("response.content_part.done", content_index=0, part=part)
        return events + self._event(
            "response.output_item.done", output_index=len(self._items) - 1, item=item
        )

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PART_TYPES[kind], "text": text}
        if kind == "message":
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part

    def _add_item(self, item: dict[str, Any]) -> str:
        self._items.append(item)
        self._is_open = True
        return self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=item
        )

    def _of_item(self, kind: str, **fields: Any) -> str:
        item_id, index = self._items[-1]["id"], len(self._items) - 1
        return self._event(kind, item_id=item_id, output_index=index, **fields)

    def _with_response(self, kind: str) -> str:
        return self._event(kind, response=self.response())

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\ndata: {compact(data)}\n\n"


def _item_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
