"""A worker that does what a test says, and a router in front of it, on the in-memory network."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pagewire.protos import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from pagewire.routers import token_metadata
from protos.contract import CONTRACT_VERSION
from router.config import RouterConfig
from router.membership import WorkerMember, WorkerRole
from router.off_loop import RunBlocking
from router.router import Router
from router.tenants.gate import TenantGate
from router.tenants.registry import Tenants
from tests.support.inline_renderer import InlineRenderer
from tests.support.memory_grpc import MemoryNetwork
from tests.support.virtual_time import run_inline, seeded, wait_until

PAGE_SIZE = 4
VOCAB_SIZE = 400
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
EOS = 2


def token_at(choice: int, index: int) -> int:
    """What every honest worker draws, whatever happened before."""
    return 100 + (7 * index + 31 * choice) % 150


def tokens(choice: int, count: int) -> list[int]:
    return [token_at(choice, index) for index in range(count)]


def delta(
    submit: worker_pb2.SubmitRequest, choice: int, first: int, count: int = 1, **fields: Any
) -> worker_pb2.TokenDelta:
    """A delta with tokens [first, first + count) of a choice; finishes it at max_tokens."""
    fields.setdefault("attempt", submit.attempt)
    fields.setdefault(
        "token_ids", pack_token_ids([token_at(choice, i) for i in range(first, first + count)])
    )
    if first + count >= submit.sampling.max_tokens:
        fields.setdefault("finish_reason", LENGTH)
    return worker_pb2.TokenDelta(
        request_id=submit.request_id, choice=choice, first_index=first, **fields
    )


class Session:
    """The worker's end of one session."""

    def __init__(self, worker: "ScriptedWorker") -> None:
        self.worker = worker
        self.outbox: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue()
        self.cancelled: set[str] = set()
        self.first_streams: dict[tuple[str, int], int] = {}  # (request id, attempt) |-> its number
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, *deltas: worker_pb2.TokenDelta) -> None:
        """Send tokens, those with nothing else to tell in columns."""
        response = worker_pb2.SessionResponse()
        for each in deltas:
            token_ids = unpack_token_ids(each.token_ids)
            number = self.first_streams.get((each.request_id, each.attempt))
            has_more = each.finish_reason or each.logprobs or each.HasField("stats")
            if len(token_ids) == 1 and number is not None and not has_more:
                response.tokens.streams.append(number + each.choice)
                response.tokens.token_ids.append(token_ids[0])
                response.tokens.indices.append(each.first_index)
            else:
                response.deltas.append(each)
        self.outbox.put_nowait(response)

    def fail(
        self,
        submit: worker_pb2.SubmitRequest,
        code: grpc.StatusCode,
        message: str = "no",
        failed_passes: int = 0,
        is_leaving: bool = False,
    ) -> None:
        failure = worker_pb2.RequestFailure(
            request_id=submit.request_id,
            attempt=submit.attempt,
            code=code.value[0],
            message=message,
            failed_passes=failed_passes,
            leaving=is_leaving,
        )
        self.outbox.put_nowait(worker_pb2.SessionResponse(failures=[failure]))

    def end(self) -> None:
        self.outbox.put_nowait(None)


Serve = Callable[[Session, worker_pb2.SubmitRequest], Awaitable[None]]


async def honest(session: Session, submit: worker_pb2.SubmitRequest) -> None:
    """Send one token per choice and step until the end or a cancellation."""
    positions = {c.choice: len(unpack_token_ids(c.emitted_token_ids)) for c in submit.choices}
    stats = common_pb2.RequestStats(pages_moved=3, bytes_moved=300)
    is_first = True
    while positions:
        await asyncio.sleep(session.worker.token_s)
        if submit.request_id in session.cancelled:
            return
        deltas = [delta(submit, choice, first) for choice, first in positions.items()]
        positions = {c: p + 1 for c, p in positions.items() if p + 1 < submit.sampling.max_tokens}
        if is_first or not positions:
            deltas[-1].stats.CopyFrom(stats)
        is_first = False
        session.send(*deltas)
        session.worker.steps += 1


@dataclass(slots=True, eq=False)
class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer, worker_pb2_grpc.DecodeServiceServicer):
    """One incarnation of a worker."""

    worker_id: str
    incarnation: int = 1
    pool: WorkerRole = "decode"
    token_s: float = 0.01
    serve: Serve = honest
    fingerprint: str = "f"
    contract_version: int = CONTRACT_VERSION
    max_context_tokens: int = 512
    vocab_size: int = VOCAB_SIZE
    page_size: int = PAGE_SIZE
    eos_token_ids: Sequence[int] = (EOS,)
    max_choices: int = 64
    device: str = "cpu"
    tokenizer_digest: str = ""
    heartbeat: dict[str, Any] = field(default_factory=dict)  # fields of the next ones
    is_silent: bool = False
    is_leaving: bool = False  # as the membership says
    steps: int = 0
    num_messages: int = 0  # of sessions, but for the first of each
    submits: list[worker_pb2.SubmitRequest] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # of whole requests
    choice_cancels: list[tuple[str, int]] = field(default_factory=list)
    cache_batches: list[worker_pb2.SubscribeCacheEventsResponse] = field(default_factory=list)
    subscriptions: list[worker_pb2.SubscribeCacheEventsRequest] = field(default_factory=list)
    met: list[list[str]] = field(default_factory=list)  # prefill workers, each time they were told
    is_shy: bool = False  # refuses to meet anybody
    meet_s: float = 0.0  # how long it takes to meet

    @property
    def address(self) -> str:
        return f"{self.worker_id}:{self.incarnation}"

    @property
    def member(self) -> WorkerMember:
        return WorkerMember(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            address=self.address,
            pool=self.pool,
            contract_version=self.contract_version,
            is_draining=self.is_leaving,
        )

    @property
    def ref(self) -> common_pb2.WorkerRef:
        return common_pb2.WorkerRef(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            address=self.address,
            contract_version=self.contract_version,
        )

    async def GetInfo(  # noqa: N802
        self, request: Any, context: Any
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(
            worker=self.ref,
            pool=f"POOL_{self.pool.upper()}",
            model=inference_pb2.Model(
                name="tiny",
                max_context_tokens=self.max_context_tokens,
                vocab_size=self.vocab_size,
                page_size=self.page_size,
                max_choices=self.max_choices if self.pool == "decode" else 0,
            ),
            model_fingerprint=self.fingerprint,
            eos_token_ids=self.eos_token_ids,
            device=self.device,
            tokenizer_digest=self.tokenizer_digest,
        )

    async def Watch(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        while True:
            if not self.is_silent:
                fields = {"steps": self.steps, **self.heartbeat}
                yield worker_pb2.WatchResponse(
                    heartbeat=inference_pb2.Heartbeat(worker=self.ref, **fields)
                )
            await asyncio.sleep(0.5)

    async def SubscribeCacheEvents(  # noqa: N802
        self, request: worker_pb2.SubscribeCacheEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.SubscribeCacheEventsResponse]:
        self.subscriptions.append(request)
        for batch in list(self.cache_batches):
            yield batch
        while True:
            await asyncio.sleep(1.0)

    async def Meet(  # noqa: N802
        self, request: worker_pb2.MeetRequest, context: Any
    ) -> worker_pb2.MeetResponse:
        if self.is_shy:
            await context.abort(grpc.StatusCode.INTERNAL, "a bug")
        await asyncio.sleep(self.meet_s)
        self.met.append([each.address for each in request.prefill_workers])
        return worker_pb2.MeetResponse()

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        hello = await anext(requests)
        assert hello.hello.contract_version == self.contract_version
        if hello.hello.incarnation != self.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stale incarnation")
        session = Session(self)
        reader = asyncio.create_task(self._read(session, requests))
        try:
            while (response := await session.outbox.get()) is not None:
                yield response
        finally:
            for task in (reader, *session.tasks):
                task.cancel()

    async def _read(
        self, session: Session, requests: AsyncIterator[worker_pb2.SessionRequest]
    ) -> None:
        async for first in requests:
            self.num_messages += 1
            for message in (first, *first.more):
                if message.HasField("cancel") and message.cancel.choices:
                    self.choice_cancels += [
                        (message.cancel.request_id, choice) for choice in message.cancel.choices
                    ]
                elif message.HasField("cancel"):
                    self.cancels.append(message.cancel.request_id)
                    session.cancelled.add(message.cancel.request_id)
                else:
                    submit = message.submit
                    self.submits.append(submit)
                    key = submit.request_id, submit.attempt
                    session.first_streams[key] = submit.first_stream
                    session.cancelled.discard(message.submit.request_id)
                    session.tasks.append(
                        asyncio.ensure_future(self.serve(session, message.submit))  # type: ignore[arg-type]
                    )


@dataclass(slots=True)
class Answer:
    """What a client got of one call."""

    messages: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None

    @property
    def usage(self) -> inference_pb2.Usage:
        return self.messages[-1].usage

    def token_ids(self, choice: int = 0) -> list[int]:
        """The tokens of a choice, after checking that their indices are contiguous."""
        received: list[int] = []
        for message in self.messages:
            if message.choice == choice:
                assert message.first_index == len(received), "a gap or a repetition"
                received += unpack_token_ids(message.token_ids)
        return received

    def text(self, choice: int = 0) -> str:
        return "".join(message.text for message in self.messages if message.choice == choice)


class RouterUnderTest:
    """A router with scripted workers."""

    def __init__(
        self,
        config: RouterConfig,
        model_dir: Path | None = None,
        *,
        window_bytes: int = 65536,
        run_blocking: RunBlocking = run_inline,
        tenants: Tenants | None = None,
    ) -> None:
        self.network = MemoryNetwork(window_bytes=window_bytes, ping_s=3.0)
        rng = seeded(0, "router")
        self.router = Router(
            config=config,
            model_dir=model_dir,
            connect_channel=lambda member: self.network.channel(member.address),
            random_id=lambda: rng.randbytes(16).hex(),
            make_renderer=InlineRenderer,
            run_blocking=run_blocking,
            tenants=tenants,
        )
        self.workers: dict[str, ScriptedWorker] = {}
        gates = [TenantGate(tenants)] if tenants else []
        self.server = self.network.server("router:1", gates)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.network.channel("router:1"))

    async def add(self, *workers: ScriptedWorker) -> None:
        """Start workers, instead of older incarnations, and wait until they take requests."""
        for worker in workers:
            await self.serve(worker)
            self.workers[worker.worker_id] = worker
        await self.announce()
        await wait_until(
            lambda: all(self.state(worker.worker_id) == "READY" for worker in workers),
            timeout_s=10,
        )

    async def serve(self, worker: ScriptedWorker) -> None:
        """Start a worker without telling the router."""
        server = self.network.server(worker.address)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)
        await server.start()

    async def announce(self) -> None:
        await self.router.set_workers([worker.member for worker in self.workers.values()])

    def state(self, worker_id: str) -> str:
        return self.router.registry.get(worker_id).state

    async def generate(
        self,
        *,
        max_tokens: int = 10,
        prompt: Sequence[int] = (5, 6, 7),
        timeout_s: float | None = 60.0,
        read_s: float = 0.0,
        request: inference_pb2.GenerateRequest | None = None,
        token: str = "",
        **sampling: Any,
    ) -> Answer:
        """Make one call and read it to its end."""
        request = request or inference_pb2.GenerateRequest(
            token_ids=pack_token_ids(prompt),
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **sampling),
        )
        answer = Answer()
        try:
            metadata = token_metadata(token)
            call = self.stub.Generate(request, timeout=timeout_s, metadata=metadata)
            async for message in call:
                answer.messages.append(message)
                answer.times.append(asyncio.get_running_loop().time())
                if read_s:
                    await asyncio.sleep(read_s)
        except grpc.aio.AioRpcError as error:
            answer.error = error
        return answer

    def check_idle(self) -> None:
        """Assert that no load and no stream is left over (R4)."""
        assert self.router.admission.num_active == 0
        for known in self.router.registry._workers.values():
            assert (known.num_requests, known.queued_tokens) == (0, 0), known.member.worker_id
        for session in self.router.dispatcher._sessions.values():
            assert not session.streams


@asynccontextmanager
async def running_router(
    *workers: ScriptedWorker,
    model_dir: Path | None = None,
    window_bytes: int = 65536,
    run_blocking: RunBlocking = run_inline,
    tenants: Tenants | None = None,
    **config: Any,
) -> AsyncIterator[RouterUnderTest]:
    """A started router; at the end it must be idle, and it stops."""
    tested = RouterUnderTest(
        RouterConfig(**config),
        model_dir,
        window_bytes=window_bytes,
        run_blocking=run_blocking,
        tenants=tenants,
    )
    tested.router.register(tested.server)
    await tested.router.start()
    await tested.server.start()
    await tested.add(*workers)
    yield tested
    tested.check_idle()
    await tested.router.stop(1.0)
