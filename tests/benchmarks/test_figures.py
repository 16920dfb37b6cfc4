"""Whether the figures show the results they are drawn from, all of them and to scale."""

import json
import sys
from itertools import pairwise
from math import log10
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.attention_cases import DECODE_CASES
from benchmarks.bar_chart import LEFT, PLOT_WIDTH, Chart, draw
from benchmarks.cascade_cases import TWO_LEVELS
from benchmarks.figures import (
    FLASHINFER_CASCADE,
    FLASHINFER_DECODE,
    cascade_chart,
    decode_chart,
    main,
)
from benchmarks.svg import WIDTH

FORESTS = [
    {
        "dtype": dtype,
        "shape": "32,8,128,64",
        "forest": "random/7",
        "num_requests": 8,
        "cascade_us": 16.0,
        "flat_us": 20.0,
        "is_shared": True,
    }
    for dtype in ("bfloat16", "bfloat16", "float8_e4m3fn")
]
SVG = "{http://www.w3.org/2000/svg}"
DECODE = {
    name: us
    for number, case in enumerate(FLASHINFER_DECODE)
    for name, us in ((f"decode/{case}", 12.0 + number), (f"read/{case}", 6.0 + number / 2))
}
CASCADE = {
    name: us
    for number, case in enumerate(FLASHINFER_CASCADE)
    for name, us in ((f"cascade/{case}", 20.0 + number), (f"cascade/{case}@flat", 200.0 + number))
}
CHARTS = pytest.mark.parametrize("chart", [decode_chart(DECODE), cascade_chart(CASCADE)])


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def bars(chart: Chart) -> dict[str, float]:
    """Return the width of each bar by what a reader sees when pointing at it."""
    rects = ElementTree.fromstring(draw(chart)).iter(f"{SVG}rect")
    return {
        title.text or "": float(rect.attrib["width"])
        for rect in rects
        if (title := rect.find(f"{SVG}title")) is not None
    }


def test_figures_show_the_cases_that_the_benchmark_runs() -> None:
    assert [f"decode/{case}" for case in FLASHINFER_DECODE] == list(DECODE_CASES)
    assert list(FLASHINFER_CASCADE) == [",".join(map(str, sizes)) for sizes in TWO_LEVELS]


@CHARTS
def test_each_case_has_its_name_and_all_its_times(chart: Chart) -> None:
    shown = texts(ElementTree.fromstring(draw(chart)))

    for group in chart.groups:
        assert shown.count(group.case) == 1
        assert len(group.values) == len(chart.series)
    assert set(shown) >= {name for name, _ in chart.series}
    assert len(bars(chart)) == len(chart.groups) * len(chart.series)


@CHARTS
def test_nothing_is_drawn_outside_the_picture(chart: Chart) -> None:
    root = ElementTree.fromstring(draw(chart))
    height = float(root.attrib["height"])
    places = [
        (float(element.attrib["x"]), float(element.attrib["y"]))
        for kind in ("text", "rect")
        for element in root.iter(SVG + kind)
        if "x" in element.attrib
    ]

    assert all(0 <= x <= WIDTH and 0 <= y <= height for x, y in places)
    assert all(0 < width <= PLOT_WIDTH for width in bars(chart).values())
    assert LEFT + PLOT_WIDTH < WIDTH <= 900


@CHARTS
def test_bars_do_not_overlap(chart: Chart) -> None:
    root = ElementTree.fromstring(draw(chart))
    rects = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    spans = [(float(rect.attrib["y"]), float(rect.attrib["height"])) for rect in rects]

    assert all(y + height <= below for (y, height), (below, _) in pairwise(spans))


def test_a_decode_bar_is_the_share_of_the_read_speed() -> None:
    widths = bars(decode_chart(DECODE))

    assert widths["1x1024, Pagewire: 12.0 us"] == pytest.approx(PLOT_WIDTH / 2, abs=0.1)
    assert widths["1x1024, FlashInfer: 12.6 us"] == pytest.approx(PLOT_WIDTH * 6 / 12.6, abs=0.1)


def test_equal_ratios_are_equal_distances_between_cascade_bars() -> None:
    widths = bars(cascade_chart(CASCADE))
    decade = PLOT_WIDTH / 3  # the axis goes from 10 to 10,000 us

    ours, flat = (
        widths[f"8,4096,1024, Pagewire {kind}"] for kind in ("cascade: 20.0 us", "flat: 200 us")
    )
    assert flat - ours == pytest.approx(decade, abs=0.2)
    assert ours == pytest.approx(decade * log10(2), abs=0.1)


def test_ticks_of_the_cascade_axis_stand_where_a_bar_of_their_time_ends() -> None:
    us = {**CASCADE, "cascade/16,8192,256": 50.0, "cascade/16,8192,256@flat": 2000.0}
    chart = cascade_chart(us)
    ticks = {text: part for part, text in chart.ticks}
    group = chart.groups[1]

    assert group.lengths[:2] == pytest.approx((ticks["50"], ticks["2,000"]))


def test_missing_cases_are_all_named() -> None:
    us = {**DECODE}
    del us["read/skew"], us["decode/8x1024"]

    with pytest.raises(ValueError, match=r"missing in the results: decode/8x1024 read/skew$"):
        decode_chart(us)
    with pytest.raises(ValueError, match="cascade/8,4096,1024@flat"):
        cascade_chart({name: t for name, t in CASCADE.items() if not name.endswith("@flat")})


def test_the_command_writes_both_files_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "kernels.json", tmp_path / "figures"
    rows = [{"case": case, "us": us} for case, us in {**DECODE, **CASCADE}.items()]
    monkeypatch.setattr(sys, "argv", ["figures", "--results", str(results), "--out", str(out)])

    results.write_text(json.dumps(rows[:-1]))
    with pytest.raises(SystemExit):
        main()
    assert "cascade/256,32768,256@flat" in capsys.readouterr().err
    assert not out.exists()

    results.write_text(json.dumps(rows))
    main()
    assert {path.name for path in out.iterdir()} == {"decode-h200.svg", "cascade-h200.svg"}


def test_the_command_also_draws_forests_or_says_what_their_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, border, out = tmp_path / "kernels.json", tmp_path / "rows.json", tmp_path / "figures"
    rows = [{"case": case, "us": us} for case, us in {**DECODE, **CASCADE}.items()]
    results.write_text(json.dumps(rows))
    argv = ["figures", "--results", str(results), "--out", str(out), "--border", str(border)]
    monkeypatch.setattr(sys, "argv", argv)

    border.write_text('[{"case": "decode/1x1024"}]')
    with pytest.raises(SystemExit):
        main()
    errors = capsys.readouterr().err
    assert str(border) in errors
    assert "unexpected keyword argument 'case'" in errors
    assert not out.exists()

    border.write_text(json.dumps(FORESTS))
    main()
    assert (out / "cascade-border-h200.svg").read_text().count("<circle") == len(FORESTS)
