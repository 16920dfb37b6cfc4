"""Measures the cost of a streamed token in the router, and the addition of HTTP, by process.

    python -m benchmarks.gateway --out benchmarks/results/gateway-cpu.json
    python -m benchmarks.gateway --streams 2000 --step-s 0.5 --tokens 100 --ways grpc http both \
        --repetitions 2 --out benchmarks/results/gateway-2000-streams-cpu.json

A worker without a model sends one token of each request every step. The same requests are read
over gRPC, one Generate call each, and over HTTP through a gateway, or half of them each way at the
same time. Each part is a process of its own, whose CPU time is divided by the tokens that pass
through it; each way has processes of its own. Every answer is compared with the tokens that the
worker sent: the program fails if one is lost, repeated or changed.

`others` is the part of all cores that was used meanwhile by processes that are none of these. CPU
time per token suffers little from them, time on the clock does.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.measured_host import conditions
from benchmarks.result_file import write_result
from benchmarks.stream_processes import (
    HOST,
    NUM_TOKEN_IDS,
    TOKENS,
    Measured,
    Steps,
    cpu_s,
    run_gateway,
    run_router,
    run_worker,
    started,
)
from cluster.demo_model import demo_model_dir
from pagewire.protos import common_pb2, inference_pb2, inference_pb2_grpc
from router.tokenizer import Tokenizer

Read = Callable[[int], Coroutine[Any, Any, str]]  # the text of a request with so many tokens
OPENING = 64  # connections at a time
WAYS = ("grpc", "http", "http, coalesced", "both")


# Clients


async def read_grpc(stub: Any, tokens: int) -> str:
    """Read one answer by a separate call."""
    sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    request = inference_pb2.GenerateRequest(text="The page was", sampling=sampling)
    return "".join([each.text async for each in stub.Generate(request)])


async def read_http(port: int, opening: asyncio.Semaphore, tokens: int) -> str:
    """Read one answer as events, on a connection of its own.

    Few are opened at a time: a gateway waits for a request no longer than it has to, and one event
    loop that opens a thousand connections writes on none of them for a while.
    """
    fields = {"prompt": "The page was", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    async with opening:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(head.encode() + body)
        await writer.drain()
    text, last = [], b""
    async for line in reader:
        last = line.strip() or last
        if line.startswith(b"data: {"):
            text += [each["text"] for each in json.loads(line[len(b"data: ") :])["choices"]]
        if line == b"data: [DONE]\n":
            break
    else:
        raise SystemExit(f"an answer over HTTP broke off after {last[-500:]!r}")
    writer.close()
    return "".join(text)


async def read_all(reads: Sequence[Read], streams: int, tokens: int, tokenizer: Tokenizer) -> None:
    """Read the answers to many requests at once, in turns by each way."""
    ids = [TOKENS[index % NUM_TOKEN_IDS].token_id for index in range(tokens)]
    expected = tokenizer.decode(ids)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reads[number % len(reads)](tokens)) for number in range(streams)]
    if wrong := [text for each in tasks if (text := each.result()) != expected]:
        raise SystemExit(f"{len(wrong)} of {streams} answers differ, one is {wrong[0]!r}")


def measure(way: str, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Serve and read in one way; return microseconds of CPU per token, by process."""
    with ExitStack() as stack:
        worker, worker_port = stack.enter_context(started(run_worker, Steps(step_s=options.step_s)))
        router, router_port = stack.enter_context(
            started(run_router, worker_port, options.model_dir)
        )
        processes = {"worker": worker, "router": router}
        if way != "grpc":
            interval_s = options.interval_s if way == "http, coalesced" else 0.0
            gateway, http_port = stack.enter_context(started(run_gateway, router_port, interval_s))
            processes["gateway"] = gateway

        async def run() -> tuple[dict[str, float], float, float]:
            async with grpc.aio.insecure_channel(f"{HOST}:{router_port}") as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]

                reads: list[Read] = []
                if way in ("grpc", "both"):
                    reads.append(partial(read_grpc, stub))
                if way != "grpc":
                    reads.append(partial(read_http, http_port, asyncio.Semaphore(OPENING)))
                await read_all(reads, 4, 20, options.tokenizer)  # warm
                before = {name: cpu_s(each) for name, each in measured.items()}
                busy_before_s, began = _busy_s(), time.monotonic()
                await read_all(reads, streams, options.tokens, options.tokenizer)
                seconds, busy_s = time.monotonic() - began, _busy_s() - busy_before_s
                used_s = {name: cpu_s(each) - before[name] for name, each in measured.items()}
                return used_s, seconds, busy_s

        measured: dict[str, Measured] = {**processes, "client": psutil.Process()}
        used_s, seconds, busy_s = asyncio.run(run())
    num_tokens = dict.fromkeys(processes, streams * options.tokens)
    if way == "both":
        num_tokens["gateway"] //= 2
    per_token = {name: round(1e6 * used_s[name] / num_tokens[name], 1) for name in processes}
    others = (busy_s - sum(used_s.values())) / (seconds * (psutil.cpu_count() or 1))
    return {
        "way": way,
        "streams": streams,
        "seconds": round(seconds, 2),
        "others": round(max(0.0, others), 2),
        "us_per_token": per_token,
    }


def _busy_s() -> float:
    """Return for how long the cores of this host have worked since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.system)  # of the host: nice, interrupts and steal are little


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each stream")
    parser.add_argument(
        "--step-s", type=float, default=0.05, help="time between two tokens of a stream"
    )
    parser.add_argument(
        "--interval-s", type=float, default=0.2, help="interval of streams that gather tokens"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model_dir = demo_model_dir()
    options.tokenizer = Tokenizer((options.model_dir / "tokenizer.json").read_text("utf-8"))
    cases = []
    for streams in options.streams:
        for way in options.ways:
            runs = [measure(way, streams, options) for _ in range(options.repetitions)]
            # Other processes on the host only add time: the least is nearest to the true cost.
            case = min(runs, key=lambda run: sum(run["us_per_token"].values()))
            case["repetitions"] = [
                {name: run[name] for name in ("seconds", "others", "us_per_token")} for run in runs
            ]
            cases.append(case)
            costs = "  ".join(f"{name} {cost:6.1f}" for name, cost in case["us_per_token"].items())
            print(f"{streams:4} streams  {way:16} us of CPU per token: {costs}", flush=True)
    result = {
        **conditions("gateway"),
        "tokens": options.tokens,
        "step_s": options.step_s,
        "interval_s": options.interval_s,
        "repetitions": options.repetitions,
        "cases": cases,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
