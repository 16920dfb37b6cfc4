"""The tables of `pagewire status`: workers, pages and hit rates."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from pagewire import ClusterStatus, Encryption, TenantStatus, WorkerStatus
from pagewire.cli.rates import Rates
from pagewire.cli.units import format_bytes, format_count, format_rate
from pagewire.protos.pem import utc

STATE_STYLES = {"ready": "green", "connecting": "yellow", "draining": "yellow", "dead": "red"}
SOON_S = 7 * 86_400  # a certificate that expires within this time should have been renewed
STOPPING = "the cluster is being stopped; run `pagewire down` again"


def status_table(
    status: ClusterStatus, rates: Rates | None = None, *, is_wide: bool = False
) -> RenderableType:
    """Draw a router's view: the most important part in 80 columns, or all of it in about 165.

    A dead worker has no numbers: its last ones are out of date.

    Args:
        rates: Recent growth of the totals in the table, if known.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    columns = _WIDE if is_wide else _NARROW
    for name in columns:
        # Folded, never cut: in a narrow terminal, rows grow higher.
        justify: JustifyMethod = "left" if name in _IDENTITY else "right"
        table.add_column(name, justify=justify, overflow="fold", vertical="bottom")
    for worker in sorted(status.workers, key=lambda each: (each.pool, each.worker_id)):
        shown = columns if worker.is_living else _IDENTITY
        table.add_row(*(cell(worker) if name in shown else "-" for name, cell in columns.items()))
    summary = (
        f"requests: {status.active_requests} active, {status.finished_requests} finished, "
        f"{status.resumed_requests} resumed · pages in the index: {status.index_pages}"
    )
    # Only operators see workers and the index.
    parts: list[RenderableType] = [] if status.is_partial else [table, Text(summary)]
    if rates and not status.is_partial:
        parts.append(Text(rates_line(rates)))
    if status.front_tls and status.cluster_tls:
        parts.append(_connections(status.front_tls, status.cluster_tls))
    if status.tenants:
        parts.append(_tenants_table(status.tenants))
    for each in status.workers:
        if each.misfit:
            parts.append(Text(f"{each.worker_id} gets no requests: {each.misfit}", "red"))
    if status.is_stopping:
        parts.append(Text(STOPPING, "yellow"))
    return Group(*parts)


def _connections(front: Encryption, cluster: Encryption) -> Text:
    """Say how connections are protected, and until when."""
    told = Text()
    for name, each in (("clients", front), ("within the cluster", cluster)):
        told.append(f"{' · ' if told else ''}{name}: ")
        if not each.encrypted:
            told.append("in clear")
            continue
        told.append("TLS")
        if each.expires_at_s is not None:
            left_s = each.expires_at_s - time.time()
            style = "red" if left_s <= 0 else "yellow" if left_s < SOON_S else ""
            verb = "expired" if left_s <= 0 else "until"
            told.append(f", certificate {verb} {utc(each.expires_at_s)}", style)
    return told


def _tenants_table(tenants: Sequence[TenantStatus]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name, justify in _OF_TENANTS.items():
        table.add_column(name, justify=justify, overflow="fold", vertical="bottom")
    for each in tenants:
        counts = (
            *(each.active_requests, each.requests, each.refused_requests),
            *(each.prompt_tokens, each.generated_tokens),
        )
        table.add_row(Text(each.name), *map(format_count, counts))
    return table


def router_silence(seconds: float) -> str:
    """Return the line for a router that does not answer."""
    return f"the router has not answered for {seconds:.0f} s; asking again"


def rates_line(rates: Rates) -> str:
    """Return the recent rates of a cluster in one line."""
    parts = [
        f"{'-' if rates.requests_per_s is None else format_rate(rates.requests_per_s)} requests/s",
        f"{format_rate(rates.generated_tokens_per_s)} tokens/s",
        f"{format_rate(rates.computed_tokens_per_s)} prompt tokens/s",
    ]
    if rates.hit_rate is not None:
        parts.append(f"hit rate {rates.hit_rate:.0%}")
    if rates.read_share is not None:
        parts.append(f"KV reads {rates.read_share:.0%} of unshared")
    return f"last {rates.seconds:.0f} s: " + " · ".join(parts)


def status_json(status: ClusterStatus) -> str:
    """Return the same as one JSON object, with null for unknown values."""
    content = asdict(status)
    content["workers"] = [_worker_fields(worker) for worker in status.workers]
    return json.dumps(content, indent=2)


def _worker_fields(worker: WorkerStatus) -> dict[str, Any]:
    values = asdict(worker) | {"hit_rate": worker.hit_rate}
    if not worker.is_living:
        values |= dict.fromkeys(values.keys() - _IDENTITY_FIELDS)
    # As in the logs; as a number it is too large for many JSON parsers.
    return values | {"incarnation": f"{worker.incarnation:016x}"}


def _state(worker: WorkerStatus) -> Text:
    return Text(worker.state, STATE_STYLES.get(worker.state, "white"))


def _num_used(worker: WorkerStatus) -> int:
    return worker.pages.total - worker.pages.free


def _num_in_flight(worker: WorkerStatus) -> int:
    return worker.pages.leased + worker.pages.incoming + worker.pages.quarantine


def _read_share(worker: WorkerStatus) -> str:
    needed = worker.attention_needed_bytes
    return f"{worker.attention_read_bytes / needed:.0%}" if needed else "-"


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
    "KV\nread": _read_share,
}
_OF_TENANTS: dict[str, JustifyMethod] = {
    "tenant": "left",
    "active": "right",
    "requests": "right",
    "refused": "right",
    "tokens\nof prompts": "right",
    "tokens\ngenerated": "right",
}
# Known without a heartbeat: columns, and fields of WorkerStatus.
_IDENTITY = {"worker", "state", "address", "incarnation"}
_IDENTITY_FIELDS = {
    *("worker_id", "incarnation", "address", "pool", "state", "misfit", "heartbeat_age_ms")
}
