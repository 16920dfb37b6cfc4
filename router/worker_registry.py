"""The workers that a router knows: their state, load and cached pages.

Life of a worker's entry (one per incarnation):
    CONNECTING  announced by the controller; GetInfo and the first heartbeat are awaited
    READY       heartbeats arrive; takes requests
    DRAINING    the membership, its heartbeats or the end of a request say so; finishes what it has
    DEAD        its connection or a session broke, it is stuck or was silent for long, or another
                incarnation replaced it. While it is a member, the registry keeps trying to reach
                it, and it may become READY again; if it was stuck, when that step has ended.

A worker's connection shows whether it is alive: gRPC's own threads answer pings, however late its
event loop and thus its heartbeats are. Its progress shows whether it works. Silence alone counts
only when it lasts long.

A worker leaves when it is neither announced nor alive. A missing announcement alone is no reason: a
restarted controller knows only the workers that have announced themselves since.

Load is counted here at the moment of a decision, because heartbeats lag behind a burst; the
heartbeat's own numbers count where they are larger, since they include other routers' requests.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, NoReturn

import grpc

from observability.logs import fields
from pagewire.protos.call_tasks import is_own_cancellation, mark_seen
from protos.contract import contract_difference
from router import wire
from router.config import RouterConfig
from router.errors import WorkerGone
from router.expected_wait import DecodeQueue, HoldingTime, TokenRate
from router.lost_reason import lost_reason
from router.membership import PoolName, WorkerMember
from router.policy import WorkerLoad
from router.prefix_index import PrefixIndex
from router.request import ServedModel
from router.worker_report import KnownWorker, WorkerHeartbeat, WorkerInfo

logger = logging.getLogger(__name__)

STALE_HEARTBEAT_S = 1.5  # three of them by default; older ones refuse no request
LATE_HEARTBEAT_S = 3.0  # after which the status tells that none comes
LATE_GAPS = 1.5  # the same, in times between heartbeats where these are rarer


class Worker:
    """One incarnation of one worker, as this router sees it."""

    def __init__(self, member: WorkerMember, channel: grpc.aio.Channel) -> None:
        self.member = member
        self.channel = channel
        self.state = "CONNECTING"
        self.model: ServedModel | None = None
        self.misfit = ""  # why it can never serve beside the other workers
        self.heartbeat: WorkerHeartbeat | None = None
        self.heartbeat_at = 0.0  # loop time
        self.lost_because = ""  # while it is neither READY nor DRAINING
        self._says_it_leaves = False
        self.is_hanging = False  # it answers, and a step of it has not ended for long
        self.stalled_s = 0.0  # for which it had work and made no step, at the last heartbeat
        self._num_steps = -1  # until then
        self._stepped_at = 0.0  # loop time of the last progress
        self._heartbeat_gap_s = 0.0  # between the last two
        self.max_sequences = 0  # places in its batch; 0: unknown, or a prefill worker
        self.device = ""  # its type; empty: unknown
        self.receive_s_per_token = 0.0  # of pages, over the transport that it prefers
        self.num_requests = 0  # that this router has there now
        self.num_sequences = 0  # of them, choices
        self.num_waiting = 0  # of them, requests before their first token
        self.num_waiting_tokens = 0  # of their prompts
        self.num_awaited_pages = 0  # that their prompts need
        self.queued_tokens = 0  # of them, prompt tokens to compute before their first token
        self.holding = HoldingTime()  # of them
        self._token_rate = TokenRate()
        self._foreign_requests = 0  # that other routers had there at the last heartbeat
        self._foreign_sequences = 0
        self._foreign_tokens = 0
        # The part of both that had its pages at the last heartbeat.
        self._num_served = 0.0
        self._num_served_pages = 0.0
        self.broken = asyncio.Event()  # set to make the registry reconnect
        self.task: asyncio.Task[None] | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether this start leaves as planned, as the membership or the worker says."""
        return self.member.is_draining or self._says_it_leaves

    def note_leaving(self) -> None:
        """Believe the worker that it leaves: this start gets nothing more."""
        self._says_it_leaves = True

    def take_heartbeat(self, beat: WorkerHeartbeat, now: float) -> None:
        """Keep it; its load beyond this router's own requests is that of other routers.

        Own load is counted when it changes: a heartbeat still includes requests that ended since.
        """
        if self.heartbeat:
            self._heartbeat_gap_s = now - self.heartbeat_at
        self.heartbeat, self.heartbeat_at = beat, now
        self._foreign_requests = max(0, beat.num_running + beat.num_waiting - self.num_requests)
        self._foreign_tokens = max(0, beat.queued_tokens - self.queued_tokens)
        self._foreign_sequences = max(0, beat.num_running + beat.num_waiting - self.num_sequences)
        self._token_rate.observe(
            num_computed=beat.num_computed_tokens, num_queued=beat.queued_tokens, now=now
        )
        self._note_served(beat)

    def note_progress(self, beat: WorkerHeartbeat, now: float) -> None:
        """Note how long it has made no step; that it was reached anew is no progress."""
        # While a decode worker computes only prompts, nothing runs there.
        has_work = beat.num_running or beat.is_stepping
        if beat.steps != self._num_steps or not has_work:
            self._num_steps, self._stepped_at = beat.steps, now
        self.stalled_s = now - self._stepped_at

    def silence(self, now: float) -> str:
        """Say why nothing is heard from it; empty: it is heard, or was not connected yet."""
        if self.state not in ("READY", "DRAINING"):
            return self.lost_because
        age_s = now - self.heartbeat_at
        is_late = age_s > max(LATE_HEARTBEAT_S, LATE_GAPS * self._heartbeat_gap_s)
        return f"no heartbeat for {age_s:.1f} s" if is_late else ""

    def load(self, now: float) -> WorkerLoad:
        """Return the current load."""
        queued_tokens = self.queued_tokens + self._foreign_tokens
        return WorkerLoad(
            worker_id=self.member.worker_id,
            device=self.device,
            num_requests=self.num_requests + self._foreign_requests,
            queued_tokens=queued_tokens,
            prefill_wait_s=self._token_rate.seconds(queued_tokens),
            receive_s_per_token=self.receive_s_per_token,
            queue=self.queue(now),
        )

    def queue(self, now: float) -> DecodeQueue:
        """Return the state that a request would meet there."""
        beat = self.heartbeat
        if beat is None or now - self.heartbeat_at > STALE_HEARTBEAT_S:
            return DecodeQueue()
        return DecodeQueue(
            num_pages=beat.num_pages,
            num_free_pages=beat.num_pages - beat.num_used_pages,
            num_holding=beat.num_running + self._num_served,
            num_waiting=max(0.0, self.num_waiting - self._num_served),
            num_awaited_pages=max(0.0, self.num_awaited_pages - self._num_served_pages),
            max_sequences=self.max_sequences,
            num_sequences=self.num_sequences + self._foreign_sequences,
            holding_s=self.holding.mean_s(now),
        )

    def _note_served(self, beat: WorkerHeartbeat) -> None:
        """Note which part of the requests without a first token holds its pages already.

        A decode worker counts the other prompts as queued, and the tokens that it computes itself.
        """
        num_tokens = max(1, self.num_waiting_tokens)
        share = 1 - min(1.0, beat.queued_tokens / num_tokens)
        self._num_served = share * self.num_waiting
        self._num_served_pages = share * self.num_awaited_pages


class WorkerRegistry:
    """Follows every member with one task; owned by the event loop that calls it."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        connect_channel: Callable[[WorkerMember], grpc.aio.Channel],
        index: PrefixIndex,
        on_lost: Callable[[Worker, str], None],
    ) -> None:
        """Create an empty registry.

        Args:
            config: Deadlines.
            connect_channel: Makes a channel to one start of a worker.
            index: Updated from the caches of living workers.
            on_lost: Called with the reason when a worker that was in use becomes DEAD.
        """
        self._config = config
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

    def ready(self, pool: PoolName) -> list[Worker]:
        """Return the workers of a pool that take requests."""
        return [
            w
            for w in self._workers.values()
            if w.member.pool == pool and w.state == "READY" and not w.is_leaving
        ]

    def serving(self, pool: PoolName) -> list[Worker]:
        """Return the workers of a pool that have or take requests, draining ones included."""
        return [
            w
            for w in self._workers.values()
            if w.member.pool == pool and w.state in ("READY", "DRAINING")
        ]

    def is_due(self, pool: PoolName) -> bool:
        """Return whether no worker of a pool takes requests, but one is being connected to."""
        return not self.ready(pool) and any(
            w.member.pool == pool and w.state == "CONNECTING" and not w.is_leaving
            for w in self._workers.values()
        )

    def has_hanging(self, pool: PoolName) -> bool:
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

    def told_misfits(self, pool: PoolName | None = None) -> str:
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
        last_reason = ""
        while True:
            worker.broken.clear()
            try:
                await self._connect_and_watch(worker)
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

    async def _connect_and_watch(self, worker: Worker) -> NoReturn:
        """Keep a worker's entry up to date until the worker cannot be used, which is raised."""
        self._check_contract(worker, worker.member.contract_version)
        info = await wire.get_info(worker.channel, self._config.connect_timeout_s)
        if info.incarnation != worker.member.incarnation:
            raise WorkerGone(
                f"{worker.member.address} is another incarnation,"
                f" {info.incarnation:016x} instead of {worker.member.incarnation:016x}"
            )
        if info.pool != worker.member.pool:
            raise WorkerGone(f"is in pool {info.pool}, was announced as {worker.member.pool}")
        self._check_contract(worker, info.contract_version)
        self._adopt_model(worker, info.model)
        worker.device = info.device
        worker.receive_s_per_token = self._receive_s_per_token(info)
        if self._is_stuck(worker):
            await self._wait_for_step(worker)
        worker.state = "CONNECTING"
        events = asyncio.create_task(
            self._follow_cache(worker), name=f"cache-events-{worker.member.worker_id}"
        )
        call = wire.watch(worker.channel)
        try:
            await self._watch(worker, call)
        finally:
            call.cancel()
            events.cancel()
            await asyncio.wait([events], timeout=self._config.connect_timeout_s)

    def _check_contract(self, worker: Worker, version: int) -> None:
        if difference := contract_difference(version, self._config.contract_version):
            worker.misfit = difference
            raise WorkerGone(difference)

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

    def _receive_s_per_token(self, info: WorkerInfo) -> float:
        config = self._config
        rates = {
            "nccl": config.gpu_bytes_per_s,
            "cuda_ipc": config.gpu_bytes_per_s,
            "tcp": config.tcp_bytes_per_s,
        }
        rate = rates.get(info.transports[0]) if info.transports else None
        return info.page_bytes / info.model.page_size / rate if rate else 0.0

    async def _wait_for_step(self, worker: Worker) -> None:
        """Return when the step of a stuck worker has ended: it steps on, or nothing runs there."""
        call = wire.watch(worker.channel)
        worker.is_hanging = True
        self._notify()
        try:
            while self._is_stuck(worker):
                worker.lost_because = _stalled(worker)
                await self._hear(worker, call)
        finally:
            worker.is_hanging = False
            call.cancel()

    async def _watch(self, worker: Worker, call: Any) -> NoReturn:
        while True:
            beat = await self._hear(worker, call)
            if self._is_stuck(worker):
                raise WorkerGone(_stalled(worker))
            worker.take_heartbeat(beat, asyncio.get_running_loop().time())
            is_draining = beat.is_draining or worker.is_leaving
            state = "DRAINING" if is_draining else "READY"
            if worker.state != state:
                worker.state, worker.lost_because = state, ""
                self._notify()

    def _is_stuck(self, worker: Worker) -> bool:
        return worker.stalled_s > self._config.stuck_after_s

    async def _hear(self, worker: Worker, call: Any) -> WorkerHeartbeat:
        """Return the next heartbeat, or raise when the worker is gone."""
        message = await self._next_heartbeat(worker, call)
        if message is grpc.aio.EOF:
            raise WorkerGone("it ended the heartbeat stream")
        beat = wire.heartbeat(message)
        if beat.incarnation != worker.member.incarnation:
            raise WorkerGone("a heartbeat came from another incarnation")
        worker.note_progress(beat, asyncio.get_running_loop().time())
        return beat

    async def _next_heartbeat(self, worker: Worker, call: Any) -> Any:
        """Return the next message of the stream, or raise when the worker is silent or broken."""
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

    async def _follow_cache(self, worker: Worker) -> None:
        """Feed the index; a broken stream or a gap starts the subscription again."""
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
