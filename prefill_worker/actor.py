"""Ray actor of a prefill worker."""

from typing import TYPE_CHECKING

from prefill_worker.config import PrefillConfig
from worker.actor import WorkerActor

if TYPE_CHECKING:
    from worker.context import WorkerContext
    from worker.host import Pool


class PrefillActor(WorkerActor[PrefillConfig]):
    """One prefill worker."""

    pool = "prefill"

    def _make_pool(self, context: "WorkerContext[PrefillConfig]") -> "Pool":
        from prefill_worker.worker import PrefillWorker

        return PrefillWorker(context)
