"""Workers without a model, a router and a gateway, each in a process of its own, to be measured.

The StepWorker has only a decode worker's sessions, and draws one token of each request every step.
The others are a whole decode worker and a whole prefill worker around an engine that computes
nothing.
"""

import asyncio
import multiprocessing
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import grpc
import psutil

from credentials.cluster import ClusterCredentials
from credentials.party import Party, Role
from credentials.secret import ClusterSecret
from decode_worker.outbox import Outbox
from decode_worker.request import Request, TokenDelta
from decode_worker.server import register_decode_service
from http_gateway.config import GatewayConfig
from http_gateway.server import GatewayServer
from llm_engine.drawing import FinishReason
from llm_engine.sampling import SampledToken
from observability.serving_process import settle_process
from pagewire.protos import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from pagewire.protos.grpc_options import WORKER_SERVER_OPTIONS
from protos.call_guard import CallGuard
from protos.contract import CONTRACT_VERSION
from worker.errors import WorkerError
from worker.identity import ModelInfo, WorkerIdentity

HOST = "127.0.0.1"
MODEL = inference_pb2.Model(
    name="none", max_context_tokens=4096, vocab_size=512, page_size=16, max_choices=1
)
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 300, 26  # of the demo model's tokenizer, whole words
TOKENS = tuple(SampledToken(token_id=FIRST_TOKEN_ID + i) for i in range(NUM_TOKEN_IDS))
MAX_OUTBOX_TOKENS = 10_000_000
START_TIMEOUT_S = 60.0
BURST_MODEL = ModelInfo(
    name="none",
    fingerprint="none",
    vocab_size=512,
    max_context_tokens=4096,
    eos_token_ids=(),
)
BURST_PAGE_SIZE, BURST_PAGES = 64, 16_384
BURST_HASH_KEY = bytes(16)
BURST_SECRET = ClusterSecret(bytes(32))
HEARTBEAT_S = 0.5

Measured = SpawnProcess | psutil.Process
Ports = Any  # a queue of integers between processes


@dataclass(kw_only=True, slots=True)
class Steps:
    """How a worker steps, and what it tells of its steps to other processes."""

    step_s: float
    num_gathered: int = 1  # requests; it waits for them before it steps
    has_begun: Event | None = None  # set before the first step
    times: Any = field(default=None)  # array of doubles: step |-> time.monotonic() of its tokens


class StepWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Sends one token of each request in each step; a RequestSink."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._ref = common_pb2.WorkerRef(
            worker_id="decode-0",
            incarnation=1,
            address="none",
            contract_version=CONTRACT_VERSION,
        )
        self._running: dict[str, tuple[Request, Outbox]] = {}  # by request id
        self._changed = asyncio.Event()
        self._stepping = asyncio.create_task(self._step_for_ever())

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

    def open_session(self, router_id: str, incarnation: int, contract_version: int) -> Outbox:
        """Begin a session."""
        return Outbox(max_tokens=MAX_OUTBOX_TOKENS)

    def submit(self, request: Request, outbox: Outbox) -> None:
        """Take a request."""
        self._running[request.request_id] = request, outbox
        self._changed.set()

    def cancel(self, request_id: str, outbox: Outbox) -> None:
        """Forget a request."""
        self._running.pop(request_id, None)

    def cancel_choices(self, request_id: str, choices: Container[int], outbox: Outbox) -> None:
        """Forget a request: each has one choice."""
        self.cancel(request_id, outbox)

    def fail(self, request_id: str, error: WorkerError, outbox: Outbox) -> None:
        """Forget a request."""
        self.cancel(request_id, outbox)

    def close_session(self, outbox: Outbox) -> None:
        """Forget all requests."""
        self._running.clear()

    def meet(self, prefill_workers: Sequence[WorkerIdentity]) -> None:
        """Connect to nobody: every token is made here."""

    async def _step_for_ever(self) -> None:
        while True:
            while len(self._running) < self._steps.num_gathered:
                self._changed.clear()
                await self._changed.wait()
            if self._steps.has_begun:
                self._steps.has_begun.set()
            await self._step_all()

    async def _step_all(self) -> None:
        num_drawn = dict.fromkeys(self._running, 0)
        due_at = time.monotonic()
        step = 0
        while self._running:
            due_at += self._steps.step_s
            await asyncio.sleep(max(due_at - time.monotonic(), 0))
            if self._steps.times is not None:
                self._steps.times[step] = time.monotonic()
            step += 1
            for request, outbox in list(self._running.values()):
                index = num_drawn.get(request.request_id, 0)
                num_drawn[request.request_id] = index + 1
                is_last = index + 1 == request.params.max_tokens
                if is_last:
                    del self._running[request.request_id]
                outbox.push(
                    TokenDelta(
                        request=request,
                        choice=0,
                        tokens=(TOKENS[index % NUM_TOKEN_IDS],),
                        first_index=index,
                        finish_reason=FinishReason.LENGTH if is_last else None,
                        is_last_of_request=is_last,
                    )
                )


# Processes: each serves forever, and reports its port.


def run_worker(ports: Ports, steps: Steps) -> None:
    """Run a worker."""

    async def start() -> tuple[int, object]:
        server = grpc.aio.server()
        worker = StepWorker(steps)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
        register_decode_service(server, worker)
        return await _listen(server), (server, worker)

    _serve(start, ports)


def run_decode_worker(ports: Ports, step_s: float, is_remote: bool = False) -> None:
    """Run a decode worker whose steps take `step_s` seconds and compute nothing.

    With `is_remote`, a prefill worker computes all prompts.
    """
    from decode_worker.config import DecodeConfig
    from decode_worker.worker import DecodeWorker

    async def start() -> tuple[int, object]:
        server = grpc.aio.server(
            options=WORKER_SERVER_OPTIONS, interceptors=[CallGuard(max_calls=1000)]
        )
        config = DecodeConfig(hash_key=BURST_HASH_KEY)
        if is_remote:
            config = replace(config, local_prefill_max_tokens=0)
        context = _burst_context("decode", config, step_s)
        pool = DecodeWorker(
            context,
            connect_channel=grpc.aio.insecure_channel,
            random_id=lambda: secrets.token_bytes(16),
        )
        return await _start_worker(context, pool, server)

    _serve(start, ports)


def run_prefill_worker(ports: Ports, step_s: float) -> None:
    """Run a prefill worker, likewise."""
    from credentials.gate import ServerGate
    from prefill_worker.config import PrefillConfig
    from prefill_worker.worker import PrefillWorker

    async def start() -> tuple[int, object]:
        context = _burst_context("prefill", PrefillConfig(hash_key=BURST_HASH_KEY), step_s)
        # As in a cluster: the caller of an attempt has to be known.
        gate = ServerGate(context.credentials)
        server = grpc.aio.server(
            options=WORKER_SERVER_OPTIONS, interceptors=[gate, CallGuard(max_calls=1000)]
        )
        return await _start_worker(context, PrefillWorker(context), server)

    _serve(start, ports)


def run_router(
    ports: Ports,
    worker_port: int,
    model_dir: Path,
    options: dict[str, Any] | None = None,
    prefill_port: int | None = None,
    shared_port: int | None = None,
) -> None:
    """Run a router, on a port that others may listen on, too, if one is given; 0: any."""
    from credentials.channel import ProvenChannel
    from router.config import RouterConfig
    from router.front import make_server
    from router.membership import WorkerMember, WorkerRole
    from router.random_ids import random_ids
    from router.router import Router

    def connect(member: WorkerMember) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(member.address)
        if member.pool == "decode":  # it has no gate
            return channel
        prefill = Party(role="prefill", name=member.worker_id, incarnation=member.incarnation)
        return ProvenChannel(channel, _credentials("router", "router-0").callee(prefill))

    async def start() -> tuple[int, object]:
        config = RouterConfig(
            max_active_requests=10_000,
            max_expected_wait_s=1e9,
            page_hash_key=BURST_HASH_KEY,
            resume_key=secrets.token_bytes(32),
            **(options or {}),
        )
        router = Router(
            config=config, model_dir=model_dir, connect_channel=connect, random_id=random_ids()
        )
        server = make_server(config, shares_port=shared_port is not None)
        router.register(server)
        await router.start()
        workers: dict[WorkerRole, int | None] = {"decode": worker_port, "prefill": prefill_port}
        await router.set_workers(
            [
                WorkerMember(
                    worker_id=f"{pool}-0", incarnation=1, address=f"{HOST}:{port}", pool=pool
                )
                for pool, port in workers.items()
                if port is not None
            ]
        )
        return await _listen(server, shared_port or 0), (server, router)

    _serve(start, ports)


def run_gateway(ports: Ports, router_port: int, stream_interval_s: float) -> None:
    """Run a gateway."""

    async def find_routers() -> list[str]:
        return [f"{HOST}:{router_port}"]

    async def start() -> tuple[int, object]:
        config = GatewayConfig(max_connections=10_000, stream_interval_s=stream_interval_s)
        server = GatewayServer(find_routers, config=config, host=HOST, port=0)
        return int((await server.start()).rpartition(":")[2]), server

    _serve(start, ports)


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


def cpu_s(process: Measured) -> float:
    """Return the CPU time that a process has used, all threads together."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def cpu_clock(process: SpawnProcess) -> int:
    """Return the clock of what a process uses, as time.clock_gettime takes it: nanoseconds."""
    assert process.pid is not None, "it runs"
    return ~process.pid << 3 | 2  # as Linux numbers the clocks of processes


def _credentials(role: Role, name: str) -> ClusterCredentials:
    return ClusterCredentials(BURST_SECRET.keys_of(role, name), incarnation=1)


def _burst_context(pool: Role, config: Any, step_s: float) -> Any:
    """Return what a worker without a model needs, but for its pool's part."""
    from benchmarks.empty_engine import EmptyEngine
    from kv_cache.layout import KVLayout
    from kv_transfer.proven_sockets import ProvenSockets
    from kv_transfer.tcp import TcpTransport
    from worker.context import WorkerContext
    from worker.executor import ThreadExecutor

    layout = KVLayout(
        num_layers=1,
        num_kv_heads=1,
        page_size=BURST_PAGE_SIZE,
        head_dim=1,
        dtype="float32",
        model_fingerprint=BURST_MODEL.fingerprint,
    )
    engine = EmptyEngine(layout, num_pages=BURST_PAGES, step_s=step_s, token=TOKENS[0])
    return WorkerContext(
        config=config,
        identity=WorkerIdentity(worker_id=f"{pool}-0", incarnation=1, address="none"),
        model=BURST_MODEL,
        executor=ThreadExecutor(engine, max_call_s=60.0),
        credentials=_credentials(pool, f"{pool}-0"),
        transports=[TcpTransport(engine.storage, ProvenSockets(host=HOST))],
    )


async def _start_worker(context: Any, pool: Any, server: grpc.aio.Server) -> tuple[int, object]:
    from worker.host import WorkerHost

    worker = WorkerHost(context, pool)
    worker.register(server)
    port = await _listen(server)
    await worker.start()
    return port, (server, worker)


async def _listen(server: grpc.aio.Server, port: int = 0) -> int:
    port = server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    return port


def _serve(start: Callable[[], Awaitable[tuple[int, object]]], ports: Ports) -> None:
    async def run() -> None:
        port, _owner = await start()  # which lives as long as the process
        settle_process()
        ports.put(port)
        await asyncio.Event().wait()

    asyncio.run(run())
