"""Prefill and decode workers with fake models in virtual time, driven by a scripted router."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from credentials.channel import ProvenChannel
from credentials.cluster import ClusterCredentials
from credentials.gate import ServerGate
from decode_worker.config import DecodeConfig
from kv_transfer.driver import RunBlocking
from llm_engine.sampling import SamplingParams
from pagewire.protos import common_pb2, worker_pb2, worker_pb2_grpc
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from prefill_worker.config import PrefillConfig
from protos.call_guard import CallGuard
from protos.contract import CONTRACT_VERSION
from protos.peer_limits import check_limits
from tests.support.cluster_keys import credentials_of, proven, worker_credentials
from tests.support.fake_engine import FakeEngine, FakeModel, fake_tokens
from tests.support.loopback import LoopbackNetwork, LoopbackTransport
from tests.support.memory_grpc import MemoryChannel, MemoryNetwork
from tests.support.virtual_executor import VirtualExecutor
from tests.support.virtual_time import Process, run_inline, run_virtual, seeded, wait_until
from tests.support.worker_hosts import host_of
from worker.context import WorkerContext
from worker.host import WorkerHost
from worker.identity import ModelInfo, WorkerIdentity
from worker.wire import sampling_to_proto, worker_to_proto

MODEL = FakeModel(vocab_size=1000, eos_token_ids=(0,))
PAGE_SIZE = 4
MAX_CONTEXT_TOKENS = 512
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def prompt_of(num_tokens: int, *, seed: int = 0, prefix: Sequence[int] = ()) -> tuple[int, ...]:
    """Return a prompt that begins with `prefix` and is otherwise random."""
    rng = seeded(seed, "prompt")
    rest = num_tokens - len(prefix)
    return (*prefix, *(rng.randrange(1, MODEL.vocab_size) for _ in range(rest)))


@dataclass(kw_only=True, slots=True)
class RunningWorker:
    identity: WorkerIdentity
    process: Process
    credentials: ClusterCredentials
    executor: VirtualExecutor
    transport: LoopbackTransport
    worker: WorkerHost
    server: Any

    @property
    def engine(self) -> FakeEngine:
        return self.executor.engine  # type: ignore[return-value]

    @property
    def num_connections(self) -> int:
        """Connections to peers that were neither aborted nor found broken."""
        return sum(not each.is_broken for each in self.transport._connections)

    @property
    def held_pages(self) -> int:
        """Pages that are neither free nor merely cached."""
        counts = self.worker.cache.pool.counts()
        return counts.total - counts.free - counts.cached


@dataclass(kw_only=True, slots=True)
class WorkerCluster:
    """Any number of prefill workers and one decode worker."""

    num_prefill: int = 1
    prefill_pages: int = 256
    decode_pages: int = 256
    prefill_config: PrefillConfig = field(
        default_factory=lambda: PrefillConfig(max_step_tokens=32, chunk_pages=2, max_chunk_pages=2)
    )
    decode_config: DecodeConfig = field(
        default_factory=lambda: DecodeConfig(
            max_running_sequences=32, max_step_tokens=64, local_prefill_max_tokens=0
        )
    )
    grpc_network: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(latency_s=0.0005))
    page_network: LoopbackNetwork = field(
        default_factory=lambda: LoopbackNetwork(hang_on_peer_death=True)
    )
    prefills: list[RunningWorker] = field(default_factory=list)
    channels: list[MemoryChannel] = field(default_factory=list)  # of the decode worker
    decode: RunningWorker = field(init=False)
    run_blocking: RunBlocking = run_inline
    router: ClusterCredentials = field(default_factory=lambda: credentials_of("router", "router-0"))

    async def start(self) -> "WorkerCluster":
        for index in range(self.num_prefill):
            await self.join(f"prefill-{index}")
        self.decode = await self._start("decode-0", self.decode_pages)
        return self

    async def session(
        self,
        incarnation: int | None = None,
        *,
        contract_version: int = CONTRACT_VERSION,
        reads: bool = True,
    ) -> "ScriptedRouter":
        stub = worker_pb2_grpc.DecodeServiceStub(self.router_channel(self.decode))
        router = ScriptedRouter(stub.Session(), self, reads=reads)
        hello = worker_pb2.SessionHello(
            router_id="router-0",
            incarnation=incarnation or self.decode.identity.incarnation,
            contract_version=contract_version,
        )
        await router.call.write(worker_pb2.SessionRequest(hello=hello))
        return router

    def router_channel(self, worker: RunningWorker) -> ProvenChannel:
        """Return a router's channel to a worker."""
        channel = self.grpc_network.channel(worker.identity.address)
        return proven(channel, worker.identity, self.router)

    def decode_channel(self, worker: RunningWorker) -> ProvenChannel:
        """Return the decode worker's channel to a prefill worker."""
        channel = self.grpc_network.channel(worker.identity.address)
        return proven(channel, worker.identity, self.decode.credentials)

    def candidates(self) -> list[WorkerIdentity]:
        return [each.identity for each in self.prefills]

    def kill(self, worker: RunningWorker) -> None:
        self.grpc_network.kill(worker.identity.address)
        worker.transport.kill()

    async def join(self, worker_id: str) -> RunningWorker:
        """Start one more prefill worker."""
        self.prefills.append(await self._start(worker_id, self.prefill_pages))
        return self.prefills[-1]

    async def restart(self, index: int) -> None:
        """Start a killed prefill worker again, with another incarnation and address."""
        worker_id = self.prefills[index].identity.worker_id
        self.prefills[index] = await self._start(worker_id, self.prefill_pages, start=1)

    async def wait_free(self, timeout_s: float = 1.0) -> None:
        """Wait until no living worker holds a page for anybody."""
        living = [each for each in (*self.prefills, self.decode) if each.process.state != "dead"]
        await wait_until(
            lambda: not any(each.held_pages for each in living),
            timeout_s=timeout_s,
            what="freedom of all pages",
        )
        for each in living:
            each.worker.cache.check_integrity()
            assert each.worker.cache.pool.counts().quarantine == 0

    async def stop(self) -> None:
        for each in (*self.prefills, self.decode):
            if each.process.state != "dead":
                await each.process.spawn(each.worker.stop(0.0))
                await each.process.spawn(each.server.stop(0.0))

    def _connect_channel(self, address: str) -> MemoryChannel:
        self.channels.append(self.grpc_network.channel(address))
        return self.channels[-1]

    async def _start(self, worker_id: str, num_pages: int, start: int = 0) -> RunningWorker:
        rng = seeded(start, worker_id)
        identity = WorkerIdentity(
            worker_id=worker_id,
            incarnation=rng.randrange(1, 2**63),
            address=f"{worker_id}:{1 + start}",
        )
        model = ModelInfo(
            name=MODEL.name,
            fingerprint=MODEL.fingerprint,
            vocab_size=MODEL.vocab_size,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            eos_token_ids=MODEL.eos_token_ids,
        )
        credentials = worker_credentials(identity)
        process = Process(worker_id)
        with process.entered():
            executor = VirtualExecutor(
                FakeEngine(MODEL, num_pages=num_pages, page_size=PAGE_SIZE), token_s=0.001
            )
            transport = LoopbackTransport(self.page_network, executor.engine.storage)
            gates = [ServerGate(credentials), CallGuard(max_calls=1000, check=check_limits)]
            server = self.grpc_network.server(identity.address, gates)
            is_prefill = worker_id.startswith("prefill")
            config: Any = self.prefill_config if is_prefill else self.decode_config
            context = WorkerContext(
                config=config,
                identity=identity,
                model=model,
                executor=executor,
                credentials=credentials,
                transports=[transport],
            )
            worker = host_of(
                context,
                rng=rng,
                connect_channel=self._connect_channel,
                run_blocking=self.run_blocking,
            )
            worker.register(server)
        await process.spawn(server.start())
        await process.spawn(worker.start())
        return RunningWorker(
            identity=identity,
            process=process,
            credentials=credentials,
            executor=executor,
            transport=transport,
            worker=worker,
            server=server,
        )


@dataclass(kw_only=True, slots=True)
class Stream:
    """What the router got for one request; checks order and fencing as it comes in."""

    request_id: str
    attempt: int
    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: dict[int, list[int]]  # choice |-> all tokens, those of earlier attempts included
    finish_reasons: dict[int, int] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)  # choices
    failure: Any = None
    stats: Any = None  # the newest
    all_stats: list[Any] = field(default_factory=list)
    num_messages: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    has_tokens: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, delta: Any) -> None:
        assert delta.attempt == self.attempt
        assert not self.ended.is_set() or self.cancelled, "a delta after the end"
        assert delta.choice not in self.finish_reasons, "a delta after the end of its choice"
        output = self.tokens[delta.choice]
        assert delta.first_index == len(output), "a gap or a repetition"
        output += unpack_token_ids(delta.token_ids)
        self.logprobs += delta.logprobs
        self.num_messages += 1
        self.has_tokens.set()
        if delta.finish_reason:
            self.finish_reasons[delta.choice] = delta.finish_reason
        if delta.HasField("stats"):
            self.stats = delta.stats
            self.all_stats.append(delta.stats)
        if self.finish_reasons.keys() | self.cancelled >= self.tokens.keys():
            assert delta.HasField("stats") or self.cancelled, "no stats at the end"
            self.ended.set()

    def assert_equals_oracle(self) -> None:
        assert self.failure is None, self.failure
        assert self.ended.is_set()
        for choice, tokens in self.tokens.items():
            expected = fake_tokens(
                self.prompt,
                self.params,
                model=MODEL,
                choice=choice,
                max_context_tokens=MAX_CONTEXT_TOKENS,
            )
            num_tokens = len(tokens) if choice in self.cancelled else len(expected)
            assert tokens == expected[:num_tokens], f"choice {choice} of {self.request_id}"


class ScriptedRouter:
    """One session."""

    def __init__(self, call: Any, cluster: WorkerCluster, *, reads: bool = True) -> None:
        self.call = call
        self.streams: dict[str, Stream] = {}
        self.numbered: dict[int, tuple[Stream, int]] = {}  # number |-> whose choice it is
        self.num_messages = 0
        self._cluster = cluster
        self._names = itertools.count()
        self.reading = asyncio.get_running_loop().create_task(
            # Cancelling a read would cancel the call.
            self._read() if reads else asyncio.sleep(0)
        )

    async def submit(
        self,
        prompt: Sequence[int],
        *,
        request_id: str | None = None,
        attempt: int = 0,
        n: int = 1,
        emitted: dict[int, list[int]] | None = None,
        candidates: Sequence[WorkerIdentity] | None = None,
        timeout_ms: int = 0,
        failed_passes: int = 0,
        cache_share: float = 0.0,
        first_stream: int | None = None,
        **params: Any,
    ) -> Stream:
        params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
        tokens = emitted if emitted is not None else {choice: [] for choice in range(n)}
        stream = Stream(
            request_id=request_id or f"request-{next(self._names)}",
            attempt=attempt,
            prompt=tuple(prompt),
            params=SamplingParams(**params),
            tokens={choice: list(output) for choice, output in tokens.items()},
        )
        self.streams[stream.request_id] = stream
        if first_stream is None:
            first_stream = len(self.numbered)
        for choice in range(max(tokens, default=0) + 1):
            self.numbered[first_stream + choice] = stream, choice
        if candidates is None:
            candidates = self._cluster.candidates()
        submit = worker_pb2.SubmitRequest(
            request_id=stream.request_id,
            attempt=attempt,
            prompt_token_ids=pack_token_ids(stream.prompt),
            sampling=sampling_to_proto(stream.params),
            choices=[
                worker_pb2.ChoiceState(choice=choice, emitted_token_ids=pack_token_ids(output))
                for choice, output in tokens.items()
            ],
            prefill_candidates=[worker_to_proto(each) for each in candidates],
            timeout_ms=timeout_ms,
            failed_passes=failed_passes,
            cache_share=cache_share,
            first_stream=first_stream,
        )
        await self.call.write(worker_pb2.SessionRequest(submit=submit))
        return stream

    async def cancel(self, stream: Stream) -> None:
        cancel = worker_pb2.CancelRequest(request_id=stream.request_id)
        del self.streams[stream.request_id]
        await self.call.write(worker_pb2.SessionRequest(cancel=cancel))

    async def cancel_choices(self, stream: Stream, *choices: int) -> None:
        """End some choices; what is on the way for them still counts."""
        cancel = worker_pb2.CancelRequest(request_id=stream.request_id, choices=choices)
        stream.cancelled.update(choices)
        await self.call.write(worker_pb2.SessionRequest(cancel=cancel))

    async def finish(self, *streams: Stream, timeout_s: float = 60.0) -> None:
        """Wait until all of these ended, and compare them with the oracle."""
        async with asyncio.timeout(timeout_s):
            for stream in streams:
                await stream.ended.wait()
        for stream in streams:
            stream.assert_equals_oracle()

    async def close(self) -> None:
        await self.call.done_writing()
        await asyncio.wait({self.reading}, timeout=5.0)

    async def _read(self) -> None:
        async for message in self.call:
            self.num_messages += 1
            columns = message.tokens
            assert len(columns.streams) == len({*columns.streams}), "each at most once"
            for number, token_id, index in zip(
                columns.streams, columns.token_ids, columns.indices, strict=True
            ):
                stream, choice = self.numbered[number]
                if self.streams.get(stream.request_id) is stream:
                    token_ids = pack_token_ids([token_id])
                    stream.take(
                        worker_pb2.TokenDelta(
                            request_id=stream.request_id,
                            attempt=stream.attempt,
                            choice=choice,
                            token_ids=token_ids,
                            first_index=index,
                        )
                    )
            for delta in message.deltas:
                if delta.request_id in self.streams:
                    self.streams[delta.request_id].take(delta)
            for failure in message.failures:
                if failure.request_id in self.streams:
                    stream = self.streams[failure.request_id]
                    assert not stream.ended.is_set(), "a failure after the end"
                    stream.failure = failure
                    stream.ended.set()


Scenario = Callable[[WorkerCluster, ScriptedRouter], Awaitable[None]]


def run(scenario: Scenario, cluster: WorkerCluster | None = None) -> None:
    """Run a scenario; afterwards no living worker may hold a page for anybody."""

    async def main() -> None:
        running = await (cluster or WorkerCluster()).start()
        router = await running.session()
        await scenario(running, router)
        await running.wait_free()
        await router.close()
        await running.stop()

    run_virtual(main())
