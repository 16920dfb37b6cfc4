"""WorkerService: the service that workers of both pools offer to routers, beside their own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from kv_cache.event_log import EventBatch
from pagewire.protos import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from worker.cache_feed import CacheFeed
from worker.config import HostConfig
from worker.context import WorkerContext
from worker.errors import (
    Draining,
    EngineFailed,
    Failing,
    InternalError,
    OtherContract,
    Overloaded,
    PassFailed,
    StaleIncarnation,
    TimedOut,
    WorkerError,
)
from worker.load import WorkerLoad
from worker.wire import heartbeat_to_proto, worker_to_proto

if TYPE_CHECKING:  # worker.host imports this
    from worker.host import Pool

WORKER_SERVICE = "pagewire.v1.WorkerService"
# Each pool adds its own errors.
STATUS_CODES: dict[type[WorkerError], grpc.StatusCode] = {
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    Failing: grpc.StatusCode.UNAVAILABLE,
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
        context: The worker.
        pool: Its pool.
        feed: Its cache events.
        load: Returns the current load.
    """

    def __init__(
        self,
        context: WorkerContext[HostConfig],
        pool: "Pool",
        feed: CacheFeed,
        load: Callable[[], WorkerLoad],
    ) -> None:
        self._context = context
        self._pool = pool
        self._feed = feed
        self._load = load

    def heartbeat(self) -> inference_pb2.Heartbeat:
        """Return the load and totals of this moment."""
        return heartbeat_to_proto(
            identity=self._context.identity,
            pool=POOLS[self._pool.name],
            load=self._load(),
            pages=self._context.cache.pool.counts(),
            totals=self._pool.scheduler.totals,
        )

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        own, model, layout = self._context, self._context.model, self._context.layout
        return worker_pb2.GetInfoResponse(
            worker=worker_to_proto(own.identity),
            pool=POOLS[self._pool.name],
            model=inference_pb2.Model(
                name=model.name,
                max_context_tokens=model.max_context_tokens,
                vocab_size=model.vocab_size,
                page_size=layout.page_size,
                max_choices=self._pool.max_choices,
            ),
            model_fingerprint=model.fingerprint,
            eos_token_ids=model.eos_token_ids,
            num_pages=own.cache.pool.num_pages,
            page_bytes=layout.page_bytes,
            transports=[transport.name for transport in own.transports],
            device=own.identity.device,
            tokenizer_digest=model.tokenizer_digest,
        )

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        while True:
            yield worker_pb2.WatchResponse(heartbeat=self.heartbeat())
            await asyncio.sleep(self._context.config.heartbeat_s)

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
