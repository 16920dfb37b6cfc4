"""Ray actor of a decode worker."""

import secrets
from typing import TYPE_CHECKING

from decode_worker.config import DecodeConfig
from worker.actor import WorkerActor

if TYPE_CHECKING:
    from credentials.cluster import ClusterCredentials
    from worker.executor import EngineExecutor
    from worker.host import WorkerHost
    from worker.identity import ModelInfo, WorkerIdentity


class DecodeActor(WorkerActor[DecodeConfig]):
    """One decode worker."""

    pool = "decode"

    def _build(
        self,
        identity: "WorkerIdentity",
        model: "ModelInfo",
        executor: "EngineExecutor",
        credentials: "ClusterCredentials",
    ) -> "WorkerHost":
        from decode_worker.worker import make_decode_worker
        from kv_transfer.transport import open_transports

        return make_decode_worker(
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
            connect_channel=self._process.links.connect,
            random_id=lambda: secrets.token_bytes(16),
        )
