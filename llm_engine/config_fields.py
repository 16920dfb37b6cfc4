"""Typed reading of a checkpoint's JSON files; every error names file, field, found and allowed."""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_engine.errors import CheckpointCorrupt, CheckpointMissing, UnsupportedModel

MAX_INTEGER = 2**31 - 1  # of kernels and page tables
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # so that products and logarithms of two are finite

_short = reprlib.Repr()  # a found value may be as large as the file
_short.maxstring = _short.maxother = 200
_short.maxlong = 30
_short.maxlist = _short.maxtuple = _short.maxdict = 16


class ConfigFields:
    """One JSON object of a checkpoint file. A field that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source  # for errors: file name, or file name and path of a nested object

    def names(self) -> list[str]:
        return list(self._values)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is given as null, where that differs from its absence."""
        return name in self._values and self._values[name] is None

    def value(self, name: str) -> Any:
        """Return a field as it is; None when absent."""
        return self._values.get(name)

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        at_least: int = 1,
        at_most: int = MAX_INTEGER,
    ) -> int:
        value = self._get(name, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not at_least <= value <= at_most:
            raise self.unsupported(name, value, f"an integer from {at_least} to {at_most}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not _is_number(value):
            allowed = f"a number above 0, {MIN_NUMBER} to {MAX_NUMBER}"
            raise self.unsupported(name, value, allowed)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.unsupported(name, value, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.unsupported(name, value, "a string")
        return value

    def strings(self, name: str) -> list[str]:
        """Return a list of strings; empty when absent."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.unsupported(name, value, "a list of strings")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an integer or a list of them as a tuple; empty when absent."""
        value = self._get(name, [])
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
            raise self.unsupported(name, value, "an integer or a list of integers")
        return tuple(values)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers above 0."""
        value = self._get(name, None)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            allowed = f"a list of numbers above 0, {MIN_NUMBER} to {MAX_NUMBER}"
            raise self.unsupported(name, value, allowed)
        return tuple(map(float, value))

    def nested(self, name: str) -> "ConfigFields":
        """Return a nested object; empty when absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.unsupported(name, value, "an object")
        return ConfigFields(value, f"{self.source}: {name}")

    def unsupported(self, name: str, found: object, allowed: str) -> UnsupportedModel:
        """Return the error for a field whose value cannot be served."""
        return UnsupportedModel(f"{self.source}: {name} is {_short.repr(found)}, must be {allowed}")

    def unknown(self, name: str) -> UnsupportedModel:
        """Return the error for a field that no table lists."""
        return UnsupportedModel(
            f"{self.source}: {name} is {_short.repr(self.value(name))}, but this key is unknown; "
            "remove it if the model is the same without it"
        )

    def _get(self, name: str, default: object) -> Any:
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise UnsupportedModel(f"{self.source}: required field {name} is missing")
            return default
        return value


def _is_number(value: object) -> bool:
    # Compared before conversion: an integer may be too large for a float.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and MIN_NUMBER <= value <= MAX_NUMBER
    )


def read_json(path: Path) -> ConfigFields:
    """Read a file that must hold one JSON object.

    Raises:
        CheckpointMissing: If the file does not exist.
        CheckpointCorrupt: If it cannot be read, or contains anything else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointMissing(f"{path}: no such file; a checkpoint folder has one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{path}: cannot be read: {error}") from error
    except RecursionError:
        raise CheckpointCorrupt(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:  # also for an integer with too many digits
        raise CheckpointCorrupt(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointCorrupt(f"{path}: holds {type(values).__name__}, must be a JSON object")
    return ConfigFields(values, str(path))
