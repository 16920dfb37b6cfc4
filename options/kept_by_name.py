"""Settings that processes with newer code can still read.

Ray keeps an actor's arguments, pickled, for as long as the actor lives. A process that it restarts
after an upgrade reads them with the newer code. A frozen dataclass with slots is pickled as a list
of values in the order of its fields: after a new field, each option would get another one's value,
and nobody would notice.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def kept_by_name(cls: type[T]) -> type[T]:
    """Let a dataclass be pickled as a mapping. The decorator stands above `dataclass`.

    A field that the pickle lacks gets its default, and one that the class lacks is dropped.
    """
    setattr(cls, "__getstate__", _values)  # noqa: B010 - mypy refuses the assignment
    setattr(cls, "__setstate__", _restore)  # noqa: B010
    return cls


def _values(self: Any) -> dict[str, Any]:
    return {each.name: getattr(self, each.name) for each in fields(self)}


def _restore(self: Any, values: Mapping[str, Any]) -> None:
    for each in fields(self):
        if each.name in values:
            value = values[each.name]
        elif each.default is not MISSING:
            value = each.default
        elif each.default_factory is not MISSING:
            value = each.default_factory()
        else:
            raise TypeError(
                f"{type(self).__name__}: found no {each.name}, because other code made it; "
                "allowed: settings that have it; `pagewire down` and `pagewire up` make them anew"
            )
        object.__setattr__(self, each.name, value)
