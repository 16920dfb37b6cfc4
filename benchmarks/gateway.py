"""What a streamed token costs in the router, and what HTTP adds: CPU time by process.

    python -m benchmarks.gateway --out benchmarks/results/gateway-cpu.json

A worker without a model sends one token of each request every step. The same requests are read
over gRPC, one Generate call each, and over HTTP through a gateway. Each part is a process of its
own, whose CPU time is divided by the tokens; each way has processes of its own.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import grpc
import psutil

from http_gateway.config import GatewayConfig
from http_gateway.server import GatewayServer
from protos import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from protos.token_ids import pack_token_ids

HOST = "127.0.0.1"
MODEL = inference_pb2.Model(
    name="none", max_context_tokens=4096, vocab_size=512, page_size=16, max_choices=1
)
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 300, 26  # of the demo model's tokenizer, whole words
START_TIMEOUT_S = 60.0
HEARTBEAT_S = 0.5

Ports = Any  # a queue of integers between processes
Read = Callable[[int], Coroutine[Any, Any, None]]  # one request with so many tokens


class StepWorker(worker_pb2_grpc.WorkerServiceServicer, worker_pb2_grpc.DecodeServiceServicer):
    """Sends one token of each request in each step, as one message."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ref = common_pb2.WorkerRef(worker_id="decode-0", incarnation=1, address="none")

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.GetInfoResponse:  # noqa: N802
        """Say which model there would be."""
        return worker_pb2.GetInfoResponse(
            worker=self._ref,
            pool=common_pb2.POOL_DECODE,
            model=MODEL,
            model_fingerprint="none",
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Live."""
        while True:
            yield worker_pb2.WatchResponse(heartbeat=inference_pb2.Heartbeat(worker=self._ref))
            await asyncio.sleep(HEARTBEAT_S)

    async def SubscribeCacheEvents(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[Any]:
        """Cache nothing."""
        await asyncio.Event().wait()
        yield

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answer all requests of a router."""
        await anext(requests)
        running: dict[str, tuple[Any, int]] = {}  # request id |-> the request, tokens sent
        reader = asyncio.create_task(self._read(requests, running))
        try:
            while True:
                await asyncio.sleep(self._step_s)
                if deltas := [self._step(running, each) for each in list(running)]:
                    yield worker_pb2.SessionResponse(deltas=deltas)
        finally:
            reader.cancel()

    async def _read(self, requests: Any, running: dict[str, tuple[Any, int]]) -> None:
        async for message in requests:
            if message.HasField("submit"):
                running[message.submit.request_id] = message.submit, 0
            else:
                running.pop(message.cancel.request_id, None)

    def _step(self, running: dict[str, tuple[Any, int]], request_id: str) -> worker_pb2.TokenDelta:
        submit, index = running[request_id]
        is_last = index + 1 == submit.sampling.max_tokens
        if is_last:
            del running[request_id]
        else:
            running[request_id] = submit, index + 1
        return worker_pb2.TokenDelta(
            request_id=request_id,
            attempt=submit.attempt,
            first_index=index,
            token_ids=pack_token_ids([FIRST_TOKEN_ID + index % NUM_TOKEN_IDS]),
            finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else None,
        )


# Processes: each serves for ever, and says on which port.


def run_worker(ports: Ports, step_s: float) -> None:
    """Run a worker."""

    async def start() -> tuple[int, object]:
        server = grpc.aio.server()
        worker = StepWorker(step_s)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        return await _listen(server), server

    _serve(start, ports)


def run_router(ports: Ports, worker_port: int, model_dir: Path) -> None:
    """Run a router."""
    from router.config import RouterConfig
    from router.front import make_server
    from router.membership import WorkerMember
    from router.router import Router

    async def start() -> tuple[int, object]:
        config = RouterConfig(max_active_requests=10_000, max_expected_wait_s=3600.0)
        router = Router(
            config=config,
            model_dir=model_dir,
            connect_channel=lambda _: grpc.aio.insecure_channel(f"{HOST}:{worker_port}"),
            random_id=lambda: secrets.token_hex(16),
        )
        server = make_server(config)
        router.register(server)
        await router.start()
        address = f"{HOST}:{worker_port}"
        member = WorkerMember(worker_id="decode-0", incarnation=1, address=address, pool="decode")
        await router.set_workers([member])
        return await _listen(server), (server, router)

    _serve(start, ports)


def run_gateway(ports: Ports, router_port: int, stream_interval_s: float) -> None:
    """Run a gateway."""

    async def find_router() -> str:
        return f"{HOST}:{router_port}"

    async def start() -> tuple[int, object]:
        config = GatewayConfig(max_connections=10_000, stream_interval_s=stream_interval_s)
        server = GatewayServer(find_router, config=config, host=HOST, port=0)
        return int((await server.start()).rpartition(":")[2]), server

    _serve(start, ports)


async def _listen(server: grpc.aio.Server) -> int:
    port: int = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    return port


def _serve(start: Callable[[], Awaitable[tuple[int, object]]], ports: Ports) -> None:
    async def run() -> None:
        port, _owner = await start()  # which lives as long as the process
        ports.put(port)
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[SpawnProcess, int]]:
    """Run a process; yields it and its port."""
    context = multiprocessing.get_context("spawn")
    ports: Ports = context.Queue()
    process = context.Process(target=target, args=(ports, *arguments), daemon=True)
    process.start()
    try:
        yield process, ports.get(timeout=START_TIMEOUT_S)
    finally:
        process.kill()
        process.join()


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
        worker, worker_port = stack.enter_context(started(run_worker, options.step_s))
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
                before = {name: _cpu_s(each) for name, each in processes.items()}
                began = time.monotonic()
                await read_all(read, streams, options.tokens)
                seconds = time.monotonic() - began
                return {
                    name: _cpu_s(each) - before[name] for name, each in processes.items()
                }, seconds

        used_s, seconds = asyncio.run(run())
    num_tokens = streams * options.tokens
    per_token = {name: round(1e6 * value / num_tokens, 1) for name, value in used_s.items()}
    return {"way": way, "streams": streams, "seconds": round(seconds, 2), "us_per_token": per_token}


def _cpu_s(process: SpawnProcess) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


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
