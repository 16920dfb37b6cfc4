"""WorkerService: the service that workers of both pools offer to routers, beside their own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from kv_cache.event_log import EventBatch
from kv_cache.layout import KVLayout
from kv_cache.page_pool import PagePool
from pagewire.protos import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from worker.cache_feed import CacheFeed
from worker.errors import (
    Draining,
    EngineFailed,
    InternalError,
    OtherContract,
    Overloaded,
    PassFailed,
    StaleIncarnation,
    TimedOut,
    WorkerError,
)
from worker.identity import ModelInfo, WorkerIdentity
from worker.load import WorkerLoad, WorkerTotals
from worker.wire import heartbeat_to_proto, worker_to_proto

WORKER_SERVICE = "pagewire.v1.WorkerService"
# Each pool adds its own errors.
STATUS_CODES: dict[type[WorkerError], grpc.StatusCode] = {
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    TimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    PassFailed: grpc.StatusCode.ABORTED,
    EngineFailed: grpc.StatusCode.INTERNAL,
    InternalError: grpc.StatusCode.INTERNAL,
    StaleIncarnation: grpc.StatusCode.FAILED_PRECONDITION,
    OtherContract: grpc.StatusCode.FAILED_PRECONDITION,
}
Message = TypeVar("Message", worker_pb2.PrefillRequest, worker_pb2.SessionRequest)
POOLS = {"prefill": common_pb2.POOL_PREFILL, "decode": common_pb2.POOL_DECODE}


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Describes the worker, beats, and publishes its cache events.

    Args:
        pool: "prefill" or "decode".
        transports: Names, best first.
        load: Returns the current load.
        totals: Counters, read at each heartbeat.
        max_choices: The most choices of one request; 0 on prefill workers, which have no limit.
    """

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        pool: str,
        model: ModelInfo,
        layout: KVLayout,
        transports: Sequence[str],
        pages: PagePool,
        feed: CacheFeed,
        load: Callable[[], WorkerLoad],
        totals: WorkerTotals,
        heartbeat_s: float,
        max_choices: int = 0,
    ) -> None:
        self._identity = identity
        self._pool = POOLS[pool]
        self._model = model
        self._layout = layout
        self._transports = transports
        self._pages = pages
        self._feed = feed
        self._load = load
        self._totals = totals
        self._heartbeat_s = heartbeat_s
        self._max_choices = max_choices

    def heartbeat(self) -> inference_pb2.Heartbeat:
        """Return the load and totals of this moment."""
        return heartbeat_to_proto(
            identity=self._identity,
            pool=self._pool,
            load=self._load(),
            pages=self._pages.counts(),
            totals=self._totals,
        )

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(
            worker=worker_to_proto(self._identity),
            pool=self._pool,
            model=inference_pb2.Model(
                name=self._model.name,
                max_context_tokens=self._model.max_context_tokens,
                vocab_size=self._model.vocab_size,
                page_size=self._layout.page_size,
                max_choices=self._max_choices,
            ),
            model_fingerprint=self._model.fingerprint,
            eos_token_ids=self._model.eos_token_ids,
            num_pages=self._pages.num_pages,
            page_bytes=self._layout.page_bytes,
            transports=self._transports,
        )

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        while True:
            yield worker_pb2.WatchResponse(heartbeat=self.heartbeat())
            await asyncio.sleep(self._heartbeat_s)

    async def SubscribeCacheEvents(
        self,
        request: worker_pb2.SubscribeCacheEventsRequest,
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[worker_pb2.SubscribeCacheEventsResponse]:
        async for batch in self._feed.follow(request.incarnation, request.after_sequence):
            yield _batch_to_proto(batch)


def register_worker_services(
    server: grpc.aio.Server, servicer: WorkerServicer, checker: health.aio.HealthServicer
) -> None:
    """Add WorkerService and the health service to a server."""
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)


def _batch_to_proto(batch: EventBatch) -> worker_pb2.SubscribeCacheEventsResponse:
    return worker_pb2.SubscribeCacheEventsResponse(
        incarnation=batch.incarnation,
        sequence=batch.sequence,
        snapshot=batch.is_snapshot,
        stored=b"".join(batch.stored),
        removed=b"".join(batch.removed),
    )


async def first_message(
    requests: AsyncIterator[Message], kind: str, timeout_s: float
) -> Message | None:
    """Return the first message of a call; None if it is not of this kind, or does not come.

    Raises:
        TimedOut: Nothing has come in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            first = await anext(requests, None)
    except TimeoutError:
        raise TimedOut(f"no {kind} within {timeout_s:g} s") from None
    return first if first is not None and first.WhichOneof("message") == kind else None
