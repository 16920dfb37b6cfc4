"""Decides which prompts get pages on a prefill worker, and what each step computes.

Pure: no clock, no task, no engine. The step loop calls `next_step`, launches the plan, and reports
with `complete_step`, after `end_undrawn`, or with `fail_step`. In between, no page that the plan
touches is released, and further steps may be planned.

Order: mostly the prompt of which least is left to compute goes first, when pages are given and
again in each step (see worker.prompt_order). A prompt whose next pages are being computed for
another one waits for them, so nothing is computed twice; it is parked at the page that it waits for
and delays no other prompt. An admitted prompt holds all pages that it will ever need: no two
half-finished prompts wait for each other.
"""

import bisect
import itertools
from collections.abc import Iterable

from kv_cache.errors import OutOfPages
from kv_cache.layout import num_pages_for
from kv_cache.prefix_cache import PrefixCache, PrefixMatch
from llm_engine.engine_step import StepResult
from prefill_worker.config import PrefillConfig
from prefill_worker.request import (
    FinishedPrompt,
    Progress,
    Prompt,
    PromptState,
    ReadyPages,
)
from prefill_worker.step_plan import Chunk, StepPlan
from worker.load import WorkerTotals
from worker.parking import Parking
from worker.prompt_chunk import next_chunks
from worker.prompt_order import in_turn
from worker.suspects import SuspectTurns

# Both bound the cost of a long queue.
NUM_REFRESHED = 16  # oldest waiting prompts that are looked up again before any is chosen
MAX_LOOKS = 64  # chosen ones that are looked up in one step


class Scheduler:
    """All prompts of a prefill worker, and the pages that each holds.

    Invariants: a prompt is in at most one of the states waiting, parked and computing; the queues
    are sorted by arrival and by admission; a computing prompt has all its pages.
    """

    def __init__(self, *, config: PrefillConfig, cache: PrefixCache, page_size: int) -> None:
        self.totals = WorkerTotals()
        self._config = config
        self._cache = cache
        self._page_size = page_size
        self._arrivals = itertools.count()
        self._waiting: list[Prompt] = []
        self._parked: Parking[Prompt] = Parking(cache)
        self._computing: list[Prompt] = []
        self._has_ended_prompts = False
        self._turns: SuspectTurns[Prompt] = SuspectTurns()
        self._is_admission_due = False  # something changed that may let a waiting prompt in

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._parked)

    @property
    def num_running(self) -> int:
        return len(self._computing)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that are not computed yet, as far as is known of waiting prompts."""
        prompts = itertools.chain(self._waiting, self._parked, self._computing)
        return sum(len(prompt.tokens) - prompt.num_computed for prompt in prompts)

    def submit(self, prompt: Prompt) -> None:
        """Queue a prompt that `admission.check_prompt` accepts."""
        prompt.arrival = next(self._arrivals)
        prompt.arrived_s = self.totals.steps_s
        prompt.num_handed_pages = prompt.first_page
        self._cache.limit(prompt.salt, prompt.cache_share)
        self._wait(prompt)
        self._match_or_park(prompt)  # so that its turn is known

    def end(self, prompt: Prompt) -> None:
        """Cancel or fail a prompt: no later step computes it, and then its pages are freed."""
        prompt.is_ended = True
        self._has_ended_prompts = True

    def transfer_ended(self, prompt: Prompt) -> None:
        """Note that no transfer reads the prompt's pages any more; idempotent."""
        prompt.is_read = False
        if prompt.lease is not None:
            self._cache.release_lease(prompt.lease)
            self._is_admission_due = True

    def next_step(self) -> StepPlan:
        """Free ended prompts, admit, and plan the next step, which may be empty."""
        self.free_ended()
        for prompt in self._parked.take_woken():
            self._wait(prompt)
        admitted = self._admit() if self._is_admission_due else []
        ready = [each for prompt in admitted for each in self._hand_over(prompt)]
        takes_part = self._turns.next_pass(self._computing)
        computing = [prompt for prompt in self._computing if takes_part(prompt)]
        plan = StepPlan(
            chunks=next_chunks(self._in_turn(computing), self._config.max_step_tokens),
            ready=tuple(ready),
            is_partial=self._is_admission_due,
        )
        self._count_in_flight(plan, 1)
        return plan

    def free_ended(self) -> None:
        """Free the pages of ended prompts, except those that a step in flight touches."""
        if not self._has_ended_prompts:
            return
        self._waiting = [prompt for prompt in self._waiting if not prompt.is_ended]
        self._parked.remove(lambda prompt: prompt.is_ended)
        self._is_admission_due = True
        ended = [prompt for prompt in self._computing if prompt.is_ended]
        for prompt in ended:
            if not prompt.num_in_flight:
                self._stop_computing(prompt)
        self._has_ended_prompts = any(prompt.num_in_flight for prompt in ended)

    def complete_step(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Apply the results of a plan's step, with the tokens drawn after each chunk."""
        self._count_in_flight(plan, -1)
        self.totals.prompt_step_s += result.seconds
        progress: list[Progress] = []
        for chunk, tokens in zip(plan.chunks, result.slices, strict=True):
            if tokens is None:
                continue
            prompt = chunk.prompt
            prompt.passes_s += result.seconds
            if not chunk.commit(self._cache):
                continue
            self.totals.computed_tokens += chunk.num_tokens
            if prompt.is_ended:
                continue
            progress += self._hand_over(prompt)
            if chunk.is_last:
                self._stop_computing(prompt)
                self.totals.generated_tokens += len(tokens)
                progress.append(FinishedPrompt(prompt=prompt, tokens=tokens))
        return progress

    def end_undrawn(self, plan: StepPlan, result: StepResult) -> list[Prompt]:
        """End the prompts for which no token could be drawn, and return them.

        The pages of their chunks are not committed, so that no prompt finds them in the cache.
        """
        computed = zip(plan.chunks, result.slices, strict=True)
        return self._end_all(chunk for chunk, tokens in computed if tokens is None)

    def fail_step(self, plan: StepPlan) -> list[Prompt]:
        """End all prompts of a failed step, and return them."""
        self._count_in_flight(plan, -1)
        return self._end_all(plan.chunks)

    def check_integrity(self) -> None:
        """Assert the invariants of the class."""
        self._cache.check_integrity()
        assert len(self._computing) <= self._config.max_computing_prompts, "too many prompts"
        arrivals = [prompt.arrival for prompt in self._waiting]
        assert arrivals == sorted(arrivals), "the queue is not in order of arrival"
        for prompt in (*self._waiting, *self._parked):
            assert prompt.state is PromptState.WAITING, "in the wrong queue"
            assert prompt.pages is None, "a waiting prompt holds pages"
        for prompt in self._computing:
            assert prompt.state is PromptState.COMPUTING, "in the wrong queue"
            assert prompt.pages is not None, "a computing prompt without pages"

    def _count_in_flight(self, plan: StepPlan, change: int) -> None:
        """Note that a step or a part of it was launched, 1, or is settled, -1."""
        for chunk in plan.chunks:
            chunk.count_in_flight(change)

    def _end_all(self, chunks: Iterable[Chunk]) -> list[Prompt]:
        ended = [chunk.prompt for chunk in chunks if not chunk.prompt.is_ended]
        for prompt in ended:
            self.end(prompt)
        return ended

    def _wait(self, prompt: Prompt) -> None:
        bisect.insort(self._waiting, prompt, key=lambda each: each.arrival)
        self._is_admission_due = True

    def _in_turn(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Return prompts in the order in which they are computed."""
        limit_s = self._config.max_overtaken_s
        return in_turn(prompts, now_s=self.totals.steps_s, max_overtaken_s=limit_s)

    def _admit(self) -> list[Prompt]:
        """Give pages to waiting prompts, and park those whose prefix is being computed."""
        admitted: list[Prompt] = []
        most = self._config.max_computing_prompts
        self._is_admission_due = False
        if len(self._computing) == most:
            return admitted
        for prompt in self._waiting[:NUM_REFRESHED]:
            self._match_or_park(prompt)
        num_waiting = len(self._waiting)
        for prompt in self._in_turn(self._waiting)[:MAX_LOOKS]:
            if len(self._computing) == most:
                return admitted
            num_left = prompt.num_left
            match = self._match_or_park(prompt)  # one admitted just now may compute its prefix
            if match is None:
                continue
            if prompt.num_left > num_left:  # its pages were evicted: others may go first
                self._is_admission_due = True
                continue
            if not self._reserve(prompt, match):
                return admitted  # others must not take the pages that this one waits for
            self._waiting.remove(prompt)
            self._computing.append(prompt)
            admitted.append(prompt)
        self._is_admission_due |= num_waiting > MAX_LOOKS  # the next step looks at more
        return admitted

    def _match_or_park(self, prompt: Prompt) -> PrefixMatch | None:
        """Look up a waiting prompt; park it and return None if its prefix is pending."""
        match = self._cache.match(prompt.tokens, prompt.salt)
        # Pending pages, too: as many as wait for a page may wake at once, too many for a look each.
        num_pages = match.num_ready_pages + match.num_pending_pages
        prompt.num_cached = prompt.num_computed = num_pages * self._page_size
        if match.last_pending_page is None:
            return match
        self._waiting.remove(prompt)
        self._parked.park(prompt, match.last_pending_page)
        return None

    def _reserve(self, prompt: Prompt, match: PrefixMatch) -> bool:
        try:
            pages = self._cache.reserve(prompt.tokens, prompt.salt, incoming=False, match=match)
        except OutOfPages:
            return False
        prompt.state = PromptState.COMPUTING
        prompt.pages = pages
        prompt.num_cached = pages.num_cached_pages * self._page_size
        if self._cache.hold_twin(pages, prompt.tokens):
            prompt.num_cached = len(prompt.tokens) - 1
        prompt.num_computed = prompt.num_cached
        self.totals.looked_up_tokens += len(prompt.tokens)
        self.totals.cached_tokens += prompt.num_cached
        return True

    def _hand_over(self, prompt: Prompt) -> list[ReadyPages]:
        """Return all finished pages, unless they are few and others follow."""
        assert prompt.pages is not None
        num_pages = num_pages_for(len(prompt.tokens), self._page_size)
        is_done = prompt.num_computed == len(prompt.tokens)
        num_ready = num_pages if is_done else prompt.num_computed // self._page_size
        fewest = self._config.chunk_pages
        most = max(fewest, self._config.max_chunk_pages)
        ready = []
        while prompt.num_handed_pages < num_ready:
            first_page = prompt.num_handed_pages
            end = min(first_page + most, num_ready)
            if end - first_page < fewest and not is_done:
                break
            prompt.num_handed_pages = end
            ready.append(
                ReadyPages(
                    prompt=prompt,
                    first_page=first_page,
                    page_ids=tuple(prompt.pages.page_ids[first_page:end]),
                    is_last=end == num_pages,
                )
            )
        return ready

    def _stop_computing(self, prompt: Prompt) -> None:
        """Release the pages: full ones stay in the tree, handed ones until they are read."""
        assert prompt.pages is not None
        assert not prompt.num_in_flight, "a step in flight touches its pages"
        self._computing.remove(prompt)
        if prompt.is_read and prompt.num_handed_pages > prompt.first_page:
            # One lease for all: each page is pinned once, however many chunks there are.
            prompt.lease = self._cache.lease(prompt.pages, prompt.num_handed_pages)
        self._cache.release(prompt.pages)
        self._is_admission_due = True
        prompt.pages = None
        prompt.state = PromptState.DONE
