"""Ray actor of a prefill worker."""

from typing import TYPE_CHECKING

from prefill_worker.config import PrefillConfig
from worker.actor import WorkerActor

if TYPE_CHECKING:
    from credentials.cluster import ClusterCredentials
    from worker.executor import EngineExecutor
    from worker.host import WorkerHost
    from worker.identity import ModelInfo, WorkerIdentity


class PrefillActor(WorkerActor[PrefillConfig]):
    """One prefill worker."""

    pool = "prefill"

    def _build(
        self,
        identity: "WorkerIdentity",
        model: "ModelInfo",
        executor: "EngineExecutor",
        credentials: "ClusterCredentials",
    ) -> "WorkerHost":
        from kv_transfer.transport import open_transports
        from prefill_worker.worker import make_prefill_worker

        return make_prefill_worker(
            config=self._config,
            identity=identity,
            model=model,
            executor=executor,
            credentials=credentials,
            transports=open_transports(
                executor.engine.storage,
                self._settings.device,
                self._settings.host,
                self._process.links.page_tls,
                self._settings.ports,
                self._settings.page_transport,
            ),
        )
