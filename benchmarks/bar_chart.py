"""Draws groups of horizontal bars over one axis as the text of an SVG file, without a library."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from benchmarks.svg import GRID, LINE_HEIGHT, NOTES_TOP, WIDTH, figure, text

LEFT, PLOT_WIDTH = 180, 570  # px; bars begin at LEFT
BAR_HEIGHT, GROUP_GAP = 14, 10  # px


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The bars of one case, from top to bottom."""

    case: str
    values: tuple[float | None, ...]  # one for each series; None: it has none
    lengths: tuple[float, ...]  # parts of the plot's width
    remark: str = ""  # stands at the right


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Groups of horizontal bars over one axis."""

    title: str
    notes: tuple[str, ...]  # lines below the title
    series: tuple[tuple[str, str], ...]  # name and colour
    case_heading: str
    ticks: tuple[tuple[float, str], ...]  # part of the plot's width, and text
    remark_heading: str = ""
    unit: str = "us"  # of the values
    groups: tuple[Group, ...]


def draw(chart: Chart) -> str:
    """Return the chart as the text of an SVG file."""
    group_height = len(chart.series) * BAR_HEIGHT + GROUP_GAP
    legend = NOTES_TOP + len(chart.notes) * LINE_HEIGHT + 12
    top = legend + 40
    bottom = top + len(chart.groups) * group_height
    parts = [
        *_legend(chart, legend),
        text(16, top - 8, chart.case_heading),
        text(LEFT - 6, top - 8, chart.unit, anchor="end"),
        text(WIDTH - 16, top - 8, chart.remark_heading, anchor="end"),
    ]
    for part, label in chart.ticks:
        x = LEFT + part * PLOT_WIDTH
        parts.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="{GRID}"/>')
        parts.append(text(x, bottom + 18, label, anchor="middle"))
    for number, group in enumerate(chart.groups):
        parts += _group(group, chart, top + number * group_height + GROUP_GAP / 2)
    return figure(chart.title, chart.notes, bottom + 30, parts)


def format_value(value: float) -> str:
    """Return a value with one digit after the point, or without fraction from 100 on."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _group(group: Group, chart: Chart, top: float) -> Iterator[str]:
    """Yield one case: its name, the value of each series, the bars and the remark."""
    middle = top + len(group.values) * BAR_HEIGHT / 2 + 4
    yield text(16, middle, group.case)
    for number, (value, length) in enumerate(zip(group.values, group.lengths, strict=True)):
        if value is None:
            continue
        name, colour = chart.series[number]
        label = f"{group.case}, {name}: {format_value(value)} {chart.unit}"
        y = top + number * BAR_HEIGHT
        yield text(LEFT - 6, y + BAR_HEIGHT - 3, format_value(value), anchor="end")
        yield (
            f'<rect x="{LEFT}" y="{y:.1f}" width="{length * PLOT_WIDTH:.1f}" '
            f'height="{BAR_HEIGHT - 1}" fill="{colour}">'
            f"<title>{escape(label)}</title></rect>"
        )
    yield text(WIDTH - 16, middle, group.remark, anchor="end")


def _legend(chart: Chart, y: float) -> Iterator[str]:
    """Yield a line of colours and names, as far apart as four fit over the plot."""
    for number, (name, colour) in enumerate(chart.series):
        x = LEFT + number * PLOT_WIDTH / 4
        yield f'<path d="M{x:.1f} {y - 10}h12v12h-12z" fill="{colour}"/>'
        yield text(x + 18, y, name)
