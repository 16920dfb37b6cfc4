"""The table of `pagewire status`: workers, pages and hit rates."""

import json
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagewire import ClusterStatus, WorkerStatus

STATE_STYLES = {"ready": "green", "connecting": "yellow", "draining": "yellow", "dead": "red"}


def status_table(status: ClusterStatus) -> RenderableType:
    """Draw what a router knows."""
    table = Table(title="Workers", title_justify="left")
    for name in ("worker", "state", "address", "incarnation"):
        table.add_column(name)
    for name in ("running", "waiting", "pages used", "cached", "in flight", "hit rate"):
        table.add_column(name, justify="right")
    for name in ("computed tokens", "generated", "pages moved", "moved"):
        table.add_column(name, justify="right")
    for worker in sorted(status.workers, key=lambda each: (each.pool, each.worker_id)):
        table.add_row(*_cells(worker))
    summary = (
        f"active requests {status.active_requests} · finished {status.finished_requests} · "
        f"resumed {status.resumed_requests} · pages in the router's index {status.index_pages}"
    )
    return Group(table, Text(summary))


def status_json(status: ClusterStatus) -> str:
    """Return the same as one JSON object."""
    content = asdict(status)
    for values, worker in zip(content["workers"], status.workers, strict=True):
        values["hit_rate"] = worker.hit_rate
    return json.dumps(content, indent=2)


def format_bytes(num_bytes: int) -> str:
    """Return a size for people: 1536 is 1.5 KiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _cells(worker: WorkerStatus) -> list[str]:
    pages = worker.pages
    in_flight = pages.leased + pages.incoming + pages.quarantine
    style = STATE_STYLES.get(worker.state, "white")
    return [
        worker.worker_id,
        f"[{style}]{worker.state}[/]",
        worker.address,
        f"{worker.incarnation:016x}",
        str(worker.running),
        str(worker.waiting),
        f"{pages.total - pages.free}/{pages.total}",
        str(pages.cached),
        str(in_flight),
        f"{worker.hit_rate:.0%}",
        str(worker.computed_tokens),
        str(worker.generated_tokens),
        str(worker.pages_moved),
        format_bytes(worker.bytes_moved),
    ]
