"""A whole cluster of fake models in virtual time: real routers and workers, simulated network.

Each worker and each router is a Process: it can be killed, paused and started again as a new
incarnation. Pages move over the loopback transport, control over the in-memory gRPC.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc

from credentials.channel import ProvenChannel
from credentials.cluster import ClusterCredentials
from credentials.gate import ServerGate
from decode_worker.config import DecodeConfig
from grammars.wire import constraint_to_proto
from kv_cache.prefix_cache import PrefixCache
from kv_transfer.deadlines import TransferDeadlines
from llm_engine.drawing import FinishReason
from pagewire.protos import common_pb2, inference_pb2, inference_pb2_grpc
from pagewire.protos.grpc_options import PING_AFTER_MS, PING_TIMEOUT_MS
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from prefill_worker.config import PrefillConfig
from protos.call_guard import CallGuard
from protos.contract import CONTRACT_VERSION
from protos.peer_limits import check_limits
from router.config import RouterConfig
from router.membership import WorkerMember
from router.router import Router
from router.tenants.gate import TenantGate
from router.tenants.registry import Tenants
from tests.support.cluster_keys import credentials_of, proven, worker_credentials
from tests.support.conservation import router_leaks, worker_leaks
from tests.support.fake_engine import SLOT_BYTES, FakeEngine, FakeModel, check_cached_pages
from tests.support.history import Delta, RequestHistory
from tests.support.inline_checker import InlineChecker
from tests.support.loopback import LoopbackNetwork, LoopbackTransport
from tests.support.memory_grpc import MemoryNetwork
from tests.support.memory_server import MemoryServer
from tests.support.oracle import RequestSpec
from tests.support.scenario import MAX_CONTEXT_TOKENS, VOCAB_SIZE, ClusterShape
from tests.support.virtual_executor import VirtualExecutor
from tests.support.virtual_time import Process, VirtualLoop, run_inline, seeded, wait_until
from tests.support.worker_hosts import host_of
from worker.context import WorkerContext
from worker.errors import EngineLost
from worker.host import WorkerHost
from worker.identity import ModelInfo, WorkerIdentity
from worker.process import LAST_WORDS_S

T = TypeVar("T")
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

PING_S = (PING_AFTER_MS + PING_TIMEOUT_MS) / 1000
RESTART_S = 0.5  # from the end of a process to the start of the next
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
    credentials: ClusterCredentials
    executor: VirtualExecutor
    transport: LoopbackTransport
    worker: WorkerHost

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
    tenants: Tenants | None = None  # of all routers
    workers: dict[str, FakeWorker] = field(default_factory=dict)  # worker_id |-> newest start
    routers: dict[str, FakeRouter] = field(default_factory=dict)
    network: MemoryNetwork = field(init=False)
    pages: LoopbackNetwork = field(init=False)
    rng: random.Random = field(init=False)
    num_starts: int = 0  # of workers
    num_router_starts: int = 0
    other_router: ClusterCredentials = field(
        default_factory=lambda: credentials_of("router", "router-x")
    )
    deaths: list[str] = field(default_factory=list)  # step loops that died of a bug
    lost_engines: list[str] = field(default_factory=list)  # workers that ended for their engine
    broken: set[str] = field(default_factory=set)  # workers whose engine fails at every start
    toxin: int | None = None  # see VirtualExecutor
    is_deadly: bool = False
    leaving: set[str] = field(default_factory=set)  # workers that drain
    text_folder: Path | None = None  # of the model's tokenizer; None: token ids only
    supervisors: set["asyncio.Task[None]"] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = seeded(self.seed, "cluster")
        self.network = MemoryNetwork(
            seed=self.seed,
            latency_s=self.shape.latency_s,
            jitter_s=self.shape.jitter_s,
            window_bytes=self.shape.window_bytes,
            ping_s=PING_S,
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
        await wait_until(self.all_are_ready, timeout_s=5.0, what="every worker ready")

    def all_are_ready(self) -> bool:
        """Return whether each router can use each worker."""
        registries = [each.router.registry for each in self.routers.values()]
        num_ready = sum(
            len(each.ready("prefill")) + len(each.ready("decode")) for each in registries
        )
        return num_ready == len(registries) * len(self.workers)

    async def start_worker(
        self, worker_id: str, contract_version: int = CONTRACT_VERSION
    ) -> FakeWorker:
        """Start or restart a worker, and tell the routers."""
        self.num_starts += 1
        is_prefill = worker_id.startswith("prefill")
        identity = WorkerIdentity(
            worker_id=worker_id,
            incarnation=self.rng.randrange(1, 2**63),
            # A restarted process rarely gets its old port back.
            address=f"{worker_id}:{self.num_starts}",
            contract_version=contract_version,
        )
        credentials = worker_credentials(identity)
        process = Process(worker_id)
        with process.entered():
            gates = [ServerGate(credentials), CallGuard(max_calls=1000, check=check_limits)]
            server = self.network.server(identity.address, gates)
            num_pages = self.shape.prefill_pages if is_prefill else self.shape.decode_pages
            executor = VirtualExecutor(
                FakeEngine(
                    MODEL,
                    num_pages=num_pages,
                    page_size=self.shape.page_size,
                    max_launched=self.shape.max_launched,
                    unit_len=self.shape.shared_unit_len,
                ),
                pass_s=self.shape.pass_s,
                token_s=self.shape.token_s,
            )
            executor.is_broken = worker_id in self.broken
            executor.toxin, executor.is_deadly = self.toxin, self.is_deadly
            transport = LoopbackTransport(self.pages, executor.storage)
            context = WorkerContext(
                config=self._prefill_config if is_prefill else self._decode_config,
                identity=identity,
                model=model_info(self.text_folder),
                executor=executor,
                credentials=credentials,
                transports=[transport],
            )
            worker = host_of(
                context,
                rng=seeded(self.seed, worker_id, identity.incarnation),
                connect_channel=self.network.channel,
                run_blocking=self._run_blocking,
            )
            worker.register(server)
        started = FakeWorker(
            identity=identity,
            process=process,
            server=server,
            credentials=credentials,
            executor=executor,
            transport=transport,
            worker=worker,
        )
        await process.spawn(server.start())
        await process.spawn(worker.start())
        self.workers[worker_id] = started
        supervisor = asyncio.create_task(self._supervise(started))
        self.supervisors.add(supervisor)
        supervisor.add_done_callback(self.supervisors.discard)
        await self.announce()
        return started

    async def _run_blocking(self, function: Callable[[], T], /) -> T:
        result = function()
        if self.shape.blocking_s:
            await asyncio.sleep(self.shape.blocking_s)
        return result

    async def start_router(self, name: str, contract_version: int = CONTRACT_VERSION) -> FakeRouter:
        self.num_router_starts += 1
        credentials = credentials_of("router", name, self.num_router_starts)
        process = Process(name)
        with process.entered():
            gates = [TenantGate(self.tenants)] if self.tenants else []
            server = self.network.server(f"{name}:1", [*gates, CallGuard(max_calls=1000)])
            rng = seeded(self.seed, name, self.num_starts)
            router = Router(
                config=RouterConfig(
                    router_id=name,
                    contract_version=contract_version,
                    resume_key=b"k" * 32,
                    retry_delay_s=0.1,
                    resume_wait_s=20.0,
                    max_expected_wait_s=self.shape.max_expected_wait_s,
                    local_prefill_max_tokens=self.shape.local_prefill_max_tokens,
                    max_running_sequences=self.shape.max_running_sequences,
                ),
                model_dir=self.text_folder,
                make_checker=InlineChecker,
                connect_channel=partial(self._connect_worker, credentials),
                random_id=lambda: rng.randbytes(16).hex(),
                tenants=self.tenants,
                run_blocking=run_inline,
            )
            router.register(server)
        await process.spawn(router.start())
        await process.spawn(server.start())
        self.routers[name] = FakeRouter(process=process, server=server, router=router)
        await self.announce()
        return self.routers[name]

    def _connect_worker(
        self, caller: ClusterCredentials, worker: WorkerMember | WorkerIdentity
    ) -> ProvenChannel:
        return proven(self.network.channel(worker.address), worker, caller)

    def router_channel(self, worker_id: str) -> ProvenChannel:
        """Return a channel to a worker as one more router would open it."""
        return self._connect_worker(self.other_router, self.workers[worker_id].identity)

    def decode_channel(self, decode_id: str, prefill_id: str) -> ProvenChannel:
        """Return a decode worker's channel to a prefill worker."""
        caller = self.workers[decode_id].credentials
        return self._connect_worker(caller, self.workers[prefill_id].identity)

    async def announce(self) -> None:
        """Tell the living routers the members, as the cluster's controller does."""
        members = [
            WorkerMember(
                worker_id=each.identity.worker_id,
                incarnation=each.identity.incarnation,
                address=each.identity.address,
                contract_version=each.identity.contract_version,
                pool="prefill" if each.identity.worker_id.startswith("prefill") else "decode",
                is_draining=each.identity.worker_id in self.leaving,
            )
            for each in self.workers.values()
        ]
        for each in self.routers.values():
            if each.process.state == "running":
                await each.process.spawn(each.router.set_workers(members))

    async def drain(
        self, worker_id: str, grace_s: float, *, is_announced: bool = True
    ) -> FakeWorker:
        """Let a worker go, as the cluster's controller and the worker's actor do.

        Args:
            worker_id: The worker.
            grace_s: Seconds for its requests.
            is_announced: The routers hear of it before it begins, as they should.
        """
        worker = self.workers[worker_id]
        self.leaving.add(worker_id)
        if is_announced:
            await self.announce()
        await worker.process.spawn(worker.worker.stop(grace_s))
        await worker.process.spawn(worker.server.stop(LAST_WORDS_S))
        del self.workers[worker_id]
        self.leaving.remove(worker_id)
        await self.announce()
        return worker

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

    async def _supervise(self, worker: FakeWorker) -> None:
        """Do what actor and Ray do: end a process whose engine is lost, and start it again."""
        worker_id = worker.identity.worker_id
        failing = worker.process.spawn(worker.worker.wait_failed())
        await asyncio.wait({failing})  # forever, if the process is killed
        error = None if failing.cancelled() else failing.exception()
        if isinstance(error, EngineLost):
            self.lost_engines.append(worker_id)
            await asyncio.sleep(LAST_WORDS_S)
            self.kill(worker_id)
            await asyncio.sleep(RESTART_S)
            await self.start_worker(worker_id)
        elif error is not None:
            self.deaths.append(f"the step loop of {worker_id} died: {error!r}")

    def living_workers(self) -> list[FakeWorker]:
        return [each for each in self.workers.values() if each.process.state == "running"]

    def held_pages(self) -> list[str]:
        """Describe the pages that living workers still hold."""
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
            check_cached_pages(each.cache, each.executor.storage, MODEL)
            leaks = worker_leaks(each.worker)
            assert leaks == [], f"{each.identity.worker_id} holds {leaks}"
        for name, each in self.routers.items():
            if each.process.state == "running":
                self._check_router(name, each.router)

    def _check_router(self, name: str, router: Router) -> None:
        leaks = router_leaks(router)
        assert leaks == [], f"{name} holds {leaks}"
        router.index.check_integrity()
        for worker in self.living_workers():
            worker_id = worker.identity.worker_id
            if worker_id in router.registry.misfits():
                continue
            indexed = router.index._pages.get(worker_id, set())
            cached = set(worker.cache.snapshot())
            assert indexed == cached, (
                f"{name} has {len(indexed)} pages of {worker_id} in its index, "
                f"the worker has {len(cached)}"
            )

    async def stop(self) -> list[str]:
        """Stop what lives and return what is left behind: tasks and calls, in words."""
        for supervisor in list(self.supervisors):
            supervisor.cancel()
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

    @property
    def _prefill_config(self) -> PrefillConfig:
        return PrefillConfig(
            max_step_tokens=self.shape.max_step_tokens,
            chunk_pages=self.shape.chunk_pages,
            max_chunk_pages=self.shape.max_chunk_pages,
            transfer_deadlines=DEADLINES,
        )

    @property
    def _decode_config(self) -> DecodeConfig:
        return DecodeConfig(
            max_running_sequences=self.shape.max_running_sequences,
            max_step_tokens=self.shape.max_step_tokens,
            local_prefill_max_tokens=self.shape.local_prefill_max_tokens,
            transfer_deadlines=DEADLINES,
        )


def page_bytes(shape: ClusterShape) -> int:
    return shape.page_size * SLOT_BYTES


def model_info(text_folder: Path | None = None) -> ModelInfo:
    return ModelInfo(
        name=MODEL.name,
        fingerprint=MODEL.fingerprint,
        vocab_size=MODEL.vocab_size,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        eos_token_ids=MODEL.eos_token_ids,
        text_folder=text_folder,
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
        constraint=constraint_to_proto(params.constraint),
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
