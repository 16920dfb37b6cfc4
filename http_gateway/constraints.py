"""The constraint of an answer, in the fields of OpenAI's API and of vLLM's extensions."""

from collections.abc import Callable
from typing import Any, cast

from http_gateway.errors import refused
from http_gateway.fields import Fields
from pagewire import Constraint
from pagewire.shown import shown

# As vLLM names them: field |-> field of Constraint
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_FORMATS = ("text", "json_object", "json_schema")
Found = tuple[str, str, Any]  # field of the request, field of Constraint, value


def take_constraint(fields: Fields, names: dict[str, str]) -> Constraint | None:
    """Take response_format, guided_* and structured_outputs; at most one may set a constraint.

    Args:
        fields: The fields of the request.
        names: Gets the request's name of the constraint.
    """
    found = _format(fields.object("response_format"), lambda each: each.object("json_schema"))
    found += [(name, kind, fields.take(name)) for name, kind in _GUIDED.items()]
    structured = fields.object("structured_outputs")
    found += [
        (structured.name(name), kind, structured.take(name)) for name, kind in _STRUCTURED.items()
    ]
    structured.refuse_others()
    return _only(found, names)


def take_text_format(text: Fields, names: dict[str, str]) -> Constraint | None:
    """Take the format of POST /v1/responses, which has no level for the schema."""
    return _only(_format(text.object("format"), lambda each: each), names)


def _format(fields: Fields, schema_fields: Callable[[Fields], Fields]) -> list[Found]:
    kind = fields.choice("type", _FORMATS, "text")
    found: list[Found] = []
    if kind == "json_object":
        found = [(fields.name("type"), kind, True)]
    elif kind == "json_schema":
        schema = schema_fields(fields)
        schema.text("name")
        schema.text("description")
        schema.flag("strict")  # in any case
        found = [(schema.name("schema"), kind, schema.take("schema"))]
        schema.refuse_others()
        if found[0][2] is None:
            raise schema.refused("schema", "nothing", "a JSON schema")
    fields.refuse_others()
    return found


def _only(found: list[Found], names: dict[str, str]) -> Constraint | None:
    given = [each for each in found if each[2] is not None and not _is_off(*each)]
    if not given:
        return None
    name, kind, value = given[0]
    if len(given) > 1:
        raise refused(given[1][0], shown(given[1][2]), f"absent with {name}")
    names["constraint"] = names[f"constraint.{kind}"] = name
    return cast(Constraint, {kind: value})


def _is_off(_: str, kind: str, value: Any) -> bool:
    """Return whether a flag is false, as vLLM sends it; as a schema, false permits no answer."""
    return kind == "json_object" and value is False
