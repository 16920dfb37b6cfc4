"""Recognizes a model's formats of tool calls and reasoning, and its roles, by its chat template.

The template shows the format that the model was trained with, so its text has the format's
markers. Pure.
"""

import re
from enum import Enum

from pagewire.chat_arguments import ROLES

REASONING_BEGINS = "<think>"
_LITERAL = re.compile(r"""(["'])(\w+)\1""", re.ASCII)


class ToolCallFormat(Enum):
    """The format of a model's tool calls; see protos/inference.proto."""

    LLAMA3_JSON = "llama3_json"
    HERMES = "hermes"
    MISTRAL = "mistral"


# Within <tool_call> of templates that are not Hermes's: of Qwen3-Coder, of GLM
_NO_JSON_WITHIN_TAGS = ("<function=", "<arg_key>")


def tool_call_format(template: str) -> ToolCallFormat | None:
    """Return the format of tool calls in a template (its Jinja text), if known."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return ToolCallFormat.MISTRAL
    if "<tool_call>" in template:
        is_json = not any(each in template for each in _NO_JSON_WITHIN_TAGS)
        return ToolCallFormat.HERMES if is_json else None
    if "<|start_header_id|>" in template and "parameters" in template:
        return ToolCallFormat.LLAMA3_JSON
    return None


def has_reasoning(template: str) -> bool:
    """Return whether a template (its Jinja text) knows reasoning."""
    return REASONING_BEGINS in template


def begins_in_reasoning(rendered: str) -> bool:
    """Return whether a rendered chat ends within reasoning that its answer continues."""
    return rendered.rstrip().endswith(REASONING_BEGINS)


def names_in(template: str) -> frozenset[str]:
    """Return the words in quotes of a template (its Jinja text), among them all roles it names."""
    return frozenset(name for _, name in _LITERAL.findall(template))


def template_role(role: str, names: frozenset[str]) -> str | None:
    """Return a message's role as the template gets it; None: neither API nor template knows it.

    Args:
        role: As the caller gave it.
        names: The words in quotes of the template.
    """
    if role == "developer" and role not in names:
        return "system"  # whose successor it is in OpenAI's API
    return role if role in ROLES or role in names else None
