"""Measures a generate call's cost in each process, and the latency of concurrent calls.

    python -m benchmarks.calls --out benchmarks/results/calls-cpu.json

Rounds of concurrent calls go through `pagewire.AsyncClient` to a router and from there to a worker
without a model, which answers each with one token. The cost of a call is the CPU time of a process,
all threads together, divided by the number of calls. The latency is the time from the start of a
round until half, or the last, of its calls have their first tokens.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measured_host import conditions
from benchmarks.result_file import write_result
from benchmarks.stream_processes import HOST, Steps, cpu_s, run_router, run_worker, started
from pagewire import AsyncClient

STEP_S = 0.001  # of the worker


async def first_token_s(client: AsyncClient) -> float:
    """Make one call; return the time until its first token."""
    began_at = time.monotonic()
    async with client.stream("The page was", max_tokens=1, ignore_eos=True) as stream:
        await anext(stream)
        arrived_at = time.monotonic()
        async for _ in stream:
            pass
    return arrived_at - began_at


async def play_round(client: AsyncClient, num_calls: int) -> list[float]:
    """Make concurrent calls; return the times until their first tokens, the shortest first."""
    return sorted(await asyncio.gather(*(first_token_s(client) for _ in range(num_calls))))


async def measure(at_once: int, options: argparse.Namespace) -> dict[str, Any]:
    """Make the calls; return microseconds of CPU per call, by process, and the times."""
    rounds = max(options.calls // at_once, 10)
    with ExitStack() as stack:
        worker, worker_port = stack.enter_context(started(run_worker, Steps(step_s=STEP_S)))
        router, router_port = stack.enter_context(
            started(run_router, worker_port, options.model_dir)
        )

        def used_s() -> dict[str, float]:
            return {"router": cpu_s(router), "worker": cpu_s(worker), "client": time.process_time()}

        async with AsyncClient(f"{HOST}:{router_port}") as client:
            for _ in range(3):  # warm
                await play_round(client, at_once)
            before = used_s()
            played = [await play_round(client, at_once) for _ in range(rounds)]
            cpu = {name: used - before[name] for name, used in used_s().items()}
    return {
        "at_once": at_once,
        "rounds": rounds,
        "us_per_call": {
            name: round(1e6 * used / (rounds * at_once), 1) for name, used in cpu.items()
        },
        "first_token_of_half_ms": _milliseconds([each[(at_once - 1) // 2] for each in played]),
        "last_first_token_ms": _milliseconds([each[-1] for each in played]),
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(1000 * statistics.median(seconds), 2),
        "worst": round(1000 * max(seconds), 2),
    }


async def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and show each case."""
    cases = []
    for at_once in options.at_once:
        runs = [await measure(at_once, options) for _ in range(options.repetitions)]
        # Other processes on the host only add time: the least is nearest to the true cost.
        case = min(runs, key=lambda run: sum(run["us_per_call"].values()))
        cases.append(case)
        costs = "  ".join(f"{name} {cost:6.1f}" for name, cost in case["us_per_call"].items())
        half, last = (
            case[name]["p50"] for name in ("first_token_of_half_ms", "last_first_token_ms")
        )
        print(
            f"{at_once:4} at once  us of CPU per call: {costs}  "
            f"first tokens of half {half} ms, of all {last} ms"
        )
    return cases


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument(
        "--calls", type=int, default=4096, help="calls of each case, enough for 10 rounds or more"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from cluster.demo_model import demo_model_dir

    options.model_dir = demo_model_dir()
    cases = asyncio.run(measure_all(options))  # gRPC needs a single event loop in a process
    result = {
        **conditions("calls"),
        "step_s": STEP_S,
        "repetitions": options.repetitions,
        "cases": cases,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
