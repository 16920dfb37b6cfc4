"""Ray actor of a prefill worker."""

from kv_transfer.transport import open_transports
from llm_engine.actor import WorkerActor
from llm_engine.engine_api import EngineExecutor
from llm_engine.worker_identity import ModelInfo, WorkerIdentity
from llm_engine.worker_process import ServedWorker
from prefill_worker.config import PrefillConfig
from prefill_worker.server import SERVICES


class PrefillActor(WorkerActor[PrefillConfig]):
    """One prefill worker."""

    pool = "prefill"
    services = SERVICES

    def _build(
        self, identity: WorkerIdentity, model: ModelInfo, executor: EngineExecutor
    ) -> ServedWorker:
        from prefill_worker.worker import PrefillWorker

        return PrefillWorker(
            config=self._config,
            identity=identity,
            model=model,
            executor=executor,
            transports=open_transports(
                executor.engine.storage, self._settings.device, self._settings.host
            ),
        )
