"""Ray actor of a decode worker."""

import secrets

from decode_worker.config import DecodeConfig
from decode_worker.server import SERVICES
from kv_transfer.transport import open_transports
from llm_engine.actor import WorkerActor
from llm_engine.engine_api import EngineExecutor
from llm_engine.worker_identity import ModelInfo, WorkerIdentity
from llm_engine.worker_process import ServedWorker, connect_channel


class DecodeActor(WorkerActor[DecodeConfig]):
    """One decode worker."""

    pool = "decode"
    services = SERVICES

    def _build(
        self, identity: WorkerIdentity, model: ModelInfo, executor: EngineExecutor
    ) -> ServedWorker:
        from decode_worker.worker import DecodeWorker

        return DecodeWorker(
            config=self._config,
            identity=identity,
            model=model,
            executor=executor,
            transports=open_transports(
                executor.engine.storage, self._settings.device, self._settings.host
            ),
            connect_channel=connect_channel,
            random_id=lambda: secrets.token_bytes(16),
        )
