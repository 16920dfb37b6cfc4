"""One worker as a router sees it: its state, its progress and its load.

Load is counted here at the moment of a decision, because heartbeats lag behind a burst; the
heartbeat's own numbers count where they are larger, since they include other routers' requests.
"""

import asyncio

import grpc

from router.expected_wait import DecodeQueue, HoldingTime, TokenRate
from router.membership import WorkerMember
from router.policy import WorkerLoad
from router.request import ServedModel
from router.worker_report import WorkerHeartbeat

STALE_HEARTBEAT_S = 1.5  # three of them by default; older ones refuse no request
LATE_HEARTBEAT_S = 3.0  # after which the status tells that none comes
LATE_GAPS = 1.5  # the same, in times between heartbeats where these are rarer


class Worker:
    """One incarnation of one worker, as this router sees it."""

    def __init__(self, member: WorkerMember, channel: grpc.aio.Channel) -> None:
        self.member = member
        self.channel = channel
        self.state = "CONNECTING"  # its life is told in router/worker_registry.py
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
