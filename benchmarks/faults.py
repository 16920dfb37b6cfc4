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
    partition/pair      the two such hosts do not reach each other, all others reach both
    partition/one-way   what the head's host, with the router, sends to one such host is lost
    loss/workers        that host loses power, and comes back empty
    loss/head           so does the host of Ray's head, the controller and a router for a minute
    disk/full           a host has no room left for logs and Ray's files, for ten seconds
    clock/HOST          the wall clock of all processes of a host jumps by hours, there and back
    launcher/start      `pagewire up` is killed before its cluster serves, and run again
    launcher/serve      `pagewire serve` is killed while its cluster serves

`pause_ms` is the longest time that any stream of a run waited for a token after the fault, and
`late_ms` the longest until the first token of a request that came after it. `whole_s` is how long
the cluster took to be whole again, the fault's own duration included. Each run is written as it
ends, with its commit, and `--resume` goes on after the last one. A run that has no end, such as one
after which the cluster is not whole in time, is listed as broken, and the next one has a new
cluster.
"""

import argparse
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.case_runs import selected
from benchmarks.client_processes import ClientProcesses, ClientsFailed
from benchmarks.fault_cases import FAULTS, Fault
from benchmarks.hosted_cluster import CommandFailed, HostedCluster, hosted_cluster
from benchmarks.hosts import why_no_hosts
from benchmarks.jumping_clock import why_no_clocks
from benchmarks.kills import count_differences
from benchmarks.measured_host import conditions
from benchmarks.prompts import Seeds, StreamSpec, wave
from benchmarks.result_file import ResultFile, say
from benchmarks.stream_statistics import Row, StreamRecord, longest_pause_ms, percentile
from cluster.demo_model import demo_model_dir

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 320, 400  # with nothing in common: on both workers
LATE_STREAMS, LATE_SHARED, LATE_OWN, LATE_OUTPUT, LATE_PERIOD_S = 10, 128, 192, 40, 0.5
TEMPERATURE = 0.9  # of every second stream
BEFORE_S = 1.0  # from the beginning of the streams to the fault
TIMEOUT_S = 300.0  # of a stream
CLIENTS = 2
SEEDS_A_RUN = STREAMS + LATE_STREAMS + 1
BREAKS = (CommandFailed, ClientsFailed, TimeoutError, subprocess.TimeoutExpired)
MAX_BROKEN = 3  # runs of a fault, and clusters in a row that do not start


def requests(seeds: Seeds, output_tokens: int = OUTPUT_TOKENS) -> list[StreamSpec]:
    """Return the requests of one run: streams that begin at once, and later ones."""
    first = wave(seeds, STREAMS, unique=PROMPT_TOKENS, max_tokens=output_tokens)
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


def run_once(
    fault: Fault,
    cluster: HostedCluster,
    clients: ClientProcesses,
    seeds: Seeds,
    output_tokens: int = OUTPUT_TOKENS,
) -> Row:
    """Run one fault once, on streams of so many tokens; returns what its clients saw."""
    specs = requests(seeds, output_tokens)
    addresses = cluster.addresses[:: -1 if fault.uses_second_router else 1]
    vocab_size = cluster.vocab_size
    fault.prepare(cluster)
    if fault.is_idle:
        began = time.monotonic()
        fault.begin(cluster)()
    else:
        begin_at = clients.begin(addresses, vocab_size, specs, TIMEOUT_S)
        time.sleep(max(begin_at + BEFORE_S - time.monotonic(), 0))
        began = time.monotonic()
        heal = fault.begin(cluster)
        time.sleep(max(began + fault.lasts_s - time.monotonic(), 0))
        heal()
        records = clients.finish()
    cluster.until_whole()
    whole_s = time.monotonic() - began
    if fault.is_idle:
        records = clients.run(addresses, vocab_size, specs, TIMEOUT_S)
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
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--faults", nargs="+", default=["*"], help="patterns of faults to measure, as in 'kill/*'"
    )
    parser.add_argument("--times", type=int, default=20, help="runs of each fault")
    parser.add_argument(
        "--resume", action="store_true", help="keep the results in --out and measure the rest"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="folder for logs; default: a temporary one")
    options = parser.parse_args()
    if why := why_no_hosts():
        raise SystemExit(why)
    if not shutil.which("redis-server"):
        raise SystemExit("redis-server is missing (Debian: redis-server)")
    names = selected(list(FAULTS), options.faults)
    if any(FAULTS[name].has_clocks for name in names) and (why := why_no_clocks()):
        raise SystemExit(why)
    head = {
        **conditions("faults"),
        "configuration": {
            "hosts": "a head, two with a prefill and a decode worker each, one with a router",
            "model": "demo model, float32, CPU",
            "streams": STREAMS,
            "late_streams": LATE_STREAMS,
        },
    }
    results = ResultFile(options.out, head, resumes=options.resume)
    left = [name for name in names if len(results.listed(name, "rounds")) < options.times]
    # The prompts of runs that are there do not come again.
    num_runs = sum(len(results.listed(name, "rounds")) for name in FAULTS)
    seeds = Seeds(options.seed * 1_000_000 + num_runs * SEEDS_A_RUN)
    with tempfile.TemporaryDirectory(prefix="pagewire-faults-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        not_started = 0
        while left and not_started < MAX_BROKEN:
            try:
                _measure(left, options.times, logs, seeds, results, head["commit"])
                not_started = 0
            except BREAKS as error:
                say(f"no cluster: {error}")
                not_started += 1
    results.leave_out(left)


def _measure(
    left: list[str], times: int, logs: Path, seeds: Seeds, results: ResultFile, commit: str
) -> None:
    """Measure faults on one cluster, and take them off the list.

    Returns when one of them has broken it, and before one that needs another kind of cluster;
    raises where none starts.
    """
    has_clocks = FAULTS[left[0]].has_clocks
    secret = logs / "secret"  # that outlives each start of the cluster
    secret.touch(mode=0o600)
    secret.write_bytes(secrets.token_bytes(32))
    with hosted_cluster(
        demo_model_dir(),
        logs,
        has_redis=True,
        has_clocks=has_clocks,
        options={"secret_file": str(secret)},
    ) as cluster:
        with cluster.edge.network():
            clients = ClientProcesses(CLIENTS)
        with clients:
            run_once(FAULTS["none"], cluster, clients, seeds)  # warms up
            while left and FAULTS[left[0]].has_clocks == has_clocks:
                name = left[0]
                rounds = results.listed(name, "rounds")
                broken = results.listed(name, "broken")
                try:
                    while len(rounds) < times:
                        found = run_once(FAULTS[name], cluster, clients, seeds)
                        rounds.append(found | {"commit": commit})
                        say(f"{name} {len(rounds)} of {times}: {rounds[-1]}")
                        results.add({"case": name, **sum_up(rounds), "broken": broken})
                except BREAKS as error:
                    broken.append(f"{type(error).__name__}: {error}")
                    row = sum_up(rounds) if rounds else {"error": broken[-1]}
                    results.add({"case": name, **row, "broken": broken})
                    if len(broken) >= MAX_BROKEN:
                        left.pop(0)
                    return
                left.pop(0)


if __name__ == "__main__":
    main()
