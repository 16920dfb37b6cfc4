"""Measures costs and benefits of separate pools, as clients of whole clusters see them.

    python -m benchmarks.disaggregation --trace conversation_trace.jsonl.gz \\
        --out benchmarks/results/disaggregation-h200.json

Weights, prompts and clients are those of benchmarks.serving_matrix. "Aggregated" is a cluster
without prefill workers on as many GPUs.

transfer/again@L    a prompt of L tokens that the prefill worker has cached and the decode worker
                    must receive in full; pages of both lie in random order.
transfer/new@L, aggregated@L    a new prompt, with 1 + 1 workers and on one GPU. All three also for
                    @page, a prompt of one page, which shows what a request costs besides. `ms` is
                    the time of the first token, which waits for no page, and `second_ms` that of
                    the second one, which needs all pages. With 1 + 1 workers also what the decode
                    worker counts for a prompt, by a clock that shows whole milliseconds:
                    `receive_ms` is the time in which pages arrived, and `exposed_ms` the part of it
                    after the prompt was computed.
transfer/scattered@L     GB/s, by how much later the second token of again@L comes than that of
                    again@page; `ms` is this delay (computed).
transfer/ttft_share@L    computed. `share`: how much later the first token of new@L comes than that
                    of aggregated@L, as a share of its time. `hidden_share`: 1 - exposed / `ms` of
                    scattered@L. Exposed is how much longer the gap between first and second token
                    is in new@L than in aggregated@L, less the same difference for a page.
                    `hidden_share_counted`: the share of `receive_ms` of new@L that is not exposed.
transfer/dedup      64 requests at once with one new prefix of 8,192 tokens: how often it was
                    computed and moved.
itl/ARM             16 chats stream while six prompts of 32,768 tokens arrive. `step_ms` is the mean
                    time of a chat's tokens then, and `calm_step_ms` that of the same tokens in a
                    wave without these prompts.
ablation/ARM/N,S,U  N streams that share S tokens: `prime_ms`, `step_ms`, and `ms` for all tokens.
                    both: as it is; cascade: all pages of a prompt move for each request; delta:
                    each request reads its prefix for itself; none: both of these.
replay/ARM          the first seconds of a Mooncake trace, by --trace-seconds, -rate and -lengths;
                    `in_time_per_s` counts requests with first token and p99 of gaps within IN_TIME.
kill/SIDE/MOMENT    SIGKILL before, during and after a transfer, --kills times each (kills.py).
hang/SIDE/MOMENT    likewise SIGSTOP, and SIGCONT ten seconds later.

Where the product has no switch, the workers are altered (altered_workers.py). With --apart NCCL
takes them for workers of different hosts, so that workers on one GPU can use it, over sockets. Try
it anywhere with --shape tiny --scale small --device cpu --page-size 16.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks import kills
from benchmarks.altered_workers import ALL_MOVE, Alteration
from benchmarks.case_runs import Case, CaseFailed, Clock, Run, run_chosen, selected
from benchmarks.measured_host import num_gpus
from benchmarks.prompts import TraceScale, read_trace, wave
from benchmarks.run_arguments import (
    arguments,
    cluster_options,
    end_in_order,
    model_of,
    results_of,
)
from benchmarks.served_cluster import ClusterSpec
from benchmarks.serving_matrix import check_fresh, first_tokens, warm_up, with_tokens
from benchmarks.stream_statistics import (
    Row,
    StreamRecord,
    first_token_ms,
    gaps_ms,
    last_first_token_ms,
    num_in_time,
    percentile,
    percentiles,
    spread,
    step_between_ms,
    step_window,
    tokens_within,
    wall_s,
    work_done,
)
from benchmarks.transfer_shares import LENGTHS, transfer_case, transfer_shares

STATUS_S = 2.0  # after which a router has had a worker's next heartbeat
DEDUP_STREAMS, DEDUP_PREFIX, DEDUP_OWN = 64, 8192, 128
CHATS, CHAT_TOKENS, CHAT_STEPS = 16, 1024, 2048
INTRUDERS, INTRUDER_TOKENS, INTRUDER_PERIOD_S = 6, 32_768, 1.0
ABLATION = ((64, 8192, 256), (256, 8192, 128), (64, 16_384, 64), (64, 32_768, 256))
ABLATION_STEPS = 256
TRACE_SEED = 1 << 40  # far from all other prompts
IN_TIME = {"ttft_ms": 2000.0, "itl_ms_p99": 50.0}
ARMS = {
    "both": Alteration(),
    "cascade": Alteration(moves_again=True),
    "delta": Alteration(reads_again=True),
    "none": Alteration(moves_again=True, reads_again=True),
}


# Transfers


def move_again(length: int, run: Run) -> Row:
    """Time the first token of a prompt whose pages all have to move, and nothing else."""
    length = run.sizes.tokens(length) or run.cluster.model.page_size
    specs = wave(run.seeds, 1, unique=length)
    for _ in range(2):
        run.wave(specs)
    waves, counted = counted_transfers(lambda: run.wave(specs), run)
    work = run.check_waves(waves)
    run.check_all_moved(work, length)
    return {
        **two_tokens(waves),
        "own_tokens": length,
        **counted,
        # None: too short for the worker's clock.
        "receive_gb_per_s": round(work["bytes_moved"] / len(waves) / counted["receive_ms"] / 1e6, 2)
        if counted["receive_ms"]
        else None,
        **work,
    }


def new_prompt(length: int, run: Run) -> Row:
    """Time the first token of a new prompt."""
    length = run.sizes.tokens(length) or run.cluster.model.page_size

    def ask() -> list[StreamRecord]:
        return run.wave(wave(run.seeds, 1, unique=length))

    ask()
    waves, counted = counted_transfers(ask, run)
    work = run.check_waves(waves)
    check_fresh(work, shared=0)
    return two_tokens(waves) | {"own_tokens": length} | counted | work


def counted_transfers(
    ask: Callable[[], list[StreamRecord]], run: Run
) -> tuple[list[list[StreamRecord]], Row]:
    """Ask again and again; return all answers, and what decode workers count for one meanwhile."""
    count = max(run.sizes.repeats, 5)
    if not run.cluster.spec.is_disaggregated:
        return [ask() for _ in range(count)], {}
    before = transfer_times_s(run)
    waves = [ask() for _ in range(count)]
    took = [after - each for after, each in zip(transfer_times_s(run), before, strict=True)]
    receive_ms, exposed_ms = (round(1e3 * each / count, 3) for each in took)
    return waves, {"receive_ms": receive_ms, "exposed_ms": exposed_ms}


def transfer_times_s(run: Run) -> tuple[float, float]:
    """Return the time in which decode workers have received pages, and how much was exposed."""
    time.sleep(STATUS_S)
    workers = run.cluster.status().workers
    return sum(each.transfer_s for each in workers), sum(
        each.exposed_transfer_s for each in workers
    )


def two_tokens(waves: list[list[StreamRecord]]) -> Row:
    """Return the times of the first and the second token of one stream at a time."""
    seconds = [1e3 * (record.times[-1] - record.started) for [record] in waves]
    return first_tokens(waves) | {f"second_{key}": v for key, v in spread(seconds, 2).items()}


def dedup(run: Run) -> Row:
    """Count how often a prefix of many concurrent requests was computed and moved."""
    sizes, page_size = run.sizes, run.cluster.model.page_size
    shared, own = sizes.tokens(DEDUP_PREFIX), sizes.tokens(DEDUP_OWN)
    count = sizes.streams(DEDUP_STREAMS)
    waves = []
    for _ in range(sizes.repeats):
        waves.append(run.wave(wave(run.seeds, count, unique=own, shared=shared)))
    work = run.check_waves(waves)
    pages = {"prefix": shared // page_size, "prompt": -(-(shared + own) // page_size)}
    own_pages = pages["prompt"] - pages["prefix"]
    computed = work["prefill_prompt_tokens"] / len(waves) - count * own
    moved = work["pages_moved"] / len(waves) - count * own_pages
    return {
        **spread([last_first_token_ms(each) for each in waves], 2),
        "times_computed": round(computed / shared, 4),
        "times_moved": round(moved / pages["prefix"], 4),
        "streams": count,
        "shared_tokens": shared,
        "own_tokens": own,
        **work,
    }


# Two kinds of work at once


def chats_beside_prompts(run: Run) -> Row:
    """Time the gaps between tokens of chats while long prompts arrive."""
    sizes = run.sizes
    chats = wave(run.seeds, sizes.streams(CHATS), unique=sizes.tokens(CHAT_TOKENS))
    run.wave(chats)
    chats = with_tokens(chats, sizes.tokens(CHAT_STEPS))
    calm = run.wave(chats)
    run.wave(wave(run.seeds, 1, unique=sizes.tokens(INTRUDER_TOKENS)))
    prompts = wave(run.seeds, INTRUDERS, unique=sizes.tokens(INTRUDER_TOKENS), max_tokens=16)
    period_s = INTRUDER_PERIOD_S / sizes.tokens_by
    late = [replace(each, offset_s=period_s * (0.5 + index)) for index, each in enumerate(prompts)]
    records = run.wave([*chats, *late])
    talking, intruding = records[: len(chats)], records[len(chats) :]
    work = run.check_work(records)
    begin = min(each.started for each in intruding)
    end = min(max(each.times[0] for each in intruding), min(each.times[-1] for each in talking))
    # Steps take longer as chats grow, so they are compared at the same tokens.
    tokens = [tokens_within(each, begin, end) for each in talking]
    steps = [
        (step_between_ms(each, *range_), step_between_ms(alone, *range_))
        for each, alone, range_ in zip(talking, calm, tokens, strict=True)
        if range_
    ]
    if not steps:
        raise CaseFailed("the chats had ended before the prompts came")
    step_ms, calm_step_ms = (percentile(each, 50) for each in zip(*steps, strict=True))
    during = percentiles(gaps_ms(talking, begin, end), "itl_ms")
    return {
        "ms": during["itl_ms_p99"],
        **during,
        "step_ms": round(step_ms, 3),
        "calm_step_ms": round(calm_step_ms, 3),
        **percentiles(gaps_ms(calm), "calm_itl_ms"),
        **percentiles(first_token_ms(intruding), "prompt_first_token_ms"),
        "window_s": round(end - begin, 3),
        "are_all_prompts_in_window": end >= max(each.times[0] for each in intruding),
        "tokens_per_s": round(work["tokens"] / wall_s(records), 1),
        "all_tokens_per_s": round((work["tokens"] + work["prompt_tokens"]) / wall_s(records), 1),
        "seconds": round(wall_s(records), 3),
        "chats": len(chats),
        **work,
    }


# What the parts are worth


def ablation(streams: int, shared: int, own: int, run: Run) -> Row:
    """Time streams that share a prefix, first new and then again."""
    sizes, page_size = run.sizes, run.cluster.model.page_size
    count, shared, own = sizes.streams(streams), sizes.tokens(shared), sizes.tokens(own)
    specs = wave(run.seeds, count, unique=own, shared=shared)
    primed = run.wave(specs)
    prime = run.check_work(primed)
    steps = max(ABLATION_STEPS // sizes.tokens_by, 16)
    specs = with_tokens(specs, steps)
    run.wave(specs)
    waves = [run.wave(specs) for _ in range(sizes.repeats)]
    work = run.check_waves(waves)
    all_pages = count * -(-(shared + own) // page_size)
    moves_all = run.cluster.spec.altered.moves_again
    if moves_all != (prime["pages_moved"] == all_pages):
        raise CaseFailed(f"{prime['pages_moved']} of {all_pages} pages moved in this arm")
    windows = [window for each in waves if (window := step_window(each))]
    steps_ms = spread([window.step_ms for window in windows]) if windows else {}
    return {
        **spread([1e3 * wall_s(each) for each in waves], 2),
        "prime_ms": round(last_first_token_ms(primed), 2),
        # None: the streams were never all active at once.
        "step_ms": steps_ms.get("ms"),
        "step_min_ms": steps_ms.get("min_ms"),
        "step_max_ms": steps_ms.get("max_ms"),
        "steps_ended": steps,
        "streams": count,
        "shared_tokens": shared,
        "own_tokens": own,
        **work,
        **{f"prime_{key}": value for key, value in prime.items()},
    }


# A trace


def replay(path: Path, scale: TraceScale, run: Run) -> Row:
    """Replay a trace at its own pace."""
    specs, too_long = read_trace(
        path, scale, seed=TRACE_SEED, max_context=run.cluster.model.max_context_tokens
    )
    if not specs:
        raise CaseFailed(f"no request of the trace fits: {too_long} are too long")
    records = run.wave(specs, may_fail=True)
    done = [each for each in records if not each.error]
    if not done:
        raise CaseFailed(f"no request was answered: {records[0].error}")
    work = work_done(done)
    ttft = percentiles(first_token_ms(done), "ttft_ms")
    seconds = wall_s(done)
    row = {
        "ms": ttft["ttft_ms_p50"],
        **ttft,
        **percentiles(gaps_ms(done), "itl_ms"),
        "seconds": round(seconds, 2),
        "offered_requests_per_s": round(len(specs) / specs[-1].offset_s, 3)
        if specs[-1].offset_s
        else None,
        "requests_per_s": round(len(done) / seconds, 3),
        "in_time_per_s": round(num_in_time(done, **IN_TIME) / seconds, 3),
        "in_time": IN_TIME,
        "tokens_per_s": round(work["tokens"] / seconds, 1),
        "hit_share": round(work["hit_tokens"] / work["prompt_tokens"], 4),
        "failed": len(records) - len(done),
        "errors": sorted({each.error for each in records if each.error})[:5],
        "too_long": too_long,
        "trace": {"file": path.name, **asdict(scale)},
        **work,
    }
    try:
        run.check_work(done)
    except CaseFailed as error:
        raise CaseFailed(str(error), row) from error
    return row


# All of them


def all_cases(options: argparse.Namespace) -> list[Case]:
    """Return all cases, those of one cluster after another."""
    pools = f"{options.pairs}+{options.pairs}"
    alone = f"0+{2 * options.pairs}"
    cases = []
    for length in LENGTHS:
        again, new = partial(move_again, length), partial(new_prompt, length)
        for kind, cluster, measure in (
            ("again", "1+1, all move", again),
            ("new", "1+1, all move", new),
            ("aggregated", "0+1", new),
        ):
            name = transfer_case(kind, length)
            cases.append(Case(name=name, cluster=cluster, measure=measure))
    cases += [
        Case(name="transfer/dedup", cluster="1+1", measure=dedup),
        Case(name="itl/disaggregated", cluster="1+1", measure=chats_beside_prompts),
        Case(name="itl/aggregated", cluster="0+2", measure=chats_beside_prompts),
    ]
    for arm in ARMS:
        for shape in ABLATION:
            name = f"ablation/{arm}/{','.join(map(str, shape))}"
            cluster = "1+1" if arm == "both" else f"1+1, {arm}"
            cases.append(Case(name=name, cluster=cluster, measure=partial(ablation, *shape)))
    if options.trace is not None:
        scale = TraceScale(
            seconds=options.trace_seconds, rate=options.trace_rate, lengths=options.trace_lengths
        )
        of_trace = partial(replay, options.trace, scale)
        cases += [
            Case(name="replay/disaggregated", cluster=pools, measure=of_trace),
            Case(name="replay/aggregated", cluster=alone, measure=of_trace),
        ]
    cases += [
        Case(
            name=f"{fault}/{side}/{moment}",
            cluster="1+1, watched",
            measure=partial(kills.strike, fault, side, moment, options.kills),
        )
        for fault in kills.FAULTS
        for side in kills.SIDES
        for moment in kills.MOMENTS
    ]
    order = list(dict.fromkeys(case.cluster for case in cases))
    return sorted(cases, key=lambda case: order.index(case.cluster))


def all_clusters(options: argparse.Namespace, model: Path) -> dict[str, ClusterSpec]:
    """Return the clusters of all cases, by name."""
    base = ClusterSpec(
        model=model, prefill=1, decode=1, device=options.device, options=cluster_options(options)
    )
    pairs = options.pairs
    clusters = {
        "1+1": base,
        f"{pairs}+{pairs}": replace(base, prefill=pairs, decode=pairs),
        "0+1": replace(base, prefill=0),
        "0+2": replace(base, prefill=0, decode=2),
        f"0+{2 * pairs}": replace(base, prefill=0, decode=2 * pairs),
        "1+1, all move": replace(base, altered=ALL_MOVE),
        **{
            f"1+1, {arm}": replace(base, altered=altered)
            for arm, altered in ARMS.items()
            if altered != Alteration()
        },
        "1+1, watched": replace(base, options={**base.options, **kills.OPTIONS}),
    }
    if not options.apart:
        return clusters
    return {
        name: replace(
            spec,
            altered=replace(spec.altered, lives_apart=True),
            options={**spec.options, "page_transport": "nccl"},
        )
        for name, spec in clusters.items()
    }


def main() -> None:
    """Run from the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--trace", type=Path, help="trace in Mooncake's JSONL format, may be .gz")
    parser.add_argument(
        "--trace-seconds", type=float, default=180.0, help="seconds of the trace to replay"
    )
    parser.add_argument(
        "--trace-rate", type=float, default=1.0, help="speed of the replay; 2: twice as fast"
    )
    parser.add_argument(
        "--trace-lengths", type=float, default=1.0, help="factor of all lengths; 0.5: half as long"
    )
    parser.add_argument(
        "--kills", type=int, default=3, help="kills, and hangs, of each side at each moment"
    )
    parser.add_argument("--apart", action="store_true", help="let NCCL connect as between hosts")
    parser.add_argument(
        "--pairs", type=int, help="pairs of GPUs for the replay; default: 1, or 2 on four GPUs"
    )
    options = parser.parse_args()
    options.pairs = options.pairs or (2 if num_gpus() >= 4 else 1)
    try:
        cases = all_cases(options)
    except ValueError as error:
        parser.error(f"--trace-...: {error}")
    chosen = selected([case.name for case in cases], options.cases)
    if options.list:
        print("\n".join(chosen))
        return
    end_in_order()
    clock = Clock(options.deadline_s, options.seed)
    clusters = all_clusters(options, model_of(options))
    results = results_of(options, "disaggregation", clusters, derive=transfer_shares)
    run_chosen(
        chosen,
        cases,
        clusters,
        results,
        options=options,
        clock=clock,
        warm_up=warm_up,
    )


if __name__ == "__main__":
    main()
