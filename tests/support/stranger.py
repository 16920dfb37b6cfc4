"""An attacker on a cluster's network who lacks its secret, and knows everything else.

It sees the metadata of every call (what an observer of the wire sees), knows the contract, the
names, addresses and incarnations of all workers, the model and the prompts of others. It speaks to
every method of every worker, with forged proofs and with those that it saw, and it can pose as a
prefill worker whose pages are wrong and whose digests are right.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import grpc

from credentials import gate
from credentials.cluster import Callee, ClusterCredentials
from credentials.gate import ANSWER_KEY, CALL_KEY
from credentials.party import Party
from credentials.rules import WORKER_CALLERS
from credentials.secret import ClusterSecret
from pagewire.protos import common_pb2, worker_pb2
from pagewire.protos.token_ids import pack_token_ids
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from protos.contract import CONTRACT_VERSION
from tests.support.cluster_keys import role_of
from tests.support.fake_cluster import DEADLINES, MODEL, FakeCluster, model_info
from tests.support.fake_engine import FakeEngine, FakeModel
from tests.support.loopback import LoopbackTransport
from tests.support.virtual_executor import VirtualExecutor
from tests.support.virtual_time import Process, run_inline, seeded
from worker.context import WorkerContext
from worker.host import WorkerHost
from worker.identity import WorkerIdentity
from worker.wire import worker_to_proto

PATIENCE_S = 1.0  # with one call
OWN_KEY = bytes(32)


class LyingModel(FakeModel):
    """Its pages are wrong, and nothing but their contents shows it."""

    def extend(self, previous: bytes, token_ids: Sequence[int]) -> list[bytes]:
        return [bytes(16) for _ in token_ids]


class OpenGate(grpc.aio.ServerInterceptor):
    """Believes each caller, and answers with what a process without the secret can make."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        header = dict(details.invocation_metadata).get(CALL_KEY, b"")
        name = header[26:-32].decode(errors="replace")
        incarnation = int.from_bytes(header[2:10], "big")
        gate._caller.set(Party(role="decode", name=name, incarnation=incarnation))
        handler = await continuation(details)
        return handler and gate._answering(handler, header[-32:])


class Stranger:
    """Such an attacker. `statuses` counts how its calls ended; "let in" must not be among them."""

    def __init__(self, cluster: FakeCluster, prompts: Sequence[Sequence[int]]) -> None:
        self.statuses: Counter[str] = Counter()
        self._cluster = cluster
        self._prompts = prompts
        self._rng = seeded(cluster.seed, "stranger")
        self._process = Process("stranger")
        self._secret = ClusterSecret(b"not that of the cluster" * 2)
        self._numbers = itertools.count(2**32)  # ahead of all genuine ones
        self._observed: dict[tuple[str, str], bytes] = {}  # (address, method) |-> newest header
        self._liar: WorkerIdentity | None = None
        self._stop: list[Callable[[float], Coroutine[Any, Any, None]]] = []
        with self._process.entered():
            storage = FakeEngine(MODEL, num_pages=64, page_size=cluster.shape.page_size).storage
            self._transport = LoopbackTransport(cluster.pages, storage)
        cluster.network.on_open = self._observe

    async def pose_as(self, identity: WorkerIdentity) -> None:
        """Serve as a prefill worker at an address; its credentials are made up."""
        keys = self._secret.keys_of("prefill", identity.worker_id)
        with self._process.entered():
            server = self._cluster.network.server(identity.address, [OpenGate()])
            engine = FakeEngine(
                LyingModel(vocab_size=MODEL.vocab_size, eos_token_ids=MODEL.eos_token_ids),
                num_pages=256,
                page_size=self._cluster.shape.page_size,
            )
            executor = VirtualExecutor(engine, token_s=0.0001)
            context = WorkerContext(
                config=PrefillConfig(transfer_deadlines=DEADLINES),
                identity=identity,
                model=model_info(),
                executor=executor,
                credentials=ClusterCredentials(keys, identity.incarnation),
                transports=[LoopbackTransport(self._cluster.pages, executor.storage)],
            )
            worker = WorkerHost(context, PrefillWorker(context, run_blocking=run_inline))
            worker.register(server)
        await self._process.spawn(server.start())
        await self._process.spawn(worker.start())
        self._liar = identity
        self._stop = [worker.stop, server.stop]

    async def leave(self) -> None:
        """Stop posing."""
        for each in self._stop:
            await self._process.spawn(each(0.0))

    async def bother(self, until_s: float, period_s: float = 0.1) -> None:
        """Call everything again and again, in the stranger's own process."""
        loop = asyncio.get_running_loop()
        calls: list[asyncio.Task[None]] = []
        while loop.time() < until_s:
            for worker in self._cluster.living_workers():
                for method in self._methods_of(worker.identity):
                    for header in self._headers(worker.identity, method):
                        work = self._call(worker.identity, method, header)
                        calls.append(self._process.spawn(work))
            await asyncio.sleep(period_s)
        if calls:
            await asyncio.wait(calls)
            for call in calls:
                call.result()

    def _observe(self, call: Any) -> None:
        header = dict(call._metadata).get(CALL_KEY)
        if header is not None and call.client_process is not self._process:
            self._observed[call._channel.address, call._method] = header

    def _methods_of(self, worker: WorkerIdentity) -> list[str]:
        other = "DecodeService" if role_of(worker.worker_id) == "prefill" else "PrefillService"
        return [method for method in WORKER_CALLERS if other not in method]

    def _headers(self, worker: WorkerIdentity, method: str) -> Iterator[bytes | None]:
        yield None
        yield self._rng.randbytes(66)
        yield self._forged(worker, method)
        for (address, _), header in self._observed.items():
            if address == worker.address:  # of this method, and of others
                yield header

    def _forged(self, worker: WorkerIdentity, method: str) -> bytes:
        """Claim to be a genuine caller that lives; only the proof is wrong."""
        caller = Party(role="router", name="router-0", incarnation=1)
        if "PrefillService" in method:
            caller = self._cluster.workers["decode-0"].credentials.party
        callee = worker.as_party(role_of(worker.worker_id))
        key = self._secret.keys_of(caller.role, caller.name).calling[callee.role]
        return Callee(callee, caller=caller, key=key, numbers=self._numbers).prove(method)[0]

    async def _call(self, worker: WorkerIdentity, method: str, header: bytes | None) -> None:
        metadata = () if header is None else ((CALL_KEY, header),)
        channel = self._cluster.network.channel(worker.address)
        call = channel.stream_stream(method)(metadata=metadata, timeout=PATIENCE_S)
        try:
            for body in self._bodies(worker, method):
                await call.write(body.SerializeToString())
            if ANSWER_KEY in await call.initial_metadata():
                self.statuses["let in"] += 1
            while await call.read() is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # refused, before or after all was written
        self.statuses[(await call.code()).name] += 1

    def _bodies(self, worker: WorkerIdentity, method: str) -> list[Any]:
        name = method.rpartition("/")[2]
        if name == "Session":
            return self._session(worker)
        if name == "Connect":
            return [self._connect_request(worker)]
        if name == "Prefill":
            return [self._prefill_start(worker)]
        if name == "Meet":
            return [worker_pb2.MeetRequest(prefill_workers=self._liars())]
        kinds = {
            "GetInfo": worker_pb2.GetInfoRequest,
            "Watch": worker_pb2.WatchRequest,
            "SubscribeCacheEvents": worker_pb2.SubscribeCacheEventsRequest,
        }
        return [kinds[name]()]

    def _session(self, worker: WorkerIdentity) -> list[worker_pb2.SessionRequest]:
        hello = worker_pb2.SessionHello(
            router_id="router-0",
            incarnation=worker.incarnation,
            contract_version=CONTRACT_VERSION,
        )
        return [worker_pb2.SessionRequest(hello=hello), *self.submits()]

    def submits(self) -> list[worker_pb2.SessionRequest]:
        """Have prompts of others computed by the liar, for the cache that all share."""
        submits = [
            worker_pb2.SubmitRequest(
                request_id=f"stranger-{self._rng.randrange(2**32)}",
                prompt_token_ids=pack_token_ids(prompt),
                sampling=common_pb2.SamplingParams(max_tokens=4, top_p=1.0, repetition_penalty=1.0),
                choices=[worker_pb2.ChoiceState(choice=0)],
                prefill_candidates=self._liars(),
            )
            for prompt in self._prompts
        ]
        return [worker_pb2.SessionRequest(submit=submit) for submit in submits]

    def _liars(self) -> list[common_pb2.WorkerRef]:
        return [worker_to_proto(self._liar)] if self._liar else []

    def _connect_request(self, worker: WorkerIdentity) -> worker_pb2.ConnectRequest:
        """Connect under a genuine decode worker's name, which would replace its connection."""
        connection_id = self._rng.randbytes(16).hex()
        victim = self._cluster.workers["decode-0"].identity
        return worker_pb2.ConnectRequest(
            receiver=worker_to_proto(victim),
            sender_incarnation=worker.incarnation,
            connection_id=connection_id,
            transport="loopback",
            offer=self._transport.offer(connection_id, OWN_KEY),
            layout=self._cluster.workers["decode-0"].engine.layout.describe(),
        )

    def _prefill_start(self, worker: WorkerIdentity) -> worker_pb2.PrefillRequest:
        victim = self._cluster.workers["decode-0"].identity
        ticket = worker_pb2.TransferTicket(
            transfer_id=self._rng.randbytes(16),
            sender_incarnation=worker.incarnation,
            receiver_incarnation=victim.incarnation,
        )
        start = worker_pb2.PrefillStart(
            ticket=ticket,
            connection_id="unknown",
            token_ids=pack_token_ids(self._prompts[0]),
            prompt_len=len(self._prompts[0]),
            choices=[0],
            contract_version=CONTRACT_VERSION,
        )
        return worker_pb2.PrefillRequest(attempt_id=1, start=start)
