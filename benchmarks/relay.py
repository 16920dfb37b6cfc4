"""Measures how many tokens a router's core relays from a decode worker to clients, and how late.

    python -m benchmarks.relay --out benchmarks/results/relay-cpu.json

A worker without a model gathers all requests, then sends one token of each every step. Processes of
clients read them with `pagewire.AsyncClient`, over one stream each. The router's process has a
core to itself; worker and clients share the others. With --routers, several of them share the
clients among themselves, each with a core if there are enough, and count as one; with --share-port,
they listen on one port, and the kernel shares the connections of clients out. Their CPU time,
from the first step to the last token, divided by the tokens, is what a token costs; its inverse is
what a core could take. How late a token is counts from its step in the worker to its arrival in the
client's code; `after_start_ms` is the same without the first steps, in which all streams begin at
once.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measured_host import add_commit, conditions
from benchmarks.result_file import write_result
from benchmarks.stream_processes import (
    HOST,
    START_TIMEOUT_S,
    Steps,
    cpu_s,
    run_router,
    run_worker,
    started,
)
from benchmarks.stream_statistics import percentile

RUN_TIMEOUT_S = 300.0
START_STEPS = 10  # the first messages of 256 streams hold up the four or five after them
CASES = ["1x200", "64x5000", "64x10000", "256x10000", "256x20000", "256x40000"]


def run_clients(
    ports: Any, router_port: int, streams: int, tokens: int, times: Any, results: Any
) -> None:
    """Read this many streams in one process; report how late each token was, in seconds."""
    from pagewire import AsyncClient

    async def read(client: AsyncClient, arrivals: list[tuple[float, int, int]]) -> None:
        stream = client.stream("The page was", max_tokens=tokens, ignore_eos=True)
        async with stream:
            async for delta in stream:
                arrivals.append((time.monotonic(), delta.first_index, len(delta.token_ids)))
        if stream.completion.choices[0].finish_reason != "length":
            raise SystemExit("the stream broke off")

    async def run() -> None:
        ports.put(0)
        arrivals: list[list[tuple[float, int, int]]] = [[] for _ in range(streams)]
        async with AsyncClient(f"{HOST}:{router_port}") as client, asyncio.TaskGroup() as group:
            for each in arrivals:
                group.create_task(read(client, each))
        delays = array("d")  # token by token of a stream, one stream after the other
        for each in arrivals:
            if sum(count for _, _, count in each) != tokens:
                raise SystemExit("tokens are missing")
            for at, first, count in each:
                delays.extend(at - times[index] for index in range(first, first + count))
        results.put((delays, sum(map(len, arrivals)), max(each[-1][0] for each in arrivals)))
        await asyncio.Event().wait()  # until it is measured

    asyncio.run(run())


def measure(streams: int, step_s: float, coalesce_ms: float, options: Any) -> dict[str, Any]:
    """Run all streams once."""
    context = multiprocessing.get_context("spawn")
    tokens = max(50, round(options.seconds / step_s))
    times = context.Array("d", tokens, lock=False)
    has_begun = context.Event()
    results: Any = context.Queue()
    steps = Steps(step_s=step_s, num_gathered=streams, has_begun=has_begun, times=times)
    with ExitStack() as stack:
        worker, worker_port = stack.enter_context(started(run_worker, steps))
        routers: list[tuple[SpawnProcess, int]] = []
        for _ in range(options.routers):
            shared_port = routers[0][1] if routers else 0
            router = started(
                run_router,
                worker_port,
                options.model_dir,
                {"coalesce_ms": coalesce_ms},
                None,
                shared_port if options.share_port else None,
            )
            routers.append(stack.enter_context(router))
        processes = {"worker": [worker], "router": [each for each, _ in routers], "clients": []}
        num_clients = min(options.clients, streams)
        for number in range(num_clients):
            share = len(range(number, streams, num_clients))
            _, router_port = routers[number % len(routers)]
            client, _ = stack.enter_context(
                started(run_clients, router_port, share, tokens, times, results)
            )
            processes["clients"].append(client)
        _pin(
            [each.pid for each in processes["router"]],
            [each.pid for each in (worker, *processes["clients"])],
        )
        if not has_begun.wait(START_TIMEOUT_S):
            raise SystemExit("the requests did not reach the worker")
        before = {name: sum(map(cpu_s, each)) for name, each in processes.items()}
        told = [results.get(timeout=RUN_TIMEOUT_S) for _ in processes["clients"]]
        used_s = {name: sum(map(cpu_s, each)) - before[name] for name, each in processes.items()}
    num_tokens = streams * tokens
    seconds = max(ended for _, _, ended in told) - times[0]
    late = [
        [1000 * delay for delays, _, _ in told for delay in delays[step::tokens]]
        for step in range(tokens)
    ]
    return {
        "tokens_per_message": round(num_tokens / sum(messages for _, messages, _ in told), 2),
        "delivered_tokens_per_s": round(num_tokens / seconds),
        "us_per_token": {name: round(1e6 * used / num_tokens, 2) for name, used in used_s.items()},
        "tokens_per_s_of_one_router_core": round(num_tokens / used_s["router"]),
        "late_ms": _percentiles(late),
        "after_start_ms": _percentiles(late[START_STEPS:]),
    }


def _percentiles(late: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return percentiles of how late tokens came, given by steps."""
    delays = [delay for step in late for delay in step]
    return {f"p{percent}": round(percentile(delays, percent), 2) for percent in (50, 99)}


def _pin(router_pids: Sequence[int | None], other_pids: Sequence[int | None]) -> None:
    """Give each router a core to itself, threads included, but leave one to the others."""
    cores = sorted(os.sched_getaffinity(0))
    num_own = max(1, min(len(router_pids), len(cores) - 1))
    others = cores[num_own:] or cores
    own = [(pid, [cores[number % num_own]]) for number, pid in enumerate(router_pids)]
    for pid, allowed in [*own, *((pid, others) for pid in other_pids)]:
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, allowed)


def median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure."""
    return {
        key: median([run[key] for run in runs])
        if isinstance(value, dict)
        else round(statistics.median(run[key] for run in runs), 2)
        for key, value in runs[0].items()
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=CASES,
        metavar="STREAMSxTOKENS",
        help="number of streams, and tokens per second of all of them",
    )
    parser.add_argument(
        "--coalesce-ms",
        type=float,
        nargs="+",
        default=[20.0, 0.0],
        help="values of the router's coalesce_ms",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each run")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--routers", type=int, default=1, help="router processes")
    parser.add_argument("--share-port", action="store_true", help="let routers share one port")
    parser.add_argument("--repetitions", type=int, default=3)
    add_commit(parser)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.clients < options.routers:  # a router without a client would count as one that works
        parser.error(f"--clients: found {options.clients}; allowed: at least {options.routers}")
    from cluster.demo_model import demo_model_dir

    options.model_dir = demo_model_dir()
    cases = []
    for coalesce_ms in options.coalesce_ms:
        for streams, rate in (map(int, case.split("x")) for case in options.cases):
            runs = [
                measure(streams, streams / rate, coalesce_ms, options)
                for _ in range(options.repetitions)
            ]
            case = {
                "streams": streams,
                "offered_tokens_per_s": rate,
                "coalesce_ms": coalesce_ms,
                **median(runs),
            }
            cases.append(case)
            print(json.dumps(case), flush=True)
    result = {
        **conditions("relay", options.commit),
        "seconds": options.seconds,
        "clients": options.clients,
        "routers": options.routers,
        "repetitions": options.repetitions,
        "cases": cases,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
