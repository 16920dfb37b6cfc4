"""Writes docs/faults.md from the results of benchmarks.faults, .disaggregation and .corruption.

python -m benchmarks.fault_table
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.fault_cases import FAULTS
from benchmarks.faults import LATE_STREAMS, OUTPUT_TOKENS, STREAMS
from benchmarks.measured_host import in_short
from benchmarks.targets import IPC_KILLS_FILES, KILLS_FILE, MEMORY_FILES, survivor_growth_mib

PAGE = Path(__file__).resolve().parent.parent / "docs" / "faults.md"
RESULTS = Path(__file__).resolve().parent / "results"
FAULTS_RESULT = "faults-cpu.json"
GAPS_FILE = "kills-nccl-gaps-h100-x4.json"
# |-> what carried the pages; of a fault that several files have, the page shows the first
KILLS_RESULTS = {
    "hangs-nccl-h100-x4.json": "NCCL",
    "kills-nccl-decode-before-h100-x4.json": "NCCL",
    KILLS_FILE: "NCCL",
    "kills-nccl-before-h100-x2.json": "NCCL",
    IPC_KILLS_FILES[0]: "CUDA IPC",
}
INTRODUCTION = """\
# What faults cost

`python -m benchmarks.fault_table` writes this page from
[{name}](../benchmarks/results/{name}); a test compares the two.

The cluster runs on four hosts that fail independently: namespaces of one machine, each with its own
network, processes and files. One has Ray's head, the controller and a router; two have a prefill
and a decode worker each; the last one is outside Ray and has a second router, the clients, and a
Redis with Ray's state.

{streams} streams of {tokens} tokens run, every second one sampled with a seed. One second after
they begin, the fault occurs, and {late} more requests arrive during the next seconds. Afterwards
the same requests run once more without a fault. Each token that differs, is missing or is repeated
counts as wrong.

| {heads} |
|---|---|--:|--:|--:|--:|--:|--:|--:|
"""
END = """
![Pauses of streams after a fault on CPUs, on a logarithmic axis](figures/faults.svg)

- *At*: the commit, or commits, at which the runs were made.
- *Pause*: the longest time that any stream of a run waited for a token. Runs without a fault show
  the machine's own share.
- *First token*: the longest time to first token of the requests that arrived after the fault.
- *Whole*: the median time until both routers see all workers ready, including the fault itself.

Decode workers computed {decode_prompt_tokens} prompt tokens in all runs, and
{pages_moved:,} pages moved between hosts. Measured on {cores} cores of an {machine} CPU, which all
hosts share, in part with other work, with a tiny model, by
{command}. The pauses depend on that
machine; the zeros do not.
"""
KILLS = """
## Kills and hangs between two GPUs

Of two GPUs with NVLink, of a host with two or four, one has a prefill worker, the other a decode
worker.
{streams} streams with prompts of 4,096 tokens begin. Before, while or after their pages move, one
worker gets SIGKILL, or SIGSTOP for ten seconds. Afterwards the same prompts run once more without a
fault. Each cluster shared the GPUs with others, whose workers were also hit.

| {heads} |
|---|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
{lines}
Pauses are those of all streams of a row's runs; other times are the median and the longest run.

![Kills and hangs of the table: medians, on a logarithmic axis](figures/kills.svg)

- *Pause*: the longest time that a stream waited for a token after the fault. Empty: not recorded.
- *Noticed*: the router gives the worker no more work.
- *Pages free*: no transfer can read or write a page of the other worker any more. Empty: that
  worker reported no failed transfer.
- *Moves again*: a new request has moved pages. A killed worker starts anew and loads weights of
  Llama-3.2-1B's shape; a hang lasts ten seconds.

Of 77 earlier kills on two H200s, three made the other worker hang
([lab book](experiments.md#2026-11-26-two-h200s-and-a-kill-that-hung)). The cause was removed before
these kills.

Measured by `python -m benchmarks.disaggregation --cases 'kill/*' 'hang/*'`, with further arguments
that the files name: {sources}.
"""
MEMORY = """
In {kills} later kills between two H200s, {lost} of {requests} requests were lost, and {wrong}
tokens were wrong. When all workers were at rest again, the GPU memory of the one that was not hit
had grown by at most {most}.
"""
GAPS = """
In {kills} more kills of the only decode worker ([{name}](../benchmarks/results/{name})), streams
continued as soon as it was back, and it recorded their passes within steps. Tokens then came
{p50} apart in the median and {p99} at p99; without a kill, {calm_p50} and {calm_p99}. The longest
wait of a run was {most}; without a kill, {calm_most}. These are medians of the runs.
"""
HEADS = (
    *("Fault", "At", "Runs", "Requests", "Failed", "Wrong tokens"),
    *("Pause, p50 and p99", "First token, p99", "Whole"),
)
KILLS_HEADS = (
    *("Pages over", "Worker", "Fault", "Moment", "On", "Runs", "Requests", "Failed"),
    *("Wrong tokens", "Pause, p50 and p99", "Noticed", "Pages free", "Moves again"),
)
CORRUPTION = """
## Corrupted pages

`python -m benchmarks.corruption` damages pages after their digests were computed and sends them
between two processes with real engines, storage and transport; several transfers share the
connection. A damaged page counts as found if its transfer fails, the error gives the exact number
of damaged pages and the first of them, and nothing from their chunk on is committed. If digests are
not compared, a test of this benchmark fails.

![Damaged pages sent and found, over each transport: all are found](figures/corruption.svg)
"""


def whole_page() -> str:
    """Return the page for the existing results."""
    hits = {name: _read(name) for name in KILLS_RESULTS}
    text = page(_read(FAULTS_RESULT), FAULTS_RESULT) + kills(hits)
    text += memory() + gaps(_read(GAPS_FILE), GAPS_FILE) + CORRUPTION
    names = sorted(each.name for each in RESULTS.glob("corruption-*.json"))
    return text + "".join(corruption(_read(name), name) for name in names)


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def page(result: dict[str, Any], name: str) -> str:
    """Return the part on faults for a result; `name` is that of its file."""
    rows = {row["case"]: row for row in result["cases"] if "error" not in row}
    text = INTRODUCTION.format(
        name=name,
        streams=STREAMS,
        tokens=OUTPUT_TOKENS,
        late=LATE_STREAMS,
        heads=" | ".join(HEADS),
    )
    text += "".join(_lines(rows))
    text += "".join(_notes(rows))
    return text + END.format(
        decode_prompt_tokens=sum(row["decode_prompt_tokens"] for row in rows.values()),
        pages_moved=sum(row["pages_moved"] for row in rows.values()),
        cores=result["hardware"]["cores"],
        machine=result["hardware"]["machine"],
        command=f"`{result['command']}`",
    )


class KillRow(NamedTuple):
    """A row of the table of kills and hangs."""

    carrier: str  # of the pages
    side: str
    fault: str  # kill or hang
    moment: str
    result: dict[str, Any]
    row: dict[str, Any]


def kill_rows(results: dict[str, dict[str, Any]]) -> list[KillRow]:
    """Return the rows of results by the names of their files, in the table's order."""
    rows: dict[tuple[bool, str, str, str], KillRow] = {}
    for name, result in results.items():
        for row in result["cases"]:
            if "error" not in row:
                fault, side, moment = row["case"].split("/")
                carrier = KILLS_RESULTS[name]
                key = (fault == "hang", carrier, side, moment)
                rows.setdefault(key, KillRow(carrier, side, fault, moment, result, row))
    return [rows[key] for key in sorted(rows)]


def kills(results: dict[str, dict[str, Any]]) -> str:
    """Return the part on workers of two GPUs, for results by the names of their files."""
    lines = []
    for carrier, side, fault, moment, result, row in kill_rows(results):
        signal = "SIGSTOP, 10 s" if fault == "hang" else "SIGKILL"
        cells = (
            *(carrier, side, signal, moment, _measured_on(result), row["times"]),
            *(row["times"] * row["streams"], row["lost_requests"], row["wrong_tokens"]),
            _pause(row),
            *(_times(row, name, f"{name}_max") for name in ("noticed_ms", "quiet_ms", "usable_ms")),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    return KILLS.format(
        streams=row["streams"],
        heads=" | ".join(KILLS_HEADS),
        lines="".join(lines),
        sources=",\n".join(f"[{name}](../benchmarks/results/{name})" for name in results),
    )


def memory() -> str:
    """Return the paragraph on the GPU memory of workers that were not hit."""
    rows = [row for name in MEMORY_FILES for row in _read(name)["cases"]]
    most = (
        f"{max(survivor_growth_mib(name))} MiB over\n[{transport}](../benchmarks/results/{name})"
        for name, transport in MEMORY_FILES.items()
    )
    return MEMORY.format(
        kills=sum(row["times"] for row in rows),
        requests=sum(row["times"] * row["streams"] for row in rows),
        lost=sum(row["lost_requests"] for row in rows),
        wrong=sum(row["wrong_tokens"] for row in rows),
        most=" and ".join(most),
    )


def gaps(result: dict[str, Any], name: str) -> str:
    """Return the paragraph on tokens after a decode worker is back."""
    rounds = [each for row in result["cases"] for each in row["rounds"]]

    def of_runs(field: str) -> str:
        ms = median(each[field] for each in rounds)
        return f"{ms:.1f} ms" if ms < 10 else _seconds(ms)

    return GAPS.format(
        name=name,
        kills=len(rounds),
        p50=of_runs("resumed_gap_ms_p50"),
        p99=of_runs("resumed_gap_ms_p99"),
        calm_p50=of_runs("calm_gap_ms_p50"),
        calm_p99=of_runs("calm_gap_ms_p99"),
        most=of_runs("resumed_gap_ms_max"),
        calm_most=of_runs("calm_gap_ms_max"),
    )


def _measured_on(result: dict[str, Any]) -> str:
    return f"{in_short(result['hardware'])}, {result['commit'][:8]}"


def corruption(result: dict[str, Any], name: str) -> str:
    """Return the table of one result on corrupted pages; `name` is that of its file."""
    *kinds, total = result["cases"]
    over = result["configuration"]
    rows = [(row["what"], f"{row['pages']:,}", f"{row['found']:,}") for row in kinds]
    rows.append(("all", f"{total['pages']:,}", f"{total['found']:,}"))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"""
Over {over["transport"]}, {" to ".join(over["devices"])}, pages of {over["page_bytes"]:,} bytes,
measured at {result["commit"]} by `{result["command"]}`
([{name}](../benchmarks/results/{name})):

| Damage | Pages sent wrong | Found |
|---|--:|--:|
{table}
Besides {total["transfers"]:,} damaged transfers, {total["whole_transfers"]:,} undamaged ones moved
{total["whole_pages"]:,} pages: {total["failed_whole_transfers"]} of them failed.
{total["wrong_commits"]} committed pages differ from the sender's (SHA-256).
{total["tokens"]:,} tokens were decoded from received pages, {total["wrong_tokens"]} of them wrong.
"""


def _lines(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    for case, fault in FAULTS.items():
        if row := rows.get(case):
            cells = (
                *(fault.what, _commits(row), row["times"], row["requests"], row["failed_requests"]),
                *(row["wrong_tokens"], _pause(row), _seconds(row["late_ms_p99"])),
                f"{row['whole_s_p50']:.0f} s",
            )
            yield f"| {' | '.join(map(str, cells))} |\n"


def _commits(row: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys(each["commit"][:7] for each in row["rounds"]))


def _notes(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a paragraph for each fault that failed requests or had unfinished runs."""
    for case, fault in FAULTS.items():
        row = rows.get(case, {})
        errors = (error for each in row.get("rounds", ()) for error in each["errors"])
        reasons = sorted({error.partition(";")[0] for error in errors})
        told = [f"the failed requests ended with `{reason}`" for reason in reasons]
        told += [
            f"a further run was aborted ({why.partition(':')[0]})" for why in row.get("broken", ())
        ]
        if told:
            what = fault.what[0].upper() + fault.what[1:]
            yield f"\n{what}: {'; '.join(told)}.\n"


def _pause(row: dict[str, Any]) -> str:
    return _times(row, "pause_ms_p50", "pause_ms_p99")


def _times(row: dict[str, Any], *names: str) -> str:
    return ", ".join(_seconds(row[name]) for name in names if name in row)


def _seconds(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def main() -> None:
    """Run from the command line."""
    PAGE.write_text(whole_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
