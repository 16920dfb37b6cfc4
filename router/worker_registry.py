"""The workers that a router knows: who comes, serves, is lost and leaves.

Life of a worker's entry (one per incarnation):
    CONNECTING  announced by the controller; GetInfo and the first heartbeat are awaited
    READY       heartbeats arrive; takes requests
    DRAINING    the membership, its heartbeats or the end of a request say so; finishes what it has
    DEAD        its connection or a session broke, it is stuck or was silent for long, or another
                incarnation replaced it. While it is a member, the registry keeps trying to reach
                it, and it may become READY again; if it was stuck, when that step has ended.

A worker leaves when it is neither announced nor alive. A missing announcement alone is no reason: a
restarted controller knows only the workers that have announced themselves since.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import grpc

from observability.logs import fields
from pagewire.protos.call_tasks import is_own_cancellation
from router.config import RouterConfig
from router.errors import WorkerGone
from router.lost_reason import lost_reason
from router.membership import WorkerMember, WorkerRole
from router.prefix_index import PrefixIndex
from router.request import ServedModel
from router.worker import Worker
from router.worker_report import KnownWorker
from router.worker_watch import WorkerWatch

logger = logging.getLogger(__name__)


class WorkerRegistry:
    """Follows every member with one task; owned by the event loop that calls it."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        tokenizer_digest: str,
        connect_channel: Callable[[WorkerMember], grpc.aio.Channel],
        index: PrefixIndex,
        on_lost: Callable[[Worker, str], None],
    ) -> None:
        """Create an empty registry.

        Args:
            config: Deadlines.
            tokenizer_digest: Of the router's own tokenizer.json; empty: it has none.
            connect_channel: Makes a channel to one start of a worker.
            index: Updated from the caches of living workers.
            on_lost: Called with the reason when a worker that was in use becomes DEAD.
        """
        self._config = config
        self._tokenizer_digest = tokenizer_digest
        self._connect_channel = connect_channel
        self._index = index
        self._on_lost = on_lost
        self._workers: dict[str, Worker] = {}  # worker_id |-> current incarnation
        self._announced: dict[str, WorkerMember] = {}  # worker_id |-> its latest start
        self._departed: dict[tuple[str, int], tuple[Worker, float]] = {}  # |-> (worker, left_at)
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._is_stopped = False
        # With the smallest capacities of any worker, also of one that is away for a moment.
        self.model: ServedModel | None = None

    def set_members(self, members: Iterable[WorkerMember]) -> None:
        """Follow these members, and former ones while they live; none after stop. Idempotent."""
        if self._is_stopped:
            return
        self._announced = {member.worker_id: member for member in members}
        for worker_id, worker in list(self._workers.items()):
            member = self._announced.get(worker_id)
            if member != worker.member and (member is not None or worker.state == "DEAD"):
                self._depart(worker)
            elif member is not None:
                worker.member = member
                if worker.state == "READY" and member.is_draining:
                    worker.state = "DRAINING"
        for worker_id, member in self._announced.items():
            if worker_id not in self._workers:
                worker = Worker(member, self._connect_channel(member))
                if member.pool == "decode":
                    worker.max_sequences = self._config.max_running_sequences
                self._workers[worker_id] = worker
                worker.task = asyncio.create_task(self._follow(worker), name=f"follow-{worker_id}")
        self._notify()

    def ready(self, pool: WorkerRole) -> list[Worker]:
        """Return the workers of a pool that take requests."""
        return [
            w
            for w in self._workers.values()
            if w.member.pool == pool and w.state == "READY" and not w.is_leaving
        ]

    def serving(self, pool: WorkerRole) -> list[Worker]:
        """Return the workers of a pool that have or take requests, draining ones included."""
        return [
            w
            for w in self._workers.values()
            if w.member.pool == pool and w.state in ("READY", "DRAINING")
        ]

    def is_due(self, pool: WorkerRole) -> bool:
        """Return whether no worker of a pool takes requests, but one is being connected to."""
        return not self.ready(pool) and any(
            w.member.pool == pool and w.state == "CONNECTING" and not w.is_leaving
            for w in self._workers.values()
        )

    def has_hanging(self, pool: WorkerRole) -> bool:
        """Return whether a step of a worker of a pool hangs: it goes on, or the worker restarts."""
        return any(w.member.pool == pool and w.is_hanging for w in self._workers.values())

    def get(self, worker_id: str) -> Worker:
        return self._workers[worker_id]

    def report_broken(self, worker: Worker, reason: str) -> None:
        """Note that a call to a worker broke: it is DEAD until it answers again."""
        self._lose(worker, reason)
        worker.broken.set()

    async def wait_changed(self, until: float) -> bool:
        """Wait for any change of any worker's state; False when time is up."""
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def changes(self, period_s: float) -> AsyncIterator[None]:
        """Yield at once, and again if any worker's state has changed since; at least each period.

        So whoever follows may take its time: it learns of what changes meanwhile.
        """
        while True:
            changed = self._changed
            yield
            with suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await changed.wait()

    def known_workers(self) -> Sequence[KnownWorker]:
        """Return all members, and those that left less than forget_dead_after_s ago.

        A worker that was to leave and is dead has left as planned, and is not among them.
        """
        now = asyncio.get_running_loop().time()
        self._forget_departed(now)
        workers = [*self._workers.values(), *(worker for worker, _ in self._departed.values())]
        return [
            KnownWorker(
                member=worker.member,
                state=worker.state,
                misfit=worker.misfit,
                silence=worker.silence(now),
                heartbeat=worker.heartbeat,
                heartbeat_age_s=now - worker.heartbeat_at,
            )
            for worker in workers
            if not (worker.state == "DEAD" and worker.is_leaving)
        ]

    def misfits(self) -> dict[str, str]:
        """Return the misfits among the members, which get no requests: name |-> reason."""
        return {name: worker.misfit for name, worker in self._workers.items() if worker.misfit}

    def told_misfits(self, pool: WorkerRole | None = None) -> str:
        """Return in brackets why workers of a pool, or of any, are misfits; empty: none is."""
        misfits = [w for w in self._workers.values() if w.misfit and pool in (None, w.member.pool)]
        reasons = sorted({each.misfit for each in misfits})
        return f" ({'; '.join(reasons)})" if reasons else ""

    async def stop(self) -> None:
        """Leave all workers."""
        self._is_stopped = True
        for worker in list(self._workers.values()):
            self._depart(worker)
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._config.connect_timeout_s)

    def _depart(self, worker: Worker) -> None:
        del self._workers[worker.member.worker_id]
        self._lose(worker, worker.lost_because or "left the membership")
        if self.model and worker.member.worker_id not in self._announced:  # it does not restart
            self._set_model(self.model)
        left_at = asyncio.get_running_loop().time()
        self._forget_departed(left_at)  # also if the status is never requested
        self._departed[worker.member.worker_id, worker.member.incarnation] = worker, left_at
        # Now, or a heartbeat that has just come would revive it.
        if worker.task and worker.task is not asyncio.current_task():
            worker.task.cancel()
        task = asyncio.create_task(self._close(worker), name=f"close-{worker.member.worker_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _forget_departed(self, now: float) -> None:
        self._departed = {
            key: (worker, left_at)
            for key, (worker, left_at) in self._departed.items()
            if now - left_at < self._config.forget_dead_after_s
        }

    async def _close(self, worker: Worker) -> None:
        if worker.task:
            await asyncio.wait([worker.task], timeout=self._config.connect_timeout_s)
        await worker.channel.close()

    def _lose(self, worker: Worker, reason: str) -> None:
        was_used = worker.state in ("READY", "DRAINING")
        worker.state, worker.lost_because = "DEAD", reason
        if self._workers.get(worker.member.worker_id, worker) is worker:
            self._index.remove_worker(worker.member.worker_id)
        if was_used:
            worker_id = worker.member.worker_id
            is_expected = worker_id not in self._workers or worker_id not in self._announced
            logger.log(
                logging.INFO if is_expected else logging.WARNING,
                "worker_lost",
                extra=fields(
                    worker_id=worker_id,
                    incarnation=f"{worker.member.incarnation:016x}",
                    reason=reason,
                ),
            )
            self._on_lost(worker, reason)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _follow(self, worker: Worker) -> None:
        """Keep a worker's entry up to date until it leaves."""
        watch = WorkerWatch(
            worker,
            config=self._config,
            tokenizer_digest=self._tokenizer_digest,
            index=self._index,
            adopt_model=self._adopt_model,
            on_change=self._notify,
        )
        last_reason = ""
        while True:
            worker.broken.clear()
            try:
                await watch.run()
            except Exception as error:
                if not isinstance(error, WorkerGone | grpc.aio.AioRpcError | OSError):
                    logger.exception(
                        "worker_follow_failed", extra=fields(worker_id=worker.member.worker_id)
                    )
                reason = lost_reason(error)
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                # gRPC cancels calls whose channel breaks in certain moments.
                reason = "a call to it was cancelled"
            if worker.state not in ("READY", "DRAINING") and reason != last_reason:
                logger.info(
                    "worker_unreachable",
                    extra=fields(worker_id=worker.member.worker_id, reason=reason),
                )
            last_reason = reason
            self._lose(worker, reason)
            if worker.member.worker_id not in self._announced:
                self._depart(worker)
                return
            await asyncio.sleep(self._config.reconnect_delay_s)

    def _adopt_model(self, worker: Worker, model: ServedModel) -> None:
        others = [w for w in self._workers.values() if w is not worker and w.model is not None]
        for other in others:
            assert other.model is not None
            differences = model.differences(other.model)
            if differences and other.state != "DEAD":
                worker.misfit = (
                    f"a model other than that of {other.member.worker_id}: {differences}"
                )
                raise WorkerGone(worker.misfit)
        worker.model, worker.misfit = model, ""
        self._set_model(model)

    def _set_model(self, model: ServedModel) -> None:
        """Serve a model within the capacities of its workers, if there are any."""
        models = [
            each.model
            for each in self._workers.values()
            if each.model is not None and not model.differences(each.model)
        ]
        if models:
            self.model = replace(
                model,
                max_context_tokens=min(each.max_context_tokens for each in models),
                max_choices=min(each.max_choices for each in models),
            )
