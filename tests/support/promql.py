"""What a query in PromQL names: series with the labels that it asks for, and labels to group by."""

import re
from dataclasses import dataclass

from tests.support.all_metrics import Exported

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()\s*(\{[^{}]*\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_WORDS = frozenset({"and", "or", "unless", "bool", "Inf", "NaN"})
_TIMES = re.compile(r"\[[^\[\]]*\]|\boffset\s+-?\w+")
# Which Prometheus itself gives to what it reads from a pod.
OF_TARGETS = frozenset({"job", "instance", "namespace", "pod"})


@dataclass(frozen=True, slots=True)
class Named:
    """What a query names."""

    series: tuple[tuple[str, frozenset[str]], ...]  # name, labels of its matchers
    grouping: frozenset[str]


def named(query: str) -> Named:
    """Read a query that is otherwise right."""
    text = _TIMES.sub("", _STRING.sub('""', query))
    grouping = {
        label.strip() for each in _GROUPING.findall(text) for label in each.split(",") if label
    }
    text = _GROUPING.sub(" ", text)
    series = [
        (name, frozenset(_MATCHER.findall(matchers)))
        for name, matchers in _SELECTOR.findall(text)
        if name not in _WORDS
    ]
    return Named(tuple(series), frozenset(grouping))


def faults(query: str, metrics: dict[str, Exported]) -> list[str]:
    """Name each series and label of a query that nobody tells."""
    known = {name: labels for each in metrics.values() for name, labels in each.series.items()}
    found, told = [], set(OF_TARGETS)
    query_names = named(query)
    if not query_names.series:
        found.append("it names no series")
    for name, labels in query_names.series:
        if name not in known:
            found.append(f"nobody tells {name}")
            continue
        told |= known[name]
        found += [
            f"{name} has no label {each}" for each in sorted(labels - known[name] - OF_TARGETS)
        ]
    return found + [f"no series has {each}" for each in sorted(query_names.grouping - told)]
