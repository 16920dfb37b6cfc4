"""The tables of `pagewire status`: workers, pages and hit rates."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from pagewire import ClusterStatus, Encryption, TenantStatus, WorkerStatus
from pagewire.cli.controller_view import RouterSilent
from pagewire.cli.rates import Rates
from pagewire.cli.units import format_bytes, format_count, format_rate
from pagewire.protos.pem import utc

# Of workers in a router's view, and then in a controller's.
STATE_STYLES = {"ready": "green", "connecting": "yellow", "draining": "yellow", "dead": "red"}
STATE_STYLES |= {"alive": "green", "leaving": "yellow", "silent": "red"}
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
    columns = _WIDE if is_wide else _NARROW
    table = _table({name: "left" if name in _IDENTITY else "right" for name in columns})
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
    parts += [Text(line, "red") for line in silences(status)]
    if status.is_stopping:
        parts.append(Text(STOPPING, "yellow"))
    return Group(*parts)


def silences(status: ClusterStatus) -> list[str]:
    """Return a line for each member that does not answer or is a misfit; empty: all answer.

    An earlier start of a worker has none if its present one answers.
    """
    lines = []
    if status.controller_silence:
        lines.append(f"the controller does not answer: {status.controller_silence}")
    known = {each.worker_id for each in status.workers if each.is_living and not each.silence}
    for each in status.workers:
        if each.misfit:
            lines.append(f"{each.worker_id} gets no requests: {each.misfit}")
        elif each.worker_id not in known:
            is_new = each.state == "connecting"
            known_of = "its first heartbeat is awaited" if is_new else "no reason is known"
            lines.append(f"{each.worker_id} does not answer: {each.silence or known_of}")
        known.add(each.worker_id)
    lines += [
        f"{each} does not serve yet: it loads, or waits for a host with room"
        for each in status.starting
    ]
    return lines


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


def _table(columns: Mapping[str, JustifyMethod]) -> Table:
    """Return an empty table, given its headers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name, justify in columns.items():
        # Folded, never cut: in a narrow terminal, rows grow higher.
        table.add_column(name, justify=justify, overflow="fold", vertical="bottom")
    return table


def _tenants_table(tenants: Sequence[TenantStatus]) -> Table:
    table = _table(_OF_TENANTS)
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
    content = asdict(status) | {"router_silence": ""}
    content["workers"] = [_worker_fields(worker) for worker in status.workers]
    return json.dumps(content, indent=2)


def view_table(silent: RouterSilent) -> RenderableType:
    """Draw what the controller knows, while no router answers."""
    table = _table({"worker": "left", "state": "left"})
    for name, state in sorted(silent.view.workers.items()):
        table.add_row(Text(name), Text(state, STATE_STYLES[state]))
    return Group(table, Text(f"the router does not answer: {silent.reason}", "red"))


def view_json(silent: RouterSilent) -> str:
    """Return the same as the JSON object of a router's view, with null for unknown values."""
    unknown = dict.fromkeys((*WorkerStatus.__dataclass_fields__, "hit_rate"))
    content = dict.fromkeys(ClusterStatus.__dataclass_fields__) | {
        "workers": [
            unknown | {"worker_id": name, "state": state}
            for name, state in sorted(silent.view.workers.items())
        ],
        "is_stopping": silent.view.is_stopping,
        "controller_silence": "",
        "router_silence": silent.reason,
    }
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
    *("worker_id", "incarnation", "address", "pool", "state", "misfit", "silence"),
    "heartbeat_age_ms",
}
