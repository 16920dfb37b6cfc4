"""Draws tables of measurements that stand in a page alone, because nothing else kept the figures.

An image directly below a table shows it, if it lies in docs/figures/tables. Its text in the page is
the figure's title, and PLOTS says what of the table is drawn.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.dot_chart import Case, DotChart, draw

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLOTTED = re.compile(r"((?:^\|.*\n)+)\n!\[(.+)\]\((?:\.\./)?figures/tables/([\w-]+)\.svg\)", re.M)
# A number and, where it follows, its unit.
VALUE = re.compile(
    r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)(?: (?P<unit>us|ms|s|min|MB|GB)\b)?"
)
# Least and most of several runs, behind their median.
RANGE = re.compile(r"\(([\d.,]+) to ([\d.,]+)\)")
SCALES = {"us": 1.0, "ms": 1e3, "s": 1e6, "min": 6e7, "MB": 1.0, "GB": 1e3}


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlot:
    """What of a table is drawn. Columns and rows are counted from 0, without the heading."""

    unit: str  # of all numbers in cells that name none
    columns: Sequence[int] = ()  # with numbers; (): all but those of names
    rows: Sequence[int] = ()  # (): all
    num_names: int = 1  # columns at the left that name a row
    is_turned: bool = False  # columns are cases and rows are series, instead of the reverse
    is_relative: bool = False  # to the first series, which becomes 100 %
    series: Sequence[str] = ()  # names in place of the table's
    cases: Sequence[str] = ()
    line_at: float | None = None  # as in DotChart, and so is the next
    is_from_zero: bool = False


PLOTS: dict[str, TablePlot] = {
    "torch-linear": TablePlot(unit="ms", is_relative=True),
    "late-prompts": TablePlot(unit="s", is_from_zero=True),
    "short-first": TablePlot(unit="s", is_from_zero=True),
    "moves-following": TablePlot(unit="ms", is_from_zero=True),
    "cascade-memory": TablePlot(
        unit="MB",
        rows=(1, 2),
        is_turned=True,
        cases=(
            "32 rows, 1 Mi keys",
            "64 rows, 64 Ki keys",
            "256 rows, 1 Mi keys",
            "512 rows, 2 Mi keys",
            "1,024 rows, 4 Mi keys",
        ),
        is_from_zero=True,
    ),
    "columns-cost": TablePlot(
        unit="us",
        is_turned=True,
        is_relative=True,
        cases=("router, CPU", "clients, CPU", "worker, CPU", "lateness, p50"),
    ),
    "start-recordings": TablePlot(unit="s", is_from_zero=True),
    "start-processes": TablePlot(
        unit="s", series=("before, least", "before, median", "after, least", "after, median")
    ),
    "row-tails": TablePlot(unit="times torch's time", line_at=1.0),
    "announced-chunks": TablePlot(unit="ms", is_from_zero=True),
    "handed-sums": TablePlot(unit="times torch's time", columns=(2, 3, 4), line_at=1.0),
    "idle-first-token": TablePlot(unit="us", rows=(*range(6), *range(7, 13))),
    "folded-segments": TablePlot(unit="us", is_relative=True),
    "image-sizes": TablePlot(
        unit="MB",
        columns=(1, 2),
        series=("image", "of it, layers that change with Pagewire"),
        is_from_zero=True,
    ),
    "token-columns": TablePlot(unit="us", is_relative=True),
    "shared-attempts": TablePlot(unit="us", num_names=2, is_relative=True),
    "ray-waits": TablePlot(unit="s", columns=(1,)),
    "start-dashboard": TablePlot(
        unit="s",
        rows=(0, 1, 2),
        series=("before, least", "before, median", "after, least", "after, median"),
    ),
    "pages-after-kills": TablePlot(
        unit="ms", columns=(3, 4), num_names=2, series=("median", "most")
    ),
    "transfer-variants": TablePlot(
        unit="ms",
        is_turned=True,
        cases=(
            "pages of 32,768 tokens",
            "pages of 8,192 tokens",
            "chats beside prompts, p50",
            "chats beside prompts, p99",
        ),
    ),
    "recorded-passes": TablePlot(
        unit="ms",
        series=("host, kernel by kernel", "whole pass", "host, recorded", "whole pass, recorded"),
    ),
    "gateway-write": TablePlot(unit="us"),
    "burst-routers": TablePlot(unit="ms", is_turned=True),
    "fused-gate": TablePlot(unit="ms", is_turned=True, is_relative=True),
    "chained-launches": TablePlot(unit="ms", is_turned=True, is_relative=True),
    "chained-launches-further": TablePlot(unit="ms", is_turned=True, is_relative=True),
    "calls-without-tasks": TablePlot(unit="us", num_names=2, is_relative=True),
    "mixed-passes": TablePlot(
        unit="ms",
        num_names=2,
        columns=(2, 3),
        series=("two passes, their sum", "one pass"),
        cases=(
            "16 requests, 1 token",
            "16 requests, 64 tokens",
            "16 requests, 256 tokens",
            "64 requests, 64 tokens",
            "64 requests, 256 tokens",
            "256 requests, 16 tokens",
        ),
    ),
    "burst-python": TablePlot(unit="ms", is_turned=True, is_from_zero=True),
    "cached-prompt-cpu": TablePlot(unit="us"),
    "burst-steps": TablePlot(unit="ms", is_turned=True),
    "client-matrix": TablePlot(unit="ms", is_relative=True),
    "steps-ahead": TablePlot(unit="ms"),
    "trained-model-waves": TablePlot(unit="tokens", rows=(0, 1, 2), is_from_zero=True),
    "wrong-token-ids": TablePlot(unit="texts", is_turned=True),
    "linear-by-weight": TablePlot(
        unit="times torch's time",
        line_at=1.0,
        series=("qkv", "output", "gate_up", "down", "lm_head", "Triton, all four products"),
    ),
    "split-lengths": TablePlot(unit="us", is_turned=True, is_relative=True),
    "fold-variants": TablePlot(unit="us", is_turned=True, is_relative=True),
    "page-layouts": TablePlot(
        unit="us",
        is_turned=True,
        is_relative=True,
        cases=("1x1024", "1x1024, clean cache", "1x4096", "1x4096, clean cache"),
    ),
    "cascade-lanes": TablePlot(unit="us", is_turned=True, is_relative=True),
    "cascade-parts": TablePlot(unit="us"),
    "cascade-one-launch": TablePlot(unit="us", is_relative=True),
    "border-shapes": TablePlot(
        unit="forests, with bfloat16 and fp8 pages",
        columns=(4, 5),
        series=("would gain a tenth or more", "of these shared"),
    ),
    "border-options": TablePlot(
        unit="forests, with bfloat16 and fp8 pages",
        columns=(4, 5),
        series=("would gain a tenth or more", "of these shared"),
    ),
    "two-waves": TablePlot(
        unit="ms",
        columns=(4,),
        cases=(
            "Llama-3-8B's shape, 1 + 1, first wave",
            "again",
            "the demo's, 1 + 1, first wave",
            "again",
            "the demo's, 2 + 2, first wave",
            "again",
            "the demo's, 3 + 1, first wave",
            "again",
        ),
    ),
    "cuda-graphs": TablePlot(
        unit="ms", cases=("1 request", "4 requests", "16 requests", "64 requests", "256 requests")
    ),
    "decode-cycles": TablePlot(unit="cycles", columns=(1, 2, 3, 4)),
    "fold-in-registers": TablePlot(
        unit="us", is_turned=True, is_relative=True, series=("before", "folded in registers")
    ),
    "further-loads": TablePlot(unit="us", is_turned=True, is_relative=True),
    "cheaper-parts": TablePlot(unit="us", is_turned=True, is_relative=True),
    "one-short-request": TablePlot(unit="cycles"),
    "first-cascade": TablePlot(unit="us"),
    "cascade-changes": TablePlot(unit="us"),
    "decode-and-read": TablePlot(unit="us", columns=(1, 3, 5, 6)),
    "decode-changes": TablePlot(unit="us", is_turned=True, is_relative=True),
    "first-decode-changes": TablePlot(unit="us", is_turned=True, is_relative=True),
    "prefill-attention": TablePlot(unit="TFLOP/s", is_from_zero=True),
    "sampling": TablePlot(unit="us", columns=(1, 2, 3, 4), series=("batch 1", "32", "128", "256")),
    "demo-waves": TablePlot(unit="tokens", rows=(0, 1, 2), is_from_zero=True),
}


def plot(name: str) -> str:
    """Return a plot as the text of an SVG file.

    Raises:
        KeyError: If no page shows it below a table.
    """
    title, table = _tables()[name]
    return draw(chart_of(title, table, PLOTS[name]))


def chart_of(title: str, table: str, how: TablePlot) -> DotChart:
    """Return what a table in Markdown shows."""
    heading, _, *lines = [_cells(line) for line in table.strip().splitlines()]
    columns = how.columns or range(how.num_names, len(heading))
    rows = [lines[row] for row in how.rows] if how.rows else lines
    values = [[_values(row[column], how.unit) for column in columns] for row in rows]
    series = [heading[column].removesuffix(f", {how.unit}") for column in columns]
    cases = _names(rows, how.num_names)
    if how.is_turned:
        values = [list(column) for column in zip(*values, strict=True)]
        series, cases = cases, series
    series, cases = list(how.series or series), list(how.cases or cases)
    unit, line_at = how.unit, how.line_at
    if how.is_relative:
        values = [_relative(row) for row in values]
        unit, line_at = f'% of "{series.pop(0)}"', 100.0
    return DotChart(
        title=title,
        unit=unit,
        series=tuple(series),
        cases=tuple(
            Case(name=case, values=tuple(row))
            for case, row in zip(cases, values, strict=True)
            if any(row)
        ),
        line_at=line_at,
        is_from_zero=how.is_from_zero,
    )


@cache
def _tables() -> dict[str, tuple[str, str]]:
    """Return the titles and tables of all pages that have a plot, by its name."""
    return {
        found[3]: (found[2], found[1])
        for page in sorted(DOCS.rglob("*.md"))
        for found in PLOTTED.finditer(page.read_text(encoding="utf-8"))
    }


def _cells(line: str) -> list[str]:
    """Return the texts of a row, without marks for emphasis and code."""
    return [cell.strip().replace("`", "").replace("**", "") for cell in line.split("|")[1:-1]]


def _names(rows: Sequence[Sequence[str]], num_names: int) -> list[str]:
    """Return the rows' names; where the first of several cells is empty, that above holds."""
    names, above = [], ""
    for row in rows:
        above = row[0] or above
        names.append(", ".join(each for each in (above, *row[1:num_names]) if each))
    return names


def _values(cell: str, unit: str) -> tuple[float, ...]:
    """Return the numbers of a cell, in a unit; those in brackets only if they are a range."""
    cell = re.sub(r"\(.*?\)", "", RANGE.sub(r"; \1; \2", cell))
    return tuple(
        float(found["number"].replace(",", "")) * SCALES.get(found["unit"], 1.0) / scale
        for found in VALUE.finditer(cell)
        for scale in [SCALES[unit] if found["unit"] else 1.0]
    )


def _relative(row: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return all series but the first as percents of it; none where it was not measured."""
    first, *others = row
    if not first:
        return [() for _ in others]
    return [tuple(100 * each / median(first) for each in values) for values in others]
