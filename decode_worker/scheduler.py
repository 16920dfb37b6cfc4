"""Decides on a decode worker who gets pages, who is prefilled where, and what each step computes.

Pure: no clock, no task, no engine. The step loop calls `next_step`, runs the plan, and reports with
`complete_step`, after `end_undrawn`, or with `fail_step`; between the two the scheduler hands out
and takes back no page that the plan touches. Transfers report with `receive_*` at any time. See
request.py for the life of a choice.

Who goes first: the older request, in everything. When pages run out, the youngest gives its own
back and is prefilled again later (mostly from the cache, since its full pages stay in the tree); so
the oldest always goes on. Who cannot go on without taking from an older one keeps its pages and
waits. Nobody waits while holding pages for somebody who waits, except for transfers, which have
deadlines.
"""

import bisect
import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from decode_worker.config import DecodeConfig
from decode_worker.request import (
    Choice,
    GroupState,
    PrefillGroup,
    Request,
    TokenDelta,
    group_by_tokens,
)
from decode_worker.step_plan import PageCopy, PromptChunk, StepPlan
from kv_cache.errors import OutOfPages
from kv_cache.layout import num_pages_for
from kv_cache.page_pool import Quarantined
from kv_cache.prefix_cache import PrefixCache
from llm_engine.drawing import finish_reason
from llm_engine.sampling import Drawn, SampledToken
from llm_engine.worker_identity import ModelInfo, WorkerIdentity
from llm_engine.worker_load import WorkerTotals

ADMISSION_WINDOW = 32  # waiting groups looked at per step; bounds the cost of a long queue


def prefills_locally(
    *, num_uncached_tokens: int, has_candidate: bool, max_local_tokens: int
) -> bool:
    """Return whether computing here is cheaper than asking a prefill worker, or the only way."""
    return not has_candidate or num_uncached_tokens <= max_local_tokens


class Scheduler:
    """All requests of a decode worker and who holds which pages.

    Invariants: a choice is in exactly one place (waiting, receiving, computing, joining, running,
    or ended); running choices plus those that hold pages for a prefill are at most
    max_running_sequences; the queues are sorted by age.
    """

    def __init__(
        self,
        *,
        config: DecodeConfig,
        cache: PrefixCache,
        model: ModelInfo,
        page_size: int,
        page_bytes: int,
    ) -> None:
        self.totals = WorkerTotals()
        self._config = config
        self._cache = cache
        self._model = model
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._arrivals = itertools.count()
        self._waiting: list[PrefillGroup] = []
        self._receiving: list[PrefillGroup] = []
        self._computing: list[PrefillGroup] = []
        self._joining: list[PrefillGroup] = []
        self._running: list[Choice] = []
        self._has_ended_choices = False
        # Something changed that may let a waiting group in. Without it a long queue of long
        # prompts would be matched again at every step.
        self._is_admission_due = False
        # Asked last: many that wait for one prefix must not find out one by one that it is gone.
        self._suspects: set[WorkerIdentity] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Groups without a first token."""
        return len(self._waiting) + len(self._receiving) + len(self._computing)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are not computed yet, cached ones of waiting groups included."""
        waiting = sum(len(group.tokens) for group in self._waiting)
        return waiting + sum(len(group.tokens) - group.num_computed for group in self._computing)

    def submit(self, request: Request) -> None:
        """Take a request that `admission.check_request` accepts."""
        request.arrival = next(self._arrivals)
        request.choices = [
            Choice(request, index, list(output)) for index, output in request.emitted.items()
        ]
        for group in group_by_tokens(request.choices):
            self._wait(group)

    def end(self, request: Request, choices: Container[int] | None = None) -> None:
        """Cancel or fail a request, or only some of its choices.

        What ended takes part in no later step; the next one frees its pages.
        """
        for choice in request.choices:
            if choices is None or choice.index in choices:
                choice.is_ended = True
        self._has_ended_choices = True

    def next_step(self) -> StepPlan:
        """Free what ended, admit, and choose what the next step computes; the plan may be empty."""
        self.free_ended()
        copies = self._join()
        decodes, is_short = self._extend_running()
        receives = tuple(self._admit()) if self._is_admission_due and not is_short else ()
        return StepPlan(
            # A copy for a choice that was preempted just now would overwrite its page's next owner.
            copies=tuple(copy for copy in copies if copy.choice.pages is not None),
            decodes=tuple(decodes),
            chunks=tuple(self._pick_chunks(self._config.max_step_tokens - len(decodes))),
            receives=receives,
        )

    def free_ended(self) -> None:
        """Free the pages of choices that ended; only between steps."""
        if not self._has_ended_choices:
            return
        self._has_ended_choices = False
        self._is_admission_due = True
        self._waiting = [group for group in self._waiting if not group.is_ended]
        for group in [*self._computing, *self._joining]:
            if group.is_ended:
                self._remove(group)
        # Pages of receiving groups are freed by receive_failed: a transfer still writes them.
        for queue in (self._waiting, self._computing):
            for group in queue:
                group.drop_ended()
            queue.sort(key=lambda each: each.age)  # a group is as old as its first choice
        for choice in [choice for choice in self._running if choice.is_ended]:
            self._stop_running(choice)

    def complete_step(self, plan: StepPlan, drawn: Sequence[Drawn]) -> list[TokenDelta]:
        """Apply what a plan's pass drew after each slice."""
        deltas = []
        num_decodes = len(plan.decodes)
        for choice, tokens in zip(plan.decodes, drawn[:num_decodes], strict=True):
            if tokens is not None and not choice.is_ended:
                deltas.append(self._advance(choice, tokens[0]))
        for chunk, tokens in zip(plan.chunks, drawn[num_decodes:], strict=True):
            if tokens is not None:
                deltas += self._complete_chunk(chunk, tokens)
        return deltas

    def end_undrawn(self, plan: StepPlan, drawn: Sequence[Drawn]) -> list[Request]:
        """End the requests for which no token could be drawn, and return them.

        What their slices computed is not committed, so that nobody finds it in the cache.
        """
        owners = zip(plan.computed_for, drawn, strict=True)
        return self._end_all(request for request, tokens in owners if tokens is None)

    def fail_step(self, plan: StepPlan) -> list[Request]:
        """End all requests that took part in a pass that failed, and return them."""
        return self._end_all([*plan.computed_for, *(copy.choice.request for copy in plan.copies)])

    def receive_committed(self, group: PrefillGroup, num_pages: int) -> None:
        """Note that the first `num_pages` pages of the group have arrived and are verified."""
        assert group.pages is not None
        num_new = num_pages - group.pages.num_committed_pages
        self._cache.commit(group.pages, num_pages)
        self._is_admission_due = True
        for stats in (group.request.stats, self.totals):
            stats.pages_moved += num_new
            stats.bytes_moved += num_new * self._page_bytes

    def receive_done(
        self,
        group: PrefillGroup,
        tokens: Sequence[SampledToken],
        *,
        num_cached_tokens: int,
        num_computed_tokens: int,
    ) -> list[TokenDelta]:
        """Take the first tokens of a group whose pages have all arrived."""
        self._receiving.remove(group)
        stats = group.request.stats
        stats.prefill_cached_tokens += num_cached_tokens
        stats.prefill_computed_tokens += num_computed_tokens
        return self._take_first_tokens(group, tokens)

    def receive_failed(
        self, group: PrefillGroup, *, may_be_written: bool
    ) -> tuple[Quarantined, ...]:
        """Give up one attempt; the group waits for the next candidate, or for a place here.

        Returns:
            The pages now in quarantine, if a posted receive may still write them. The caller gives
            them to `release_quarantine` when the transport is quiet.
        """
        assert group.pages is not None
        self._receiving.remove(group)
        quarantined = self._cache.abort(group.pages, quarantine=may_be_written)
        group.pages = None
        self._is_admission_due = True
        if not group.is_ended:
            self.totals.transfer_failures += 1
            group.request.stats.prefill_retries += 1
            assert group.candidate is not None
            group.failed += (group.candidate,)
            self._suspects.add(group.candidate)
            self._wait(group)
        return quarantined

    def trust(self, prefill_worker: WorkerIdentity) -> None:
        """Forget that the last attempt at a prefill worker failed."""
        self._suspects.discard(prefill_worker)

    def release_quarantine(self, pages: Sequence[Quarantined]) -> None:
        """Free pages that no transfer writes any more."""
        self._cache.release_quarantine(pages)
        self._is_admission_due = True

    def check_integrity(self) -> None:
        """Assert the invariants of the class."""
        self._cache.check_integrity()
        groups = [*self._waiting, *self._receiving, *self._computing, *self._joining]
        places = [choice for group in groups for choice in group.choices] + self._running
        assert len(places) == len(set(places)), "a choice is in two places"
        assert self._num_active() <= self._config.max_running_sequences, "too many sequences"
        for queue in (self._waiting, self._computing, self._running):
            ages = [each.age for each in queue]
            assert ages == sorted(ages), "a queue is not sorted by age"
        for group in groups:
            assert (group.pages is None) == (group.state is GroupState.WAITING), "pages and state"
        assert all(choice.pages is not None for choice in self._running), "running without pages"

    def _remove(self, group: PrefillGroup) -> None:
        assert group.pages is not None
        queue = self._computing if group.state is GroupState.COMPUTING else self._joining
        queue.remove(group)
        self._cache.release(group.pages)
        group.pages = None
        self._is_admission_due = True

    def _join(self) -> list[PageCopy]:
        """Move groups with first tokens to the batch; return the page copies this takes."""
        copies = []
        self._is_admission_due |= bool(self._joining)  # choices that ended leave their places
        for group in self._joining:
            assert group.pages is not None
            first, *others = [choice for choice in group.choices if not choice.is_ended]
            for choice in others:
                try:
                    choice.pages, pairs = self._cache.fork(group.pages, len(group.tokens))
                except OutOfPages:
                    self._wait_again(choice)
                    continue
                copies += [PageCopy(choice=choice, source=s, target=t) for s, t in pairs]
                bisect.insort(self._running, choice, key=lambda each: each.age)
            first.pages = group.pages
            bisect.insort(self._running, first, key=lambda each: each.age)
        self._joining.clear()
        return copies

    def _extend_running(self) -> tuple[list[Choice], bool]:
        """Give each running choice room for its last token, oldest first.

        Returns:
            The choices that can go on, and whether pages were short.
        """
        ready = []
        is_short = False
        for choice in list(self._running):
            if choice.pages is None:  # preempted for an older one
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
            self._cache.extend(choice.pages, choice.num_tokens)
        except OutOfPages:
            return False
        return True

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
        bisect.insort(self._waiting, group, key=lambda each: each.age)

    def _stop_running(self, choice: Choice) -> None:
        """Give the pages back; the full ones stay in the tree."""
        assert choice.pages is not None
        self._running.remove(choice)
        # The last token's own K and V are not computed yet, or not for sure after a failed pass.
        self._cache.insert(choice.pages, choice.tokens()[:-1])
        self._cache.release(choice.pages)
        choice.pages = None
        self._is_admission_due = True

    def _admit(self) -> list[PrefillGroup]:
        """Give pages to waiting groups; return those that a prefill worker shall fill."""
        receives = []
        window = self._waiting[:ADMISSION_WINDOW]
        for group in window:
            num_active = self._num_active() + len(group.choices)
            if num_active > self._config.max_running_sequences:
                break
            match = self._cache.match(group.tokens, group.request.salt)
            if match.num_pending_pages:
                continue  # its prefix is on its way; somebody else's commit wakes us
            candidate = group.next_candidate(self._suspects)
            is_local = prefills_locally(
                num_uncached_tokens=len(group.tokens) - match.num_ready_pages * self._page_size,
                has_candidate=candidate is not None,
                max_local_tokens=self._config.local_prefill_max_tokens,
            )
            num_new_pages = (
                num_pages_for(len(group.tokens), self._page_size) - match.num_ready_pages
            )
            # Each active sequence needs a page before long: to admit without would mean to preempt.
            headroom = 0 if num_active == len(group.choices) else num_active
            if not self._has_pages(num_new_pages + headroom) or not self._reserve(
                group, is_local=is_local, headroom=headroom
            ):
                break  # younger ones must not take the pages that this one waits for
            self._waiting.remove(group)
            if is_local:
                bisect.insort(self._computing, group, key=lambda each: each.age)
            else:
                group.candidate = candidate
                self._receiving.append(group)
                receives.append(group)
        # Whoever is left waits for an event, or for those before it to leave the window.
        is_window_full = len(window) == ADMISSION_WINDOW
        self._is_admission_due = is_window_full and window != self._waiting[:ADMISSION_WINDOW]
        return receives

    def _num_active(self) -> int:
        groups = itertools.chain(self._receiving, self._computing, self._joining)
        choices = itertools.chain.from_iterable(group.choices for group in groups)
        return len(self._running) + sum(not choice.is_ended for choice in choices)

    def _has_pages(self, num_pages: int) -> bool:
        counts = self._cache.pool.counts()
        return counts.free + counts.cached >= num_pages

    def _reserve(self, group: PrefillGroup, *, is_local: bool, headroom: int) -> bool:
        """Reserve all pages of a group if `headroom` pages are left then."""
        cache = self._cache
        try:
            pages = cache.reserve(group.tokens, group.request.salt, incoming=not is_local)
        except OutOfPages:
            return False
        if not self._has_pages(headroom):  # ready pages were evictable until they were reserved
            cache.abort(pages, quarantine=False)
            return False
        group.pages = pages
        group.num_computed = pages.num_cached_pages * self._page_size
        group.state = GroupState.COMPUTING if is_local else GroupState.RECEIVING
        if group.is_first_visit:
            group.is_first_visit = False
            group.request.stats.decode_cached_tokens += group.num_computed
            self.totals.looked_up_tokens += len(group.tokens)
            self.totals.cached_tokens += group.num_computed
        return True

    def _pick_chunks(self, budget: int) -> list[PromptChunk]:
        chunks = []
        for group in self._computing:
            num_tokens = min(budget, len(group.tokens) - group.num_computed)
            if num_tokens == 0:
                break
            chunks.append(PromptChunk(group=group, num_tokens=num_tokens))
            budget -= num_tokens
        return chunks

    def _end_all(self, requests: Iterable[Request]) -> list[Request]:
        ended = [request for request in dict.fromkeys(requests) if not request.is_ended]
        for request in ended:
            self.end(request)
        return ended

    def _complete_chunk(
        self, chunk: PromptChunk, tokens: tuple[SampledToken, ...]
    ) -> list[TokenDelta]:
        group = chunk.group
        assert group.pages is not None
        is_last = chunk.is_last
        group.num_computed += chunk.num_tokens
        group.request.stats.decode_computed_tokens += chunk.num_tokens
        self.totals.computed_tokens += chunk.num_tokens
        self._cache.commit(group.pages, group.num_computed // self._page_size)
        self._is_admission_due = True
        if group.is_ended or not is_last:
            return []
        self._computing.remove(group)
        return self._take_first_tokens(group, tokens)

    def _take_first_tokens(
        self, group: PrefillGroup, tokens: Sequence[SampledToken]
    ) -> list[TokenDelta]:
        assert group.pages is not None
        group.state = GroupState.JOINING
        self._joining.append(group)
        deltas = [
            self._advance(choice, token)
            for choice, token in zip(group.choices, tokens, strict=True)
            if not choice.is_ended
        ]
        if deltas:
            # Told now, because nobody knows whether this worker lives to tell it at the end.
            deltas[0] = replace(deltas[0], has_stats=True)
        if group.is_ended:
            self._remove(group)
        return deltas

    def _advance(self, choice: Choice, token: SampledToken) -> TokenDelta:
        """Append a drawn token to a choice, and end the choice if it is the last one."""
        request = choice.request
        first_index = len(choice.output)
        choice.output.append(token.token_id)
        self.totals.generated_tokens += 1
        reason = finish_reason(
            request.params,
            num_prompt_tokens=len(request.prompt),
            output_token_ids=choice.output,
            eos_token_ids=self._model.eos_token_ids,
            max_context_tokens=self._model.max_context_tokens,
        )
        if reason is not None:
            choice.is_ended = True
            if choice.pages is not None:
                self._stop_running(choice)
        is_last = request.is_ended
        return TokenDelta(
            request=request,
            choice=choice.index,
            tokens=(token,),
            first_index=first_index,
            finish_reason=reason,
            is_last_of_request=is_last,
            has_stats=is_last,
        )
