"""The cost of a cached prompt at router and decode worker when many arrive at once.

    python -m benchmarks.bursts --out benchmarks/results/bursts-cpu.json
    python -m benchmarks.bursts --prefill

Waves of prompts, each of 1,024 distinct tokens that the cache holds, go through the client library
to a router and from there to a decode worker, each in a separate process. The worker is complete
except for its engine, whose steps take a fixed time and compute nothing. The cost of a request is
the CPU time of a process in a wave, over all threads, divided by the wave's requests: the median of
the waves, and the least, since neighbours on the host only add to it. Several routers count as one.
`first_ms` is the median over the waves of the time from the first call until half, or all, of the
requests have a token; where the processes share few cores it says little.

With --prefill, the decode worker computes no prompt token: a prefill worker, in one more process,
computes the one that is not cached and sends the page that holds it, over TCP.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.measured_host import conditions
from benchmarks.prompts import Seeds, token_ids, wave
from benchmarks.result_file import write_result
from benchmarks.stream_processes import (
    BURST_MODEL,
    HOST,
    cpu_clock,
    run_decode_worker,
    run_prefill_worker,
    run_router,
    started,
)
from benchmarks.stream_statistics import percentile
from pagewire import AsyncClient

PROMPT_TOKENS = 1024
MAX_TOKENS = 2  # the first one, and one of a step of decode
MAX_ROUNDS = 300
PAUSE_S = 0.02


async def first_token_at(
    client: AsyncClient, prompt: Sequence[int], num_cached: int, num_moved: int
) -> float:
    """Make one call; return when its first token came."""
    stream = client.stream(prompt, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    async with stream:
        await anext(stream)
        arrived_at = time.monotonic()
        async for delta in stream:
            if delta.usage:
                found = delta.usage.cached_tokens
                assert found >= num_cached, f"{found} tokens were cached, not {num_cached}"
                found = delta.usage.pages_moved
                assert found >= num_moved, f"{found} pages moved, not {num_moved}"
    return arrived_at


async def play(
    clients: Sequence[AsyncClient],
    prompts: Sequence[Sequence[int]],
    num_cached: int = PROMPT_TOKENS - 1,
    num_moved: int = 0,
) -> list[float]:
    """Make all calls at once, in turns to each router; return the times to their first tokens."""
    began_at = time.monotonic()
    calls = zip(cycle(clients), prompts, strict=False)
    arrived = await asyncio.gather(
        *(first_token_at(*each, num_cached, num_moved) for each in calls)
    )
    return [each - began_at for each in arrived]


async def measure(at_once: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start everything and play waves; return the costs of a request."""
    rounds = min(max(options.requests // at_once, 10), MAX_ROUNDS)
    specs = wave(Seeds(at_once), at_once, unique=PROMPT_TOKENS)
    prompts = [token_ids(each.prompt, BURST_MODEL.vocab_size) for each in specs]
    num_moved = 1 if options.prefill else 0
    with ExitStack() as stack:
        step_s = options.step_ms / 1000
        worker, worker_port = stack.enter_context(
            started(run_decode_worker, step_s, options.prefill)
        )
        clocks = {"worker": [cpu_clock(worker)]}
        prefill_port = None
        if options.prefill:
            prefill, prefill_port = stack.enter_context(started(run_prefill_worker, step_s))
            clocks["prefill"] = [cpu_clock(prefill)]
        routers = [
            stack.enter_context(
                started(run_router, worker_port, options.model_dir, None, prefill_port)
            )
            for _ in range(options.routers)
        ]
        clocks["router"] = [cpu_clock(process) for process, _ in routers]
        clocks["client"] = [time.CLOCK_PROCESS_CPUTIME_ID]
        costs: dict[str, list[float]] = {name: [] for name in clocks}
        waves = []
        async with AsyncExitStack() as calling:
            clients = [
                await calling.enter_async_context(AsyncClient(f"{HOST}:{port}"))
                for _, port in routers
            ]
            await play(clients, prompts, num_cached=0)
            for _ in range(3):  # warm
                await play(clients, prompts, num_moved=num_moved)
            for _ in range(rounds):
                before = {name: _used_s(each) for name, each in clocks.items()}
                waves.append(await play(clients, prompts, num_moved=num_moved))
                await asyncio.sleep(PAUSE_S)  # work after the last token counts, too
                for name, each in clocks.items():
                    costs[name].append(1e6 * (_used_s(each) - before[name]) / at_once)
    return {
        "at_once": at_once,
        "rounds": rounds,
        "us_per_request": {
            name: {"p50": round(statistics.median(each), 1), "least": round(min(each), 1)}
            for name, each in costs.items()
        },
        "first_ms": {
            name: round(1e3 * statistics.median(percentile(each, share) for each in waves), 2)
            for name, share in (("half", 50), ("all", 100))
        },
    }


def _used_s(clocks: Sequence[int]) -> float:
    return sum(map(time.clock_gettime, clocks))


async def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and show each case."""
    cases = []
    for at_once in options.at_once:
        case = await measure(at_once, options)
        cases.append(case)
        costs = "  ".join(
            f"{name} {us['p50']:.0f} ({us['least']:.0f})"
            for name, us in case["us_per_request"].items()
        )
        first = case["first_ms"]
        print(
            f"{at_once:4} at once  us of CPU per request: {costs}  "
            f"first tokens of half {first['half']} ms, of all {first['all']} ms",
            flush=True,
        )
    return cases


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument(
        "--requests",
        type=int,
        default=4096,
        help="requests of each case, enough for 10 rounds or more",
    )
    parser.add_argument(
        "--step-ms", type=float, default=5.0, help="time that the device would take for a step"
    )
    parser.add_argument(
        "--routers", type=int, default=1, help="routers, among which the calls are divided"
    )
    parser.add_argument(
        "--prefill", action="store_true", help="have a prefill worker compute the prompts"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from cluster.demo_model import demo_model_dir

    options.model_dir = demo_model_dir()
    result = {
        **conditions("bursts"),
        "step_ms": options.step_ms,
        "routers": options.routers,
        "prefill": options.prefill,
        "cases": asyncio.run(measure_all(options)),  # gRPC wants one event loop in a process
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
