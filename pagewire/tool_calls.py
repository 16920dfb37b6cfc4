"""Answers that must call functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.arguments import refused
from pagewire.shown import shown
from pagewire.types import Constraint, Model


def forced_calls(
    model: Model,
    tools: Sequence[Mapping[str, Any]],
    *,
    function: str | None = None,
    is_parallel: bool = True,
) -> Constraint:
    """Return the constraint of an answer that calls functions and contains nothing else.

    Each call is in the format of the model's chat template, and its arguments follow the JSON
    Schema of the function's parameters.

    Args:
        model: From `list_models`.
        tools: The tools of the chat, in the format of OpenAI's API.
        function: Name of the only function that may be called; None: any of them.
        is_parallel: Whether several calls are allowed; Llama 3 makes one regardless.

    Raises:
        InvalidRequestError: The template has no known format of calls, a tool is not a function,
            or none has this name.
    """
    if model.tool_call_format is None:
        allowed = "a model whose chat template has a known format of tool calls"
        raise refused("model", shown(model.name), allowed)
    given = [_function(each, f"tools[{i}]") for i, each in enumerate(tools)]
    chosen = [each for each in given if function in (None, each["name"])]
    if not chosen:
        names = ", ".join(shown(each["name"]) for each in given)
        raise refused("function", shown(function), f"one of the tools: {names or 'there is none'}")
    functions = [{"name": each["name"], "parameters": each.get("parameters")} for each in chosen]
    return {
        "tool_calls": {
            "format": model.tool_call_format,
            "functions": functions,
            "is_parallel": is_parallel,
        }
    }


def _function(tool: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or "name" not in function:
        raise refused(field, shown(tool), "a function with a name")
    return function
