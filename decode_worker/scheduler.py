"""Decides on a decode worker which request gets pages, where it is prefilled, what a step computes.

Pure: no clock, no task, no engine. The step loop calls `next_step`, launches the plan, and reports
with `complete_step`, after `end_undrawn`, or with `fail_step`; between the two the scheduler takes
back no page that the plan touches. It plans further steps meanwhile, because the length of a
sequence is known before its tokens are. Transfers report with `receive_*` at any time. See
request.py for the life of a choice.

A group waits while its prefix is being computed or received for another one, so that nothing is
computed or moved twice. It is parked under the page that it waits for and delays no other group.

The older request goes first in everything but one thing: prompts that are computed here take turns
(see worker.prompt_order). When pages run out, the youngest gives its pages back and is prefilled
again later (mostly from the cache, since its full pages stay in the tree), so the oldest always
goes on. A request that could proceed only by preempting an older one keeps its pages and waits. No
request holds pages while it waits for another waiting request, except for transfers, which have
deadlines. Nothing is preempted while a step is in flight: the step is settled first.

A choice with a constraint is drawn for only when its mask is known (see masks.py). It therefore
takes part in no step that is launched before its last token is read; other choices do not wait.
"""

import bisect
import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeVar

from decode_worker.candidates import Candidates
from decode_worker.chunk_budget import ChunkBudget
from decode_worker.config import DecodeConfig
from decode_worker.request import (
    Choice,
    GroupState,
    PrefillGroup,
    Request,
    TokenDelta,
    group_by_tokens,
)
from decode_worker.seats import Seats
from decode_worker.step_plan import Chunk, PageCopy, StepPlan
from kv_cache.errors import OutOfPages
from kv_cache.layout import num_pages_for
from kv_cache.page_pool import Quarantined
from kv_cache.prefix_cache import PrefixCache, PrefixMatch
from llm_engine.drawing import finish_reason
from llm_engine.engine_step import StepResult
from llm_engine.sampling import SampledToken
from worker.identity import ModelInfo, WorkerIdentity
from worker.load import WorkerTotals
from worker.parking import Parking
from worker.prompt_chunk import next_chunk, next_chunks
from worker.prompt_order import in_turn
from worker.suspects import SuspectTurns

HolderT = TypeVar("HolderT", Choice, PrefillGroup)

ADMISSION_WINDOW = 32  # waiting groups looked at in one step; bounds the cost of a long queue


def prefills_locally(
    *, num_uncached_tokens: int, has_candidate: bool, max_local_tokens: int
) -> bool:
    """Return whether computing here is cheaper than asking a prefill worker, or the only way."""
    return not has_candidate or num_uncached_tokens <= max_local_tokens


class Scheduler:
    """All requests of a decode worker and the pages that each holds.

    Invariants: a choice is in exactly one place (waiting, parked, receiving, computing, joining,
    running, or ended); at most max_running_sequences choices run or hold pages for a prefill; the
    queues are sorted by age.

    Args:
        full_pass: Returns how many prompt tokens a step computes beside decodes; see EngineLike.

    Attributes:
        totals: What this worker has done since its start.
        candidates: Chooses the prefill workers that are asked.
    """

    def __init__(
        self,
        *,
        config: DecodeConfig,
        cache: PrefixCache,
        model: ModelInfo,
        page_size: int,
        page_bytes: int,
        full_pass: Callable[[int, int], int],
    ) -> None:
        self.totals = WorkerTotals()
        self._config = config
        self._cache = cache
        self._model = model
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._full_pass = full_pass
        self._num_arrivals = 0
        self._waiting: list[PrefillGroup] = []
        self._parked: Parking[PrefillGroup] = Parking(cache)
        self._receiving: list[PrefillGroup] = []
        self._computing: list[PrefillGroup] = []
        self._joining: list[PrefillGroup] = []
        self._running: list[Choice] = []
        self._seats = Seats(config.max_running_sequences)
        self._num_in_flight = 0  # copies, decodes and chunks of steps
        self._has_ended_choices = False
        # Whether something changed that may let a waiting group in. Without it every step would
        # match a long queue of long prompts again.
        self._is_admission_due = False
        self.candidates = Candidates()
        self._turns: SuspectTurns[Request] = SuspectTurns()
        self._chunk_budget = ChunkBudget(
            budget_s=config.step_budget_ms / 1000,
            min_tokens=page_size,
            max_tokens=config.max_step_tokens,
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Groups that do not run yet; some of them have a first token, but not all pages."""
        num_parked = len(self._parked)
        return num_parked + len(self._waiting) + len(self._receiving) + len(self._computing)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet, cached ones of waiting groups included."""
        waiting = sum(len(group.tokens) for group in (*self._waiting, *self._parked))
        return waiting + sum(len(group.tokens) - group.num_computed for group in self._computing)

    def submit(self, request: Request) -> None:
        """Take a request that `admission.check_request` accepts."""
        request.arrival = self._num_arrivals
        request.arrived_s = self.totals.steps_s
        self._num_arrivals += 1
        self._cache.limit(request.salt, request.cache_share)
        request.choices = [
            Choice(request, index, list(output)) for index, output in request.emitted.items()
        ]
        for group in group_by_tokens(request.choices):
            self._wait(group)

    def end(self, request: Request, choices: Container[int] | None = None) -> None:
        """Cancel or fail a request, or only some of its choices.

        Ended choices take part in no later step; the next step frees their pages.
        """
        for choice in request.choices:
            if not choice.is_ended and (choices is None or choice.index in choices):
                choice.is_ended = True
                self._has_ended_choices = True

    def next_step(self) -> StepPlan:
        """Free ended choices, admit, and choose what the next step computes; may be empty."""
        self.free_ended()
        if self._num_in_flight and not self._has_pages(self._num_pages_due()):
            return StepPlan()  # steps in flight may free pages; their choices cannot be preempted
        for group in self._parked.take_woken():
            self._wait(group)
        copies = self._join()
        decodes, is_short = self._extend_running()
        receives = tuple(self._admit()) if self._is_admission_due and not is_short else ()
        max_tokens = self._config.max_step_tokens
        # Not those that wait for a mask: a suspect's turn would pass with nothing computed.
        ready = [group for group in self._computing if next_chunk(group, max_tokens)]
        takes_part = self._turns.next_pass(
            [*(each.request for each in decodes), *(each.request for each in ready)]
        )
        # A copy for a choice that was preempted just now would overwrite its page's next owner.
        copies = [copy for copy in copies if copy.choice.pages is not None]
        if all(takes_part(copy.choice.request) for copy in copies):
            decodes = [choice for choice in decodes if takes_part(choice.request)]
            computing = [group for group in self._computing if takes_part(group.request)]
        else:  # copies get a separate step, so that a failure is blamed on no other request
            decodes, computing = [], []
        started, extended = self._seats.tell(decodes)
        chunk_tokens = max_tokens - len(decodes)
        if decodes and computing:
            chunk_tokens = min(chunk_tokens, self._chunk_budget.num_tokens)
            chunk_tokens = self._full_pass(len(decodes), chunk_tokens)
        limit_s = self._config.max_overtaken_s
        computing = in_turn(computing, now_s=self.totals.steps_s, max_overtaken_s=limit_s)
        plan = StepPlan(
            copies=tuple(copies),
            ended_seats=tuple(self._seats.ended),
            started=started,
            extended=extended,
            decodes=tuple(decodes),
            chunks=next_chunks(computing, chunk_tokens),
            receives=receives,
            is_partial=self._is_admission_due and not is_short,
        )
        if not plan.is_empty:
            self._seats.ended.clear()
            self._count_in_flight(plan, 1)
        return plan

    def free_ended(self) -> None:
        """Free the pages of choices that ended, unless a step in flight touches them."""
        if not self._has_ended_choices:
            return
        self._is_admission_due = True
        self._waiting = [group for group in self._waiting if not group.is_ended]
        self._parked.remove(lambda group: group.is_ended)
        for group in [*self._computing, *self._joining]:
            if group.is_ended and not group.num_in_flight:
                self._remove(group)
        # Pages of receiving groups are freed by receive_failed: a transfer still writes them.
        for group in self._parked:
            group.drop_ended()
        for queue in (self._waiting, self._computing):
            for group in queue:
                # A step in flight that computes its last chunk draws for each of its choices.
                if group.num_computed + group.num_launched < len(group.tokens):
                    group.drop_ended()
            queue.sort(key=lambda each: each.age)  # a group is as old as its first choice
        ended = [choice for choice in self._running if choice.is_ended]
        for choice in ended:
            if not choice.num_in_flight:
                self._stop_running(choice)
        holders: list[Choice | PrefillGroup] = [*ended, *self._computing]
        self._has_ended_choices = any(each.is_ended and each.num_in_flight for each in holders)

    def complete_step(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Apply what a plan's step drew, and how long it took."""
        self._count_in_flight(plan, -1)
        self._chunk_budget.observe(
            num_decodes=len(plan.decodes),
            num_chunk_tokens=plan.num_tokens - len(plan.decodes),
            seconds=result.seconds,
        )
        self._count_time(plan, result.seconds)
        deltas = []
        for choice, token in zip(plan.decodes, result.decodes, strict=True):
            if token is not None:
                choice.request.num_failed_passes = 0  # nothing that it computes makes a pass fail
                if not choice.is_ended:
                    deltas.append(self._advance(choice, token))
        for chunk, tokens in zip(plan.chunks, result.slices, strict=True):
            if tokens is not None:
                deltas += self._complete_chunk(chunk, tokens)
        self.totals.generated_tokens += len(deltas)  # prefill workers count what they drew
        return deltas

    def end_undrawn(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """End the requests for which no token could be drawn, and return them.

        The results of their slices are not committed, so they never appear in the cache.
        """
        drawn = [*result.decodes, *result.slices]
        owners = zip(plan.computed_for, drawn, strict=True)
        return self._end_all(request for request, tokens in owners if tokens is None)

    def fail_step(self, plan: StepPlan) -> list[Request]:
        """End all requests that took part in a failed step, and return them."""
        self._count_in_flight(plan, -1)
        return self._end_all([*plan.computed_for, *(copy.choice.request for copy in plan.copies)])

    def receive_committed(self, group: PrefillGroup, num_pages: int) -> None:
        """Note that the first `num_pages` pages of the group have arrived and are verified."""
        assert group.pages is not None
        num_new = num_pages - group.pages.num_committed_pages
        self._cache.commit(group.pages, num_pages)
        for stats in (group.request.stats, self.totals):
            stats.pages_moved += num_new
            stats.bytes_moved += num_new * self._page_bytes

    def receive_result(
        self,
        group: PrefillGroup,
        tokens: Sequence[SampledToken],
        *,
        num_cached_tokens: int,
        num_computed_tokens: int,
    ) -> list[TokenDelta]:
        """Take the first tokens of a group, whose pages may still be on their way.

        If the transfer fails, the choices go on from these tokens, as after a resumption.
        """
        assert group.state is GroupState.RECEIVING
        stats = group.request.stats
        stats.prefill_cached_tokens += num_cached_tokens
        stats.prefill_computed_tokens += num_computed_tokens
        group.request.computed_from(num_cached_tokens)
        return self._take_first_tokens(group, tokens)

    def receive_done(self, group: PrefillGroup, *, transfer_s: float, exposed_s: float) -> None:
        """Let a group run: all its pages have arrived, and its first tokens were taken.

        Args:
            group: In RECEIVING.
            transfer_s: Time in which its pages arrived.
            exposed_s: The part of it after the group was computed.
        """
        self._receiving.remove(group)
        self.totals.transfer_s += transfer_s
        self.totals.exposed_transfer_s += exposed_s
        group.request.is_account_due = True
        self._start_joining(group)

    def receive_failed(
        self, group: PrefillGroup, *, may_be_written: bool
    ) -> tuple[Quarantined, ...]:
        """Give up one attempt; the group waits for the next candidate, or for a place here.

        Returns:
            The pages now in quarantine, if a posted receive may still write them. The caller passes
            them to `release_quarantine` once the transport is quiet.
        """
        assert group.pages is not None
        self._receiving.remove(group)
        if group.pages.num_committed_pages > group.pages.num_cached_pages:
            # How many of the received pages were computed may never be reported, and they are here.
            group.request.computed_from(group.num_computed)
        quarantined = self._cache.abort(group.pages, quarantine=may_be_written)
        group.pages = None
        self._is_admission_due = True
        if not group.is_ended:
            self.totals.transfer_failures += 1
            group.request.stats.prefill_retries += 1
            assert group.candidate is not None
            self.candidates.distrust(group.candidate)
            # If first tokens were drawn, the choices may differ from now on.
            for rest in group_by_tokens([each for each in group.choices if not each.is_ended]):
                rest.failed = (*group.failed, group.candidate)
                rest.is_first_visit = False
                self._wait(rest)
        return quarantined

    def abandon(self, group: PrefillGroup, *, may_be_written: bool) -> tuple[Quarantined, ...]:
        """Give up a group that a bug left half received; its request has ended.

        Returns:
            What `receive_failed` returns.
        """
        for queue in (self._waiting, self._receiving, self._joining):
            if group in queue:
                queue.remove(group)
        if group.pages is None:
            return ()
        pages, group.pages = group.pages, None
        self._is_admission_due = True
        return self._cache.abort(pages, quarantine=may_be_written)

    def meet(self, prefill_workers: Sequence[WorkerIdentity]) -> None:
        """Take the prefill workers that a router can use now, instead of those named before."""
        self.candidates.meet(prefill_workers, self._num_arrivals)

    def release_quarantine(self, pages: Sequence[Quarantined]) -> None:
        """Free pages that no transfer can write any more."""
        self._cache.release_quarantine(pages)
        self._is_admission_due = True

    def check_integrity(self) -> None:
        """Assert the invariants of the class."""
        self._cache.check_integrity()
        groups = [*self._waiting, *self._parked, *self._receiving, *self._computing, *self._joining]
        places = [choice for group in groups for choice in group.choices] + self._running
        assert len(places) == len(set(places)), "a choice is in two places"
        assert self._num_active() <= self._config.max_running_sequences, "too many sequences"
        for queue in (self._waiting, self._computing, self._running):
            ages = [each.age for each in queue]
            assert ages == sorted(ages), "a queue is not sorted by age"
        for group in groups:
            assert (group.pages is None) == (group.state is GroupState.WAITING), "pages and state"
        assert all(choice.pages is not None for choice in self._running), "running without pages"
        self._seats.check_integrity(self._running)
        flying: list[Choice | PrefillGroup] = [*self._running, *self._computing]
        assert self._num_in_flight or not any(each.num_in_flight for each in flying), "in flight"

    def _remove(self, group: PrefillGroup) -> None:
        assert group.pages is not None
        queue = self._computing if group.state is GroupState.COMPUTING else self._joining
        queue.remove(group)
        self._cache.release(group.pages)
        group.pages = None
        self._is_admission_due = True

    def _count_in_flight(self, plan: StepPlan, change: int) -> None:
        """Note that a step, or part of it, was launched (1) or is settled (-1)."""
        self._num_in_flight += change * (len(plan.decodes) + len(plan.copies) + len(plan.chunks))
        for choice in plan.decodes:
            choice.num_unread += change
            choice.num_in_flight += change
        for copy in plan.copies:
            copy.choice.num_in_flight += change
            copy.holder.num_in_flight += change
        for chunk in plan.chunks:
            chunk.count_in_flight(change)

    def _num_pages_due(self) -> int:
        """Return an upper bound of the pages that choices need for the next step."""
        joining = sum(len(group.choices) for group in self._joining)  # a fork, and the next page
        return 2 * joining + sum(
            choice.num_pages_missing(self._page_size) for choice in self._running
        )

    def _join(self) -> list[PageCopy]:
        """Move groups with first tokens to the batch; return the page copies that this needs."""
        copies = []
        self._is_admission_due |= bool(self._joining)  # ended choices leave their places
        for group in self._joining:
            assert group.pages is not None
            first, *others = [choice for choice in group.choices if not choice.is_ended]
            for choice in others:
                try:
                    choice.pages, pairs = self._cache.fork(group.pages, len(group.tokens))
                except OutOfPages:
                    self._wait_again(choice)
                    continue
                copies += [
                    PageCopy(choice=choice, holder=first, source=s, target=t) for s, t in pairs
                ]
                self._start_running(choice)
            first.pages = group.pages
            self._start_running(first)
        self._joining.clear()
        return copies

    def _extend_running(self) -> tuple[list[Choice], bool]:
        """Give each running choice room for its last token, oldest first.

        Returns:
            The choices that can go on, and whether pages ran short.
        """
        ready = []
        is_short = False
        for choice in list(self._running):
            if choice.pages is None:  # preempted for an older one
                continue
            if choice.is_ended or choice.awaits_mask or self._is_last_token_launched(choice):
                continue
            while not self._extend(choice):
                is_short = True
                victim = self._youngest_after(choice)
                if victim is None:
                    break
                self._preempt(victim)
            else:
                ready.append(choice)
        return ready, is_short

    def _extend(self, choice: Choice) -> bool:
        assert choice.pages is not None
        try:
            self._cache.extend(choice.pages, choice.num_tokens + choice.num_unread)
        except OutOfPages:
            return False
        return True

    def _is_last_token_launched(self, choice: Choice) -> bool:
        """Whether a step in flight draws the last token that the choice's length limit allows."""
        if not choice.num_unread:
            return False
        num_tokens = choice.num_tokens + choice.num_unread
        num_output = len(choice.output) + choice.num_unread
        max_tokens = choice.request.params.max_tokens
        return num_output >= max_tokens or num_tokens >= self._model.max_context_tokens

    def _youngest_after(self, choice: Choice) -> Choice | PrefillGroup | None:
        holders: list[Choice | PrefillGroup] = [*self._running[-1:], *self._computing[-1:]]
        youngest = max(holders, key=lambda each: each.age)  # at least `choice` itself
        return youngest if youngest.age > choice.age else None

    def _preempt(self, victim: Choice | PrefillGroup) -> None:
        if isinstance(victim, Choice):
            self._stop_running(victim)
            self._wait_again(victim)
            return
        self._remove(victim)
        victim.request.stats.preemptions += 1
        self.totals.preemptions += 1
        self._wait(victim)

    def _wait_again(self, choice: Choice) -> None:
        """Queue a choice that lost its pages, to be prefilled with what it has drawn so far."""
        choice.request.stats.preemptions += 1
        self.totals.preemptions += 1
        self._wait(PrefillGroup([choice], choice.tokens(), is_first_visit=False))

    def _wait(self, group: PrefillGroup) -> None:
        group.drop_ended()
        group.state = GroupState.WAITING
        group.num_computed = 0
        self._is_admission_due = True
        _insert(self._waiting, group)

    def _start_running(self, choice: Choice) -> None:
        self._seats.take(choice)
        _insert(self._running, choice)

    def _stop_running(self, choice: Choice) -> None:
        """Give seat and pages back; full pages stay in the tree."""
        assert choice.pages is not None
        assert not choice.num_in_flight, "a step in flight touches its pages"
        self._running.remove(choice)
        self._seats.leave(choice)
        # K and V of the last token are not computed yet, or uncertain after a failed pass.
        self._cache.insert(choice.pages, choice.tokens()[:-1])
        self._cache.release(choice.pages)
        choice.pages = None
        self._is_admission_due = True

    def _admit(self) -> list[PrefillGroup]:
        """Give pages to waiting groups; return the groups that a prefill worker shall fill."""
        receives: list[PrefillGroup] = []
        self._is_admission_due = False
        num_before = self._num_active()
        for _ in range(ADMISSION_WINDOW):
            if not self._waiting:
                return receives
            group = self._waiting[0]
            num_active = num_before + len(group.choices)
            if num_active > self._config.max_running_sequences:
                return receives
            match = self._cache.match(group.tokens, group.request.salt)
            if match.last_pending_page is not None:
                self._parked.park(self._waiting.pop(0), match.last_pending_page)
                continue
            candidate = self.candidates.next_for(group)
            is_local = prefills_locally(
                num_uncached_tokens=len(group.tokens) - match.num_ready_pages * self._page_size,
                has_candidate=candidate is not None,
                max_local_tokens=self._config.local_prefill_max_tokens,
            )
            num_new_pages = (
                num_pages_for(len(group.tokens), self._page_size) - match.num_ready_pages
            )
            # Each active sequence soon needs a page: admission without it would cause preemption.
            headroom = num_active if num_before else 0
            if not self._has_pages(num_new_pages + headroom) or not self._reserve(
                group, match, is_local=is_local, headroom=headroom
            ):
                return receives  # younger ones must not take the pages that this one waits for
            self._waiting.pop(0)
            num_before = num_active
            if is_local:
                _insert(self._computing, group)
            else:
                group.candidate = candidate
                self._receiving.append(group)
                receives.append(group)
        self._is_admission_due = bool(self._waiting)  # the next step looks at more
        return receives

    def _num_active(self) -> int:
        groups = itertools.chain(self._receiving, self._computing, self._joining)
        choices = itertools.chain.from_iterable(group.choices for group in groups)
        return len(self._running) + sum(not choice.is_ended for choice in choices)

    def _has_pages(self, num_pages: int) -> bool:
        return self._cache.pool.num_available >= num_pages

    def _reserve(
        self, group: PrefillGroup, match: PrefixMatch, *, is_local: bool, headroom: int
    ) -> bool:
        """Reserve all pages of a group if `headroom` pages are left then."""
        cache = self._cache
        try:
            pages = cache.reserve(
                group.tokens, group.request.salt, incoming=not is_local, match=match
            )
        except OutOfPages:
            return False
        if not self._has_pages(headroom):  # ready pages were evictable until they were reserved
            cache.abort(pages, quarantine=False)
            return False
        group.pages = pages
        group.num_computed = pages.num_cached_pages * self._page_size
        if is_local and cache.hold_twin(pages, group.tokens):
            group.num_computed = len(group.tokens) - 1
        group.state = GroupState.COMPUTING if is_local else GroupState.RECEIVING
        if group.is_first_visit:
            group.is_first_visit = False
            group.request.stats.decode_cached_tokens += group.num_computed
            self.totals.looked_up_tokens += len(group.tokens)
            self.totals.cached_tokens += group.num_computed
            if not is_local:
                self.totals.needed_bytes += len(pages.page_ids) * self._page_bytes
        return True

    def _end_all(self, requests: Iterable[Request]) -> list[Request]:
        ended = [request for request in dict.fromkeys(requests) if not request.is_ended]
        for request in ended:
            self.end(request)
        return ended

    def _count_time(self, plan: StepPlan, seconds: float) -> None:
        for request in {chunk.prompt.request for chunk in plan.chunks}:
            request.passes_s += seconds
        if not plan.chunks:
            self.totals.decode_step_s += seconds
        elif plan.decodes:
            self.totals.mixed_step_s += seconds
        else:
            self.totals.prompt_step_s += seconds

    def _complete_chunk(self, chunk: Chunk, tokens: tuple[SampledToken, ...]) -> list[TokenDelta]:
        group = chunk.prompt
        if not chunk.commit(self._cache):
            return []
        group.request.stats.decode_computed_tokens += chunk.num_tokens
        group.request.computed_from(chunk.start)
        self.totals.computed_tokens += chunk.num_tokens
        if group.is_ended or not chunk.is_last:
            return []
        self._computing.remove(group)
        deltas = self._take_first_tokens(group, tokens)
        self._start_joining(group)
        return deltas

    def _take_first_tokens(
        self, group: PrefillGroup, tokens: Sequence[SampledToken]
    ) -> list[TokenDelta]:
        # Reported now, because this worker may die before the end.
        group.request.is_account_due = True
        return [
            self._advance(choice, token)
            for choice, token in zip(group.choices, tokens, strict=True)
            if not choice.is_ended
        ]

    def _start_joining(self, group: PrefillGroup) -> None:
        group.state = GroupState.JOINING
        self._joining.append(group)
        if group.is_ended:
            self._remove(group)

    def _advance(self, choice: Choice, token: SampledToken) -> TokenDelta:
        """Append a drawn token to a choice, and end the choice if it is the last one."""
        request = choice.request
        first_index = len(choice.output)
        choice.output.append(token.token_id)
        choice.allowed = None
        reason = finish_reason(
            request.params,
            num_prompt_tokens=len(request.prompt),
            output_token_ids=choice.output,
            eos_token_ids=self._model.eos_token_ids,
            max_context_tokens=self._model.max_context_tokens,
        )
        if reason is not None:
            choice.is_ended = True
            self._is_admission_due = True  # its place is free, even while pages still arrive
            if choice.num_in_flight:  # a later step writes after its last token
                self._has_ended_choices = True
            elif choice.pages is not None:
                self._stop_running(choice)
        is_last = request.is_ended
        has_stats = is_last or request.is_account_due
        request.is_account_due = False
        return TokenDelta(
            request=request,
            choice=choice.index,
            tokens=(token,),
            first_index=first_index,
            finish_reason=reason,
            is_last_of_request=is_last,
            has_stats=has_stats,
        )


def _insert(queue: list[HolderT], new: HolderT) -> None:
    """Insert by age; most are younger than all others."""
    if not queue or queue[-1].age < new.age:
        queue.append(new)
    else:
        bisect.insort(queue, new, key=lambda each: each.age)
