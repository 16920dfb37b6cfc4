"""Runs a worker of either pool: services, step loop, heartbeats, health, drain, failure.

The pool supplies its scheduler and its own service:
1. register   the services and health are added to a server
2. start      the step loop runs
3. stop       new work is refused, running work gets some time, then everything ends

When the engine no longer computes, or a bug breaks the step loop or a background task, everything
ends at once and `wait_failed` raises the reason: the process must exit, and its successor is a new
incarnation.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2

from kv_cache.errors import OutOfPages
from kv_cache.prefix_cache import PrefixCache
from kv_transfer.transport import close_transports
from llm_engine.sampling import SequenceSlice
from observability.logs import fields
from pagewire.types import WorkerStatus
from worker.cache_feed import CacheFeed
from worker.config import HostConfig
from worker.context import WorkerContext
from worker.errors import Draining, Failing, WorkerError
from worker.load import WorkerLoad, WorkerTotals
from worker.server import WORKER_SERVICE, WorkerServicer, register_worker_services
from worker.step_loop import Scheduler, StepListener, StepLoop
from worker.wire import own_status

logger = logging.getLogger(__name__)

RESIGN_S = 1.0  # for telling all callers that the worker ends


class PoolScheduler(Scheduler[Any, Any, Any], Protocol):
    """A pool's scheduler, as the host sees it."""

    @property
    def totals(self) -> WorkerTotals: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...

    def free_ended(self) -> None:
        """Free the pages of ended work; only between steps."""
        ...


class Pool(StepListener[Any, Any, Any], Protocol):
    """The differences between the pools."""

    @property
    def name(self) -> str:
        """Return "prefill" or "decode"."""
        ...

    @property
    def service(self) -> str:
        """Return the full name of the pool's own gRPC service."""
        ...

    @property
    def max_choices(self) -> int:
        """Return the most choices of one request; 0 where there is no limit."""
        ...

    @property
    def scheduler(self) -> PoolScheduler: ...

    def register(self, server: grpc.aio.Server) -> None:
        """Add the pool's own service to a server."""
        ...

    async def wait_idle(self) -> None:
        """Return when no request is being served."""
        ...

    def end_all(self, error: WorkerError) -> None:
        """End all requests, and tell the callers the reason."""
        ...

    async def wait_told(self) -> None:
        """After end_all: return when all callers have been told."""
        ...

    async def close(self) -> None:
        """Close sessions and connections, when no background task is left."""
        ...


class WorkerHost:
    """One worker. Everything runs in the event loop that called `start`.

    Args:
        context: State that it shares with the pool.
        pool: Its scheduler and service.
    """

    def __init__(self, context: WorkerContext[HostConfig], pool: Pool) -> None:
        self.cache = context.cache
        self._services = (pool.service, WORKER_SERVICE)  # of which health tells
        self._context = context
        self._pool = pool
        self._scheduler = pool.scheduler
        self._feed = CacheFeed(context.cache, context.identity.incarnation)
        self._health = health.aio.HealthServicer()
        self._loop: StepLoop[Any, Any, Any] = StepLoop(
            scheduler=pool.scheduler,
            listener=pool,
            executor=context.executor,
            eos_token_ids=context.model.eos_token_ids,
            before_step=self._feed.publish,
            wake=context.wake,
            make_probe=partial(probing, context.cache),
            max_failed_passes=context.config.max_failed_passes,
        )
        self._servicer = WorkerServicer(context, pool, self._feed, self._load)
        self._running: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Add the pool's service, WorkerService and the health service to a server."""
        self._pool.register(server)
        register_worker_services(server, self._servicer, self._health)

    def status(self) -> WorkerStatus:
        """Return the figures that the next heartbeat would have."""
        return own_status(self._servicer.heartbeat())

    async def start(self) -> None:
        """Begin to step; returns at once."""
        for service in self._services:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._running = asyncio.get_running_loop().create_task(self._run(), name="worker")

    async def wait_failed(self) -> None:
        """Raise the error that broke the worker, once all callers know: the process must exit then.

        Returns after an orderly stop.
        """
        assert self._running is not None, "start comes first"
        await asyncio.wait({self._running})
        if not self._running.cancelled():
            self._running.result()

    async def stop(self, grace_s: float) -> None:
        """Refuse new work, give running work `grace_s` seconds, then end everything."""
        self._context.is_draining = True
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(grace_s):
                await self._pool.wait_idle()
        except TimeoutError:
            await self._send_away(Draining("the worker stops"))
        if self._running is not None:
            if not self._running.cancelling():  # twice, it would not wait for its parts
                self._running.cancel()
            await asyncio.wait({self._running})
        await self._context.tasks.wait()
        await self._pool.close()
        abort_s = self._context.config.transfer_deadlines.abort_s
        await close_transports(self._context.transports, abort_s)
        self._scheduler.free_ended()
        self._feed.publish()

    async def _run(self) -> None:
        """Step; if that or a background task breaks, turn all callers away and raise the error."""
        loop = asyncio.get_running_loop()
        parts = {
            loop.create_task(self._loop.run(), name="steps"),
            loop.create_task(self._context.tasks.wait_crashed(), name="watch-tasks"),
        }
        try:
            broken, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in parts:
                task.cancel()
            await asyncio.wait(parts)
        error = next(iter(broken)).exception()
        assert error is not None, "neither returns"
        logger.critical(
            "worker_broken",
            extra=fields(worker_id=self._context.identity.worker_id, error=repr(error)),
        )
        await self._resign()
        raise error

    async def _resign(self) -> None:
        """Refuse new work, and turn all callers away."""
        self._context.is_draining = self._context.is_failing = True
        await self._health.enter_graceful_shutdown()
        await self._send_away(Failing("this worker fails"))

    async def _send_away(self, error: WorkerError) -> None:
        """End running work and make sure its callers know, so that they go on elsewhere at once."""
        self._pool.end_all(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(RESIGN_S):
                await self._pool.wait_told()

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            steps=self._loop.num_steps,
            steps_ahead=self._loop.num_steps_ahead,
            steps_alone=self._loop.num_steps_alone,
            reads=self._loop.reads,
            num_over_quota=self.cache.num_over_quota,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            gpu_memory=self._context.executor.engine.gpu_memory,
            is_draining=self._context.is_draining,
            is_stepping=self._loop.is_stepping,
        )


@contextmanager
def probing(cache: PrefixCache) -> Iterator[SequenceSlice | None]:
    """Make a pass of one token on a page of its own, held while entered; None if none is free."""
    try:
        pages = cache.reserve([0], incoming=False)
    except OutOfPages:
        yield None
        return
    try:
        yield SequenceSlice(token_ids=[0], start=0, page_ids=pages.page_ids, num_prompt_tokens=1)
    finally:
        cache.release(pages)
