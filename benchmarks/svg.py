"""The frame of a figure and its texts, as parts of an SVG file; without a library."""

from collections.abc import Iterable, Sequence
from html import escape
from math import floor, log10

# Stated, so that a page's dark theme changes neither.
BACKGROUND, INK, GRID = "#FFFFFF", "#222222", "#CCCCCC"
WIDTH, NOTES_TOP, LINE_HEIGHT = 860, 48, 17  # px


def figure(title: str, notes: Sequence[str], height: int, parts: Iterable[str]) -> str:
    """Return a figure as the text of an SVG file.

    Args:
        title: Heading.
        notes: Lines below the title.
        height: px.
        parts: What stands below.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" fill="{BACKGROUND}"/>',
        text(16, 26, title, style='font-size="16" font-weight="bold"'),
        *(text(16, NOTES_TOP + LINE_HEIGHT * line, note) for line, note in enumerate(notes)),
        *parts,
    ]
    return "\n".join([*lines, "</svg>\n"])


def tick_step(length: float) -> float:
    """Return a distance of ticks of which at most six fill a length above 0."""
    power = 10.0 ** floor(log10(length))
    return next(each for each in (power / 5, power / 2, power, 2 * power) if length / each <= 6)


def text(x: float, y: float, content: str, *, anchor: str = "start", style: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(content)}</text>'
