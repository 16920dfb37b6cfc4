"""Measures the cost of a streamed token in the router, and the addition of HTTP, by process.

    python -m benchmarks.gateway --out benchmarks/results/gateway-cpu.json
    python -m benchmarks.gateway --streams 2000 --step-s 1 --tokens 60 --ways both \
        --out benchmarks/results/gateway-2000-streams-cpu.json

A worker without a model sends one token of each request every step. The same requests are read
over gRPC, one Generate call each, and over HTTP through a gateway, or half of them each way at the
same time. Each part is a separate process, whose CPU time is divided by the tokens that pass
through it; each way has its own processes. Every answer is compared with the tokens that the worker
sent: the program fails if one is lost, repeated or changed.
"""

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.stream_processes import (
    HOST,
    NUM_TOKEN_IDS,
    TOKENS,
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

Read = Callable[[int], Coroutine[Any, Any, str]]  # number of tokens |-> text of the answer
WAYS = ("grpc", "http", "http, coalesced", "both")


# Clients


async def read_grpc(stub: Any, tokens: int) -> str:
    """Read one answer by a separate call."""
    sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    request = inference_pb2.GenerateRequest(text="The page was", sampling=sampling)
    return "".join([each.text async for each in stub.Generate(request)])


async def read_http(port: int, tokens: int) -> str:
    """Read one answer as events, on a separate connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    fields = {"prompt": "The page was", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    text = []
    async for line in reader:
        if line.startswith(b"data: {"):
            text += [each["text"] for each in json.loads(line[len(b"data: ") :])["choices"]]
        if line == b"data: [DONE]\n":
            break
    else:
        raise SystemExit("an answer over HTTP broke off")
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

        async def run() -> tuple[dict[str, float], float]:
            async with grpc.aio.insecure_channel(f"{HOST}:{router_port}") as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]

                reads: list[Read] = []
                if way in ("grpc", "both"):
                    reads.append(partial(read_grpc, stub))
                if way != "grpc":
                    reads.append(partial(read_http, http_port))
                await read_all(reads, 4, 20, options.tokenizer)  # warm
                before = {name: cpu_s(each) for name, each in processes.items()}
                began = time.monotonic()
                await read_all(reads, streams, options.tokens, options.tokenizer)
                seconds = time.monotonic() - began
                return {
                    name: cpu_s(each) - before[name] for name, each in processes.items()
                }, seconds

        used_s, seconds = asyncio.run(run())
    num_tokens = dict.fromkeys(processes, streams * options.tokens)
    if way == "both":
        num_tokens["gateway"] //= 2
    per_token = {name: round(1e6 * used_s[name] / num_tokens[name], 1) for name in processes}
    return {"way": way, "streams": streams, "seconds": round(seconds, 2), "us_per_token": per_token}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--step-s", type=float, default=0.05, help="between two tokens")
    parser.add_argument("--interval-s", type=float, default=0.2, help="of coalesced streams")
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
            cases.append(case)
            costs = "  ".join(f"{name} {cost:6.1f}" for name, cost in case["us_per_token"].items())
            print(f"{streams:4} streams  {way:16} us of CPU per token: {costs}", flush=True)
    result = {
        "command": " ".join(["python -m benchmarks.gateway", *sys.argv[1:]]),
        "hardware": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "grpcio": grpc.__version__},
        "tokens": options.tokens,
        "step_s": options.step_s,
        "interval_s": options.interval_s,
        "repetitions": options.repetitions,
        "cases": cases,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
