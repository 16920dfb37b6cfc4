"""Draws what benchmarks.cascade_border has timed as an SVG file: a point for each forest.

python -m benchmarks.border_chart --results benchmarks/results/cascade-border-h200.json \
    --out docs/figures/cascade-border-h200.svg
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from html import escape
from math import log
from pathlib import Path

from benchmarks.bar_chart import BACKGROUND, GRID, INK
from benchmarks.cascade_border import DTYPES, Row

TITLE = "Sharing a prefix on an H200, as a part of flat decode's time (lower is better)"
NOTES = (
    "A point is a forest near the border between the two, timed both ways; in order of that part.",
    "Blue: the planner shares its prefix. Orange: it decodes flat.",
)
SHARED, FLAT = "#0072B2", "#E69F00"
WIDTH, HEIGHT, LEFT, TOP, PANEL_WIDTH, PANEL_GAP, PANEL_HEIGHT = 860, 420, 60, 110, 360, 50, 270
LOWEST, HIGHEST = 0.4, 1.6
TICKS = (0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6)


def draw(rows: Sequence[Row]) -> str:
    """Return the figure as the text of an SVG file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(TITLE)}</title>",
        f'<rect width="100%" height="100%" fill="{BACKGROUND}"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold">{escape(TITLE)}</text>',
        *(
            f'<text x="16" y="{48 + 17 * line}">{escape(note)}</text>'
            for line, note in enumerate(NOTES)
        ),
    ]
    for number, dtype in enumerate(DTYPES):
        left = LEFT + number * (PANEL_WIDTH + PANEL_GAP)
        parts += _panel([row for row in rows if row.dtype == dtype], dtype, left)
    return "\n".join([*parts, "</svg>\n"])


def _panel(rows: Sequence[Row], dtype: str, left: float) -> Iterator[str]:
    """Yield the points of one kind of pool, and the lines behind them."""
    yield f'<text x="{left}" y="{TOP - 10}">{dtype}, {len(rows)} forests</text>'
    for tick in TICKS:
        stroke = f'stroke="{INK if tick == 1.0 else GRID}"'
        yield f'<path d="M{left} {_y(tick):.1f}h{PANEL_WIDTH}" {stroke}/>'
        yield f'<text x="{left - 6}" y="{_y(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
    ordered = sorted(rows, key=_part)
    for number, row in enumerate(ordered):
        x = left + PANEL_WIDTH * (number + 0.5) / len(ordered)
        y = _y(min(max(_part(row), LOWEST), HIGHEST))
        sizes = f"{row.batch} requests share {row.shared} tokens, {row.own} of their own"
        times = f"{row.cascade_us:.1f} us, flat {row.flat_us:.1f} us"
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{SHARED if row.is_shared else FLAT}">'
            f"<title>{sizes}: {times}</title></circle>"
        )


def _part(row: Row) -> float:
    return row.cascade_us / row.flat_us


def _y(part: float) -> float:
    return TOP + PANEL_HEIGHT * log(HIGHEST / part) / log(HIGHEST / LOWEST)


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="of benchmarks.cascade_border")
    parser.add_argument("--out", type=Path, required=True, help="SVG file to write")
    arguments = parser.parse_args()
    try:
        rows = [Row(**row) for row in json.loads(arguments.results.read_text())]
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"{arguments.results}: {error}")
    arguments.out.write_text(draw(rows))


if __name__ == "__main__":
    main()
