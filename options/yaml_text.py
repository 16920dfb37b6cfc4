"""Reads YAML that people write: its content, and the line of each key."""

import os
import re
from collections.abc import Iterator
from datetime import date
from typing import Any, NamedTuple

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from options.option import told_value


class Key(NamedTuple):
    """A key of a mapping; one that is repeated is there again."""

    path: str
    line: int
    written: str  # its value as the text has it; empty: that is a list or a mapping


Lines = list[Key]

MAX_REPEATED = 10_000  # values that aliases may add to one for each character


class YamlError(Exception):
    """A text is not plain YAML. The message follows a file's name, so it begins with the place."""


class _Loader(yaml.SafeLoader):
    """Reads 1e9 as a number, as YAML 1.2 does, not as a text; and keys as written."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)  # first: it knows the keys << by their tag
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = self.DEFAULT_SCALAR_TAG  # a text, even if it is true, on or 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            _check_usable(value)
        except (yaml.YAMLError, RecursionError, MemoryError):
            raise
        except Exception as error:  # for a date of month 13, say, it raises anything
            problem = f"found a value that cannot be read: {error}"
            raise ConstructorError(problem=problem, problem_mark=node.start_mark) from error
        return value


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> tuple[Any, Lines]:
    """Return the content of a text (None: empty), and each key in its mappings.

    Raises:
        YamlError: The text is not plain YAML, is nested too deeply, or repeats too much by aliases.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if _num_values(node, {}) > (most := len(text) + MAX_REPEATED):
            raise YamlError(f": found too many values through aliases; allowed: at most {most}")
        content = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        problem = str(error.problem)
        if isinstance(error, ComposerError) and error.context:  # the first half of the sentence
            problem = f"{error.context}, {problem}"
        raise YamlError(f"{place}: is not plain YAML: {problem}") from error
    except yaml.YAMLError as error:  # a character that YAML forbids
        raise YamlError(f": is not plain YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise YamlError(": is nested too deeply; an option is at most two deep") from None
    try:
        return content, list(_keys(node))
    except RecursionError as error:
        raise YamlError(": has a mapping that contains itself, by an anchor") from error


def told_found(value: object, written: str = "") -> str:
    """Return a value as an error shows it.

    Args:
        value: As YAML has it.
        written: As the text has it, if it is no list or mapping.
    """
    if isinstance(value, bool) and written.lower() not in ("", told_value(value)):
        return f"{written}, which YAML takes for {told_value(value)}"
    if isinstance(value, date):
        return f"{written or value}, which YAML takes for a date"
    return "nothing" if value is None else told_value(value)


def told_kind(content: object) -> str:
    """Return what a content is, in words: "a list"."""
    if isinstance(content, bool):
        return "true or false"
    if isinstance(content, int | float):
        return "a number"
    return {"list": "a list", "str": "a text"}.get(name := type(content).__name__, f"a {name}")


def _check_usable(value: Any) -> None:
    """Raise ValueError for a number that is too long to print, or a text that cannot be a path.

    Other bases and escapes can write them. No error could show such a number, and the system could
    not open such a path.
    """
    if isinstance(value, int):
        repr(value)
    elif isinstance(value, str):
        os.fsencode(value)
        if "\0" in value:
            raise ValueError("a text with the null character")


def _num_values(node: yaml.Node | None, known: dict[yaml.Node, int]) -> int:
    """Return how many keys and values a node has, counting each alias as a copy.

    Args:
        known: The numbers of nodes counted before; a node within itself counts as 0.
    """
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if node not in known:
        known[node] = 0
        pairs = isinstance(node, yaml.MappingNode)
        below = (each for pair in node.value for each in pair) if pairs else node.value
        known[node] = 1 + sum(_num_values(each, known) for each in below)
    return known[node]


def _keys(node: yaml.Node | None, prefix: str = "") -> Iterator[Key]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        path = f"{prefix}{key.value}"
        written = value.value if isinstance(value, yaml.ScalarNode) else ""
        yield Key(path, key.start_mark.line + 1, written)
        yield from _keys(value, f"{path}.")
