"""Reads the parts of an answer out of a text that comes in pieces."""

from itertools import pairwise

from http_gateway.answer_text import AnswerText
from http_gateway.parts import CallArguments, CallBegins, Content, Reasoning
from pagewire import Model

TOOLS = ("weather", "time", "f")


def model(tool_call_format=None, *, has_reasoning=False):
    return Model(
        name="tiny",
        max_context_tokens=64,
        vocab_size=9,
        page_size=4,
        has_chat_template=True,
        max_choices=4,
        tool_call_format=tool_call_format,
        has_reasoning=has_reasoning,
        max_request_bytes=10**6,
        max_request_fields=1000,
    )


def read(text, kind, *, cuts=(), tools=TOOLS, begins=False, reasoning=False, parallel=True):
    """Return (reasoning, content, calls as (name, arguments)) of a text that comes in pieces."""
    reader = AnswerText(
        model(kind, has_reasoning=reasoning),
        begins_in_reasoning=begins,
        tools=tools,
        is_parallel=parallel,
    )
    parts = []
    edges = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(edges):
        parts += reader.push(text[start:end])
    parts += reader.finish()
    thought, content, calls, ids = "", "", [], []
    for part in parts:
        match part:
            case Reasoning(more):
                assert more
                thought += more
            case Content(more):
                assert more
                content += more
            case CallBegins(index, call_id, name):
                assert index == len(calls)
                ids.append(call_id)
                calls.append((name, ""))
            case CallArguments(index, more):
                assert index == len(calls) - 1, "arguments belong to the last call that began"
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    assert len(set(ids)) == len(ids)
    assert reader.has_calls == bool(calls)
    return thought, content, calls
