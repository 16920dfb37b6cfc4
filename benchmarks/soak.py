"""A cluster under a mixed load for minutes while its workers are killed: what is lost, what leaks.

    python -m benchmarks.soak --out benchmarks/results/soak-cpu.json --shape tiny --scale small \\
        --device cpu --page-size 16 --streams 60 --clients 2
    python -m benchmarks.soak --out benchmarks/results/soak-h200.json --prefill 0 --decode 2 \\
        --option workers_per_gpu=2

Rounds follow each other. In each, requests come over some seconds: chats about shared documents,
long and short prompts, greedy and seeded, and clients that leave in the middle of an answer. In its
middle a worker is killed: each in turn, of all pools or of those that --kill names. A round ends
when all answers have ended and all workers are ready and idle again. Then no page may be in use,
and some of the answers are read once more: their tokens are what they must have been. The end of
each round notes the memory of processes and GPUs. For GPUs, and for processes that nobody killed,
`*_growth_mib` compares the last rounds with the first ones after the warm-up.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import psutil

from benchmarks.case_runs import CaseFailed, Clock, OutOfTime, Run, start
from benchmarks.client_processes import ClientProcesses
from benchmarks.kills import RECOVERY_TIMEOUT_S, count_differences, is_idle, newest_workers
from benchmarks.measured_host import conditions, gpu_memory_of
from benchmarks.prompts import Seeds, Segment, StreamSpec
from benchmarks.result_file import ResultFile, say
from benchmarks.run_arguments import (
    SCALES,
    Sizes,
    cluster_arguments,
    cluster_options,
    configuration_of,
    end_in_order,
    model_of,
)
from benchmarks.served_cluster import ClusterSpec
from benchmarks.stream_statistics import Row, StreamRecord, percentile, work_done
from cluster.pool_config import ROLES
from pagewire import PagewireError, WorkerStatus

ROUND_S = 20.0  # over which requests come
DOCUMENTS, DOCUMENT_TOKENS = 4, 4096  # that chats of all rounds are about
TEMPERATURE = 0.9  # of every second request
CHECKED = 12  # answers of a round that are read again
LASTING = {"router": "router-0", "controller": "pagewire-controller"}  # that nobody kills
WARM_ROUNDS = 2  # in which caches, pools and recordings fill
LEAST_ENDS = 2  # least rounds to compare at each end; the ends share none
MIB = 2**20
# A decode worker may be alone, and its streams wait until it has loaded its weights again.
OPTIONS = {"router.resume_wait_s": 180.0, "router.worker_wait_s": 180.0}


class Load:
    """Makes the requests of rounds."""

    def __init__(self, seeds: Seeds, sizes: Sizes, streams: int) -> None:
        self._seeds = seeds
        self._sizes = sizes
        self._streams = streams
        self._source = random.Random(1)  # noqa: S311 - reproducible, nothing secret
        length = sizes.tokens(DOCUMENT_TOKENS)
        self._documents = [seeds.segment(length) for _ in range(DOCUMENTS)]

    def round(self) -> list[StreamSpec]:
        """Return the requests of one round."""
        specs = []
        for index in range(self._streams):
            spec = self._request(self._source.random())
            spec = replace(spec, offset_s=self._source.uniform(0.0, ROUND_S), keeps_tokens=True)
            if index % 2:
                spec = replace(spec, temperature=TEMPERATURE, seed=index)
            specs.append(spec)
        return specs

    def _request(self, draw: float) -> StreamSpec:
        if draw < 0.1:
            return StreamSpec(
                prompt=(self._own(8192, 16_384),), max_tokens=self._source.randint(16, 64)
            )
        if draw < 0.3:
            return StreamSpec(
                prompt=(self._own(16, 1024),), max_tokens=self._source.randint(64, 512)
            )
        document = self._source.choice(self._documents)
        chat = StreamSpec(
            prompt=(document, self._own(64, 512)), max_tokens=self._source.randint(64, 512)
        )
        if draw < 0.8:
            return chat
        return replace(chat, leaves_after=self._source.randint(1, chat.max_tokens - 1))

    def _own(self, least: int, most: int) -> Segment:
        return self._seeds.segment(self._length(least, most))

    def _length(self, least: int, most: int) -> int:
        return self._source.randint(self._sizes.tokens(least), self._sizes.tokens(most))


def play_round(load: Load, victim: str, run: Run) -> Row:
    """Play a round; returns what happened in it.

    Raises:
        CaseFailed: A worker did not come back, or pages stayed in use.
    """
    specs = load.round()
    began_at = run.begin(specs)
    time.sleep(max(began_at + ROUND_S / 2 - time.monotonic(), 0))
    before = newest_workers(run.cluster.status())[victim].incarnation
    os.kill(run.cluster.pid(victim), signal.SIGKILL)
    records = run.finish(may_fail=True)

    def is_whole() -> bool:
        try:
            status = run.cluster.status()
        except PagewireError:
            return False
        return newest_workers(status)[victim].incarnation != before and is_idle(status)

    run.until(is_whole, RECOVERY_TIMEOUT_S, f"{victim} is back, and no page is in use")
    kept = [pair for pair in zip(specs, records, strict=True) if not pair[0].leaves_after]
    checked = [pair for pair in kept if not pair[1].error][:CHECKED]
    wrong = _wrong_tokens(checked, run) if checked else 0
    run.until(is_whole, RECOVERY_TIMEOUT_S, "no page is in use after answers were read again")
    workers = newest_workers(run.cluster.status()).values()
    work = work_done(records)
    return {
        "victim": victim,
        "seconds": round(time.monotonic() - began_at, 1),
        "streams": len(specs),
        "left": sum(bool(each.leaves_after) for each in specs),
        "errors": sorted({each.error for each in records if each.error}),
        "lost_requests": sum(bool(each.error) for each in records),
        "checked": len(checked),
        "wrong_tokens": wrong,
        "resumed": sum(bool(each.usage and each.usage.resumptions) for each in records),
        "tokens": sum(each.num_tokens for each in records),
        "decode_prompt_tokens": work["decode_prompt_tokens"],
        "pages_moved": work["pages_moved"],
        "pages_cached": {each.worker_id: each.pages.cached for each in workers},
        "pages_free": {each.worker_id: each.pages.free for each in workers},
        "memory_mib": _memory_mib(workers, run),
        "gpu_memory_mib": _gpu_memory_mib(workers, run),
    }


def _wrong_tokens(pairs: Sequence[tuple[StreamSpec, StreamRecord]], run: Run) -> int:
    """Read answers again; return at how many places they differ."""
    calm = run.wave([replace(spec, offset_s=0.0) for spec, _ in pairs])
    return sum(
        count_differences(record.token_ids, again.token_ids)
        for (_, record), again in zip(pairs, calm, strict=True)
    )


def _memory_mib(workers: Collection[WorkerStatus], run: Run) -> dict[str, int]:
    """Return the resident memory of each process."""
    actors = LASTING | {each.worker_id: each.worker_id for each in workers}
    pids = {name: run.cluster.pid(actor) for name, actor in actors.items()}
    return {name: psutil.Process(pid).memory_info().rss // MIB for name, pid in pids.items()}


def _gpu_memory_mib(workers: Collection[WorkerStatus], run: Run) -> dict[str, int]:
    """Return the GPU memory of each worker; {} without GPUs."""
    pids = {run.cluster.pid(each.worker_id): each.worker_id for each in workers}
    return gpu_memory_of(pids)


def sum_up(rounds: Mapping[str, Row]) -> list[Row]:
    """Return the row of all rounds together."""
    rows = list(rounds.values())
    if not rows:
        return []
    found: Row = {"case": "all", "from": "rounds", "rounds": len(rows), "kills": len(rows)}
    found["minutes"] = round(sum(each["seconds"] for each in rows) / 60, 1)
    names = ("streams", "left", "lost_requests", "checked", "wrong_tokens", "resumed", "tokens")
    for name in (*names, "decode_prompt_tokens", "pages_moved"):
        found[name] = sum(each[name] for each in rows)
    settled = rows[WARM_ROUNDS:]
    noted = {
        name: [each["memory_mib"][name] for each in settled]
        for name in rows[0]["memory_mib"].keys() - {each["victim"] for each in rows}
    }
    for worker in rows[0]["gpu_memory_mib"]:
        # A worker that was just killed has not filled its memory yet; a GPU may report nothing.
        noted[f"gpu_of_{worker}"] = [
            each["gpu_memory_mib"][worker]
            for each in settled
            if each["victim"] != worker and worker in each["gpu_memory_mib"]
        ]
    found |= {
        f"{name}_growth_mib": _growth(values)
        for name, values in noted.items()
        if len(values) >= 2 * LEAST_ENDS
    }
    return [found]


def _growth(values: Sequence[float]) -> float:
    """Return by how much the last quarter is above the first one, in the median."""
    quarter = max(len(values) // 4, LEAST_ENDS)
    return round(percentile(values[-quarter:], 50) - percentile(values[:quarter], 50), 1)


def soak(
    run: Run, results: ResultFile, minutes: float, streams: int, pools: tuple[str, ...]
) -> None:
    """Play rounds, in each of which a worker of these pools is killed, until the time is over."""
    load = Load(run.seeds, run.sizes, streams)
    ends_at = time.monotonic() + 60 * minutes
    workers = newest_workers(run.cluster.status())
    victims = cycle(sorted((name for name in workers if name.startswith(pools)), reverse=True))
    number = 0
    while time.monotonic() < ends_at:
        number += 1
        results.add({"case": f"round/{number:03}", **play_round(load, next(victims), run)})


def main() -> None:
    """Run from the command line."""
    parser = cluster_arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=160, help="streams of a round")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument(
        "--kill", nargs="+", choices=ROLES, default=ROLES, help="pools whose workers are killed"
    )
    options = parser.parse_args()
    end_in_order()
    spec = ClusterSpec(
        model=model_of(options),
        prefill=options.prefill,
        decode=options.decode,
        device=options.device,
        options={**OPTIONS, **cluster_options(options)},
    )
    name = f"{spec.prefill}+{spec.decode}"
    configuration = configuration_of(options, {name: spec}) | {"streams": options.streams}
    head = conditions("soak", options.commit) | {"configuration": configuration}
    results = ResultFile(options.out, head, derive=sum_up)
    clock = Clock(options.deadline_s, options.seed)
    try:
        with start(spec, name, clock) as cluster, ClientProcesses(options.clients) as clients:
            run = Run(cluster, clients, SCALES[options.scale], clock)
            soak(run, results, options.minutes, options.streams, tuple(options.kill))
    except OutOfTime:
        say("the deadline has passed")
    except CaseFailed as error:
        results.add({"case": "failed", "error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
