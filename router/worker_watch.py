"""Follows a worker over its connection until the worker cannot be used.

A worker's connection shows whether it is alive: gRPC's own threads answer pings, however late its
event loop and thus its heartbeats are. Its progress shows whether it works. Silence alone counts
only when it lasts long.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from observability.logs import fields
from pagewire.protos.call_tasks import is_own_cancellation, mark_seen
from protos.contract import contract_difference
from router import wire
from router.config import RouterConfig
from router.errors import WorkerGone
from router.lost_reason import lost_reason
from router.prefix_index import PrefixIndex
from router.request import ServedModel
from router.worker import Worker
from router.worker_report import WorkerHeartbeat, WorkerInfo

logger = logging.getLogger(__name__)


class WorkerWatch:
    """Keeps a worker's entry up to date; `run` may be called again after it has raised.

    Args:
        worker: The entry.
        config: Deadlines.
        tokenizer_digest: Of the router's own tokenizer.json; empty: it has none.
        index: Updated from the worker's cache.
        adopt_model: Takes the worker's model, or raises WorkerGone if others serve another one.
        on_change: Called when the worker's state has changed.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        config: RouterConfig,
        tokenizer_digest: str,
        index: PrefixIndex,
        adopt_model: Callable[[Worker, ServedModel], None],
        on_change: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._config = config
        self._tokenizer_digest = tokenizer_digest
        self._index = index
        self._adopt_model = adopt_model
        self._on_change = on_change

    async def run(self) -> NoReturn:
        """Connect, and watch until the worker cannot be used.

        Raises:
            WorkerGone: It is another start, does not fit, is stuck, silent or reported broken.
            AioRpcError, OSError: The connection or a call broke.
        """
        worker = self._worker
        own = self._config.contract_version
        self._refuse(contract_difference(worker.member.contract_version, own))
        info = await wire.get_info(worker.channel, self._config.connect_timeout_s)
        if info.incarnation != worker.member.incarnation:
            raise WorkerGone(
                f"{worker.member.address} is another incarnation,"
                f" {info.incarnation:016x} instead of {worker.member.incarnation:016x}"
            )
        if info.pool != worker.member.pool:
            raise WorkerGone(f"is in pool {info.pool}, was announced as {worker.member.pool}")
        self._refuse(contract_difference(info.contract_version, own))
        self._refuse(self._other_tokenizer(info.tokenizer_digest))
        self._refuse(info.model.fault())
        self._adopt_model(worker, info.model)
        worker.device = info.device
        worker.receive_s_per_token = self._receive_s_per_token(info)
        if self._is_stuck():
            await self._wait_for_step()
        worker.state = "CONNECTING"
        events = asyncio.create_task(
            self._follow_cache(), name=f"cache-events-{worker.member.worker_id}"
        )
        call = wire.watch(worker.channel)
        try:
            await self._watch(call)
        finally:
            call.cancel()
            events.cancel()
            await asyncio.wait([events], timeout=self._config.connect_timeout_s)

    def _refuse(self, difference: str) -> None:
        """Raise WorkerGone for a worker that differs; empty: it does not."""
        if difference:
            self._worker.misfit = difference
            raise WorkerGone(difference)

    def _other_tokenizer(self, digest: str) -> str:
        """Say that a worker's tokens would be other words here; empty: not as far as it tells."""
        is_other = digest and self._tokenizer_digest and digest != self._tokenizer_digest
        return "another tokenizer.json than this router's" if is_other else ""

    def _receive_s_per_token(self, info: WorkerInfo) -> float:
        config = self._config
        rates = {
            "nccl": config.gpu_bytes_per_s,
            "cuda_ipc": config.gpu_bytes_per_s,
            "tcp": config.tcp_bytes_per_s,
        }
        rate = rates.get(info.transports[0]) if info.transports else None
        return info.page_bytes / info.model.page_size / rate if rate else 0.0

    async def _wait_for_step(self) -> None:
        """Return when the step of a stuck worker has ended: it steps on, or nothing runs there."""
        worker = self._worker
        call = wire.watch(worker.channel)
        worker.is_hanging = True
        self._on_change()
        try:
            while self._is_stuck():
                worker.lost_because = _stalled(worker)
                await self._hear(call)
        finally:
            worker.is_hanging = False
            call.cancel()

    async def _watch(self, call: Any) -> NoReturn:
        worker = self._worker
        while True:
            beat = await self._hear(call)
            if self._is_stuck():
                raise WorkerGone(_stalled(worker))
            worker.take_heartbeat(beat, asyncio.get_running_loop().time())
            is_draining = beat.is_draining or worker.is_leaving
            state = "DRAINING" if is_draining else "READY"
            if worker.state != state:
                worker.state, worker.lost_because = state, ""
                self._on_change()

    def _is_stuck(self) -> bool:
        return self._worker.stalled_s > self._config.stuck_after_s

    async def _hear(self, call: Any) -> WorkerHeartbeat:
        """Return the next heartbeat, or raise when the worker is gone."""
        worker = self._worker
        message = await self._next_heartbeat(call)
        if message is grpc.aio.EOF:
            raise WorkerGone("it ended the heartbeat stream")
        beat = wire.heartbeat(message)
        if beat.incarnation != worker.member.incarnation:
            raise WorkerGone("a heartbeat came from another incarnation")
        worker.note_progress(beat, asyncio.get_running_loop().time())
        return beat

    async def _next_heartbeat(self, call: Any) -> Any:
        """Return the next message of the stream, or raise when the worker is silent or broken."""
        worker = self._worker
        read = asyncio.ensure_future(call.read())
        broken = asyncio.ensure_future(worker.broken.wait())
        try:
            # In two parts: if this loop itself was busy for the whole time, the heartbeats that
            # arrived meanwhile are taken in during the second.
            for part_s in (0.9 * self._config.dead_after_s, 0.1 * self._config.dead_after_s):
                await asyncio.wait(
                    {read, broken}, timeout=part_s, return_when=asyncio.FIRST_COMPLETED
                )
                if worker.broken.is_set():  # though a heartbeat has come in the same moment
                    raise WorkerGone("a session with it broke")
                if read.done():
                    return read.result()
            raise WorkerGone(f"silent for {self._config.dead_after_s} s")
        finally:
            for task in (read, broken):
                task.cancel()
                task.add_done_callback(mark_seen)

    async def _follow_cache(self) -> None:
        """Feed the index; a broken stream or a gap starts the subscription again."""
        worker = self._worker
        worker_id = worker.member.worker_id
        while True:
            try:
                position = self._index.position(worker_id)
                async with aclosing(wire.cache_batches(worker.channel, position)) as batches:
                    async for batch in batches:
                        if worker.state == "DEAD":  # this task is about to be cancelled
                            return
                        if batch.incarnation != worker.member.incarnation:
                            break
                        if not self._index.apply(worker_id, batch):
                            self._index.forget(worker_id)
                            break
            except Exception as error:
                logger.warning(
                    "cache_events_broken",
                    extra=fields(worker_id=worker_id, reason=lost_reason(error)),
                )
                # Whatever the error, a snapshot repairs it.
                self._index.forget(worker_id)
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
            await asyncio.sleep(self._config.reconnect_delay_s)


def _stalled(worker: Worker) -> str:
    return f"no engine step for {worker.stalled_s:.1f} s with work to do"
