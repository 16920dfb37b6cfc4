"""Tables and figures of steps that are served and of starts show what their files hold."""

import re
from collections.abc import Mapping
from xml.etree import ElementTree

import pytest

from benchmarks import page_figures, tables
from benchmarks.dot_chart import COLORS
from benchmarks.stream_statistics import Row
from benchmarks.svg import INK

SVG = "{http://www.w3.org/2000/svg}"
ALONE = {"decode/8@1024": {"ms": 10.0}, "shared/64,8192,256": {"ms": 20.0}}
SERVED = {
    "8@1024": {"ms": 10.0, "busy_ms": 11.0, "between_ms": 9.0, "between_ms_p50": 0.25},
    "shared/64,8192,256": {"ms": 21.0, "busy_ms": 20.5, "between_ms_p50": 0.125},
    "pools/8@1024": {"ms": 12.0, "busy_ms": 9.0, "between_ms": 9.0, "between_ms_p50": 0.5},
    "pools/shared/64,8192,256": {"ms": 23.0, "busy_ms": 22.0, "between_ms_p50": 0.75},
}
STARTS = {
    "ready/new": {"last_worker": "prefill-0", "parts_s": {"until_process": 2.5, "imports": 9.25}},
    "ready/warm": {"last_worker": "decode-0", "parts_s": {"until_process": 1.5, "imports": 4.0}},
    "decode/8@1024": {"ms": 10.0},
}


def replace_results(monkeypatch: pytest.MonkeyPatch, **files: Mapping[str, Row]) -> None:
    """Let tables find these cases in files that they name by constants."""
    contents = {getattr(tables, name): dict(rows) for name, rows in files.items()}
    monkeypatch.setattr(tables, "_rows_of", contents.__getitem__)


def test_a_served_step_stands_beside_the_engine_alone_without_and_beside_a_prefill_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_results(monkeypatch, ENGINE_STEPS_RESULT=ALONE, SERVED_STEPS_RESULT=SERVED)

    heads, _, *rows = tables.served_steps().splitlines()

    assert heads == (
        "| case | engine alone, ms | 0 + 1, client, ms | 0 + 1, device, ms | 0 + 1, between, ms "
        "| 1 + 1, client, ms | 1 + 1, device, ms | 1 + 1, between, ms |"
    )
    assert rows == [
        "| `decode/8@1024` | 10.00 | 10.00 | 11.00 | 0.25 | 12.00 | 9.00 | 0.50 |",
        "| `shared/64,8192,256` | 20.00 | 21.00 | 20.50 | 0.12 | 23.00 | 22.00 | 0.75 |",
    ]


@pytest.mark.parametrize("missing", ["pools/8@1024", "decode/8@1024"])
def test_a_served_step_without_its_counterpart_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, served = (
        {case: row for case, row in rows.items() if case != missing} for rows in (ALONE, SERVED)
    )
    replace_results(monkeypatch, ENGINE_STEPS_RESULT=alone, SERVED_STEPS_RESULT=served)

    with pytest.raises(KeyError, match=missing):
        tables.served_steps()


def test_served_steps_are_drawn_as_shares_of_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = {case: row for case, row in SERVED.items() if "shared" not in case}
    replace_results(monkeypatch, ENGINE_STEPS_RESULT=ALONE, SERVED_STEPS_RESULT=served)

    root = ElementTree.fromstring(page_figures.served_steps())

    paths = [each.attrib for each in root.iter(f"{SVG}path")]
    (line,) = (x_of(each["d"]) for each in paths if each.get("stroke") == INK)
    dots = {each["stroke"]: x_of(each["d"]) - line for each in paths if "stroke-width" in each}
    client, device, pools_client, pools_device = (dots[color] for color in COLORS[:4])
    assert client == pytest.approx(0, abs=0.2)
    assert device > 20
    assert pools_client == pytest.approx(2 * device, abs=0.3)
    assert pools_device == pytest.approx(-device, abs=0.3)


def test_steps_of_another_host_stand_beside_its_own_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = {case: row for case, row in SERVED.items() if case.startswith("pools/")}
    replace_results(monkeypatch, JOINED_ENGINE_RESULT=ALONE, JOINED_STEPS_RESULT=pools)

    _, _, *rows = tables.joined_steps().splitlines()

    assert rows == [
        "| `decode/8@1024` | 10.00 | 12.00 | 9.00 | 0.50 |",
        "| `shared/64,8192,256` | 20.00 | 23.00 | 22.00 | 0.75 |",
    ]


def x_of(path: str) -> float:
    found = re.match(r"M([\d.]+) ", path)
    assert found
    return float(found[1])


def test_a_start_shows_its_last_worker_all_parts_and_their_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_results(monkeypatch, STARTS_FILE=STARTS)

    heads, _, *rows = tables.starts().splitlines()

    assert heads == "| case | last worker | until process, s | imports, s | sum, s |"
    assert rows == [
        "| `ready/new` | prefill-0 | 2.50 | 9.25 | 11.75 |",
        "| `ready/warm` | decode-0 | 1.50 | 4.00 | 5.50 |",
    ]


def test_each_part_of_a_start_is_drawn_once_for_each_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_results(monkeypatch, STARTS_FILE=STARTS)

    root = ElementTree.fromstring(page_figures.starts())

    widths = {
        title.text or "": float(rect.attrib["width"])
        for rect in root.iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None
    }
    assert list(widths) == [
        "until process, new: 2.5 s",
        "until process, warm: 1.5 s",
        "imports, new: 9.2 s",
        "imports, warm: 4.0 s",
    ]
    assert widths["imports, warm: 4.0 s"] == pytest.approx(
        1.6 * widths["until process, new: 2.5 s"], abs=0.2
    )


def test_parts_of_the_starts_on_record_add_up_to_them() -> None:
    starts = tables.start_rows()

    assert starts
    for row in starts.values():
        rounding = 0.005 * (len(row["parts_s"]) + 1) + 1e-9  # all figures have two digits
        assert sum(row["parts_s"].values()) == pytest.approx(row["seconds"], abs=rounding)
