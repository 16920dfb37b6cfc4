"""A worker of a 1 + 1 cluster is killed or hangs around a transfer: what that costs, for how long.

Streams begin, and one worker gets SIGKILL, or SIGSTOP for ten seconds, before, during or after
their pages move. The cluster is observed until a new request moves pages again. The same prompts
then run once more: their greedy tokens are those that the interrupted streams must have had.
`pauses_ms` has the longest time that each stream which ended waited for a token after the fault,
`resumed_gap_ms` the time between its tokens after that pause, `calm_gap_ms` that without the fault.

GPU memory is compared while no worker's changes: one that has nothing to do records passes, which
takes memory. It is noted twice: `memory_grew_mib` as the driver counts it for the process of the
prefill worker and for that of the decode worker, and `survivor_grew_mib` as torch's allocator does
in the worker that was not hit. What tensors have and what the allocator keeps for later ones are
told apart there: a leak is the former.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.case_runs import CaseFailed, OutOfTime, Run
from benchmarks.measured_host import gpu_memory_of
from benchmarks.prompts import token_ids, wave
from benchmarks.stream_statistics import (
    Row,
    StreamRecord,
    gaps_after_pause_ms,
    gaps_ms,
    longest_pause_ms,
    percentile,
    percentiles,
    work_done,
)
from pagewire import ClusterStatus, PagewireError, WorkerStatus

FAULTS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
SIDES = {"prefill": "prefill-0", "decode": "decode-0"}
MOMENTS = ("before", "during", "after")
# All streams must run at once after the transfer, and the transfer last for some heartbeats, also
# of a small model; so a scale makes these no smaller than LEAST_...
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 4096, 512
LEAST_STREAMS, LEAST_PROMPT_TOKENS = 4, 2048
RECOVERY_TIMEOUT_S = 240.0
SETTLE_TIMEOUT_S = 15.0  # for requests to end, and for pages to settle
STEADY_S = 2.0  # without a change of memory; a worker records passes after a shorter rest
STEADY_TIMEOUT_S = 30.0
MIB = 2**20
PROBE_PAGES = 4

# Status is only as new as the last heartbeat.
OPTIONS = {
    "decode_worker.heartbeat_s": 0.05,
    "prefill_worker.heartbeat_s": 0.05,
    # There is no second decode worker: streams wait until the first has loaded its weights again.
    "router.resume_wait_s": 180.0,
    "router.worker_wait_s": 180.0,
}
GAPS_AFTERWARDS = ("resumed_gap_ms_p50", "resumed_gap_ms_p99", "resumed_gap_ms_max")
GAPS_WITHOUT = ("calm_gap_ms_p50", "calm_gap_ms_p99", "calm_gap_ms_max")
BEFORE_S = 0.005  # from the calls to the fault, in which no worker can fill a chunk of pages
HANG_S = 10.0


def strike(fault: str, side: str, moment: str, times: int, run: Run) -> Row:
    """Kill or stop a worker repeatedly, each time with new prompts, and sum up the costs.

    Rounds that the run's deadline cuts off are left out.
    """
    rounds: list[Row] = []
    for _ in range(times):
        try:
            rounds.append(_strike_once(FAULTS[fault], SIDES[side], moment, run))
        except OutOfTime:
            if not rounds:
                raise
            break
        except CaseFailed as error:
            raise CaseFailed(str(error), {"rounds": rounds}) from error
    return sum_up(rounds)


def sum_up(rounds: Sequence[Row]) -> Row:
    """Return what rounds of one case have in common."""
    found: Row = {
        "times": len(rounds),
        "streams": rounds[0]["streams"],
        "hit_the_moment": sum(each["hit_the_moment"] for each in rounds),
        "lost_requests": sum(each["lost_requests"] for each in rounds),
        "wrong_tokens": sum(each["wrong_tokens"] for each in rounds),
    }
    for name in ("noticed_ms", "failed_ms", "quiet_ms", "restarted_ms", "usable_ms", "last_ms"):
        if values := [each[name] for each in rounds if each[name] is not None]:
            found[name] = round(percentile(values, 50), 1)
            found[f"{name}_max"] = round(max(values), 1)
    found |= percentiles([pause for each in rounds for pause in each["pauses_ms"]], "pause_ms", 1)
    for name in (*GAPS_AFTERWARDS, *GAPS_WITHOUT):
        if values := [each[name] for each in rounds if name in each]:
            found[name] = round(percentile(values, 50), 2)
    if grown := [growth for each in rounds for growth in each["memory_grew_mib"]]:
        found["memory_grew_mib"] = max(grown)
    if told := [each["survivor_grew_mib"] for each in rounds if each.get("survivor_grew_mib")]:
        found["survivor_grew_mib"] = {
            name: max(each[name] for each in told) for name in ("allocated", "reserved")
        }
    return {"ms": found["usable_ms"], **found, "rounds": rounds}


def _strike_once(fault: signal.Signals, victim: str, moment: str, run: Run) -> Row:
    sizes = run.sizes
    streams = max(sizes.streams(STREAMS), LEAST_STREAMS)
    length = max(sizes.tokens(PROMPT_TOKENS), LEAST_PROMPT_TOKENS)
    specs = [
        replace(each, max_tokens=OUTPUT_TOKENS, keeps_tokens=True)
        for each in wave(run.seeds, streams, unique=length)
    ]
    run.until(lambda: is_idle(run.cluster.status()), SETTLE_TIMEOUT_S, "an idle cluster")
    memory_mib = _steady_memory_mib(run)
    before = newest_workers(run.cluster.status())
    num_pages = sum(-(-each.prompt_tokens // run.cluster.model.page_size) for each in specs)
    pid = run.cluster.pid(victim)
    begin_at = run.begin(specs)
    moved = _wait_for(moment, begin_at, len(specs), num_pages, before, run)
    struck_at = time.monotonic()
    os.kill(pid, fault)
    hangs = fault is signal.SIGSTOP
    if hangs:
        threading.Timer(HANG_S, os.kill, (pid, signal.SIGCONT)).start()
    seen = _watch(victim, before, struck_at, run, comes_back_as_it_was=hangs)
    records = run.finish(may_fail=True)
    run.until(lambda: is_idle(run.cluster.status()), SETTLE_TIMEOUT_S, "an idle cluster again")
    calm = run.wave(specs)
    memory_mib_after = _steady_memory_mib(run)
    work = work_done(records)
    return {
        "streams": len(specs),
        "hit_the_moment": _is_hit(moment, moved, num_pages, records, struck_at),
        "pages_moved_by_then": moved,
        "prompt_pages": num_pages,
        "lost_requests": sum(bool(record.error) for record in records),
        "wrong_tokens": sum(
            count_differences(interrupted.token_ids, undisturbed.token_ids)
            for interrupted, undisturbed in zip(records, calm, strict=True)
            if not interrupted.error
        ),
        "errors": sorted({record.error for record in records if record.error}),
        **seen,
        "pauses_ms": [
            round(longest_pause_ms(each, struck_at), 1) for each in records if not each.error
        ],
        **percentiles(gaps_after_pause_ms(records, struck_at), "resumed_gap_ms"),
        **percentiles(gaps_ms(calm), "calm_gap_ms"),
        "last_ms": max(
            (round(1e3 * (each.times[-1] - struck_at), 1) for each in records if each.times),
            default=None,
        ),
        "memory_grew_mib": [
            after - before for before, after in zip(memory_mib, memory_mib_after, strict=True)
        ],
        "survivor_grew_mib": allocator_growth_mib(
            before[_other(victim)], newest_workers(run.cluster.status())[_other(victim)]
        ),
        "resumptions": _total(records, "resumptions"),
        "prefill_retries": _total(records, "prefill_retries"),
        "prefill_prompt_tokens": work["prefill_prompt_tokens"],
        "decode_prompt_tokens": work["decode_prompt_tokens"],  # by itself while it is alone
    }


def count_differences(found: Sequence[int], expected: Sequence[int]) -> int:
    """Return at how many places two streams differ; missing tokens count."""
    longer = max(len(found), len(expected))
    return longer - sum(a == b for a, b in zip(found, expected, strict=False))


def _wait_for(
    moment: str,
    begin_at: float,
    streams: int,
    num_pages: int,
    before: dict[str, WorkerStatus],
    run: Run,
) -> int:
    """Wait for the moment to strike; returns the pages known to have moved by then."""
    moved = 0

    def is_due() -> bool:
        nonlocal moved
        if moment == "before":
            return time.monotonic() >= begin_at + BEFORE_S
        worker = newest_workers(run.cluster.status())["decode-0"]
        moved = worker.pages_moved - before["decode-0"].pages_moved
        if moment == "during":
            return moved > 0
        return moved >= num_pages and worker.running == streams

    run.until(is_due, RECOVERY_TIMEOUT_S, f"the moment {moment} the transfer")
    return moved


def _is_hit(
    moment: str, moved: int, num_pages: int, records: Sequence[StreamRecord], struck_at: float
) -> bool:
    """Return whether the fault came at the right moment, according to clients and workers."""
    had_token = [bool(each.times) and each.times[0] < struck_at for each in records]
    if moment == "before":
        return not any(had_token)
    if moment == "during":
        return 0 < moved < num_pages
    return all(had_token)


def _watch(
    victim: str,
    before: dict[str, WorkerStatus],
    struck_at: float,
    run: Run,
    *,
    comes_back_as_it_was: bool,
) -> Row:
    """Return how long after the fault each event was seen, ms; None: it was not.

    noticed_ms      the router gives the victim no more work
    failed_ms       the other worker has given up a transfer
    quiet_ms        and has no page any more that a transfer reads or may write
    restarted_ms    the victim is ready again; if it only hangs, not before it runs on
    usable_ms       a new request has moved pages, and no decode worker computed its prompt
    """
    other = _other(victim)
    seen: dict[str, float | None] = dict.fromkeys(
        ("noticed_ms", "failed_ms", "quiet_ms", "restarted_ms", "usable_ms")
    )

    def mark(name: str) -> None:
        if seen[name] is None:
            seen[name] = round(1e3 * (time.monotonic() - struck_at), 1)

    def is_usable() -> bool:
        try:
            workers = newest_workers(run.cluster.status())
        except PagewireError:
            return False
        mine, its = workers.get(victim), workers[other]
        if mine is None or mine.state != "ready":
            mark("noticed_ms")
        if its.transfer_failures > before[other].transfer_failures:
            mark("failed_ms")
            pages = its.pages
            if not pages.leased + pages.incoming + pages.quarantine:
                mark("quiet_ms")
        if mine is None or mine.state != "ready":
            return False
        if comes_back_as_it_was:
            if time.monotonic() < struck_at + HANG_S:
                return False
        elif mine.incarnation == before[victim].incarnation:
            return False
        mark("noticed_ms")
        mark("restarted_ms")
        return _probe(run)

    run.until(is_usable, RECOVERY_TIMEOUT_S, f"a transfer after the fault of {victim}")
    mark("usable_ms")
    return dict(seen)


def _probe(run: Run) -> bool:
    """Return whether a new request moves pages."""
    model = run.cluster.model
    prompt = token_ids([run.seeds.segment(PROBE_PAGES * model.page_size)], model.vocab_size)
    try:
        completion = run.cluster.client.generate(
            prompt, max_tokens=2, temperature=0.0, ignore_eos=True, timeout_s=SETTLE_TIMEOUT_S
        )
    except PagewireError:
        return False
    usage = completion.usage
    return usage is not None and usage.bytes_moved > 0 and not usage.decode_computed_tokens


def newest_workers(status: ClusterStatus) -> dict[str, WorkerStatus]:
    """Return the newest start of each worker that the router still knows."""
    workers: dict[str, WorkerStatus] = {}
    for each in status.workers:
        if each.worker_id not in workers or each.state == "ready":
            workers[each.worker_id] = each
    return workers


def is_idle(status: ClusterStatus) -> bool:
    """Return whether all workers are ready, and none has a request or a page in use."""
    workers = newest_workers(status).values()
    return all(
        each.state == "ready"
        and not each.running + each.waiting
        and not each.pages.live + each.pages.leased + each.pages.incoming + each.pages.quarantine
        for each in workers
    )


def _steady_memory_mib(run: Run) -> list[int]:
    """Return the GPU memory of prefill and decode worker, MiB, once it is steady; [] on CPUs."""
    if run.cluster.device == "cpu":
        return []
    pids = {run.cluster.pid(name): name for name in SIDES.values()}
    used: dict[str, int] = {}
    changed_at = time.monotonic()

    def is_steady() -> bool:
        nonlocal used, changed_at
        now = gpu_memory_of(pids)
        if now != used:
            used, changed_at = now, time.monotonic()
        return time.monotonic() - changed_at > STEADY_S

    run.until(is_steady, STEADY_TIMEOUT_S, "GPU memory that is steady")
    return [used[name] for name in SIDES.values() if used]


def allocator_growth_mib(before: WorkerStatus, after: WorkerStatus) -> dict[str, float]:
    """Return by how much a worker's tensors and its allocator have grown; {} without a GPU."""
    if not after.gpu_reserved_bytes:
        return {}
    return {
        "allocated": round((after.gpu_allocated_bytes - before.gpu_allocated_bytes) / MIB, 2),
        "reserved": round((after.gpu_reserved_bytes - before.gpu_reserved_bytes) / MIB, 2),
    }


def _other(victim: str) -> str:
    return next(name for name in SIDES.values() if name != victim)


def _total(records: Sequence[StreamRecord], name: str) -> Any:
    return sum(getattr(each.usage, name) for each in records if each.usage)
