"""Measures a whole cluster as its clients see it: steps, first tokens, a mix, the start.

    python -m benchmarks.serving_matrix --out benchmarks/results/serving-matrix-h200.json

Weights are random, of Llama-3-8B's shape; prompts are random token ids, tokens greedy. Clients are
processes of their own. Cases named aggregated/... have no prefill worker; all others have one, and,
but for cached prompts, fail if no page moved or the decode worker computed a prompt token.

decode/N@L          N streams, prompts of L tokens. All prompts are computed and moved before; then
                    the streams begin at once. `ms` is a step: the time in which all streams are
                    active over the tokens of one stream in it.
shared/N,S,U        the same, with prompts of S tokens that all share and U of their own;
                    `prime_ms` is the last first token of the wave before, which computes them.
ttft/NxL            from the first call to the last first token of N new prompts at once.
ttft/cached         the same for a prompt of 1,024 tokens that the cache holds, of which the last
                    token is computed; N-cached-at-once for N of them. Here, as by default, a decode
                    worker computes short rests itself.
mixed/512           until all of 512 requests are done that come at once: lognormal lengths,
                    502,942 input and 121,658 output tokens.
ready/...           from the launch until the router is ready; new: the first start ever, without
                    compiled kernels; cold: no weights in the file cache; warm: both at hand.
                    `parts_s` divides it, by the worker that is ready last.

Every repeat of ttft and mixed has new prompts. Without --cases everything runs; try it anywhere
with --shape tiny --scale small --device cpu --page-size 16.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from unittest import mock

from benchmarks.case_runs import Case, CaseFailed, Clock, Run, run_chosen, selected, start
from benchmarks.measured_host import drop_from_file_cache, read_into_file_cache
from benchmarks.prompts import (
    MIX_INPUT_TOKENS,
    MIX_OUTPUT_TOKENS,
    MIX_REQUESTS,
    StreamSpec,
    mix,
    wave,
)
from benchmarks.run_arguments import (
    LOCAL_PREFILL,
    arguments,
    cluster_options,
    end_in_order,
    model_of,
    results_of,
)
from benchmarks.served_cluster import ClusterSpec
from benchmarks.start_parts import LOGGED, start_parts
from benchmarks.stream_statistics import (
    Row,
    StreamRecord,
    first_token_ms,
    last_first_token_ms,
    percentiles,
    spread,
    step_window,
    wall_s,
)

DECODE = ((1, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024))
LONG_DECODE = ((64, 8192), (16, 32_768))  # streams, context
SHARED = ((64, 8192, 256), (256, 8192, 128), (64, 32_768, 256))  # streams, shared, own tokens
FIRST_TOKENS = ((1, 512), (1, 4096), (1, 32_768), (16, 4096))  # streams, prompt
CACHED = {"cached": 1, "32-cached-at-once": 32, "256-cached-at-once": 256}
CACHED_TOKENS = 1024
DISAGGREGATED, SHIPPED, AGGREGATED = "1+1", "1+1, as shipped", "0+1"
# Workers without a step for half a second record the passes that the warm-up did not need, in 3.3 s
# at most. Their log lines that say so are below the level of measured clusters.
RECORDING_S = 5.0
NEW, COLD, WARM = "ready/new", "ready/cold", "ready/warm"


def measured_cases() -> dict[str, Callable[[Run], Row]]:
    """Return what runs on any cluster, by name, in the order of the runs."""
    return {
        **{f"decode/{n}@{length}": partial(decode, n, length) for n, length in DECODE},
        **{f"decode/{n}@{length}": partial(decode, n, length) for n, length in LONG_DECODE},
        **{f"shared/{n},{s},{u}": partial(decode, n, u, shared=s) for n, s, u in SHARED},
        **{f"ttft/{n}x{length}": partial(ttft, n, length) for n, length in FIRST_TOKENS},
        **{f"ttft/{name}": partial(cached, n) for name, n in CACHED.items()},
        f"mixed/{MIX_REQUESTS}": mixed,
    }


def clusters_of(options: argparse.Namespace, num_routers: int = 1) -> dict[str, ClusterSpec]:
    """Return the clusters of all cases, by name."""
    disaggregated = ClusterSpec(
        model=model_of(options),
        prefill=1,
        decode=1,
        device=options.device,
        options=cluster_options(options),
        routers=num_routers,
    )
    shipped = {name: each for name, each in disaggregated.options.items() if name != LOCAL_PREFILL}
    return {
        DISAGGREGATED: disaggregated,
        SHIPPED: replace(disaggregated, options=shipped),
        AGGREGATED: replace(disaggregated, prefill=0),
    }


def cases_of(measured: Mapping[str, Callable[[Run], Row]]) -> list[Case]:
    """Return what to measure as cases, with prefill workers and without, cluster by cluster."""
    cases = [
        Case(
            name=name,
            cluster=SHIPPED if name.removeprefix("ttft/") in CACHED else DISAGGREGATED,
            measure=each,
        )
        for name, each in measured.items()
    ]
    cases += [
        Case(name=f"aggregated/{name}", cluster=AGGREGATED, measure=each)
        for name, each in measured.items()
    ]
    return sorted(cases, key=lambda case: case.cluster == SHIPPED)


def decode(streams: int, own: int, run: Run, *, shared: int = 0) -> Row:
    """Time steps of streams whose prompts the cluster has computed before."""
    count, sizes = run.sizes.streams(streams), run.sizes
    own, shared = sizes.tokens(own), sizes.tokens(shared) if shared else 0
    specs = wave(run.seeds, count, unique=own, shared=shared)
    primed = run.wave(specs)
    prime = run.check_work(primed)
    check_fresh(prime, shared=shared)
    run.wave(with_tokens(specs, max(sizes.steps // 8, 4)))  # of the kind that is measured
    waves = [run.wave(with_tokens(specs, sizes.steps)) for _ in range(sizes.repeats)]
    windows = [step_window(each) for each in waves]
    found = [window for window in windows if window]
    if len(found) < len(windows):
        raise CaseFailed("the streams were never all active at once")
    work = run.check_waves(waves)
    step_ms = spread([window.step_ms for window in found])
    return {
        **step_ms,
        "tokens_per_s": round(1e3 * count / step_ms["ms"], 1),
        "steps": min(window.tokens for window in found),
        "streams": count,
        "shared_tokens": shared,
        "own_tokens": own,
        "prime_ms": round(last_first_token_ms(primed), 2),
        "first_token_ms": round(max(last_first_token_ms(each) for each in waves), 2),
        **work,
        **{f"prime_{key}": value for key, value in prime.items()},
    }


def with_tokens(specs: list[StreamSpec], max_tokens: int) -> list[StreamSpec]:
    """Return the same requests, for so many tokens."""
    return [replace(each, max_tokens=max_tokens) for each in specs]


def check_fresh(prime: Row, *, shared: int) -> None:
    """Refuse a wave of new prompts that found more in a cache than what they share."""
    most = (prime["requests"] - 1) * shared
    if prime["hit_tokens"] > most:
        raise CaseFailed(f"new prompts found {prime['hit_tokens']} tokens, allowed: {most}")


def ttft(streams: int, length: int, run: Run) -> Row:
    """Time the first tokens of new prompts."""
    count, length = run.sizes.streams(streams), run.sizes.tokens(length)

    def once() -> list[StreamRecord]:
        return run.wave(wave(run.seeds, count, unique=length))

    once()
    waves = [once() for _ in range(run.sizes.repeats)]
    work = run.check_waves(waves)
    check_fresh(work, shared=0)
    return first_tokens(waves) | {"streams": count, "own_tokens": length} | work


def cached(streams: int, run: Run) -> Row:
    """Time the first tokens of prompts that the cache holds."""
    count, length = run.sizes.streams(streams), run.sizes.tokens(CACHED_TOKENS)
    specs = wave(run.seeds, count, unique=length)
    run.check_work(run.wave(specs))
    run.wave(specs)
    waves = [run.wave(specs) for _ in range(run.sizes.repeats)]
    work = run.check_waves(waves)
    page_size = run.cluster.model.page_size
    least = count * len(waves) * (length - page_size)
    if work["hit_tokens"] < least:
        raise CaseFailed(f"cached prompts found {work['hit_tokens']} tokens, not {least}")
    return first_tokens(waves) | {"streams": count, "own_tokens": length} | work


def first_tokens(waves: list[list[StreamRecord]]) -> Row:
    """Return the time to the last first token of each wave, and to each of all."""
    each_ms = first_token_ms(record for records in waves for record in records)
    return spread([last_first_token_ms(each) for each in waves], 2) | {
        f"each_{key}": value for key, value in percentiles(each_ms, "ms").items()
    }


def mixed(run: Run) -> Row:
    """Time an offline mix from its first call to its last token."""
    count = run.sizes.streams(MIX_REQUESTS)
    run.wave(mix_of(max(count // 8, 1), run))
    records = run.wave(mix_of(count, run))
    work = run.check_work(records)
    seconds = wall_s(records)
    each_ms = first_token_ms(records)
    return {
        "ms": round(1e3 * seconds, 1),
        "seconds": round(seconds, 2),
        "repeats": 1,
        "requests_per_s": round(count / seconds, 2),
        "tokens_per_s": round(work["tokens"] / seconds, 1),
        **percentiles(each_ms, "first_token_ms"),
        **work,
    }


def mix_of(requests: int, run: Run) -> list[StreamSpec]:
    """Return so many requests of the mix, with their share of its tokens."""
    share = requests / MIX_REQUESTS / run.sizes.tokens_by
    return mix(
        run.seeds,
        requests=requests,
        input_tokens=max(round(MIX_INPUT_TOKENS * share), requests),
        output_tokens=max(round(MIX_OUTPUT_TOKENS * share), requests),
    )


def warm_up(run: Run) -> None:
    """Have kernels loaded and passes recorded before anything is measured."""
    for streams in (1, 8, 64, 256):
        count = run.sizes.streams(streams)
        specs = wave(run.seeds, count, unique=run.sizes.tokens(512), shared=run.sizes.tokens(512))
        for _ in range(2):
            run.wave(with_tokens(specs, 16))
    run.wave(wave(run.seeds, 1, unique=run.sizes.tokens(8192)))
    if run.cluster.device == "cuda":
        time.sleep(RECORDING_S)


def starts_of(spec: ClusterSpec) -> dict[str, Callable[[Clock], Row]]:
    """Return the measurements of a cluster's start, by name."""

    @cache
    def start_before(clock: Clock) -> None:
        with start(spec, "a start before", clock):
            pass

    def new(clock: Clock) -> Row:
        drop_from_file_cache(spec.model)
        with (
            tempfile.TemporaryDirectory() as kernels,
            mock.patch.dict(os.environ, TRITON_CACHE_DIR=kernels),
        ):
            return time_start(spec, NEW, clock)

    def cold(clock: Clock) -> Row:
        start_before(clock)
        drop_from_file_cache(spec.model)
        return time_start(spec, COLD, clock)

    def warm(clock: Clock) -> Row:
        start_before(clock)
        read_into_file_cache(spec.model)
        return time_start(spec, WARM, clock)

    return {NEW: new, COLD: cold, WARM: warm}


def time_start(spec: ClusterSpec, name: str, clock: Clock) -> Row:
    """Start a cluster and stop it."""
    with start(replace(spec, options={**spec.options, **LOGGED}), name, clock) as cluster:
        seconds = cluster.ready_s
        parts = start_parts(cluster.logs, cluster.launched_at, seconds)
    return {"ms": round(1e3 * seconds, 1), "seconds": round(seconds, 2), "repeats": 1, **parts}


def main() -> None:
    """Run from the command line."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--routers", type=int, default=1, help="routers, among which the clients are divided"
    )
    options = parser.parse_args()
    measured = measured_cases()
    names = [NEW, COLD, WARM, *measured, *(f"aggregated/{name}" for name in measured)]
    chosen = selected(names, options.cases)
    if options.list:
        print("\n".join(chosen))
        return
    end_in_order()
    clock = Clock(options.deadline_s, options.seed)
    specs = clusters_of(options, num_routers=options.routers)
    results = results_of(options, "serving_matrix", specs)
    starts = starts_of(specs[DISAGGREGATED]).items()
    cases = [Case(name=name, measure_start=each) for name, each in starts]
    cases += cases_of(measured)
    run_chosen(
        chosen,
        cases,
        specs,
        results,
        options=options,
        clock=clock,
        warm_up=warm_up,
    )


if __name__ == "__main__":
    main()
