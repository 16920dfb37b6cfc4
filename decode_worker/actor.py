"""Ray actor of a decode worker."""

import secrets
from typing import TYPE_CHECKING

from decode_worker.config import DecodeConfig
from worker.actor import WorkerActor

if TYPE_CHECKING:
    from worker.context import WorkerContext
    from worker.host import Pool


class DecodeActor(WorkerActor[DecodeConfig]):
    """One decode worker."""

    pool = "decode"

    def _make_pool(self, context: "WorkerContext[DecodeConfig]") -> "Pool":
        from decode_worker.worker import DecodeWorker

        return DecodeWorker(
            context,
            connect_channel=self._process.links.connect,
            random_id=lambda: secrets.token_bytes(16),
        )
