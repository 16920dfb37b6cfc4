"""The worker that belongs to a context: its name says of which pool."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from decode_worker.worker import DecodeWorker
from kv_transfer.driver import RunBlocking
from prefill_worker.worker import PrefillWorker
from tests.support.cluster_keys import role_of
from worker.context import WorkerContext
from worker.host import Pool, WorkerHost


def host_of(
    context: WorkerContext[Any],
    *,
    rng: random.Random,
    connect_channel: Callable[[str], Any],
    run_blocking: RunBlocking = asyncio.to_thread,
) -> WorkerHost:
    pool: Pool
    if role_of(context.identity.worker_id) == "prefill":
        pool = PrefillWorker(context, run_blocking=run_blocking)
    else:
        pool = DecodeWorker(
            context,
            connect_channel=connect_channel,
            random_id=lambda: rng.randbytes(16),
            run_blocking=run_blocking,
        )
    return WorkerHost(context, pool)
