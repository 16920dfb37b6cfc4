"""Decides on a prefill worker which prompts get pages, and what each step computes.

Pure: no clock, no task, no engine. The step loop calls `next_step`, runs the plan, and reports with
`complete_step`, after `end_undrawn`, or with `fail_step`; between the two no page that the plan
touches is given back.

Who goes first: the prompt with the longest cached prefix, because it costs least and its pages may
be evicted if it waits; but a prompt is passed over at most `max_overtakes` times while it could
run. A prompt whose next pages are being computed for another one waits for them, so nothing is
computed twice. An admitted prompt holds all pages that it will ever need: no two half-finished
prompts wait for each other.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv_cache.errors import OutOfPages
from kv_cache.layout import num_pages_for
from kv_cache.prefix_cache import Lease, PrefixCache
from llm_engine.sampling import Drawn
from llm_engine.worker_load import WorkerTotals
from prefill_worker.config import PrefillConfig
from prefill_worker.request import (
    FinishedPrompt,
    Progress,
    Prompt,
    PromptState,
    ReadyPages,
)
from prefill_worker.step_plan import PromptChunk, StepPlan

ADMISSION_WINDOW = 16  # waiting prompts looked at per admission; bounds the cost of a long queue


@dataclass(frozen=True, kw_only=True, slots=True)
class Runnable:
    """A waiting prompt that computes nothing twice if it is admitted now."""

    prompt: Prompt
    num_cached_pages: int


def pick_next(runnable: Sequence[Runnable], max_overtakes: int) -> Prompt | None:
    """Return the prompt to admit, of those that are runnable, oldest first."""
    for each in runnable:
        if each.prompt.num_overtakes >= max_overtakes:
            return each.prompt
    # max returns the first of equals: the oldest.
    best = max(runnable, key=lambda each: each.num_cached_pages, default=None)
    return best.prompt if best else None


class Scheduler:
    """All prompts of a prefill worker and who holds which pages.

    Invariants: a prompt is waiting, computing or neither; the queues are sorted by arrival and by
    admission; a computing prompt has all its pages.
    """

    def __init__(self, *, config: PrefillConfig, cache: PrefixCache, page_size: int) -> None:
        self.totals = WorkerTotals()
        self._config = config
        self._cache = cache
        self._page_size = page_size
        self._arrivals = itertools.count()
        self._waiting: list[Prompt] = []
        self._computing: list[Prompt] = []
        self._has_ended_prompts = False
        self._is_admission_due = False  # something changed that may let a waiting prompt in

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_computing(self) -> int:
        return len(self._computing)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that are not computed yet, cached ones of waiting prompts included."""
        prompts = itertools.chain(self._waiting, self._computing)
        return sum(len(prompt.tokens) - prompt.num_computed for prompt in prompts)

    def submit(self, prompt: Prompt) -> None:
        """Take a prompt that `admission.check_prompt` accepts."""
        prompt.arrival = next(self._arrivals)
        prompt.num_handed_pages = prompt.first_page
        self._waiting.append(prompt)
        self._is_admission_due = True

    def end(self, prompt: Prompt) -> None:
        """Cancel or fail a prompt: no later step computes it, then its pages are freed."""
        prompt.is_ended = True
        self._has_ended_prompts = True

    def release_lease(self, lease: Lease) -> None:
        """Unpin pages that the receiver has, or will never get."""
        self._cache.release_lease(lease)
        self._is_admission_due = True

    def next_step(self) -> StepPlan:
        """Free what ended, admit, and choose what the next step computes; may be nothing."""
        self.free_ended()
        admitted = self._admit()
        ready = [each for prompt in admitted for each in self._hand_over(prompt)]
        return StepPlan(chunks=tuple(self._pick_chunks()), ready=tuple(ready))

    def free_ended(self) -> None:
        """Free the pages of prompts that ended; only between steps."""
        if not self._has_ended_prompts:
            return
        self._has_ended_prompts = False
        self._waiting = [prompt for prompt in self._waiting if not prompt.is_ended]
        self._is_admission_due = True
        for prompt in [prompt for prompt in self._computing if prompt.is_ended]:
            self._stop_computing(prompt)

    def complete_step(self, plan: StepPlan, drawn: Sequence[Drawn]) -> list[Progress]:
        """Apply what a plan's pass computed, and drew after each chunk."""
        progress: list[Progress] = []
        for chunk, tokens in zip(plan.chunks, drawn, strict=True):
            if tokens is None:
                continue
            prompt = chunk.prompt
            assert prompt.pages is not None
            is_last = chunk.is_last
            prompt.num_computed += chunk.num_tokens
            self.totals.computed_tokens += chunk.num_tokens
            self._cache.commit(prompt.pages, prompt.num_computed // self._page_size)
            self._is_admission_due = True
            if prompt.is_ended:
                continue
            progress += self._hand_over(prompt)
            if is_last:
                self._stop_computing(prompt)
                self.totals.generated_tokens += len(tokens)
                progress.append(FinishedPrompt(prompt=prompt, tokens=tokens))
        return progress

    def end_undrawn(self, plan: StepPlan, drawn: Sequence[Drawn]) -> list[Prompt]:
        """End the prompts for which no token could be drawn, and return them.

        What their chunks computed is not committed, so that nobody finds it in the cache.
        """
        computed = zip(plan.chunks, drawn, strict=True)
        return self._end_all(chunk for chunk, tokens in computed if tokens is None)

    def fail_step(self, plan: StepPlan) -> list[Prompt]:
        """End all prompts that took part in a pass that failed, and return them."""
        return self._end_all(plan.chunks)

    def check_integrity(self) -> None:
        """Assert the invariants of the class."""
        self._cache.check_integrity()
        assert len(self._computing) <= self._config.max_computing_prompts, "too many prompts"
        arrivals = [prompt.arrival for prompt in self._waiting]
        assert arrivals == sorted(arrivals), "the queue is not in order of arrival"
        for prompt in self._waiting:
            assert prompt.state is PromptState.WAITING, "in the wrong queue"
            assert prompt.pages is None, "a waiting prompt holds pages"
        for prompt in self._computing:
            assert prompt.state is PromptState.COMPUTING, "in the wrong queue"
            assert prompt.pages is not None, "a computing prompt without pages"

    def _end_all(self, chunks: Iterable[PromptChunk]) -> list[Prompt]:
        ended = [chunk.prompt for chunk in chunks if not chunk.prompt.is_ended]
        for prompt in ended:
            self.end(prompt)
        return ended

    def _admit(self) -> list[Prompt]:
        admitted: list[Prompt] = []
        if not self._is_admission_due:
            return admitted
        self._is_admission_due = False
        while len(self._computing) < self._config.max_computing_prompts:
            prompt = pick_next(self._runnable(), self._config.max_overtakes)
            if prompt is None or not self._reserve(prompt):
                break  # others must not take the pages that this one waits for
            self._waiting.remove(prompt)
            self._computing.append(prompt)
            for other in self._waiting:
                if other.arrival > prompt.arrival:
                    break
                other.num_overtakes += 1
            admitted.append(prompt)
        return admitted

    def _runnable(self) -> list[Runnable]:
        found = []
        for prompt in self._waiting[:ADMISSION_WINDOW]:
            match = self._cache.match(prompt.tokens, prompt.salt)
            if not match.num_pending_pages:
                found.append(Runnable(prompt=prompt, num_cached_pages=match.num_ready_pages))
        return found

    def _reserve(self, prompt: Prompt) -> bool:
        try:
            pages = self._cache.reserve(prompt.tokens, prompt.salt, incoming=False)
        except OutOfPages:
            return False
        prompt.state = PromptState.COMPUTING
        prompt.pages = pages
        prompt.num_cached = prompt.num_computed = pages.num_cached_pages * self._page_size
        self.totals.looked_up_tokens += len(prompt.tokens)
        self.totals.cached_tokens += prompt.num_cached
        return True

    def _pick_chunks(self) -> list[PromptChunk]:
        budget = self._config.max_step_tokens
        chunks = []
        for prompt in self._computing:
            num_tokens = min(budget, len(prompt.tokens) - prompt.num_computed)
            if num_tokens == 0:
                break
            chunks.append(PromptChunk(prompt=prompt, num_tokens=num_tokens))
            budget -= num_tokens
        return chunks

    def _hand_over(self, prompt: Prompt) -> list[ReadyPages]:
        """Lease the finished pages that fill a chunk, or all that are left at the end."""
        assert prompt.pages is not None
        num_pages = num_pages_for(len(prompt.tokens), self._page_size)
        is_done = prompt.num_computed == len(prompt.tokens)
        num_ready = num_pages if is_done else prompt.num_computed // self._page_size
        chunk_pages = self._config.chunk_pages
        ready = []
        while prompt.num_handed_pages < num_ready:
            first_page = prompt.num_handed_pages
            end = min(first_page + chunk_pages, num_ready)
            if end - first_page < chunk_pages and not is_done:
                break
            prompt.num_handed_pages = end
            ready.append(
                ReadyPages(
                    prompt=prompt,
                    first_page=first_page,
                    is_last=end == num_pages,
                    lease=self._cache.lease(prompt.pages, first_page, end - first_page),
                )
            )
        return ready

    def _stop_computing(self, prompt: Prompt) -> None:
        """Give the pages back: full ones stay in the tree, leased ones stay until acknowledged."""
        assert prompt.pages is not None
        self._computing.remove(prompt)
        self._cache.release(prompt.pages)
        self._is_admission_due = True
        prompt.pages = None
        prompt.state = PromptState.DONE
