"""Draws the values of cases over one axis as the text of an SVG file: bars from 0, or dots.

A case has a lane for each series. Where a figure was taken several times, small dots show each of
them, and the bar or the large dot their median.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, floor, log10
from statistics import median
from textwrap import wrap

from benchmarks.figures import BLUE, LIGHT_BLUE, ORANGE, RED
from benchmarks.svg import GRID, INK, LINE_HEIGHT, NOTES_TOP, WIDTH, figure, text, tick_step

COLORS = (BLUE, ORANGE, LIGHT_BLUE, RED, "#009E73", "#CC79A7", INK, "#999999")
MARGIN, RIGHT = 16, WIDTH - 28  # px; half of the last tick's number stands at the right of RIGHT
LANE, CASE_GAP, CASE_LINE = 9, 8, 14  # px: of a series, between cases, of a line of a case's name
CASE_CHARS, CHAR_WIDTH = 48, 6.8  # of a case's name in a line; px, of a wide sans serif at 12 px
LOGARITHMIC_FROM = 30  # the most as a multiple of the least
FROM_ZERO = 0.5  # the least as a part of the most; above, bars from 0 would hide the differences


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What was measured of one case."""

    name: str
    values: tuple[tuple[float, ...], ...]  # of each series, one for each time; (): never


@dataclass(frozen=True, kw_only=True, slots=True)
class DotChart:
    """Cases from top to bottom, and in each of them the series."""

    title: str
    unit: str
    series: tuple[str, ...]
    cases: tuple[Case, ...]
    line_at: float | None = None  # where a line stands, by which the values are judged
    is_from_zero: bool = False  # bars, however different the values are

    def values(self) -> list[float]:
        """Return all values, and that of the line."""
        found = [each for case in self.cases for values in case.values for each in values]
        return found if self.line_at is None else [*found, self.line_at]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """Places of values between `left` and RIGHT."""

    low: float
    high: float
    ticks: tuple[float, ...]
    left: float  # px
    is_logarithmic: bool = False

    def x(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_logarithmic:
            low, high, value = log10(low), log10(high), log10(value)
        return self.left + (value - low) / (high - low) * (RIGHT - self.left)


def draw(chart: DotChart) -> str:
    """Return the chart as the text of an SVG file.

    Raises:
        ValueError: If there are more series than colours.
    """
    if len(chart.series) > len(COLORS):
        raise ValueError(f"series: found {len(chart.series)}; allowed: {len(COLORS)}")
    names = [wrap(case.name, CASE_CHARS) or [""] for case in chart.cases]
    axis = _axis(
        chart, 12 + MARGIN + CHAR_WIDTH * max(len(line) for each in names for line in each)
    )
    notes = _notes(chart, axis)
    legend, top = _legend(chart.series, NOTES_TOP + LINE_HEIGHT * len(notes) + 14)
    heights = [CASE_GAP + max(LANE * len(chart.series), CASE_LINE * len(each)) for each in names]
    edges = list(accumulate(heights, initial=top + 12))
    parts = [*legend, *_frame(chart, axis, edges), *_names(names, edges)]
    for number, color in enumerate(COLORS[: len(chart.series)]):
        lanes = [
            (top + (height - LANE * len(chart.series)) / 2 + LANE * (number + 0.5), values)
            for top, height, case in zip(edges, heights, chart.cases, strict=False)
            if (values := case.values[number])
        ]
        parts += _marks(lanes, axis, color)
    return figure(chart.title, notes, round(edges[-1] + 28), parts)


def _axis(chart: DotChart, left: float) -> _Axis:
    """Return an axis from 0, one of a narrow range, or a logarithmic one for a wide range."""
    found = chart.values()
    least, most = min(found), max(found)
    if least > 0 and most / least > LOGARITHMIC_FROM and not chart.is_from_zero:
        powers = range(floor(log10(least / 1.1)), ceil(log10(most * 1.1)))
        digits = (1, 2, 5) if len(powers) <= 3 else (1,)
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        low, high = least / 1.1, most * 1.1
        inside = tuple(tick for tick in ticks if low <= tick <= high)
        return _Axis(low=low, high=high, ticks=inside, left=left, is_logarithmic=True)
    is_from_zero = chart.is_from_zero or least < FROM_ZERO * (chart.line_at or most)
    step = tick_step(most if is_from_zero else max(most - least, most / 100))
    first, last = 0 if is_from_zero else floor(least / step), ceil(most / step)
    steps = tuple(step * number for number in range(first, max(last, first + 1) + 1))
    return _Axis(low=steps[0], high=steps[-1], ticks=steps, left=left)


def _notes(chart: DotChart, axis: _Axis) -> list[str]:
    scale = ", on a logarithmic axis" if axis.is_logarithmic else ""
    judged = "; left of the line is less" if chart.line_at is not None else ""
    notes = [f"In {chart.unit}{scale}{judged}."]
    if any(len(values) > 1 for case in chart.cases for values in case.values):
        notes.append("Small dots: the single figures. Bars and large dots: their medians.")
    return notes


def _legend(series: Sequence[str], y: float) -> tuple[list[str], float]:
    """Return colours and names, in as many lines as they need, and where the last one stands."""
    parts: list[str] = []
    x = float(MARGIN)
    for name, color in zip(series, COLORS, strict=False):
        length = 16 + CHAR_WIDTH * len(name)
        if x > MARGIN and x + length > WIDTH - MARGIN:
            x, y = float(MARGIN), y + LINE_HEIGHT
        parts.append(f'<path d="M{x:.1f} {y - 9:.1f}h10v10h-10z" fill="{color}"/>')
        parts.append(text(x + 16, y, name))
        x += length + 16
    return parts, y


def _frame(chart: DotChart, axis: _Axis, edges: Sequence[float]) -> Iterator[str]:
    """Yield the lines between cases, those of the ticks with their numbers, and the chart's own."""
    top, bottom = edges[0], edges[-1]
    for edge in edges:
        yield f'<path d="M{MARGIN} {edge:.0f}H{RIGHT}" stroke="{GRID}"/>'
    for tick in axis.ticks:
        yield f'<path d="M{axis.x(tick):.1f} {top:.0f}V{bottom:.0f}" stroke="{GRID}"/>'
        yield text(axis.x(tick), bottom + 16, f"{tick:,.6g}", anchor="middle")
    if chart.line_at is not None:
        yield f'<path d="M{axis.x(chart.line_at):.1f} {top:.0f}V{bottom:.0f}" stroke="{INK}"/>'


def _names(names: Sequence[Sequence[str]], edges: Sequence[float]) -> Iterator[str]:
    """Yield the names of cases, each in the middle of its lanes."""
    for (top, bottom), lines in zip(pairwise(edges), names, strict=True):
        first = (top + bottom - CASE_LINE * (len(lines) - 1)) / 2 + 4
        for number, line in enumerate(lines):
            yield text(MARGIN, first + CASE_LINE * number, line)


def _marks(
    lanes: Sequence[tuple[float, Sequence[float]]], axis: _Axis, color: str
) -> Iterator[str]:
    """Yield the bars or dots of one series: y and values of each case in which it has some."""
    round_ends = 'stroke-linecap="round"'
    has_bars = axis.low == 0
    middles = [(y, axis.x(median(values))) for y, values in lanes]
    single = [(y, axis.x(each)) for y, values in lanes if len(values) > 1 for each in values]
    if has_bars:
        bars = "".join(f"M{axis.left:.1f} {y:.1f}H{x:.1f}" for y, x in middles)
        yield f'<path d="{bars}" stroke="{color}" stroke-width="{LANE - 2}"/>'
    else:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for y, x in middles)
        yield f'<path d="{dots}" stroke="{color}" stroke-width="{LANE - 1}" {round_ends}/>'
    if single:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for y, x in single)
        stroke = INK if has_bars else color
        yield f'<path d="{dots}" stroke="{stroke}" stroke-width="3.5" {round_ends}/>'
