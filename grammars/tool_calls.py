"""Function calls as rules of a grammar, in the formats of chat templates. Pure.

router/chat_format.py names the formats, http_gateway/tool_calls/ parses them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grammars.errors import InvalidConstraint
from grammars.json_schema import check_schema, json_rule, kind_of, read_json, shown

MAX_FUNCTIONS = 128
MAX_CALLS = 32  # of one answer; a model that never stops calling would fill its context
# Often one token of the tokenizer, with which models were trained to begin calls
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")
FORMATS = ("hermes", "llama3_json", "mistral")
_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_FIELDS = ("format", "functions", "is_parallel")
_ALLOWED = f"a mapping with {', '.join(_FIELDS)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCalls:
    """Calls that an answer must consist of: at least one, and nothing else.

    Attributes:
        format: One of FORMATS.
        functions: Name and JSON Schema of the arguments of each function that may be called.
        is_parallel: Whether several calls are allowed, if the format supports it.
    """

    format: str
    functions: tuple[tuple[str, Any], ...]
    is_parallel: bool

    def each_alone(self) -> list[tuple[str, "ToolCalls"]]:
        """Return the name of each function, with the calls of that function alone."""
        return [
            (name, replace(self, functions=((name, schema),))) for name, schema in self.functions
        ]

    def rules(self, markers: Mapping[str, int]) -> str:
        """Return the rules of a Lark grammar.

        Args:
            markers: The MARKERS that are one token |-> its id.
        """

        def mark(text: str) -> str:
            return f"<[{markers[text]}]>" if text in markers else json.dumps(text)

        many = self.is_parallel
        match self.format:
            case "hermes":
                begin, end = mark("<tool_call>"), mark("</tool_call>")
                start = _repeated(r'"\n" call') if many else ""
                head = [f"start: call{start}", rf'call: {begin} "\n" function "\n" {end}']
                return self._with_functions(head, "arguments")
            case "mistral" if "[ARGS]" in markers:
                start = _repeated("call") if many else ""
                head = [f"start: call{start}", f"call: {mark('[TOOL_CALLS]')} function"]
                return self._with_named_functions(head, mark("[ARGS]"))
            case "mistral":
                more = _repeated('", " function') if many else ""
                head = [f'start: {mark("[TOOL_CALLS]")} "[" function{more} "]"']
                return self._with_functions(head, "arguments")
            case _:  # Llama 3 templates reject conversations with several calls in a message
                return self._with_functions(["start: function"], "parameters")

    def _with_functions(self, head: Sequence[str], arguments: str) -> str:
        """Return rules for calls that are JSON objects."""
        bodies = []
        for name, schema in self.functions:
            begin = f'{{"name": {json.dumps(name)}, "{arguments}": '
            bodies.append(f'{json.dumps(begin)} {json_rule(schema)} "}}"')
        return _joined(head, bodies)

    def _with_named_functions(self, head: Sequence[str], separator: str) -> str:
        """Return rules for calls of a name and the JSON of its arguments."""
        bodies = [
            f"{json.dumps(name)} {separator} {json_rule(schema)}" for name, schema in self.functions
        ]
        return _joined(head, bodies)


def read_tool_calls(text: str) -> ToolCalls:
    """Read the calls of a constraint.

    Raises:
        InvalidConstraint: It is not JSON, lacks a field, or has a wrong function, which it names.
    """
    value = read_json(text, _ALLOWED)
    if not isinstance(value, dict):
        raise InvalidConstraint(kind_of(value), _ALLOWED)
    for name in value:
        if name not in _FIELDS:
            raise InvalidConstraint(f"the key {shown(name)}", _ALLOWED)
    if value.get("format") not in FORMATS:
        found = f"format {shown(value.get('format'))}"
        raise InvalidConstraint(found, f"one of {', '.join(FORMATS)}")
    is_parallel = value.get("is_parallel", True)
    if not isinstance(is_parallel, bool):
        raise InvalidConstraint("is_parallel of another type", "true or false")
    functions = value.get("functions")
    if not isinstance(functions, list) or not 1 <= len(functions) <= MAX_FUNCTIONS:
        found = f"{len(functions)} functions" if isinstance(functions, list) else "no functions"
        raise InvalidConstraint(found, f"an array of 1 to {MAX_FUNCTIONS}")
    return ToolCalls(
        format=value["format"],
        functions=tuple(_function(each, f"functions[{i}]") for i, each in enumerate(functions)),
        is_parallel=is_parallel,
    )


def _function(value: Any, where: str) -> tuple[str, Any]:
    if not isinstance(value, dict) or not set(value) <= {"name", "parameters"}:
        raise InvalidConstraint(f"{where} of another form", "an object with name, parameters")
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        found = f"{where}.name {shown(name)}"
        raise InvalidConstraint(found, "1 to 128 letters, digits, or any of _ - . :")
    parameters = value.get("parameters")
    if parameters is None:
        return name, {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        schema = check_schema(parameters)
    except InvalidConstraint as error:
        raise InvalidConstraint(f"parameters of {name!r}: {error.found}", error.allowed) from None
    if isinstance(schema, bool) or schema.get("type", "object") != "object":
        raise InvalidConstraint(f"parameters of {name!r} that are not an object", 'type "object"')
    return name, {"type": "object", **schema}


def _repeated(rule: str) -> str:
    return f" ({rule}){{0,{MAX_CALLS - 1}}}"


def _joined(head: Sequence[str], bodies: Sequence[str]) -> str:
    names = [f"function_{index}" for index in range(len(bodies))]
    rules = [f"{name}: {body}" for name, body in zip(names, bodies, strict=True)]
    return "\n".join([*head, f"function: {' | '.join(names)}", *rules])
