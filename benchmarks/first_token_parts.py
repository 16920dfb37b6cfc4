"""Measures the parts of the way to a first token, and how an engine's time divides in the mix.

    python -m benchmarks.first_token_parts --out benchmarks/results/first-token-parts-h100-x2.json

Clusters, clients, prompts and cases are those of benchmarks.serving_matrix. Waves without traces
precede those with traces on the same cluster, whose spans this process collects.

ttft/...            `first` and `last` are the requests of a wave whose first tokens come first and
                    last, of a single one `last`. Their times begin at the wave's first call, and
                    are medians over waves, of the whole and of each part; `rest_ms` is what the
                    medians of the parts leave of that of the whole. `ms` is the time to the last
                    first token with traces, `untraced_ms` that without. Where pages move,
                    `pages_after_passes_ms` and `pages_after_token_ms` are the times from the end of
                    a request's passes, and from its first token at the decode worker, until all of
                    its pages are there; medians over requests.
moved/N             the same for a prompt of N tokens that the prefill worker holds, of which all
                    pages move each time, as in benchmarks.disaggregation.
mixed/512           `engines` has the time of each engine in steps of each kind, and without a step,
                    from the first call to the last token, without traces. `ms` is that time, and
                    `traced_ms` that with traces.

Cases named aggregated/... have no prefill worker. Without --cases everything runs; try it anywhere
with --shape tiny --scale small --device cpu --page-size 16.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.altered_workers import ALL_MOVE
from benchmarks.case_runs import Case, CaseFailed, Clock, Run, run_chosen, selected
from benchmarks.first_token_path import Trace, UnclearPath, median_parts, pages_ms, parts_ms
from benchmarks.prompts import MIX_REQUESTS, StreamSpec, wave
from benchmarks.run_arguments import (
    arguments,
    end_in_order,
    results_of,
)
from benchmarks.serving_matrix import (
    CACHED,
    CACHED_TOKENS,
    DISAGGREGATED,
    FIRST_TOKENS,
    cases_of,
    check_fresh,
    clusters_of,
    mix_of,
    warm_up,
)
from benchmarks.span_collector import SpanCollector, SpansMissing, span_collector
from benchmarks.stream_statistics import (
    Row,
    StreamRecord,
    last_first_token_ms,
    percentile,
    spread,
    wall_s,
)
from pagewire import WorkerStatus

WAVES = 3  # of each kind, for each repeat of a case
MOVED = (64, 32_768)  # tokens
HEARTBEAT_S = 30.0  # a heartbeat comes at most so late
STEPS = ("prompt", "decode", "mixed")  # kinds of steps, as in WorkerStatus


def measured_cases(collector: SpanCollector) -> dict[str, Callable[[Run], Row]]:
    """Return what runs on any cluster, by name."""
    return {
        **{f"ttft/{n}x{length}": partial(new, n, length, collector) for n, length in FIRST_TOKENS},
        **{f"ttft/{name}": partial(cached, n, collector) for name, n in CACHED.items()},
        f"mixed/{MIX_REQUESTS}": mixed,
    }


def new(streams: int, length: int, collector: SpanCollector, run: Run) -> Row:
    """Take the first tokens of new prompts apart."""
    count, length = run.sizes.streams(streams), run.sizes.tokens(length)
    row, work = _first_tokens(lambda: wave(run.seeds, count, unique=length), collector, run)
    check_fresh(work, shared=0)
    return row | {"streams": count, "own_tokens": length} | work


def cached(streams: int, collector: SpanCollector, run: Run) -> Row:
    """Take the first tokens of prompts apart that the cache holds."""
    count, length = run.sizes.streams(streams), run.sizes.tokens(CACHED_TOKENS)
    specs = wave(run.seeds, count, unique=length)
    run.wave(specs)
    row, work = _first_tokens(lambda: specs, collector, run)
    least = work["requests"] * (length - run.cluster.model.page_size)
    if work["hit_tokens"] < least:
        raise CaseFailed(f"cached prompts found {work['hit_tokens']} tokens, not {least}")
    return row | {"streams": count, "own_tokens": length} | work


def moved(length: int, collector: SpanCollector, run: Run) -> Row:
    """Take the first token of a prompt apart whose pages all move again each time."""
    length = run.sizes.tokens(length) or run.cluster.model.page_size
    specs = wave(run.seeds, 1, unique=length)
    run.wave(specs)
    row, work = _first_tokens(lambda: specs, collector, run)
    run.check_all_moved(work, length)
    return row | {"streams": 1, "own_tokens": length} | work


def mixed(run: Run) -> Row:
    """Divide the time of each engine in the mix by what its steps computed."""
    count = run.sizes.streams(MIX_REQUESTS)
    run.wave(mix_of(max(count // 8, 1), run))
    before = _settled(run)
    records = run.wave(_spans_of(mix_of(count, run), is_traced=False))
    after = _settled(run)
    traced = run.wave(_spans_of(mix_of(count, run), is_traced=True))
    return {
        "ms": round(1e3 * wall_s(records), 1),
        "traced_ms": round(1e3 * wall_s(traced), 1),
        "repeats": 1,
        "engines": {
            name: engine_time(before[name], after[name], 1e3 * wall_s(records)) for name in after
        },
        **run.check_work(records),
    }


def engine_time(before: WorkerStatus, after: WorkerStatus, wall_ms: float) -> Row:
    """Return the time of an engine, ms, in steps of each kind and without a step."""
    times = {
        kind: 1e3 * (getattr(after, f"{kind}_step_s") - getattr(before, f"{kind}_step_s"))
        for kind in STEPS
    }
    times["no_step"] = wall_ms - sum(times.values())
    return {
        **{f"{kind}_ms": round(ms, 1) for kind, ms in times.items()},
        "steps": after.steps - before.steps,
    }


def _first_tokens(
    specs: Callable[[], list[StreamSpec]], collector: SpanCollector, run: Run
) -> tuple[Row, Row]:
    """Return the parts of waves of such requests, and the work of those that were traced."""
    waves = WAVES * run.sizes.repeats
    run.wave(_spans_of(specs(), is_traced=False))
    # First, since processes still send spans for seconds after a wave with traces.
    untraced = [run.wave(_spans_of(specs(), is_traced=False)) for _ in range(waves)]
    traced: list[tuple[list[StreamSpec], list[StreamRecord]]] = []
    for _ in range(waves):
        sent = _spans_of(specs(), is_traced=True)
        traced.append((sent, run.wave(sent)))
    run.check_waves(untraced)
    work = run.check_waves([records for _, records in traced])
    trace_ids = [each.traceparent[3:35] for sent, _ in traced for each in sent]
    try:
        traces = iter(collector.take(trace_ids))
        paths = [(records, [next(traces) for _ in sent]) for sent, records in traced]
        found = [_ends(*each) for each in paths]
    except (SpansMissing, UnclearPath) as error:
        raise CaseFailed(str(error)) from error
    firsts, lasts = zip(*found, strict=True)
    each_ms = [last_first_token_ms(each) for each in untraced]
    row: Row = {
        **spread([last_first_token_ms(records) for _, records in traced], 2),
        "untraced_ms": round(percentile(each_ms, 50), 2),
        "untraced_min_ms": round(min(each_ms), 2),
        "untraced_max_ms": round(max(each_ms), 2),
    }
    if len(trace_ids) > len(traced):
        row["first"] = median_parts(firsts)
    row["last"] = median_parts(lasts)
    waits = [ms for _, found in paths for trace in found if (ms := pages_ms(trace))]
    for name in waits[0] if waits else ():
        row[name] = round(percentile([each[name] for each in waits], 50), 3)
    return row, work


def _spans_of(specs: Sequence[StreamSpec], *, is_traced: bool) -> list[StreamSpec]:
    """Return requests with a caller's span each, of a new trace or of one that is left out."""
    return [
        replace(
            each,
            traceparent=f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{is_traced:02x}",
        )
        for each in specs
    ]


def _ends(
    records: Sequence[StreamRecord], traces: Sequence[Trace]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the parts of the requests whose first tokens came first and last."""
    offset_ns = time.time_ns() - time.monotonic_ns()  # clients tell times of the monotonic clock
    called = min(each.started for each in records)

    def parts(index: int) -> dict[str, float]:
        token_ns = round(1e9 * records[index].times[0]) + offset_ns
        called_ns = round(1e9 * called) + offset_ns
        return parts_ms(traces[index], called_ns=called_ns, token_ns=token_ns)

    order = sorted(range(len(records)), key=lambda index: records[index].times[0])
    return parts(order[0]), parts(order[-1])


def _settled(run: Run) -> dict[str, WorkerStatus]:
    """Return what workers say of themselves, by name, after they have ended all work."""
    since = time.monotonic()
    workers: dict[str, WorkerStatus] = {}

    def have_told() -> bool:
        now = time.monotonic()
        workers.update({each.worker_id: each for each in run.cluster.status().workers})
        return all(
            now - each.heartbeat_age_ms / 1e3 > since and not each.running and not each.waiting
            for each in workers.values()
        )

    run.until(have_told, HEARTBEAT_S, "a heartbeat of each worker without work")
    return workers


def main() -> None:
    """Run from the command line."""
    options = arguments(__doc__).parse_args()
    with span_collector() as collector:
        cases = cases_of(measured_cases(collector))
        cases += [
            Case(name=f"moved/{n}", cluster="1+1, all move", measure=partial(moved, n, collector))
            for n in MOVED
        ]
        chosen = selected([case.name for case in cases], options.cases)
        if options.list:
            print("\n".join(chosen))
            return
        end_in_order()
        specs = clusters_of(options)
        specs["1+1, all move"] = replace(specs[DISAGGREGATED], altered=ALL_MOVE)
        # Without the collector's port, another one in each run.
        results = results_of(options, "first_token_parts", specs)
        traced = {
            name: replace(spec, options={**spec.options, "tracing.endpoint": collector.endpoint})
            for name, spec in specs.items()
        }
        run_chosen(
            chosen,
            cases,
            traced,
            results,
            options=options,
            clock=Clock(options.deadline_s, options.seed),
            warm_up=warm_up,
        )


if __name__ == "__main__":
    main()
