"""Draws the figures of the concept pages as SVG files (make docs).

Each figure brings a light and a dark set of colours, and takes the one that its page asks for.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[1] / "figures"
# class |-> (fill, stroke, text), light and dark
COLOURS = {
    "router": (("#EDE7F6", "#5E35B1", "#311B92"), ("#2E2447", "#B39DDB", "#EDE7F6")),
    "prefill": (("#E3F2FD", "#0072B2", "#003F63"), ("#12304A", "#7CC4F5", "#E3F2FD")),
    "decode": (("#FFF3E0", "#B85C00", "#663300"), ("#46290A", "#F5B061", "#FFF3E0")),
    "shared": (("#DDF3EA", "#00805A", "#004D36"), ("#0F3B2D", "#63D3AB", "#DDF3EA")),
    "plain": (("#F5F5F5", "#757575", "#222222"), ("#2A2D34", "#9AA0A6", "#E8EAED")),
    "idle": (("#FFFFFF", "#9E9E9E", "#616161"), ("#1B1D22", "#70757A", "#BDC1C6")),
}
INK = ("#222222", "#E8EAED")
SOFT = ("#5F6368", "#BDC1C6")


def _rules(which: int) -> str:
    rules = [
        f"text{{fill:{INK[which]}}}.soft{{fill:{SOFT[which]}}}",
        f".line{{stroke:{INK[which]};fill:none}}.head{{fill:{INK[which]}}}",
        f".faint{{stroke:{SOFT[which]};fill:none}}",
    ]
    for name, themes in COLOURS.items():
        fill, stroke, ink = themes[which]
        rules.append(f".{name}{{fill:{fill};stroke:{stroke}}}text.{name}-ink{{fill:{ink}}}")
        rules.append(f".{name}-line{{stroke:{stroke};fill:none}}.{name}-head{{fill:{stroke}}}")
    return "".join(rules)


class Drawing:
    """A figure as a list of parts; x and y are px from its upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f"<style>{_rules(0)}@media (prefers-color-scheme: dark){{{_rules(1)}}}</style>",
        ]

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])

    def box(
        self, x: float, y: float, w: float, h: float, kind: str, *lines: str, dashed: bool = False
    ) -> None:
        """Draw a box with lines of text in its middle, the first of several in bold."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" stroke-width="1.5" '
            f'class="{kind}"{dash}/>'
        )
        top = y + h / 2 - 8 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            bold = len(lines) > 1 and number == 0
            self.text(
                x + w / 2, top + 16 * number, line, anchor="middle", bold=bold, style=f"{kind}-ink"
            )

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        anchor: str = "start",
        bold: bool = False,
        style: str = "",
    ) -> None:
        """Write a line."""
        weight = ' font-weight="bold"' if bold else ""
        name = f' class="{style}"' if style else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}{name}>'
            f"{escape(content)}</text>"
        )

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        kind: str = "",
        width: float = 1.5,
        dashed: bool = False,
    ) -> None:
        """Draw an arrow from one point to another."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        bx, by = x2 - 9 * ux, y2 - 9 * uy
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        name = f"{kind}-" if kind else ""
        self._parts.append(
            f'<path d="M{x1:g} {y1:g}L{bx:.1f} {by:.1f}" class="{name}line" '
            f'stroke-width="{width}"{dash}/>'
        )
        half = 3.5 + width / 2
        self._parts.append(
            f'<path d="M{x2:g} {y2:g}L{bx - half * uy:.1f} {by + half * ux:.1f}'
            f'L{bx + half * uy:.1f} {by - half * ux:.1f}z" class="{name}head"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "faint") -> None:
        """Draw a line."""
        self._parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="{style}"/>')


def overview() -> Drawing:
    """Client, router and both pools, numbered as in the README."""
    d = Drawing(
        860, 270, "A request goes to a router and a decode worker; pages come from a prefill worker"
    )
    d.box(10, 40, 110, 60, "plain", "client", "gRPC or HTTP")
    d.box(250, 40, 150, 60, "router", "router", "tokenizes, places")
    d.box(
        600,
        25,
        250,
        90,
        "decode",
        "decode worker",
        "owns the request",
        "reads a shared prefix once",
    )
    d.box(600, 185, 250, 70, "prefill", "prefill worker", "computes a prefix once")
    d.arrow(120, 60, 250, 60)
    d.text(185, 52, "1  prompt", anchor="middle")
    d.arrow(250, 86, 120, 86)
    d.text(185, 104, "6  text", anchor="middle")
    d.arrow(400, 50, 600, 50)
    d.text(500, 42, "2  tokens, candidates", anchor="middle")
    d.arrow(600, 92, 400, 92)
    d.text(500, 110, "5  one message a step", anchor="middle")
    d.arrow(650, 115, 650, 185)
    d.text(640, 155, "3  Prefill: only the missing pages", anchor="end")
    for number in range(3):
        d.box(716 + 18 * number, 145, 14, 14, "shared")
    d.arrow(740, 185, 740, 115, kind="shared", width=3)
    d.text(785, 157, "4  pages", bold=True)
    return d


def page() -> Drawing:
    """A request's page table, the pool, and what a page holds."""
    d = Drawing(
        860, 300, "A page table names pages of the pool; a page holds keys and values of all layers"
    )
    d.text(20, 28, "page table of a request", bold=True)
    ids = (7, 2, 9)
    for row, (tokens, number) in enumerate(zip(("0-63", "64-127", "128-150"), ids, strict=True)):
        y = 44 + 44 * row
        d.box(20, y, 110, 34, "plain", f"tokens {tokens}")
        d.box(130, y, 60, 34, "shared", f"page {number}")
    d.text(20, 200, "the last page is not full:", style="soft")
    d.text(20, 217, "23 of its 64 slots are valid", style="soft")
    d.text(270, 28, "page pool of one GPU", bold=True)
    for number in range(12):
        x, y = 270 + 56 * (number % 4), 44 + 56 * (number // 4)
        kind = "shared" if number in ids else "idle"
        d.box(x, y, 48, 48, kind, str(number), dashed=kind == "idle")
    d.arrow(190, 61, 434, 116, kind="shared")
    d.arrow(190, 105, 380, 76, kind="shared")
    d.arrow(190, 149, 324, 174, kind="shared")
    d.text(560, 28, "one page, contiguous in memory", bold=True)
    for row, layer in enumerate(("layer 0", "layer 1", "…", "layer 31")):
        y = 44 + 40 * row
        d.text(560, y + 21, layer)
        if layer != "…":
            d.box(625, y, 105, 32, "prefill", "keys")
            d.box(735, y, 105, 32, "decode", "values")
    d.text(560, 224, "64 token slots in each")
    d.text(560, 242, "8 MiB for Llama-3-8B in bfloat16")
    d.text(270, 240, "allocated, shared and moved as a whole", style="soft")
    d.text(20, 280, "page_size tokens a page: 16, 32, 64 or 128", style="soft")
    return d


def prefix() -> Drawing:
    """A radix tree of pages that three requests share."""
    d = Drawing(860, 300, "A radix tree: requests with equal beginnings share the pages of these")
    d.text(20, 28, "radix tree of a worker: an edge is a run of full pages", bold=True)
    for number in range(4):
        d.box(20 + 62 * number, 130, 56, 36, "shared", f"page {number}")
    d.text(20, 190, "system prompt and document,", style="soft")
    d.text(20, 207, "computed once", style="soft")
    rows = (
        (60, "A", ("4", "5"), "question A"),
        (130, "B", ("6",), "question B"),
        (200, "C", ("7", "8", "9"), "question C, in two turns"),
    )
    for y, name, pages, caption in rows:
        d.arrow(266, 148, 330, y + 18, kind="shared")
        for number, each in enumerate(pages):
            d.box(334 + 62 * number, y, 56, 36, "plain", f"page {each}")
        end = 334 + 62 * len(pages)
        d.box(end, y, 56, 36, "idle", "partial", dashed=True)
        d.text(end + 66, y + 22, f"request {name}: {caption}")
    d.text(
        334, 268, "A partial last page belongs to one request and is never shared.", style="soft"
    )
    d.text(334, 286, "A page that nobody reads stays until its slots are needed.", style="soft")
    return d


def transfer() -> Drawing:
    """What moves, and that it moves while the next chunk is computed."""
    d = Drawing(
        860, 340, "Only missing pages move, chunk by chunk, while the next chunk is computed"
    )
    d.text(20, 28, "what moves", bold=True)
    d.text(20, 66, "prefill worker")
    d.text(20, 136, "decode worker")
    for number in range(8):
        x = 150 + 84 * number
        cached = number < 3
        d.box(x, 44, 74, 36, "prefill" if cached else "shared", "cached" if cached else "computed")
        d.box(
            x,
            114,
            74,
            36,
            "decode" if cached else "idle",
            "cached" if cached else "INCOMING",
            dashed=not cached,
        )
        if not cached:
            d.arrow(x + 37, 80, x + 37, 114, kind="shared", width=2.5)
    d.text(20, 190, "when it moves", bold=True)
    for row, name in enumerate(("prefill computes", "pages move", "decode verifies")):
        d.text(20, 224 + 36 * row, name)
    for chunk in range(4):
        d.box(150 + 130 * chunk, 204, 122, 28, "prefill", f"chunk {chunk + 1}")
        d.box(280 + 130 * chunk, 240, 70, 28, "shared", f"chunk {chunk + 1}")
        d.box(352 + 130 * chunk, 276, 56, 28, "decode", "digest")
    d.box(700, 204, 146, 28, "router", "first token leaves")
    d.text(
        150,
        330,
        "A chunk is committed when all its digests match. A failure repeats only the rest.",
        style="soft",
    )
    return d


def cascade() -> Drawing:
    """What a step of decode reads, flat and as a cascade."""
    d = Drawing(
        860, 310, "Flat attention reads a shared prefix for each request; cascade reads it once"
    )
    d.text(20, 28, "flat: each request reads its whole context", bold=True)
    d.text(450, 28, "cascade: the shared pages are read once", bold=True)
    for row, name in enumerate("ABCD"):
        y = 48 + 44 * row
        d.text(20, y + 20, name, bold=True)
        d.box(44, y, 250, 30, "shared", "shared prefix")
        d.box(298, y, 70, 30, "plain", "own")
    d.box(
        474, 48, 200, 162, "shared", "shared prefix", "level 0: one read,", "queries of A, B, C, D"
    )
    for row, name in enumerate("ABCD"):
        y = 48 + 44 * row
        d.text(452, y + 20, name, bold=True)
        d.arrow(674, y + 15, 700, y + 15)
        d.box(704, y, 60, 30, "plain", "own")
        d.text(772, y + 20, "merged")
    d.text(20, 246, "reads 4 * (shared + own)")
    d.text(452, 246, "reads 1 * shared + 4 * own, in one step of decode")
    d.text(
        20,
        282,
        "Both give the same bits: keys are cut and folded at fixed positions of the request.",
        style="soft",
    )
    d.text(
        20,
        300,
        "The planner takes the way that it estimates to be faster, for each run of shared pages.",
        style="soft",
    )
    return d


def run_ahead() -> Drawing:
    """Host and device, one step after the other and one step ahead."""
    d = Drawing(
        860, 300, "Run-ahead: the host launches a step before it reads the tokens of the one before"
    )
    d.text(
        20, 28, "one by one: the device waits while the host reads, plans and launches", bold=True
    )
    d.text(20, 66, "host")
    d.text(20, 106, "device")
    for step in range(3):
        x = 80 + 250 * step
        d.box(x, 46, 90, 30, "router", "plan, launch")
        d.box(x + 90, 86, 130, 30, "decode", f"step {step + 1}")
        d.box(x + 222, 46, 26, 30, "plain", "…")
        d.box(x + 4, 86, 82, 30, "idle", "idle", dashed=True)
    d.text(20, 168, "run-ahead: step 2 is in the device's queue before step 1 ends", bold=True)
    d.text(20, 206, "host")
    d.text(20, 246, "device")
    d.box(80, 186, 80, 30, "router", "launch 1")
    d.box(164, 186, 80, 30, "router", "launch 2")
    for step in range(5):
        d.box(170 + 130 * step, 226, 128, 30, "decode", f"step {step + 1}")
    for step in range(3):
        d.box(300 + 130 * step, 186, 46, 30, "plain", f"read {step + 1}")
        d.box(350 + 130 * step, 186, 72, 30, "router", f"launch {step + 3}")
    d.text(
        80,
        284,
        "A sequence that ends by a stop token leaves one superfluous row; nobody reads its token.",
        style="soft",
    )
    return d


def request() -> Drawing:
    """A request's messages in order."""
    d = Drawing(860, 700, "Sequence of a request: client, router, decode worker, prefill worker")
    columns = {"C": 70, "R": 290, "D": 540, "P": 790}
    names = (
        ("C", "plain", "client"),
        ("R", "router", "router"),
        ("D", "decode", "decode worker"),
        ("P", "prefill", "prefill worker"),
    )
    for name, kind, title in names:
        d.box(columns[name] - 62, 10, 124, 34, kind, title)
        d.line(columns[name], 44, columns[name], 690)
    rows = (
        (80, "C", "R", "Generate(prompt, sampling)", False),
        (150, "R", "D", "submit(tokens, candidates)", False),
        (220, "D", "P", "Prefill(ticket, first missing page)", False),
        (290, "P", "D", "result: the first token", True),
        (316, "D", "R", "first token", True),
        (342, "R", "C", "text", True),
        (400, "P", "D", "ChunkReady", True),
        (428, "D", "P", "ChunkGo", False),
        (456, "P", "D", "ChunkPosted(digests)", True),
        (488, "P", "D", "pages: CUDA IPC, NCCL or TCP", True),
        (548, "D", "P", "ChunkAck: the lease ends", False),
        (610, "D", "R", "each step: all new tokens", True),
        (636, "R", "C", "text and tokens", True),
        (676, "D", "R", "finish reason, account", True),
    )
    for y, start, end, label, is_answer in rows:
        x1, x2 = columns[start], columns[end]
        is_pages = label.startswith("pages")
        d.arrow(
            x1,
            y,
            x2,
            y,
            kind="shared" if is_pages else "",
            width=4 if is_pages else 1.5,
            dashed=is_answer and not is_pages,
        )
        d.text((x1 + x2) / 2, y - 6, label, anchor="middle", bold=is_pages)
    notes = (
        (92, "R", "router", "validate, tokenize, hash pages, choose workers"),
        (162, "D", "decode", "match own cache, reserve the missing pages"),
        (232, "P", "prefill", "match own cache, compute the rest in chunks"),
        (500, "D", "decode", "verify the digests, commit the pages"),
    )
    for y, name, kind, text in notes:
        width = 7.0 * len(text) + 16
        x = min(max(columns[name] - width / 2, 5), 855 - width)
        d.box(x, y, width, 26, kind, text)
    d.text(300, 388, "for each chunk of pages:", bold=True)
    d.text(300, 584, "for each engine step:", bold=True)
    return d


def trace() -> Drawing:
    """Draw the spans of one request, as a cluster on two CPU cores sent them."""
    d = Drawing(860, 292, "The spans of one request, from router to prefill worker")
    spans = (  # name, where, kind, from and to in ms, event and when
        ("generate", "router-0", "router", 0, 4743, ("first token", 2655)),
        ("attempt", "router-0", "router", 4, 4743, None),
        ("decode", "decode-0", "decode", 5, 4741, None),
        ("receive", "decode-0", "decode", 6, 2885, ("first token", 2653)),
        ("prefill", "prefill-0", "prefill", 11, 2884, ("computed", 2651)),
    )
    left, scale = 190, 650 / 4743
    for second in range(5):
        x = left + 1000 * second * scale
        d.line(x, 30, x, 240)
        d.text(x, 22, f"{second} s", anchor="middle", style="soft")
    for row, (name, where, kind, start, end, event) in enumerate(spans):
        y = 38 + 40 * row
        d.text(20 + 12 * row, y + 19, name, bold=True)
        d.text(182, y + 19, where, anchor="end", style="soft")
        d.box(left + start * scale, y, (end - start) * scale, 28, kind)
        if event is not None:
            what, when = event
            x = left + when * scale
            d.line(x, y, x, y + 28, style="line")
            d.text(x - 6, y + 19, what, anchor="end", style=f"{kind}-ink")
    d.text(
        20,
        270,
        "986 prompt tokens computed by prefill-0, 16 pages moved, 24 tokens decoded; "
        "SmolLM2-135M on two busy CPU cores",
        style="soft",
    )
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "overview": overview,
    "page": page,
    "prefix": prefix,
    "transfer": transfer,
    "cascade-levels": cascade,
    "run-ahead": run_ahead,
    "request": request,
    "trace": trace,
}


def main() -> None:
    """Write all figures."""
    for name, draw in DRAWINGS.items():
        (FIGURES / f"{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
