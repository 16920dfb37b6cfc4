"""Plots show a page's table: its numbers, in one unit, where the axis says."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from benchmarks import table_plots
from benchmarks.dot_chart import CHAR_WIDTH, COLORS, Case, DotChart, draw
from benchmarks.svg import WIDTH
from benchmarks.table_plots import PLOTS, TablePlot, chart_of, plot

SVG = "{http://www.w3.org/2000/svg}"
TABLE = """\
| what | | before | after |
|---|---|--:|--:|
| **start** | least | 1.5 s | 900 ms |
| | most | 2,000 ms, 3 s | 1.2 (of 40) |
| no numbers | | | not measured |
"""


def test_a_plot_has_the_tables_numbers_in_one_unit() -> None:
    chart = chart_of("Starts", TABLE, TablePlot(unit="s", num_names=2))

    assert chart.series == ("before", "after")
    assert chart.cases == (
        Case(name="start, least", values=((1.5,), (0.9,))),
        Case(name="start, most", values=((2.0, 3.0), (1.2,))),
    )


def test_a_range_in_brackets_belongs_to_a_number() -> None:
    table = "| | ms |\n|---|--:|\n| a | 44 (33 to 57) |\n| b | 10.4 to 10.5 |\n"

    chart = chart_of("", table, TablePlot(unit="ms"))

    assert [each.values for each in chart.cases] == [((44, 33, 57),), ((10.4, 10.5),)]


def test_a_turned_plot_has_columns_as_cases() -> None:
    chart = chart_of("", TABLE, TablePlot(unit="s", num_names=2, rows=(0, 1), is_turned=True))

    assert chart.series == ("start, least", "start, most")
    assert [each.name for each in chart.cases] == ["before", "after"]
    assert chart.cases[1].values == ((0.9,), (1.2,))


def test_a_relative_plot_shows_percents_of_the_first_series() -> None:
    chart = chart_of("", TABLE, TablePlot(unit="s", num_names=2, is_relative=True))

    assert (chart.series, chart.line_at) == (("after",), 100.0)
    assert '"before"' in chart.unit
    assert [each.values[0] for each in chart.cases] == [
        (pytest.approx(60.0),),
        (pytest.approx(48.0),),
    ]


def bars_and_dots(svg: str) -> list[tuple[str, str]]:
    """Return colours and paths of all marks."""
    paths = ElementTree.fromstring(svg).iter(f"{SVG}path")
    return [
        (each.attrib["stroke"], each.attrib["d"]) for each in paths if "stroke-width" in each.attrib
    ]


def chart_with(*values: float) -> DotChart:
    cases = tuple(Case(name=str(value), values=((value,),)) for value in values)
    return DotChart(title="t", unit="ms", series=("a",), cases=cases)


def test_bars_begin_at_zero_and_have_the_lengths_of_their_values() -> None:
    ((color, path),) = bars_and_dots(draw(chart_with(10.0, 20.0, 40.0)))

    lengths = [
        float(end) - float(begin) for begin, end in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", path)
    ]
    assert color == COLORS[0]
    assert lengths[1] == pytest.approx(2 * lengths[0], abs=0.2)
    assert lengths[2] == pytest.approx(4 * lengths[0], abs=0.2)


@pytest.mark.parametrize(
    ("values", "is_logarithmic"), [((100.0, 101.0, 102.0), False), ((1.0, 10.0, 100.0), True)]
)
def test_narrow_and_wide_ranges_are_dots_at_equal_distances(
    values: tuple[float, ...], is_logarithmic: bool
) -> None:
    svg = draw(chart_with(*values))
    ((_, path),) = bars_and_dots(svg)

    places = [float(x) for x in re.findall(r"M([\d.]+) [\d.]+h0", path)]
    first, second = (right - left for left, right in pairwise(places))
    assert first > 50
    assert second == pytest.approx(first, abs=0.2)
    assert ("logarithmic" in svg) == is_logarithmic


def test_single_figures_stand_beside_their_median() -> None:
    case = Case(name="c", values=((100.0, 104.0, 101.0),))
    svg = draw(DotChart(title="t", unit="ms", series=("a",), cases=(case,)))

    (_, middle), (_, single) = bars_and_dots(svg)
    assert single.count("h0") == 3
    assert middle in single


def test_more_series_than_colours_are_refused() -> None:
    case = Case(name="c", values=((1.0,),) * 9)

    with pytest.raises(ValueError, match="found 9; allowed: 8"):
        draw(DotChart(title="t", unit="ms", series=tuple("abcdefghi"), cases=(case,)))


@pytest.mark.parametrize("name", PLOTS)
def test_nothing_of_a_plot_lies_outside_of_it(name: str) -> None:
    root = ElementTree.fromstring(plot(name))
    height = float(root.attrib["height"])

    for text in root.iter(f"{SVG}text"):
        char_width = 9.9 if "font-weight" in text.attrib else CHAR_WIDTH
        length = char_width * len(text.text or "")
        left = float(text.attrib["x"]) - (
            length / 2 if text.attrib["text-anchor"] == "middle" else 0
        )
        assert left >= 0, text.text
        assert left + length <= WIDTH, text.text
        assert float(text.attrib["y"]) <= height, text.text


def test_a_plot_without_a_table_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table_plots.PLOTS, "nowhere", TablePlot(unit="ms"))

    with pytest.raises(KeyError, match="nowhere"):
        plot("nowhere")
