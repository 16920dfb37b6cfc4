"""Measures the cost of faults to clients of a cluster on several hosts: tokens, errors, pauses.

    python -m benchmarks.faults --out benchmarks/results/faults-cpu.json

A cluster of hosted_cluster.py serves a small model on CPUs. Streams run, greedy and seeded, through
clients that know both routers; midway something fails, and later streams begin meanwhile. When all
have ended and the cluster is whole again, the same requests run once more: their tokens are those
that the interrupted streams must have had.

    kill/PROCESS        SIGKILL; Ray or a service manager restarts it
    hang/PROCESS        SIGSTOP, and SIGCONT ten seconds later; of the router twenty
    partition/workers   the host of a prefill and a decode worker loses its network for ten seconds
    partition/long      until Ray declares it dead, and a while longer
    loss/workers        that host loses power, and comes back empty
    loss/head           so does the host of Ray's head, the controller and a router for a minute
    disk/full           a host has no room left for logs and Ray's files, for ten seconds

`pause_ms` is the longest time that any stream of a run waited for a token after the fault, and
`late_ms` the longest time to first token of a request that arrived after it. `whole_s` is the time
until the cluster was whole again, including the fault's own duration.
"""

import argparse
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.case_runs import selected
from benchmarks.client_processes import ClientProcesses, ClientsFailed
from benchmarks.hosted_cluster import CommandFailed, HostedCluster, hosted_cluster
from benchmarks.hosts import Host, why_no_hosts
from benchmarks.kills import count_differences
from benchmarks.measured_host import commit, hardware, versions
from benchmarks.prompts import Seeds, StreamSpec, wave
from benchmarks.result_file import ResultFile, say
from benchmarks.stream_statistics import Row, StreamRecord, percentile
from cluster.demo_model import demo_model_dir

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 320, 400  # with nothing in common: on both workers
LATE_STREAMS, LATE_SHARED, LATE_OWN, LATE_OUTPUT, LATE_PERIOD_S = 10, 128, 192, 40, 0.5
TEMPERATURE = 0.9  # of every second stream
BEFORE_S = 1.0  # from the beginning of the streams to the fault
TIMEOUT_S = 300.0  # of a stream
HANG_S = 10.0
MINUTE_S = 60.0
LONG_S = 90.0
FILLER = "/tmp/ray/filler"  # noqa: S108 - on a file system of the host's own
CLIENTS = 2

Heal = Callable[[], None]
Begin = Callable[[HostedCluster], Heal]
Find = Callable[[HostedCluster], tuple[Host, str]]  # where a process is, and a part of its command


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something that fails."""

    what: str
    begin: Begin  # returns what ends it
    lasts_s: float = 0.0
    uses_second_router: bool = False  # clients begin at the one outside Ray


def kill(find: Find) -> Begin:
    """Return what kills processes."""

    def begin(cluster: HostedCluster) -> Heal:
        _signal(cluster, find, signal.SIGKILL)
        return lambda: None

    return begin


def hang(find: Find) -> Begin:
    """Return what stops processes without ending them."""

    def begin(cluster: HostedCluster) -> Heal:
        stopped = _signal(cluster, find, signal.SIGSTOP)

        def heal() -> None:
            for process in stopped:
                if process.is_running():  # Ray may have killed it
                    process.send_signal(signal.SIGCONT)

        return heal

    return begin


def partition(cluster: HostedCluster) -> Heal:
    """Take a host of workers off the network."""
    host = cluster.worker_hosts[0]
    host.unplug()
    return host.plug_in


def lose_power(host_of: Callable[[HostedCluster], Host]) -> Begin:
    """Return a fault that ends a host with everything that runs on it."""

    def begin(cluster: HostedCluster) -> Heal:
        host = host_of(cluster)
        host.power_off()

        def heal() -> None:
            host.power_on()
            cluster.start_ray(host)

        return heal

    return begin


def fill_disk(cluster: HostedCluster) -> Heal:
    """Fill the file system that Ray and all its processes write to."""
    host = cluster.worker_hosts[0]
    host.run("sh", "-c", f"cat /dev/zero > {FILLER}")
    return lambda: host.run("rm", FILLER) and None


def _of_workers(name: str) -> Find:
    return lambda cluster: (cluster.worker_hosts[0], f"ray::{name}")


def _of_head(name: str) -> Find:
    return lambda cluster: (cluster.head, f"ray::{name}")


def _outside(cluster: HostedCluster) -> tuple[Host, str]:
    return cluster.edge, "cli router"


def _signal(
    cluster: HostedCluster,
    find: Find,
    number: signal.Signals,
) -> list[psutil.Process]:
    host, text = find(cluster)
    found = [each for each in host.processes(text) if each.name() != "sh"]
    if len(found) != 1:
        raise CommandFailed(f"{len(found)} processes are {text} on {host.name}")
    for each in found:
        each.send_signal(number)
    return found


FAULTS: Mapping[str, Fault] = {
    "none": Fault(what="nothing: what the measurement itself shows", begin=lambda _: lambda: None),
    "kill/decode": Fault(what="SIGKILL of a decode worker", begin=kill(_of_workers("DecodeActor"))),
    "kill/prefill": Fault(
        what="SIGKILL of a prefill worker", begin=kill(_of_workers("PrefillActor"))
    ),
    "kill/router": Fault(
        what="SIGKILL of the router in Ray, which clients use", begin=kill(_of_head("RouterActor"))
    ),
    "kill/router-outside": Fault(
        what="SIGKILL of a router outside Ray, which clients use",
        begin=kill(_outside),
        uses_second_router=True,
    ),
    "kill/controller": Fault(
        what="SIGKILL of the controller", begin=kill(_of_head("ControllerActor"))
    ),
    "hang/decode": Fault(
        what="SIGSTOP of a decode worker for 10 s",
        begin=hang(_of_workers("DecodeActor")),
        lasts_s=HANG_S,
    ),
    "hang/prefill": Fault(
        what="SIGSTOP of a prefill worker for 10 s",
        begin=hang(_of_workers("PrefillActor")),
        lasts_s=HANG_S,
    ),
    "hang/router": Fault(
        what="SIGSTOP of the router that clients use for 20 s",
        begin=hang(_of_head("RouterActor")),
        lasts_s=2 * HANG_S,
    ),
    "hang/controller": Fault(
        what="SIGSTOP of the controller for 10 s",
        begin=hang(_of_head("ControllerActor")),
        lasts_s=HANG_S,
    ),
    "partition/workers": Fault(
        what="a host of workers without network for 10 s", begin=partition, lasts_s=HANG_S
    ),
    "partition/long": Fault(
        what=f"a host of workers without network for {LONG_S:.0f} s",
        begin=partition,
        lasts_s=LONG_S,
    ),
    "loss/workers": Fault(
        what="a host of workers without power for 10 s",
        begin=lose_power(lambda cluster: cluster.worker_hosts[0]),
        lasts_s=HANG_S,
    ),
    "loss/head": Fault(
        what="the host of Ray's head, the controller and a router without power for a minute",
        begin=lose_power(lambda cluster: cluster.head),
        lasts_s=MINUTE_S,
    ),
    "disk/full": Fault(
        what="no room on the disk of a host of workers for 10 s", begin=fill_disk, lasts_s=HANG_S
    ),
}


def requests(seeds: Seeds) -> list[StreamSpec]:
    """Return the requests of one run: streams that begin at once, and later ones."""
    first = wave(seeds, STREAMS, unique=PROMPT_TOKENS, max_tokens=OUTPUT_TOKENS)
    late = wave(seeds, LATE_STREAMS, unique=LATE_OWN, shared=LATE_SHARED, max_tokens=LATE_OUTPUT)
    late = [
        replace(each, offset_s=BEFORE_S + LATE_PERIOD_S * index) for index, each in enumerate(late)
    ]
    return [
        replace(
            each,
            keeps_tokens=True,
            temperature=TEMPERATURE if index % 2 else 0.0,
            seed=index,
        )
        for index, each in enumerate([*first, *late])
    ]


def run_once(fault: Fault, cluster: HostedCluster, clients: ClientProcesses, seeds: Seeds) -> Row:
    """Run one fault once; returns what its clients saw."""
    specs = requests(seeds)
    addresses = cluster.addresses[:: -1 if fault.uses_second_router else 1]
    vocab_size = cluster.vocab_size
    begin_at = clients.begin(addresses, vocab_size, specs, TIMEOUT_S)
    time.sleep(max(begin_at + BEFORE_S - time.monotonic(), 0))
    began = time.monotonic()
    heal = fault.begin(cluster)
    time.sleep(max(began + fault.lasts_s - time.monotonic(), 0))
    heal()
    records = clients.finish()
    cluster.until_whole()
    whole_s = time.monotonic() - began
    at_once = [replace(each, offset_s=0.0) for each in specs]
    calm = clients.run(addresses, vocab_size, at_once, TIMEOUT_S)
    if errors := [each.error for each in calm if each.error]:
        raise ClientsFailed(f"the calm streams failed, too: {errors[0]}")
    ended = [(now, then) for now, then in zip(records, calm, strict=True) if not now.error]
    usages = [each.usage for each in records if each.usage]
    return {
        "requests": len(specs),
        "errors": sorted(each.error for each in records if each.error),
        "wrong_tokens": sum(count_differences(a.token_ids, b.token_ids) for a, b in ended),
        "resumed": sum(each.resumptions > 0 for each in usages),
        "decode_prompt_tokens": sum(each.decode_computed_tokens for each in usages),
        "pages_moved": sum(each.pages_moved for each in usages),
        "pause_ms": round(max(longest_pause_ms(each, began) for each in records[:STREAMS])),
        "late_ms": round(max(_first_ms(each) for each in records[STREAMS:])),
        "whole_s": round(whole_s, 1),
    }


def longest_pause_ms(record: StreamRecord, since: float) -> float:
    """Return the longest time before a token that came after a moment, ms; 0: none came."""
    pairs = pairwise([record.started, *record.times])
    return max((1e3 * (after - before) for before, after in pairs if after > since), default=0.0)


def _first_ms(record: StreamRecord) -> float:
    return 1e3 * (record.times[0] - record.started) if record.times else 0.0


def sum_up(rounds: Sequence[Row]) -> Row:
    """Return the total cost of all runs of a fault."""
    found: Row = {"times": len(rounds)}
    for name in ("requests", "wrong_tokens", "resumed", "decode_prompt_tokens", "pages_moved"):
        found[name] = sum(each[name] for each in rounds)
    found["failed_requests"] = sum(len(each["errors"]) for each in rounds)
    for name in ("pause_ms", "late_ms", "whole_s"):
        values = [each[name] for each in rounds]
        found[f"{name}_p50"] = round(percentile(values, 50), 1)
        found[f"{name}_p99"] = round(percentile(values, 99), 1)
    return found | {"rounds": list(rounds)}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--faults", nargs="+", default=["*"], help="patterns, as in 'kill/*'")
    parser.add_argument("--times", type=int, default=20, help="runs of each fault")
    parser.add_argument("--resume", action="store_true", help="keep what --out has measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="folder for logs; default: a temporary one")
    options = parser.parse_args()
    if why := why_no_hosts():
        raise SystemExit(why)
    if not shutil.which("redis-server"):
        raise SystemExit("redis-server is missing (Debian: redis-server)")
    names = selected(list(FAULTS), options.faults)
    head = {
        "command": f"python -m benchmarks.faults --times {options.times}",
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "configuration": {
            "hosts": "a head, two with a prefill and a decode worker each, one with a router",
            "model": "demo model, float32, CPU",
            "streams": STREAMS,
            "late_streams": LATE_STREAMS,
        },
    }
    results = ResultFile(options.out, head, derive=lambda rows: [], resumes=options.resume)
    left = [name for name in names if not results.has(name)]
    seeds = Seeds(options.seed * 1_000_000)
    with tempfile.TemporaryDirectory(prefix="pagewire-faults-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        while left:
            _measure(left, options.times, logs, seeds, results)


def _measure(left: list[str], times: int, logs: Path, seeds: Seeds, results: ResultFile) -> None:
    """Measure faults on one cluster, removing them from the list, until one of them breaks it."""
    with hosted_cluster(demo_model_dir(), logs, has_redis=True) as cluster:
        with cluster.edge.network():
            clients = ClientProcesses(CLIENTS)
        with clients:
            run_once(FAULTS["none"], cluster, clients, seeds)  # warms up
            while left:
                name = left.pop(0)
                rounds: list[Row] = []
                try:
                    for number in range(times):
                        rounds.append(run_once(FAULTS[name], cluster, clients, seeds))
                        say(f"{name} {number + 1} of {times}: {rounds[-1]}")
                except (CommandFailed, ClientsFailed, TimeoutError) as error:
                    failed = f"{type(error).__name__}: {error}"
                    results.add({"case": name, "error": failed, "rounds": rounds})
                    return
                results.add({"case": name, **sum_up(rounds)})


if __name__ == "__main__":
    main()
