"""docs/metrics.md lists what is told, and nothing else."""

import re
from pathlib import Path

import pytest

from tests.support.all_metrics import all_metrics

REFERENCE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"\| `(pagewire_\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.*?) \| (.+) \|")
UNITS = {
    "seconds": "s",
    "tokens": "tokens",
    "bytes": "bytes",
    "pages": "pages",
    "steps": "steps",
    "perc": "0 to 1",
}


def listed():
    """name |-> cells of its row: type, labels, unit, from, meaning."""
    rows = [
        each.groups() for each in map(ROW.fullmatch, REFERENCE.read_text().splitlines()) if each
    ]
    assert len({name for name, *_ in rows}) == len(rows), "a metric is listed twice"
    return {name: cells for name, *cells in rows}


def test_the_reference_lists_every_metric_and_no_other():
    assert sorted(listed()) == sorted(all_metrics())


def test_types_labels_and_places_are_those_of_the_code():
    for name, each in all_metrics().items():
        kind, labels, _, places, meaning = listed()[name]
        assert (name, kind) == (name, each.type)
        assert (name, set(re.findall(r"`(\w+)`", labels))) == (name, each.labels)
        assert (name, set(places.split(", "))) == (name, each.places)
        assert meaning.strip(), name


@pytest.mark.parametrize("name", sorted(all_metrics()))
def test_a_name_carries_its_unit(name):
    unit = listed()[name][2]
    last = name.removesuffix("_total").rpartition("_")[2]

    assert unit.strip()
    if last in UNITS:
        assert unit == UNITS[last], name
