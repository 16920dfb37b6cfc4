"""The view of `pagewire top`: the rates of a cluster and of each worker, in any width."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from pagewire import Client, ClusterStatus, PagewireError, TransportError, WorkerStatus
from pagewire.cli.rates import Answer, Rates, RateWindow, WorkerRates, look_twice
from pagewire.cli.status import STOPPING, router_silence, silences
from pagewire.cli.units import format_bytes, format_count, format_rate

UNKNOWN = "-"
GAP = "  "
REVERSE, PLAIN = "\x1b[7m", "\x1b[0m"
TITLE = "pagewire top: q ends"
LINE_COLUMNS = 80  # of output to a pipe


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    cell: Callable[[WorkerStatus, WorkerRates | None], str]
    is_left: bool = False
    needs_life: bool = True  # blank for a dead worker, whose last value is out of date


def top_lines(
    status: ClusterStatus, rates: Rates | None, *, columns: int, lines: int | None = None
) -> list[str]:
    """Return the cluster's lines, an empty one, a line for each worker, and what does not answer.

    Args:
        rates: None: not known yet.
        columns: Longest line. The table loses its last columns, other lines their ends.
        lines: Most lines; None: any number. Below the cluster's lines, the list of what does not
            answer gets up to half, or more if the workers need less; both count what does not fit.
    """
    if status.is_partial:
        own = f"requests: {status.active_requests} active"
        return [line[:columns] for line in (own, "the rest is for operators")]
    head = [*_cluster_lines(status, rates), ""]
    workers = sorted(status.workers, key=lambda each: (each.pool, each.worker_id))
    table, told = _table(workers, rates, columns), silences(status)
    if lines is not None:
        room = max(lines - len(head), 0)
        told = _at_most(
            max(room // 2, room - len(table)), told, "that get no requests or do not answer"
        )
        table = [table[0], *_at_most(room - len(told) - 1, table[1:], "workers")]
    shown = [*head, *table, *told][:lines]
    return [line[:columns].rstrip() for line in shown]


def print_once(client: Client, interval_s: float) -> ClusterStatus:
    """Print the rates of one interval; return the status at its end. Raises PagewireError."""
    status, rates = look_twice(client, interval_s)
    sys.stdout.writelines(f"{line}\n" for line in top_lines(status, rates, columns=LINE_COLUMNS))
    return status


def watch(client: Client, interval_s: float) -> None:
    """Show the rates on the whole terminal until q or Ctrl-C; raises PagewireError.

    If the router stops answering, it keeps asking.
    """
    from pagewire.cli.screen import Event, Screen  # not available on every system

    asked_at = answered_at = time.monotonic()
    status = client.status()
    window = RateWindow()
    rates = window.add(Answer(asked_at, status))
    found: SimpleQueue[ClusterStatus | PagewireError] = SimpleQueue()
    is_asking, silence = False, ""
    with Screen() as screen:

        def ask() -> None:
            try:
                found.put(client.status())
            except PagewireError as error:
                found.put(error)
            screen.nudge()

        while True:
            size = screen.size
            note = silence or TITLE
            # The last line stays empty: some terminals scroll after its last character.
            shown = top_lines(status, rates, columns=size.columns, lines=size.lines - 2)
            screen.draw([f"{REVERSE}{note[: size.columns].ljust(size.columns)}{PLAIN}", *shown])
            if screen.wait(asked_at + interval_s - time.monotonic()) is Event.QUIT:
                return
            now = time.monotonic()
            if not found.empty():
                is_asking, answer = False, found.get()
                if isinstance(answer, ClusterStatus):
                    status, answered_at, silence = answer, now, ""
                    rates = window.add(Answer(now, status))
                elif isinstance(answer, TransportError):  # a dead router is back in seconds
                    silence = router_silence(now - answered_at)
                else:
                    raise answer
            if now - asked_at >= interval_s:
                asked_at = now
                if not is_asking:
                    is_asking = True
                    # In a thread, so that keys work while a router is silent.
                    threading.Thread(target=ask, name="top", daemon=True).start()


def _cluster_lines(status: ClusterStatus, rates: Rates | None) -> list[str]:
    lines = [
        f"requests: {_rate(rates and rates.requests_per_s)}/s finished, "
        f"{status.active_requests} active, {status.resumed_requests} resumed",
        f"tokens:   {_rate(rates and rates.generated_tokens_per_s)}/s generated, "
        f"{_rate(rates and rates.computed_tokens_per_s)}/s of prompts computed",
        f"prefixes: {_share(rates and rates.hit_rate)} of prompts found, "
        f"{_bytes(rates and rates.bytes_moved_per_s)}/s moved, "
        f"KV reads {_share(rates and rates.read_share)} of unshared",
    ]
    if status.is_stopping:
        lines.append(STOPPING)
    return lines


def _at_most(number: int, lines: list[str], what: str) -> list[str]:
    if len(lines) <= number:
        return lines
    kept = lines[: max(number - 1, 0)]
    return [*kept, f"and {len(lines) - len(kept)} more {what}"]


def _table(workers: list[WorkerStatus], rates: Rates | None, columns: int) -> list[str]:
    rows = [[each.header for each in _COLUMNS]]
    for worker in workers:
        own = rates.workers.get((worker.worker_id, worker.incarnation)) if rates else None
        rows.append(
            [
                each.cell(worker, own) if worker.is_living or not each.needs_life else UNKNOWN
                for each in _COLUMNS
            ]
        )
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    num_shown = 1
    while num_shown < len(widths) and _width(widths[: num_shown + 1]) <= columns:
        num_shown += 1
    return [
        GAP.join(
            cell.ljust(width) if column.is_left else cell.rjust(width)
            for cell, width, column in zip(row[:num_shown], widths, _COLUMNS, strict=False)
        )
        for row in rows
    ]


def _width(widths: list[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _pages(worker: WorkerStatus) -> str:
    referenced = worker.pages.total - worker.pages.free - worker.pages.cached
    return f"{referenced / max(worker.pages.total, 1):.0%}"


def _rate(per_s: float | None) -> str:
    return UNKNOWN if per_s is None else format_rate(per_s)


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def _bytes(per_s: float | None) -> str:
    return UNKNOWN if per_s is None else format_bytes(round(per_s))


# From the most important to the least.
_COLUMNS = (
    _Column("worker", lambda w, _: w.worker_id, is_left=True, needs_life=False),
    _Column("state", lambda w, _: w.state, is_left=True, needs_life=False),
    _Column("run+wait", lambda w, _: f"{format_count(w.running)}+{format_count(w.waiting)}"),
    _Column("pages", lambda w, _: _pages(w)),
    _Column("gen/s", lambda _, r: _rate(r and r.generated_tokens_per_s)),
    _Column("comp/s", lambda _, r: _rate(r and r.computed_tokens_per_s)),
    _Column("hits", lambda _, r: _share(r and r.hit_rate)),
    _Column("moved/s", lambda _, r: _bytes(r and r.bytes_moved_per_s)),
    _Column("read", lambda _, r: _share(r and r.read_share)),
)
