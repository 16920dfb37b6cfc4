"""Workers with a fake model over real gRPC, TCP and engine threads, in one event loop."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from credentials.gate import ServerGate
from decode_worker.config import DecodeConfig
from kv_transfer.proven_sockets import ProvenSockets
from kv_transfer.tcp import TcpTransport
from prefill_worker.config import PrefillConfig
from protos.rpc_server import rpc_server
from tests.support.cluster_keys import credentials_of, role_of
from tests.support.fake_engine import FakeEngine, FakeModel
from tests.support.worker_hosts import host_of
from worker.context import WorkerContext
from worker.executor import ThreadExecutor
from worker.identity import ModelInfo, WorkerIdentity


class FakeWorkers:
    """Workers on this host; their names begin with their pool's.

    Args:
        model: That they serve.
        page_size: The size of its pages.
        make_engine: Makes the engine of each.
        text_folder: The folder of the model's tokenizer, for constraints.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        page_size: int,
        make_engine: Callable[..., FakeEngine] = FakeEngine,
        text_folder: Path | None = None,
    ) -> None:
        self.model = model
        self.page_size = page_size
        self.make_engine = make_engine
        self.text_folder = text_folder
        self.servers: list[grpc.aio.Server] = []
        self.workers: dict[str, Any] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.identities: dict[str, WorkerIdentity] = {}
        self._transports: list[TcpTransport] = []
        self._executors: list[ThreadExecutor] = []

    async def start(self, worker_id: str) -> None:
        incarnation = random.Random(worker_id).randrange(1, 2**63)
        credentials = credentials_of(role_of(worker_id), worker_id, incarnation)
        server = rpc_server(interceptors=[ServerGate(credentials)], options=())
        port = server.add_insecure_port("127.0.0.1:0")
        identity = WorkerIdentity(
            worker_id=worker_id, incarnation=incarnation, address=f"127.0.0.1:{port}"
        )
        engine = self.engines[worker_id] = self.make_engine(
            self.model, num_pages=256, page_size=self.page_size
        )
        executor = ThreadExecutor(engine, max_call_s=60.0)
        transport = TcpTransport(executor.engine.storage, ProvenSockets(host="127.0.0.1"))
        model = ModelInfo(
            name=self.model.name,
            fingerprint=self.model.fingerprint,
            vocab_size=self.model.vocab_size,
            max_context_tokens=512,
            eos_token_ids=self.model.eos_token_ids,
            text_folder=self.text_folder,
        )
        is_prefill = role_of(worker_id) == "prefill"
        config: Any = DecodeConfig(local_prefill_max_tokens=0)
        if is_prefill:
            config = PrefillConfig(max_step_tokens=32, chunk_pages=2, max_chunk_pages=2)
        context = WorkerContext(
            config=config,
            identity=identity,
            model=model,
            executor=executor,
            credentials=credentials,
            transports=[transport],
        )
        worker = host_of(context, rng=random.Random(1), connect_channel=grpc.aio.insecure_channel)
        worker.register(server)
        await server.start()
        await worker.start()
        self.servers.append(server)
        self.workers[worker_id] = worker
        self.identities[worker_id] = identity
        self._transports.append(transport)
        self._executors.append(executor)

    def candidates(self) -> list[WorkerIdentity]:
        return [self.identities["prefill"]]

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.stop(1.0)
        for server in self.servers:
            await server.stop(1.0)
        for transport in self._transports:
            # Stopping a worker closed its port and left no connection.
            listener = transport._sockets._listener
            assert listener is None or listener.fileno() == -1
            assert all(each.is_broken for each in transport._connections._made)
        for executor in self._executors:
            executor.close()
