"""Calls of all kinds while everything comes and goes: in the end nothing is held for any of them.

Clients leave, stop reading or send nonsense, streams carry many calls, tenants reach their limits,
deadlines pass, workers die and drain, and routers stop and come back, all at random from a seed.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from llm_engine.sampling import SamplingParams
from pagewire import AsyncClient, PagewireError
from pagewire.protos import inference_pb2, inference_pb2_grpc
from pagewire.protos.gathering import READS_TOKENS_KEY
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from pagewire.routers import token_metadata
from router.dispatch import Dispatcher
from router.tenants.registry import Tenants
from router.tenants.turns import FairQueue
from tests.router.tenants.known import rules, tenants
from tests.simulation.checked_completions import complete
from tests.support.conservation import router_leaks, tenant_leaks
from tests.support.fake_cluster import MODEL, FakeCluster, generate_request
from tests.support.nemesis import Nemesis
from tests.support.oracle import RequestSpec, expected_choices
from tests.support.rarely import rarely
from tests.support.scenario import MAX_CONTEXT_TOKENS, VOCAB_SIZE, ClusterShape, Fault
from tests.support.simulator import QUIET_AFTER_S, ErrorLog
from tests.support.virtual_time import run_virtual

LASTS_S = 3.0
# Ends of calls under limits, deadlines and routers that stop; any other is a bug.
ENDS = {"OK", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SHAPE = ClusterShape(
    num_prefill=2,
    num_decode=2,
    num_routers=2,
    prefill_pages=60,
    decode_pages=60,
    max_running_sequences=6,
    window_bytes=512,
)


def some_tenants() -> Tenants:
    return tenants(
        rules("fast", requests_per_s=20.0, burst=10),
        rules("busy", tokens_per_minute=20_000, weight=3.0),
        rules("few", max_active_requests=5),
        rules("free"),
    )


def some_spec(rng: random.Random, prefixes: list[tuple[int, ...]]) -> RequestSpec:
    prompt = rng.choice(prefixes) + tuple(
        rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 20))
    )
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.9)),
        seed=rng.randrange(2**32),
        max_tokens=rng.randint(1, 40),
        ignore_eos=rng.choice((True, False)),
        logprobs=rng.choice((None, None, 2)),
    )
    return RequestSpec(name="", prompt=prompt, params=params, n=rng.choice((1, 1, 1, 3)))


def in_messages(columns: Any) -> Iterator[inference_pb2.CallResult]:
    """Return what columns of tokens stand for."""
    rows = zip(columns.call_ids, columns.token_ids, columns.indices, columns.texts, strict=True)
    for call_id, token_id, index, text in rows:
        response = inference_pb2.GenerateResponse(
            text=text, token_ids=pack_token_ids([token_id]), first_index=index
        )
        yield inference_pb2.CallResult(call_id=call_id, response=response)


class Stream:
    """A GenerateMany stream of a caller who may do anything; checks the tokens that arrive."""

    def __init__(self, rng: random.Random, stub: Any, token: str) -> None:
        self._rng = rng
        metadata = token_metadata(token) + ((READS_TOKENS_KEY, "1"),) * rng.choice((0, 1, 1))
        self._call = stub.GenerateMany(metadata=metadata, timeout=100.0)
        self._specs: dict[int, RequestSpec] = {}
        self._received: dict[tuple[int, int], list[int]] = defaultdict(list)  # (call id, choice)
        self._running: set[int] = set()
        self.violations: list[str] = []
        self.num_ended = 0

    async def run(self, specs: list[RequestSpec]) -> None:
        reading = asyncio.create_task(self._read())
        try:
            await self._write(specs)
            if self._rng.random() < 0.8:
                await self._call.done_writing()
                await asyncio.wait({reading}, timeout=self._rng.choice((0.2, 200.0, 200.0)))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the router ended the stream
        finally:
            self._call.cancel()
            reading.cancel()
            await asyncio.wait({reading})

    async def _write(self, specs: list[RequestSpec]) -> None:
        rng, call_id = self._rng, 0
        while specs:
            messages = []
            for _ in range(rng.choice((1, 1, 8))):
                if not specs:
                    break
                if self._specs and rng.random() < 0.15:
                    number = rng.choice(list(self._specs))
                    messages.append(inference_pb2.GenerateManyRequest(call_id=number))
                    continue
                spec = specs.pop()
                call_id += 1
                start = generate_request(spec)
                if rng.random() < 0.1:
                    start.model = "another"
                messages.append(
                    inference_pb2.GenerateManyRequest(
                        call_id=call_id,
                        start=start,
                        timeout_ms=rng.choice((0, 0, 0, 20, 300)),
                        interval_ms=rng.choice((0, 0, 50)),
                    )
                )
                self._specs[call_id] = spec
                self._running.add(call_id)
            if rng.random() < 0.01 and messages[0].HasField(
                "start"
            ):  # twice, which ends the stream
                messages.insert(1, messages[0])
            message = messages[0]
            message.more.extend(messages[1:])
            await self._call.write(message)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.uniform(0.0, 0.3))

    async def _read(self) -> None:
        stops_after = self._rng.choice((10**6, 10**6, 10**6, 10**6, 0, 5))
        try:
            for _ in range(stops_after):
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    if self._running and await self._call.code() is grpc.StatusCode.OK:
                        self.violations.append(f"calls {self._running} have no end")
                    return
                for each in (*in_messages(message.tokens), *message.results):
                    self._take(each)
            await asyncio.Event().wait()  # reads no more
        except grpc.aio.AioRpcError as error:
            if error.code().name not in ENDS | {"INVALID_ARGUMENT"}:
                self.violations.append(f"the stream ended {error.code().name}: {error.details()}")

    def _take(self, result: Any) -> None:
        number = result.call_id
        if number not in self._running:
            self.violations.append(f"something follows the end of call {number}")
            return
        if result.error_status:
            self._running.discard(number)
            status = status_pb2.Status.FromString(result.error_status)
            code = next(each.name for each in grpc.StatusCode if each.value[0] == status.code)
            if code not in ENDS | {"NOT_FOUND"}:
                self.violations.append(f"call {number} ended {code}: {status.message}")
            return
        response, spec = result.response, self._specs[number]
        tokens = self._received[number, response.choice]
        if response.first_index != len(tokens):
            self.violations.append(f"call {number}: {response.first_index} after {len(tokens)}")
        tokens += unpack_token_ids(response.token_ids)
        expected = expected_choices(spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS)
        right = expected[response.choice].tokens
        if tuple(tokens) != right[: len(tokens)]:
            self.violations.append(f"call {number} has a wrong token")
        if response.HasField("usage"):
            self._running.discard(number)
            self.num_ended += 1
            if any(self._received[number, i] != list(expected[i].tokens) for i in range(spec.n)):
                self.violations.append(f"call {number} ended too early")


class Run:
    """One run; `violations` is empty after one without faults."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"conservation/{seed}")
        self.tenants = some_tenants()
        self.cluster = FakeCluster(shape=SHAPE, seed=seed, tenants=self.tenants)
        self.violations: list[str] = []
        self.num_ended = 0
        prefixes = [
            tuple(self.rng.randrange(1, VOCAB_SIZE) for _ in range(self.rng.randint(0, 30)))
            for _ in range(4)
        ]
        self._specs = [some_spec(self.rng, prefixes) for _ in range(80)]

    async def play(self) -> None:
        await self.cluster.start()
        callers: list[Awaitable[None]] = []
        while self._specs:
            kind = self.rng.choice((self._stream, self._generate, self._resumable))
            callers.append(kind())
        await asyncio.gather(*callers, self._trouble_workers(), self._stop_router())
        await self._client(some_spec(self.rng, [()]), stays=True)  # all others may have left
        await asyncio.sleep(35.0)  # clients that read nothing are cancelled
        await self.cluster.wait_quiescent(QUIET_AFTER_S)
        await self.cluster.check_at_rest()
        self.violations += tenant_leaks(self.tenants)
        self.violations += await self.cluster.stop()

    async def _begin(self) -> tuple[Any, str]:
        await asyncio.sleep(self.rng.uniform(0.0, LASTS_S))
        channel = self.cluster.network.channel(f"router-{self.rng.randrange(2)}:1")
        token = self.rng.choice(("fast", "busy", "few", "free", "free"))
        return inference_pb2_grpc.InferenceServiceStub(channel), token

    def _take_specs(self, most: int) -> list[RequestSpec]:
        return [self._specs.pop() for _ in range(min(most, len(self._specs)))]

    async def _many(self, specs: list[RequestSpec]) -> None:
        stub, token = await self._begin()
        stream = Stream(self.rng, stub, token)
        await stream.run(specs)
        self.violations += stream.violations
        self.num_ended += stream.num_ended

    def _stream(self) -> Awaitable[None]:
        return self._many(self._take_specs(self.rng.randint(1, 30)))

    def _generate(self) -> Awaitable[None]:
        return self._one(*self._take_specs(1))

    async def _one(self, spec: RequestSpec) -> None:
        """Call Generate; read all, some or nothing of the answer; perhaps leave."""
        stub, token = await self._begin()
        timeout_s = self.rng.choice((60.0, 60.0, 0.2))
        call = stub.Generate(
            generate_request(spec), timeout=timeout_s, metadata=token_metadata(token)
        )
        if self.rng.random() < 0.3:
            asyncio.get_running_loop().call_later(self.rng.uniform(0.0, 0.5), call.cancel)
        try:
            for _ in range(self.rng.choice((0, 3, 10**6))):
                if await call.read() is grpc.aio.EOF:
                    self.num_ended += 1
                    return
            await asyncio.sleep(self.rng.choice((0.5, 40.0)))
            call.cancel()
        except grpc.aio.AioRpcError as error:
            if error.code().name not in ENDS:
                self.violations.append(f"Generate ended {error.code().name}: {error.details()}")
        except asyncio.CancelledError:
            if not call.cancelled():
                raise

    def _resumable(self) -> Awaitable[None]:
        return self._client(*self._take_specs(1))

    async def _client(self, spec: RequestSpec, *, stays: bool = False) -> None:
        """Go on at the other router if one stops; perhaps leave."""
        await self._begin()
        names = self.rng.sample(("router-0:1", "router-1:1"), 2)
        channel_factory = self.cluster.network.channel
        async with AsyncClient(names, token="free", channel_factory=channel_factory) as client:
            asking = asyncio.create_task(complete(client, spec))
            patience_s = 300.0 if stays else self.rng.choice((300.0, 300.0, 0.3))
            await asyncio.wait({asking}, timeout=patience_s)
            asking.cancel()
            await asyncio.wait({asking})
        if not asking.cancelled():
            try:
                answer = asking.result()
            except PagewireError as error:
                if error.code not in ENDS:
                    self.violations.append(f"a client's call ended {error}")
            else:
                expected = expected_choices(
                    spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS
                )
                if [each.token_ids for each in answer.choices] != [e.tokens for e in expected]:
                    self.violations.append("a client's answer is wrong")
                self.num_ended += 1

    async def _trouble_workers(self) -> None:
        nemesis = Nemesis(self.cluster)
        faults = ("kill_prefill", "kill_decode", "lose_decode", "pause_decode", "slow_down")
        for _ in range(4):
            await asyncio.sleep(self.rng.uniform(0.0, 0.8))
            worker_id = self.rng.choice(WORKERS)
            if self.rng.random() < 0.4:
                await self.cluster.drain(worker_id, self.rng.choice((0.0, 0.3, 5.0)))
                await self.cluster.start_worker(worker_id)
                continue
            fault = Fault(
                at=0.0, kind="", targets=(worker_id,), lasts_s=self.rng.choice((0.1, 1.0))
            )
            await getattr(nemesis, self.rng.choice(faults))(fault)

    async def _stop_router(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.2, 0.5 * LASTS_S))
        name = self.rng.choice(("router-0", "router-1"))
        stopping = self.cluster.routers[name]
        del self.cluster.routers[name]  # it hears of no further worker
        await stopping.process.spawn(stopping.router.stop(self.rng.choice((0.0, 0.5, 20.0))))
        await stopping.process.spawn(stopping.server.stop(0.0))
        await asyncio.sleep(0.1)
        if held := router_leaks(stopping.router):
            self.violations.append(f"{name} has stopped and holds {held}")
        await self.cluster.start_router(name)


def violations(seed: int) -> list[str]:
    """Return what went wrong in a run."""
    run = Run(seed)
    with ErrorLog() as errors:
        try:
            run_virtual(run.play(), limit_s=2000.0)
        except Exception as error:
            run.violations.append(f"the run broke: {type(error).__name__}: {error}")
    if not run.num_ended:
        run.violations.append("no call came to its end")
    return run.violations + errors.messages


@pytest.mark.parametrize(
    "seed",
    [
        *(
            pytest.param(seed, marks=pytest.mark.thorough if seed >= 1 else ())
            for seed in range(30)
        ),
        5138,  # all callers but the last one leave early
    ],
)
def test_nothing_is_held_for_calls_that_are_over(seed: int) -> None:
    assert violations(seed) == []


def stopped_stream_stays_at_its_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_stop", lambda self, stream, error: stream.end(error))


def turn_of_a_caller_that_left_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "remove", lambda self, name, waiting: None)


@pytest.mark.parametrize(
    ("plant", "seed", "says"),
    [
        (stopped_stream_stays_at_its_worker, 0, "microseconds of messages"),
        *rarely((turn_of_a_caller_that_left_is_kept, 0, "turns: ")),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_run_finds(
    plant: Callable[[pytest.MonkeyPatch], None],
    seed: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)

    assert any(says in each for each in violations(seed))
