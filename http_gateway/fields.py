"""The fields of a request's JSON object: taken one by one, so that an unread field is an error.

A null field counts as absent, as in OpenAI's API.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from http_gateway.errors import HttpError, joined, refused
from pagewire.arguments import did_you_mean
from pagewire.shown import shown, shown_with_type

MAX_NAME_CHARS = 100  # shown of a name that no field has
MAX_UNKNOWN = 8  # such names that an error shows
Value = TypeVar("Value")
Default = TypeVar("Default")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field that this gateway does not support."""

    reason: str
    off: tuple[Any, ...] = ()  # values without effect, which clients send by default


class Fields:
    """The fields of one object, with checked types.

    Args:
        values: The object.
        path: Its path in the request, "tools[0].function"; empty: the request itself.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path
        self._known: set[str] = set()  # names that were asked for
        self._missing: HttpError | None = None  # the first field that is required and not given

    def name(self, field: str) -> str:
        """Return the path of a field in the request."""
        return f"{self._path}.{field}" if self._path else field

    def take(self, field: str) -> Any:
        """Return a field of any type; None: it is absent."""
        self._known.add(field)
        return self._left.pop(field, None)

    def has(self, field: str) -> bool:
        """Return whether a field is given, before it is taken."""
        self._known.add(field)
        return field in self._left

    def text(self, field: str, default: str = "") -> str:
        """Return a text that UTF-8 can encode."""
        value = self._typed(field, str, "a string", default)
        self._check_encodable(field, value)
        return value

    def required_text(self, field: str, *, empty: str | None = None) -> str:
        """Return a text that must be given.

        `refuse_others` refuses its absence, after slips in its name.

        Args:
            field: Its name.
            empty: How the error describes an empty text; None allows it.
        """
        if not self.has(field):
            self._missing = self._missing or refused(
                self.name(field), "none", "a string", code="missing_required_parameter"
            )
            return ""
        text = self.text(field)
        if empty is not None and not text:
            raise self.refused(field, empty, "at least one character")
        return text

    def texts(self, field: str) -> dict[str, str]:
        """Return an object of texts; empty where it is absent."""
        inner = self.object(field)
        for name in inner._left:
            self._check_encodable(field, name)
        return {name: inner.text(name) for name in list(inner._left)}

    def flag(self, field: str, default: bool = False) -> bool:
        """Return a switch."""
        return self._typed(field, bool, "true or false", default)

    def array(self, field: str) -> list[Any]:
        """Return a list; empty where it is absent."""
        return self._typed(field, list, "an array", [])

    def object(self, field: str) -> "Fields":
        """Return an object; without fields where it is absent."""
        return Fields(self._typed(field, dict, "an object", {}), self.name(field))

    def choice(self, field: str, allowed: tuple[str, ...], default: str) -> str:
        """Return one of several texts."""
        value = self.text(field, default)
        if value not in allowed:
            raise self.refused(field, shown(value), " or ".join(map(repr, allowed)))
        return value

    def integer(self, field: str, low: int, high: int) -> int | None:
        """Return an integer within bounds, or None where it is absent."""
        value = self._typed(field, int, f"an integer, {low} to {high}", None)
        if value is not None and not low <= value <= high:
            raise self.refused(field, shown(value), f"{low} to {high}")
        return value

    def refuse_unsupported(self, table: Mapping[str, Unsupported]) -> None:
        """Refuse known but unsupported fields, unless they request nothing."""
        for field, known in table.items():
            value = self._left.pop(field, None)
            if value is not None and not any(
                type(value) is type(off) and value == off for off in known.off
            ):
                allowed = " or ".join(["absent", *map(shown, known.off)])
                raise refused(
                    self.name(field),
                    f"{shown(value)}, which is not supported: {known.reason}",
                    allowed,
                    code="unsupported_parameter",
                )

    def drop(self, *fields: str) -> None:
        """Take fields without effect here."""
        for field in fields:
            self.take(field)

    def refuse_others(self) -> None:
        """Refuse remaining fields, which would otherwise be ignored silently; then missing ones."""
        if self._left:
            raise joined([self._unknown(name) for name in islice(self._left, MAX_UNKNOWN)])
        if self._missing is not None:
            raise self._missing

    def refused(self, field: str, found: str, allowed: str) -> HttpError:
        """Make the error for a wrong value of a field."""
        return refused(self.name(field), found, allowed)

    def _unknown(self, name: str) -> HttpError:
        found = "an unknown parameter" + did_you_mean(name, self._known, self.name(""))
        allowed = ", ".join(sorted(self._known))
        field = self.name(name)[:MAX_NAME_CHARS]
        return refused(field, found, allowed, code="unknown_parameter")

    def _check_encodable(self, field: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"{shown(text[error.start])} at character {error.start}"
            raise self.refused(field, found, "text without lone surrogates") from None

    def _typed(
        self, field: str, kind: type[Value], allowed: str, default: Default
    ) -> Value | Default:
        value = self.take(field)
        if value is None:
            return default
        if type(value) is not kind:  # a bool is not an integer
            raise self.refused(field, shown_with_type(value), allowed)
        return value


def shown_text(text: str) -> str:
    """Return a text as an error shows it; an empty one is as good as none."""
    return shown(text) if text else "none"


def shown_json(value: object) -> str:
    """Return a value of a wrong type as an error shows it; null is none."""
    return "none" if value is None else shown_with_type(value)


def as_object(value: object, path: str) -> Fields:
    """Return the fields of an item of an array, which must be an object."""
    if not isinstance(value, dict):
        raise refused(path, shown_json(value), "an object")
    return Fields(value, path)
