"""Measures what metrics, traces and log lines cost a worker in a step and a router in a token.

    python -m benchmarks.relay --cases 256x20000 --out benchmarks/results/relay-beside-cost-cpu.json
    python -m benchmarks.observability_cost --out benchmarks/results/observability-cost-cpu.json
    python -m benchmarks.observability_cost --scrape --out benchmarks/results/scrape-cost-cpu.json

Each case runs the calls that exist only for metrics, traces or log lines, as a process makes them.
Its cost is the CPU time of all threads; for traces, it includes making the bytes that would be
sent, and for lines, writing them to a file. What a plan counts of shared prefixes, once for many
steps, is left out. Shares refer to figures of the same result folder: a step of decode in the
engine alone, and the router's CPU for a token of 256 streams, measured by the relay on the same
host. A scrape's share is that of one core, if one comes every 15 s. `loop` is the work of the
router's event loop, without its prefix index; `text` is that of another thread.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured_host import conditions
from benchmarks.result_file import write_result
from llm_engine.kv_reads import NO_READS, flat_reads
from observability.logs import configure_logging, fields
from observability.token_gaps import TokenGaps
from observability.tracing import begin_part, begin_trace, stop_tracing, trace_to
from pagewire import ClusterStatus
from pagewire.protos import common_pb2, inference_pb2, worker_pb2
from pagewire.protos.trace_context import NO_TRACE, TraceContext
from pagewire.wire import status_from
from router import wire
from router.membership import WorkerMember
from router.metrics import RouterMetrics
from router.tenants.registry import Tenants
from router.tenants.tenant import TenantRules
from router.worker_report import KnownWorker
from worker.load import WorkerTotals

RESULTS = Path(__file__).parent / "results"
CONTEXT = 1024  # tokens of each stream
ANSWER_TOKENS = 128  # over which the cost of a call is spread
SCRAPED_WORKERS, SCRAPED_TENANTS = 16, 100
SCRAPE_S = 15.0  # between two scrapes
LARGE = 1_234_567_890  # as totals of some days
CALLER = TraceContext(f"00-{'1' * 32}-{'1' * 16}-01")
TOKEN_BYTES = 2 * 8 * 128 * 2 * 32  # K and V of Llama-3-8B
REQUEST_ID = "0123456789abcdef" * 2

log = logging.getLogger(__name__)


def worker_step(num_streams: int) -> Callable[[], None]:
    """Return what a decode worker counts in a step of so many streams."""
    kv_lens = np.full(num_streams, CONTEXT, dtype=np.int32)
    totals = WorkerTotals()
    reads = NO_READS

    def step() -> None:
        nonlocal reads
        taken = NO_READS + flat_reads(int(kv_lens.sum()), TOKEN_BYTES)
        time.monotonic(), time.monotonic()  # launch and end, from which the step's time is told
        reads += taken
        for _ in range(num_streams):
            totals.generated_tokens += 1

    return step


def router_token() -> Callable[[], None]:
    """Return what a router counts for a token after the first."""
    gaps = TokenGaps()
    return lambda: gaps.add(0.0044, 1)


def router_call() -> Callable[[], None]:
    """Return what a router counts for a call besides its tokens."""
    metrics = RouterMetrics()
    usage = inference_pb2.Usage(prompt_tokens=CONTEXT, completion_tokens=ANSWER_TOKENS, tpot_ms=4.4)

    def call() -> None:
        metrics.call_begun()
        metrics.dispatched("model", 0.001)
        metrics.waiting(-1)
        metrics.first_token("model", 0.02)
        metrics.choice_finished("model", "length")
        metrics.call_finished("model", usage, CONTEXT)
        metrics.asked("model", n=1, max_tokens=ANSWER_TOKENS)
        metrics.answered("model", 0.6)
        metrics.call_ended("ok", is_waiting=False)

    return call


def router_view() -> Callable[[], ClusterStatus]:
    """Return what a router's event loop does for a scrape."""
    beat = inference_pb2.Heartbeat(pool=common_pb2.POOL_DECODE, steps=LARGE, running=64, waiting=3)
    for part in (beat.pages, beat.totals):
        for field in part.DESCRIPTOR.fields:
            setattr(part, field.name, LARGE)
    known = [
        KnownWorker(
            member=WorkerMember(
                worker_id=f"decode-{index}", incarnation=LARGE, address="host:1", pool="decode"
            ),
            state="READY",
            misfit="",
            silence="",
            heartbeat=wire.heartbeat(worker_pb2.WatchResponse(heartbeat=beat)),
            heartbeat_age_s=0.1,
        )
        for index in range(SCRAPED_WORKERS)
    ]
    tenants = Tenants(TenantRules(name=f"tenant-{n}") for n in range(SCRAPED_TENANTS))
    return lambda: status_from(
        inference_pb2.GetClusterStatusResponse(
            workers=[wire.worker_status(each) for each in known],
            tenants=[wire.tenant_status(each) for each in tenants.told],
        )
    )


def router_text(status: ClusterStatus) -> Callable[[], bytes]:
    """Return what a router's other thread does for a scrape."""
    metrics = RouterMetrics()
    metrics.tell_cluster(lambda: status, lambda: "model")
    return metrics.expose


def router_spans() -> None:
    """Make the spans of a call at a router."""
    span = begin_trace("generate", NO_TRACE, request_id="0" * 16)
    span.event("admitted")
    attempt = span.child("attempt", attempt=1, decode_worker="decode-0")
    span.event("first_token")
    attempt.end()
    span.end("", outcome="ok", prompt_tokens=CONTEXT, completion_tokens=ANSWER_TOKENS, ttft_ms=20.0)


def worker_spans() -> None:
    """Make the spans of a call at a decode worker."""
    span = begin_part("decode", CALLER, request_id="0" * 16)
    span.event("begun")
    receive = span.child("receive", prefill_worker="prefill-0")
    receive.event("first_token")
    span.event("first_token", passes_ms=0.0)
    receive.end("", moved_pages=16, moved_bytes=2**27)
    span.end("", queue_ms=1, tokens=CONTEXT, cached_tokens=0, moved_pages=16, preemptions=0)


def router_line() -> None:
    """Write the line of a call at a router."""
    log.info(
        "request_done",
        extra=fields(
            request_id=REQUEST_ID,
            outcome="ok",
            total_ms=571.2,
            prompt_tokens=CONTEXT,
            completion_tokens=ANSWER_TOKENS,
            ttft_ms=20.3,
            resumptions=0,
            decode_workers="decode-0",
            tenant="acme",
        ),
    )


def worker_line() -> None:
    """Write the line of a call at a decode worker."""
    log.info(
        "request_ended",
        extra=fields(
            request_id=REQUEST_ID,
            attempt=0,
            outcome="done",
            prompt_tokens=CONTEXT,
            output_tokens=ANSWER_TOKENS,
            s=0.571,
            cached_tokens=0,
            computed_tokens=0,
            moved_pages=64,
            prefill_retries=0,
            preemptions=0,
        ),
    )


def us(work: Callable[[], object], *, number: int, repeats: int) -> float:
    """Return the median CPU time of a call, in microseconds, of all threads."""
    for _ in range(number // 10):
        work()
    times = []
    for _ in range(repeats):
        began = time.process_time_ns()
        for _ in range(number):
            work()
        times.append((time.process_time_ns() - began) / number / 1000)
    return round(statistics.median(times), 3)


def traced_us(work: Callable[[], object], *, number: int, repeats: int) -> float:
    """Return the same for spans that are exported, up to their bytes."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export import (
        BatchSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    class Encoder(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            encode_spans(spans).SerializeToString()
            return SpanExportResult.SUCCESS

    processor = BatchSpanProcessor(Encoder(), max_queue_size=8 * number)
    trace_to(processor, sample_ratio=1.0, service="benchmark", instance="0")

    def batch() -> None:
        for _ in range(number):
            work()
        processor.force_flush()

    try:
        return round(us(batch, number=1, repeats=repeats) / number, 3)
    finally:
        stop_tracing()


def logged_us(work: Callable[[], object], line_format: str, *, number: int, repeats: int) -> float:
    """Return the same for lines that are written to a file, as those of Ray's processes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with tempfile.TemporaryFile("w") as file, redirect_stderr(file):
        configure_logging("info", line_format)
        try:
            return us(work, number=number, repeats=repeats)
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)


def measure(number: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each case."""
    steps = {row["case"]: row["ms"] for row in _cases("engine-step-llama-3-8b-h200.json")}
    relay = max(
        (row for row in _cases("relay-beside-cost-cpu.json") if row["streams"] == 256),
        key=lambda row: row["offered_tokens_per_s"],
    )
    token_us = relay["us_per_token"]["router"]
    size = {"number": number, "repeats": repeats}
    rows = []

    def add(case: str, cost_us: float, whole_us: float, of: str) -> None:
        rows.append(_row(case, cost_us, whole_us, of))

    for streams in (1, 64, 256):
        step_ms = steps[f"decode/{streams}@{CONTEXT}"]
        of = f"a step of {streams} streams, {step_ms} ms"
        add(f"metrics/step/{streams}", us(worker_step(streams), **size), 1000 * step_ms, of)
    of = f"a token of 256 streams, {token_us} us"
    add("metrics/token", us(router_token(), **size), token_us, of)
    answer_us, of = ANSWER_TOKENS * token_us, f"{ANSWER_TOKENS} such tokens"
    add("metrics/call", us(router_call(), **size), answer_us, of)
    add("traces/off/router/call", us(router_spans, **size), answer_us, of)
    add("traces/on/router/call", traced_us(router_spans, **size), answer_us, of)
    for line_format in ("text", "json"):
        cost_us = logged_us(router_line, line_format, **size)
        add(f"logs/{line_format}/router/call", cost_us, answer_us, of)
    answer_us = 1000 * ANSWER_TOKENS * steps[f"decode/1@{CONTEXT}"]
    of = f"{ANSWER_TOKENS} steps of 1 stream"
    add("traces/on/worker/call", traced_us(worker_spans, **size), answer_us, of)
    for line_format in ("text", "json"):
        cost_us = logged_us(worker_line, line_format, **size)
        add(f"logs/{line_format}/worker/call", cost_us, answer_us, of)
    return rows


def measure_scrape(number: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each part of a scrape."""
    size = {"number": max(number // 50, 1), "repeats": repeats}
    of = f"{SCRAPE_S:.0f} s, {SCRAPED_WORKERS} workers and {SCRAPED_TENANTS} tenants"
    view = router_view()
    return [
        _row("metrics/scrape/loop", us(view, **size), 1e6 * SCRAPE_S, of),
        _row("metrics/scrape/text", us(router_text(view()), **size), 1e6 * SCRAPE_S, of),
    ]


def _row(case: str, cost_us: float, whole_us: float, of: str) -> dict[str, Any]:
    percent = round(100 * cost_us / whole_us, 2)
    return {"case": case, "us": cost_us, "percent": percent, "of": of}


def _cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["cases"]
    return found


def main() -> None:
    """Measure, print, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--scrape", action="store_true", help="Measure a scrape, and nothing else.")
    options = parser.parse_args()
    rows = (measure_scrape if options.scrape else measure)(options.number, options.repeats)
    for row in rows:
        cost = f"{row['us']:>9} us {row['percent']:>6} %"
        sys.stdout.write(f"{row['case']:<24} {cost} of {row['of']}\n")
    settings = {"number": options.number, "repeats": options.repeats}
    write_result(options.out, conditions("observability_cost") | settings | {"cases": rows})


if __name__ == "__main__":
    main()
