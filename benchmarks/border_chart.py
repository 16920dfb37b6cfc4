"""Draws the results of benchmarks.cascade_border as the text of an SVG file: a point per forest."""

from collections.abc import Iterator, Sequence
from math import log

from benchmarks.cascade_border import DTYPES, Row
from benchmarks.svg import GRID, INK, figure, text

TITLE = "Sharing a prefix on an H200, as a part of flat decode's time (lower is better)"
NOTES = (
    "A point is a forest near the border between the two, timed both ways; in order of that part.",
    "Blue: the planner shares its prefixes. Orange: it decodes flat.",
)
SHARED, FLAT = "#0072B2", "#E69F00"
HEIGHT, LEFT, TOP, PANEL_WIDTH, PANEL_GAP, PANEL_HEIGHT = 420, 60, 110, 360, 50, 270  # px
LOWEST, HIGHEST = 0.4, 1.6
TICKS = (0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6)


def draw(rows: Sequence[Row]) -> str:
    """Return the figure as the text of an SVG file."""
    parts: list[str] = []
    for number, dtype in enumerate(DTYPES):
        left = LEFT + number * (PANEL_WIDTH + PANEL_GAP)
        parts += _panel([row for row in rows if row.dtype == dtype], dtype, left)
    return figure(TITLE, NOTES, HEIGHT, parts)


def _panel(rows: Sequence[Row], dtype: str, left: float) -> Iterator[str]:
    """Yield the points of one kind of pool, and the lines behind them."""
    yield text(left, TOP - 10, f"{dtype}, {len(rows)} forests")
    for tick in TICKS:
        stroke = f'stroke="{INK if tick == 1.0 else GRID}"'
        yield f'<path d="M{left} {_y(tick):.1f}h{PANEL_WIDTH}" {stroke}/>'
        yield text(left - 6, _y(tick) + 4, str(tick), anchor="end")
    ordered = sorted(rows, key=_part)
    for number, row in enumerate(ordered):
        x = left + PANEL_WIDTH * (number + 0.5) / len(ordered)
        y = _y(min(max(_part(row), LOWEST), HIGHEST))
        times = f"{row.cascade_us:.1f} us, flat {row.flat_us:.1f} us"
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{SHARED if row.is_shared else FLAT}">'
            f"<title>{row.forest}, {row.num_requests} requests: {times}</title></circle>"
        )


def _part(row: Row) -> float:
    return row.cascade_us / row.flat_us


def _y(part: float) -> float:
    return TOP + PANEL_HEIGHT * log(HIGHEST / part) / log(HIGHEST / LOWEST)
