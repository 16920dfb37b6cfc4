"""A whole cluster of fake models in virtual time: real routers and workers, pretended network.

Each worker and each router is a Process: it can be killed, paused and started again as a new
incarnation. Pages move over the loopback transport, control over the in-memory gRPC.
"""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import grpc

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from kv_cache.prefix_cache import PrefixCache
from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.driver import run_inline
from kv_transfer.loopback import LoopbackNetwork, LoopbackTransport
from llm_engine.drawing import FinishReason
from llm_engine.fake_engine import SLOT_BYTES, FakeEngine, FakeModel
from llm_engine.worker_identity import ModelInfo, WorkerIdentity
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.token_ids import pack_token_ids, unpack_token_ids
from router.config import RouterConfig
from router.membership import WorkerMember
from router.router import Router
from tests.support.history import Delta, RequestHistory
from tests.support.memory_grpc import MemoryNetwork
from tests.support.memory_server import MemoryServer
from tests.support.oracle import RequestSpec
from tests.support.scenario import MAX_CONTEXT_TOKENS, VOCAB_SIZE, ClusterShape
from tests.support.virtual_executor import VirtualExecutor
from tests.support.virtual_time import Process, VirtualLoop, seeded, wait_until

MODEL = FakeModel(vocab_size=VOCAB_SIZE, eos_token_ids=(0,))
# Short, so that a run sees several of them; their order is that of the defaults.
DEADLINES = TransferDeadlines(
    connect_s=1.0,
    grant_s=2.0,
    chunk_s=4.0,
    slot_s=4.0,
    post_s=1.0,
    transfer_s=1.0,
    digest_s=1.0,
    ack_s=4.0,
    abort_s=5.0,
)

SETTLE_S = 3.0  # longer than a router needs to find a worker again

FINISH_REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(kw_only=True, slots=True)
class FakeWorker:
    """One start of one worker."""

    identity: WorkerIdentity
    process: Process
    server: MemoryServer
    executor: VirtualExecutor
    transport: LoopbackTransport
    worker: Any  # PrefillWorker or DecodeWorker

    @property
    def engine(self) -> FakeEngine:
        return self.executor.fake_engine

    @property
    def cache(self) -> PrefixCache:
        return self.worker.cache


@dataclass(kw_only=True, slots=True)
class FakeRouter:
    """One start of one router."""

    process: Process
    server: MemoryServer
    router: Router


@dataclass(kw_only=True, slots=True)
class FakeCluster:
    """Starts, breaks and inspects the cluster. Use within run_virtual."""

    shape: ClusterShape = field(default_factory=ClusterShape)
    seed: int = 0
    workers: dict[str, FakeWorker] = field(default_factory=dict)  # worker_id |-> newest start
    routers: dict[str, FakeRouter] = field(default_factory=dict)
    network: MemoryNetwork = field(init=False)
    pages: LoopbackNetwork = field(init=False)
    rng: random.Random = field(init=False)
    num_starts: int = 0
    deaths: list[str] = field(default_factory=list)  # step loops that died of a bug

    def __post_init__(self) -> None:
        self.rng = seeded(self.seed, "cluster")
        self.network = MemoryNetwork(
            seed=self.seed,
            latency_s=self.shape.latency_s,
            jitter_s=self.shape.jitter_s,
            window_bytes=self.shape.window_bytes,
        )
        self.pages = LoopbackNetwork(
            bytes_per_s=page_bytes(self.shape) / self.shape.page_transfer_s,
            hang_on_peer_death=self.shape.hangs_on_peer_death,
        )

    async def start(self) -> None:
        """Start everything and wait until each router can use each worker."""
        for index in range(self.shape.num_prefill):
            await self.start_worker(f"prefill-{index}")
        for index in range(self.shape.num_decode):
            await self.start_worker(f"decode-{index}")
        for index in range(self.shape.num_routers):
            await self.start_router(f"router-{index}")
        await wait_until(self._all_are_ready, timeout_s=5.0, what="every worker ready")

    def _all_are_ready(self) -> bool:
        registries = [each.router.registry for each in self.routers.values()]
        num_ready = sum(
            len(each.ready("prefill")) + len(each.ready("decode")) for each in registries
        )
        return num_ready == len(registries) * len(self.workers)

    async def start_worker(self, worker_id: str) -> FakeWorker:
        """Start a worker, anew where it ran before, and tell the routers."""
        self.num_starts += 1
        is_prefill = worker_id.startswith("prefill")
        identity = WorkerIdentity(
            worker_id=worker_id,
            incarnation=self.rng.randrange(1, 2**63),
            # A restarted process rarely gets its old port back.
            address=f"{worker_id}:{self.num_starts}",
        )
        process = Process(worker_id)
        with process.entered():
            server = self.network.server(identity.address)
            num_pages = self.shape.prefill_pages if is_prefill else self.shape.decode_pages
            executor = VirtualExecutor(
                FakeEngine(MODEL, num_pages=num_pages, page_size=self.shape.page_size),
                pass_s=self.shape.pass_s,
                token_s=self.shape.token_s,
            )
            transport = LoopbackTransport(self.pages, executor.storage)
            make = self._prefill_worker if is_prefill else self._decode_worker
            worker = make(identity, executor, transport)
            worker.register(server)
        started = FakeWorker(
            identity=identity,
            process=process,
            server=server,
            executor=executor,
            transport=transport,
            worker=worker,
        )
        await process.spawn(server.start())
        await process.spawn(worker.start())
        self.workers[worker_id] = started
        process.spawn(self._watch(started))
        await self.announce()
        return started

    async def start_router(self, name: str) -> FakeRouter:
        process = Process(name)
        with process.entered():
            server = self.network.server(f"{name}:1")
            rng = seeded(self.seed, name, self.num_starts)
            router = Router(
                config=RouterConfig(router_id=name, retry_delay_s=0.1, resume_wait_s=20.0),
                model_dir=None,
                connect_channel=self.network.channel,
                random_id=lambda: rng.randbytes(16).hex(),
            )
            router.register(server)
        await process.spawn(router.start())
        await process.spawn(server.start())
        self.routers[name] = FakeRouter(process=process, server=server, router=router)
        await self.announce()
        return self.routers[name]

    async def announce(self) -> None:
        """Tell the living routers who is there, as the cluster's controller does."""
        members = [
            WorkerMember(
                worker_id=each.identity.worker_id,
                incarnation=each.identity.incarnation,
                address=each.identity.address,
                pool="prefill" if each.identity.worker_id.startswith("prefill") else "decode",
            )
            for each in self.workers.values()
        ]
        for each in self.routers.values():
            if each.process.state == "running":
                await each.process.spawn(each.router.set_workers(members))

    def kill(self, name: str, *, silently: bool = False) -> None:
        """Kill a worker or a router, as SIGKILL does."""
        if name in self.workers:
            worker = self.workers[name]
            if worker.process.state == "dead":
                return
            self.network.kill(worker.identity.address, silently=silently)
            worker.transport.kill()
        elif self.routers[name].process.state != "dead":
            self.network.kill(f"{name}:1", silently=silently)

    def process(self, name: str) -> Process:
        return self.workers[name].process if name in self.workers else self.routers[name].process

    async def generate(self, spec: RequestSpec) -> RequestHistory:
        """Be the client of one request, from its arrival to its end."""
        history = RequestHistory(spec=spec)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, spec.arrives_at - loop.time()))
        history.arrived_at = loop.time()
        stub = inference_pb2_grpc.InferenceServiceStub(
            self.network.channel(f"router-{spec.router}:1")
        )
        call = stub.Generate(generate_request(spec), timeout=spec.timeout_s)
        if spec.cancels_after_s is not None:
            loop.call_later(spec.cancels_after_s, call.cancel)
        try:
            async for message in call:
                history.deltas.append(_delta(message, loop.time()))
                if spec.reads_slowly_s:
                    await asyncio.sleep(spec.reads_slowly_s)
            history.ends.append("OK")
        except grpc.aio.AioRpcError as error:
            history.ends.append(error.code().name)
            history.details = error.details() or ""
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            history.ends.append("CANCELLED")
        history.ended_at = loop.time()
        return history

    # Judging.

    async def _watch(self, worker: FakeWorker) -> None:
        try:
            await worker.worker.wait_failed()
        except Exception as error:
            self.deaths.append(f"the step loop of {worker.identity.worker_id} died: {error!r}")

    def living_workers(self) -> list[FakeWorker]:
        return [each for each in self.workers.values() if each.process.state == "running"]

    def held_pages(self) -> list[str]:
        """Return what the living workers still hold for somebody, in words."""
        held = []
        for each in self.living_workers():
            counts = each.cache.pool.counts()
            for state in ("live", "leased", "incoming", "quarantine"):
                if number := getattr(counts, state):
                    held.append(f"{each.identity.worker_id} has {number} pages {state}")
        return held

    async def wait_quiescent(self, timeout_s: float = 30.0) -> float:
        """Wait until no page is held for anybody; return how long it took."""
        try:
            return await wait_until(lambda: not self.held_pages(), timeout_s=timeout_s)
        except AssertionError:
            raise AssertionError(f"leaked after {timeout_s} s: {self.held_pages()}") from None

    async def check_at_rest(self) -> None:
        """Assert what must hold when all requests have ended; gives the last messages time."""
        await asyncio.sleep(SETTLE_S)
        assert self.deaths == []
        for each in self.living_workers():
            each.cache.check_integrity()
        for name, each in self.routers.items():
            if each.process.state == "running":
                self._check_router(name, each.router)

    def _check_router(self, name: str, router: Router) -> None:
        assert router.admission.num_active == 0, f"{name} counts requests that have ended"
        router.index.check_integrity()
        for pool in ("prefill", "decode"):
            for known in router.registry.ready(pool):
                worker_id = known.member.worker_id
                assert known.num_requests == 0, f"{name} counts requests at {worker_id}"
                assert known.queued_tokens == 0, f"{name} counts queued tokens at {worker_id}"
        for worker in self.living_workers():
            worker_id = worker.identity.worker_id
            indexed = router.index._pages.get(worker_id, set())
            cached = set(worker.cache.snapshot())
            assert indexed == cached, (
                f"{name} has {len(indexed)} pages of {worker_id} in its index, "
                f"the worker has {len(cached)}"
            )

    async def stop(self) -> list[str]:
        """Stop what lives and return what is left behind: tasks and calls, in words."""
        for router in self.routers.values():
            if router.process.state == "running":
                await router.process.spawn(router.router.stop(0.0))
                await router.process.spawn(router.server.stop(0.0))
        for each in self.living_workers():
            await each.process.spawn(each.worker.stop(0.0))
            await each.process.spawn(each.server.stop(0.0))
        await asyncio.sleep(1.0)
        return self._left_behind()

    def _left_behind(self) -> list[str]:
        left = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for task in asyncio.all_tasks():
            process = loop.process_of(task)
            if task is not asyncio.current_task() and (process is None or process.state != "dead"):
                left.append(f"task {task.get_name()} {task.get_coro()!r}")
        if self.network.num_open_calls:
            left.append(f"{self.network.num_open_calls} open calls")
        return left

    def _prefill_worker(
        self, identity: WorkerIdentity, executor: VirtualExecutor, transport: LoopbackTransport
    ) -> PrefillWorker:
        config = PrefillConfig(
            max_step_tokens=self.shape.max_step_tokens,
            chunk_pages=self.shape.chunk_pages,
            transfer_deadlines=DEADLINES,
        )
        return PrefillWorker(
            config=config,
            identity=identity,
            model=model_info(),
            executor=executor,
            transports=[transport],
            run_blocking=run_inline,
        )

    def _decode_worker(
        self, identity: WorkerIdentity, executor: VirtualExecutor, transport: LoopbackTransport
    ) -> DecodeWorker:
        config = DecodeConfig(
            max_running_sequences=self.shape.max_running_sequences,
            max_step_tokens=self.shape.max_step_tokens,
            local_prefill_max_tokens=self.shape.local_prefill_max_tokens,
            transfer_deadlines=DEADLINES,
        )
        rng = seeded(self.seed, identity.worker_id, identity.incarnation)
        return DecodeWorker(
            config=config,
            identity=identity,
            model=model_info(),
            executor=executor,
            transports=[transport],
            connect_channel=self.network.channel,
            random_id=lambda: rng.randbytes(16),
            run_blocking=run_inline,
        )


def page_bytes(shape: ClusterShape) -> int:
    return shape.page_size * SLOT_BYTES


def model_info() -> ModelInfo:
    return ModelInfo(
        name=MODEL.name,
        fingerprint=MODEL.fingerprint,
        vocab_size=MODEL.vocab_size,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        eos_token_ids=MODEL.eos_token_ids,
    )


def generate_request(spec: RequestSpec) -> inference_pb2.GenerateRequest:
    """Return the request as a client sends it."""
    params = spec.params
    sampling = common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        n=spec.n,
    )
    if params.logprobs is not None:
        sampling.logprobs = params.logprobs
    return inference_pb2.GenerateRequest(token_ids=pack_token_ids(spec.prompt), sampling=sampling)


def _delta(message: inference_pb2.GenerateResponse, at: float) -> Delta:
    return Delta(
        at=at,
        request_id=message.request_id,
        choice=message.choice,
        first_index=message.first_index,
        tokens=tuple(unpack_token_ids(message.token_ids)),
        finish_reason=FINISH_REASONS[message.finish_reason],
        usage=message.usage if message.HasField("usage") else None,
    )
