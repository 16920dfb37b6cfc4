"""What a streamed token costs in the router, and what HTTP adds: CPU time by process.

    python -m benchmarks.gateway --out benchmarks/results/gateway-cpu.json

A worker without a model sends one token of each request every step. The same requests are read
over gRPC, one Generate call each, and over HTTP through a gateway. Each part is a process of its
own, whose CPU time is divided by the tokens; each way has processes of its own.
"""

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.stream_processes import (
    HOST,
    Steps,
    cpu_s,
    run_gateway,
    run_router,
    run_worker,
    started,
)
from pagewire.protos import common_pb2, inference_pb2, inference_pb2_grpc

Read = Callable[[int], Coroutine[Any, Any, None]]  # one request with so many tokens


# Clients


async def read_grpc(stub: Any, tokens: int) -> None:
    """Read one answer, a call of its own."""
    sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    request = inference_pb2.GenerateRequest(text="The page was", sampling=sampling)
    async for _ in stub.Generate(request):
        pass


async def read_http(port: int, tokens: int) -> None:
    """Read one answer as events, on a connection of its own."""
    reader, writer = await asyncio.open_connection(HOST, port)
    fields = {"prompt": "The page was", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    end = b""
    while data := await reader.read(65536):
        end = (end + data)[-64:]
    writer.close()
    if b"[DONE]" not in end:
        raise SystemExit(f"the stream broke off: {end!r}")


async def read_all(read: Read, streams: int, tokens: int) -> None:
    """Read the answers to many requests at once."""
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(read(tokens))


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

                async def read(tokens: int) -> None:
                    if way == "grpc":
                        await read_grpc(stub, tokens)
                    else:
                        await read_http(http_port, tokens)

                await read_all(read, 4, 20)  # warm
                before = {name: cpu_s(each) for name, each in processes.items()}
                began = time.monotonic()
                await read_all(read, streams, options.tokens)
                seconds = time.monotonic() - began
                return {
                    name: cpu_s(each) - before[name] for name, each in processes.items()
                }, seconds

        used_s, seconds = asyncio.run(run())
    num_tokens = streams * options.tokens
    per_token = {name: round(1e6 * value / num_tokens, 1) for name, value in used_s.items()}
    return {"way": way, "streams": streams, "seconds": round(seconds, 2), "us_per_token": per_token}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--step-s", type=float, default=0.05, help="between two tokens")
    parser.add_argument("--interval-s", type=float, default=0.2, help="of coalesced streams")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from cluster.demo_model import demo_model_dir

    options.model_dir = demo_model_dir()
    cases = []
    for streams in options.streams:
        for way in ("grpc", "http", "http, coalesced"):
            runs = [measure(way, streams, options) for _ in range(options.repetitions)]
            # Neighbours on the host only add: the least is nearest to what it costs.
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
