"""The tables of `pagewire status`: workers, pages and hit rates."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from pagewire import ClusterStatus, WorkerStatus
from pagewire.cli.rates import Rates
from pagewire.cli.units import format_bytes, format_count, format_rate

STATE_STYLES = {"ready": "green", "connecting": "yellow", "draining": "yellow", "dead": "red"}
STOPPING = "the cluster is being stopped; run `pagewire down` again"


def status_table(
    status: ClusterStatus, rates: Rates | None = None, *, is_wide: bool = False
) -> RenderableType:
    """Draw what a router knows: what matters most in 80 columns, or all of it in about 165.

    Of a worker that does not live the numbers are unknown: its last ones say nothing any more.

    Args:
        rates: What the sums of the table grew by lately, where that is known.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    columns = _WIDE if is_wide else _NARROW
    for name in columns:
        # Folded, never cut: where the terminal is too narrow, a row grows higher.
        justify: JustifyMethod = "left" if name in _IDENTITY else "right"
        table.add_column(name, justify=justify, overflow="fold", vertical="bottom")
    for worker in sorted(status.workers, key=lambda each: (each.pool, each.worker_id)):
        shown = columns if worker.is_living else _IDENTITY
        table.add_row(*(cell(worker) if name in shown else "-" for name, cell in columns.items()))
    summary = (
        f"requests: {status.active_requests} active, {status.finished_requests} finished, "
        f"{status.resumed_requests} resumed · pages in the index: {status.index_pages}"
    )
    lines = [Text(summary)]
    if rates:
        lines.append(Text(rates_line(rates)))
    if status.is_stopping:
        lines.append(Text(STOPPING, "yellow"))
    return Group(table, *lines)


def router_silence(seconds: float) -> str:
    """Return the line for a router that does not answer."""
    return f"the router has not answered for {seconds:.0f} s; asking again"


def rates_line(rates: Rates) -> str:
    """Return the rates of a cluster in one line: what its sums grew by lately."""
    parts = [
        f"{'-' if rates.requests_per_s is None else format_rate(rates.requests_per_s)} requests/s",
        f"{format_rate(rates.generated_tokens_per_s)} tokens/s",
        f"{format_rate(rates.computed_tokens_per_s)} prompt tokens/s",
    ]
    if rates.hit_rate is not None:
        parts.append(f"hit rate {rates.hit_rate:.0%}")
    return f"last {rates.seconds:.0f} s: " + " · ".join(parts)


def status_json(status: ClusterStatus) -> str:
    """Return the same as one JSON object, with null for what is unknown."""
    content = asdict(status)
    content["workers"] = [_worker_fields(worker) for worker in status.workers]
    return json.dumps(content, indent=2)


def _worker_fields(worker: WorkerStatus) -> dict[str, Any]:
    values = asdict(worker) | {"hit_rate": worker.hit_rate}
    if not worker.is_living:
        values |= dict.fromkeys(values.keys() - _IDENTITY_FIELDS)
    # As in the logs; as a number it is more than many readers of JSON can hold.
    return values | {"incarnation": f"{worker.incarnation:016x}"}


def _state(worker: WorkerStatus) -> Text:
    return Text(worker.state, STATE_STYLES.get(worker.state, "white"))


def _num_used(worker: WorkerStatus) -> int:
    return worker.pages.total - worker.pages.free


def _num_in_flight(worker: WorkerStatus) -> int:
    return worker.pages.leased + worker.pages.incoming + worker.pages.quarantine


# header |-> cell
_Columns = dict[str, Callable[[WorkerStatus], RenderableType]]
_NARROW: _Columns = {
    "worker": lambda w: Text(w.worker_id),
    "state": _state,
    "running\n+waiting": lambda w: f"{format_count(w.running)}+{format_count(w.waiting)}",
    "pages\nused": lambda w: f"{format_count(_num_used(w))}/{format_count(w.pages.total)}",
    "hit\nrate": lambda w: f"{w.hit_rate:.0%}",
    "tokens\ncomputed": lambda w: format_count(w.computed_tokens),
    "tokens\ngenerated": lambda w: format_count(w.generated_tokens),
    "moved": lambda w: format_bytes(w.bytes_moved),
}
_WIDE: _Columns = {
    "worker": lambda w: Text(w.worker_id),
    "state": _state,
    "address": lambda w: Text(w.address),
    "incarnation": lambda w: f"{w.incarnation:016x}",
    "running": lambda w: str(w.running),
    "waiting": lambda w: str(w.waiting),
    "pages\nused": lambda w: f"{_num_used(w)}/{w.pages.total}",
    "pages\ncached": lambda w: str(w.pages.cached),
    "pages\nin flight": lambda w: str(_num_in_flight(w)),
    "hit\nrate": lambda w: f"{w.hit_rate:.0%}",
    "tokens\ncomputed": lambda w: str(w.computed_tokens),
    "tokens\ngenerated": lambda w: str(w.generated_tokens),
    "pages\nmoved": lambda w: str(w.pages_moved),
    "moved": lambda w: format_bytes(w.bytes_moved),
}
# What no heartbeat tells: columns, and fields of WorkerStatus.
_IDENTITY = {"worker", "state", "address", "incarnation"}
_IDENTITY_FIELDS = {"worker_id", "incarnation", "address", "pool", "state", "heartbeat_age_ms"}
