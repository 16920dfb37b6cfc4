"""The prefill scheduler: decisions as tables, and everything else by a state machine."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kv_cache.errors import CacheError
from kv_cache.page_pool import PagePool
from kv_cache.prefix_cache import PrefixCache, PrefixMatch
from llm_engine.engine_step import EngineStep
from prefill_worker.config import PrefillConfig
from prefill_worker.request import FinishedPrompt, Progress, Prompt, PromptState, ReadyPages
from prefill_worker.scheduler import MAX_LOOKS, NUM_REFRESHED, Scheduler
from prefill_worker.step_plan import Chunk, StepPlan
from tests.prefill_worker.scheduler_machine import (
    MODEL,
    NUM_PAGES,
    PAGE_SIZE,
    SchedulerMachine,
    prompt_with,
    walk,
)
from tests.support.fake_engine import FakeEngine
from tests.support.planted_bugs import Plant, Right, instead_of
from worker import step_loop
from worker.prompt_order import in_turn
from worker.suspects import SuspectTurns

SETTINGS = settings(
    stateful_step_count=70,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def no_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of failed steps, which take longer than all the rest."""
    monkeypatch.setattr(step_loop.logger, "disabled", True)


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let queues be longer than what is looked at, as they are under load."""
    monkeypatch.setattr("prefill_worker.scheduler.NUM_REFRESHED", 2)
    monkeypatch.setattr("prefill_worker.scheduler.MAX_LOOKS", 3)


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("max_examples", [100, pytest.param(1000, marks=pytest.mark.thorough)])
def test_state_machine(max_examples: int) -> None:
    SchedulerMachine.seen.clear()
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(SETTINGS, max_examples=max_examples)
    )
    check_seen("cached", "overtakes", "cancelled in flight", "read after the end", "steps alone")


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("num_seeds", [60, pytest.param(4000, marks=pytest.mark.thorough)])
def test_failures_at_any_moment_cost_no_page_and_no_right_token(num_seeds: int) -> None:
    SchedulerMachine.seen.clear()
    walk_all(num_seeds)
    check_seen(
        "failed", "dropped steps", "steps alone", "cached last pages", "probes", "over quota"
    )
    check_seen("cancelled in flight", "read after the end", "lost the loop", "lost the device")


def walk_all(num_seeds: int, machine: type[SchedulerMachine] = SchedulerMachine) -> None:
    for seed in range(num_seeds):
        walk(machine(), seed)


def check_seen(*things: str) -> None:
    """A run in which nothing happens would prove nothing."""
    seen = {each: SchedulerMachine.seen[each] for each in things}
    assert min(seen.values()) >= 2, seen


# Planted bugs: each must be found by few walks of the state machine.


class ForgetsLeases(Scheduler):
    def _stop_computing(self, prompt: Prompt) -> None:
        prompt.is_read = False
        super()._stop_computing(prompt)


class KeepsLeases(Scheduler):
    def transfer_ended(self, prompt: Prompt) -> None:
        pass


class LeasesWhatIsReadAlready(Scheduler):
    def transfer_ended(self, prompt: Prompt) -> None:
        super().transfer_ended(prompt)
        prompt.is_read = True


class ComputesPendingPages(Scheduler):
    def _match_or_park(self, prompt: Prompt) -> PrefixMatch:
        return self._cache.match(prompt.tokens, prompt.salt)


class OverTheBudget(Scheduler):
    def __init__(self, *, config: PrefillConfig, **options: Any) -> None:
        super().__init__(config=replace(config, max_step_tokens=10**9), **options)


class SendsUnwantedPages(Scheduler):
    def submit(self, prompt: Prompt) -> None:
        super().submit(prompt)
        prompt.num_handed_pages = 0


class ForgetsPartialPage(Scheduler):
    def _hand_over(self, prompt: Prompt) -> list[ReadyPages]:
        return [each for each in super()._hand_over(prompt) if not each.is_last]


class ForgetsCancelledPrompts(Scheduler):
    def free_ended(self) -> None:
        self._waiting = [prompt for prompt in self._waiting if not prompt.is_ended]


class ComputesForNobody(Scheduler):
    def free_ended(self) -> None:
        pass


class FreesPagesInFlight(Scheduler):
    def free_ended(self) -> None:
        for prompt in self._computing:
            if prompt.is_ended:
                prompt.num_in_flight = 0
        super().free_ended()


class ComputesChunksTwice(Scheduler):
    def next_step(self) -> StepPlan:
        for prompt in self._computing:
            prompt.num_launched = 0
        return super().next_step()


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize(
    "bug",
    [
        FreesPagesInFlight,
        ComputesChunksTwice,
        ForgetsLeases,
        KeepsLeases,
        LeasesWhatIsReadAlready,
        ComputesPendingPages,
        OverTheBudget,
        SendsUnwantedPages,
        ForgetsPartialPage,
        ForgetsCancelledPrompts,
        ComputesForNobody,
    ],
)
def test_walks_find_planted_bug(bug: type[Scheduler]) -> None:
    machine = type(f"{bug.__name__}Machine", (SchedulerMachine,), {"scheduler_class": bug})
    with pytest.raises((AssertionError, CacheError)):
        walk_all(20, machine)


# Planted bugs that show only where steps fail, or run alone.


@instead_of(Scheduler, "fail_step")
def pages_of_failed_steps_are_cached(right: Right, self: Scheduler, plan: StepPlan) -> Any:
    ended = right(self, plan)
    for chunk in plan.chunks:
        chunk.commit(self._cache)
    return ended


@instead_of(Chunk, "commit")
def what_followed_a_failed_step_is_cached(right: Right, self: Chunk, cache: PrefixCache) -> Any:
    if self.prompt.is_ended:
        self.prompt.num_computed = self.start
    return right(self, cache)


@instead_of(StepPlan, "engine_step")
def copies_are_made_once(right: Right, *args: Any, is_again: bool) -> EngineStep:
    """The step that failed has made them, and spoiled them."""
    step: EngineStep = right(*args, is_again=is_again)
    return replace(step, copies=()) if is_again else step


@instead_of(StepPlan, "halves")
def all_are_blamed_together(right: Right, self: StepPlan) -> tuple[StepPlan, ...]:
    return ()


@instead_of(Scheduler, "_end_all")
def who_has_left_is_told(right: Right, self: Scheduler, chunks: Iterable[Chunk]) -> list[Prompt]:
    chunks = list(chunks)
    right(self, chunks)
    return [chunk.prompt for chunk in chunks]


@instead_of(SuspectTurns, "next_pass")
def suspects_share_passes(right: Right, self: Any, ready: Any) -> Callable[[Prompt], bool]:
    return lambda prompt: True


def steps_of_suspects_run_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "is_alone", False)


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize(
    "plant",
    [
        pages_of_failed_steps_are_cached,
        what_followed_a_failed_step_is_cached,
        copies_are_made_once,
        all_are_blamed_together,
        who_has_left_is_told,
        suspects_share_passes,
        steps_of_suspects_run_ahead,
    ],
)
def test_walks_find_planted_bug_of_failures(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        walk_all(40)


class Scene:
    """A scheduler whose steps always succeed, and take 10 ms for each token."""

    def __init__(self, num_pages: int = NUM_PAGES, **config: Any) -> None:
        self.cache = PrefixCache(
            num_pages=num_pages, page_size=PAGE_SIZE, fingerprint=MODEL.fingerprint
        )
        self.engine = FakeEngine(MODEL, num_pages=num_pages, page_size=PAGE_SIZE)
        self.config = PrefillConfig(
            **{"max_step_tokens": 8, "chunk_pages": 2, "max_chunk_pages": 2, **config}
        )
        self.scheduler = Scheduler(config=self.config, cache=self.cache, page_size=PAGE_SIZE)

    def submit(self, *tokens: int, first_page: int = 0) -> Prompt:
        prompt = prompt_with(tokens, first_page=first_page)
        self.scheduler.submit(prompt)
        return prompt

    def finish_next(self) -> Prompt:
        """Step until a prompt is finished, and return it."""
        for _ in range(100):
            for progress in self.step():
                if isinstance(progress, FinishedPrompt):
                    self.scheduler.transfer_ended(progress.prompt)
                    return progress.prompt
        raise AssertionError("no prompt finished")

    def step(self) -> list[Progress]:
        plan = self.scheduler.next_step()
        self.engine.launch(plan.engine_step((), is_again=False))
        result = replace(self.engine.read(), seconds=plan.num_tokens / 100)
        return [*plan.ready, *self.scheduler.complete_step(plan, result)]


def test_a_short_prompt_overtakes_a_long_one_that_is_being_computed() -> None:
    scene = Scene(max_step_tokens=8)
    long = scene.submit(*range(1, 33))
    scene.step()

    short = scene.submit(41, 42)

    assert scene.finish_next() is short
    assert long.num_computed == 8 + 6


def test_a_short_prompt_overtakes_a_long_one_that_waits() -> None:
    scene = Scene(max_computing_prompts=1)
    first = scene.submit(*range(1, 20))
    scene.step()

    long, short = scene.submit(*range(2, 33)), scene.submit(41, 42)

    assert [scene.finish_next() for _ in range(3)] == [first, short, long]


def test_a_prompt_counts_by_what_is_not_cached() -> None:
    scene = Scene(max_computing_prompts=1)
    scene.submit(*range(1, 30))
    scene.finish_next()

    short, mostly_cached = scene.submit(40, 41, 42), scene.submit(*range(1, 30), 43)

    assert (short.num_left, mostly_cached.num_left) == (3, 2)
    assert mostly_cached.num_computed == mostly_cached.num_cached, "none was computed for it"
    assert scene.scheduler.num_queued_tokens == 3 + 2
    assert [scene.finish_next(), scene.finish_next()] == [mostly_cached, short]


def test_a_prompt_whose_prefix_was_computed_while_it_waited_goes_before_shorter_ones() -> None:
    scene = Scene(max_computing_prompts=1)
    prefix = range(1, 17)
    first, second, other = scene.submit(*prefix), scene.submit(*prefix, 40), scene.submit(50, 51)

    assert [scene.finish_next() for _ in range(3)] == [other, first, second]


def test_a_prompt_whose_prefix_was_computed_for_a_like_one_goes_before_shorter_ones() -> None:
    scene = Scene(max_computing_prompts=1)
    busy = scene.submit(*range(20, 40))
    scene.step()
    prefix = range(1, 17)
    first, second = scene.submit(*prefix), scene.submit(*prefix, 40)
    assert second.num_left == 17, "nothing of it is being computed"
    assert scene.finish_next() is busy
    scene.step()

    short = scene.submit(50, 51)

    assert [scene.finish_next() for _ in range(3)] == [first, second, short]


def test_a_prompt_goes_first_when_it_has_waited_for_the_limit() -> None:
    scene = Scene(max_computing_prompts=1, max_overtaken_s=0.08)
    long = scene.submit(*range(1, 25))
    for index in range(20):
        scene.submit(41 + index % 5, 30 + index)

    served = [scene.finish_next() for _ in range(10)]

    assert served.index(long) == 4


def test_the_oldest_goes_first_though_one_that_overtook_it_is_being_computed() -> None:
    scene = Scene(max_computing_prompts=2, max_overtaken_s=0.2)
    busy = [scene.submit(*range(1, 18)), scene.submit(*range(2, 20))]
    scene.step()
    old = scene.submit(*range(3, 30))
    scene.step()
    young = scene.submit(*range(4, 20))

    assert [scene.finish_next() for _ in range(4)] == [*busy, old, young]


def test_without_a_limit_a_prompt_would_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug shows that the scenario can fail."""
    monkeypatch.setattr("prefill_worker.scheduler.in_turn", partial(never_due, right=in_turn))

    with pytest.raises(ValueError, match="not in list"):
        test_a_prompt_goes_first_when_it_has_waited_for_the_limit()


def never_due(prompts: Any, *, now_s: float, max_overtaken_s: float, right: Any) -> Any:
    return right(prompts, now_s=now_s, max_overtaken_s=1e9)


def test_two_prompts_with_one_new_prefix_compute_it_once() -> None:
    scene = Scene()
    prefix = range(1, 17)
    scene.submit(*prefix, 40)
    second = scene.submit(*prefix, 41)
    for _ in range(6):
        scene.step()
    assert second.num_cached == 16
    assert scene.engine.num_computed_tokens == 17 + 1


def test_finished_chunks_are_handed_over_while_the_rest_is_computed() -> None:
    scene = Scene()
    scene.submit(*range(1, 22), first_page=1)
    handed = [
        [
            (p.first_page, len(p.page_ids), p.is_last)
            for p in scene.step()
            if isinstance(p, ReadyPages)
        ]
        for _ in range(3)
    ]
    # 8 tokens are computed in each step; page 0 is not wanted, the last page is partial.
    assert handed == [[], [(1, 2, False)], [(3, 2, False), (5, 1, True)]]


def test_of_a_cached_prompt_one_token_is_computed_in_one_step() -> None:
    scene = Scene()
    tokens = range(1, 4 * PAGE_SIZE + 1)  # no page is partial, so the last one has a twin
    scene.submit(*tokens)
    scene.finish_next()
    num_computed = scene.engine.num_computed_tokens

    again = scene.submit(*tokens)
    finished = [each.prompt for each in scene.step() if isinstance(each, FinishedPrompt)]

    assert finished == [again]
    assert again.num_cached == len(tokens) - 1
    assert scene.engine.num_computed_tokens == num_computed + 1


def test_cached_pages_are_handed_over_before_anything_is_computed() -> None:
    scene = Scene()
    scene.submit(*range(1, 18))
    scene.finish_next()
    scene.submit(*range(1, 18), 40)
    ready = scene.scheduler.next_step().ready
    assert [(p.first_page, len(p.page_ids)) for p in ready] == [(0, 2), (2, 2)]


def test_all_pages_that_are_ready_are_handed_over_together_up_to_the_most() -> None:
    scene = Scene(max_chunk_pages=3, max_step_tokens=30)
    scene.submit(*range(1, 40))
    computed = [(p.first_page, len(p.page_ids)) for p in scene.step() if isinstance(p, ReadyPages)]
    # 30 tokens are 7 pages: the third chunk would have a single page, and others follow.
    assert computed == [(0, 3), (3, 3)]
    scene.step()

    scene.submit(*range(1, 40), 45)
    cached = scene.scheduler.next_step().ready
    assert [(p.first_page, len(p.page_ids)) for p in cached] == [(0, 3), (3, 3), (6, 3)]


def test_a_prompt_without_pages_waits_until_transfers_end() -> None:
    scene = Scene(num_pages=6)
    first = scene.submit(*range(1, 18))
    for _ in range(3):
        scene.step()
    second = scene.submit(*range(20, 37))
    assert scene.step() == []
    assert second.state is PromptState.WAITING
    scene.scheduler.transfer_ended(first)
    scene.step()
    assert first.state is PromptState.DONE
    assert second.state is PromptState.COMPUTING


def test_a_long_prompt_pins_each_page_once_though_it_is_sent_in_many_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[int] = []
    for name in ("lease", "end_lease"):
        right = getattr(PagePool, name)

        def counting(self: PagePool, page_ids: Any, right: Any = right) -> None:
            pinned.extend(page_ids)
            right(self, page_ids)

        monkeypatch.setattr(PagePool, name, counting)
    scene = Scene(num_pages=500, max_step_tokens=100, chunk_pages=1, max_chunk_pages=1)
    prompt = scene.submit(*[1 + index % 40 for index in range(2000)])

    handed = [p for _ in range(20) for p in scene.step() if isinstance(p, ReadyPages)]
    scene.scheduler.transfer_ended(prompt)

    assert len(handed) == 500
    assert len(pinned) == 2 * 500


def count_matches(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the tokens of each look-up in the cache."""
    looked_up: list[int] = []
    right = PrefixCache.match

    def counting(self: PrefixCache, token_ids: Any, salt: bytes = b"") -> PrefixMatch:
        looked_up.append(len(token_ids))
        return right(self, token_ids, salt)

    patch.setattr(PrefixCache, "match", counting)
    return looked_up


def test_prompts_that_wait_for_one_prefix_hold_up_nobody_behind_them() -> None:
    scene = Scene(num_pages=400, max_computing_prompts=4)
    prefix = range(1, 33)
    scene.submit(*prefix, 40)
    scene.step()
    for index in range(60):
        scene.submit(*prefix, 41, 1 + index % 40, 2)
    other = scene.submit(*range(33, 41))

    for _ in range(2):
        scene.scheduler.next_step()

    assert other.state is PromptState.COMPUTING
    assert scene.scheduler.num_waiting == 60


def test_a_prompt_that_waits_for_a_prefix_is_looked_up_when_it_comes_and_when_it_may_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(num_pages=1000, max_computing_prompts=100, max_step_tokens=16)
    prefix = [1 + index % 40 for index in range(800)]
    scene.submit(*prefix, 40)
    looked_up = count_matches(monkeypatch)
    prompts = [scene.submit(*prefix, 41, 1 + index % 40, index // 40) for index in range(60)]

    for _ in range(60):
        scene.step()

    assert all(prompt.num_cached == 800 for prompt in prompts)
    # Three times each, parked, woken and picked, and the oldest ones in some steps; not with each
    # of 50 chunks.
    assert len(looked_up) <= 5 * 60


def test_of_many_prompts_that_wake_at_once_a_step_looks_up_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(num_pages=1000, max_step_tokens=100)
    prefix = range(1, 41)
    scene.submit(*prefix)
    plan = scene.scheduler.next_step()
    scene.engine.launch(plan.engine_step((), is_again=False))
    for index in range(200):
        scene.submit(*prefix, 1 + index % 40, 1 + index // 40)
    scene.scheduler.complete_step(plan, scene.engine.read())
    looked_up = count_matches(monkeypatch)

    assert scene.scheduler.next_step().chunks
    assert len(looked_up) <= NUM_REFRESHED + MAX_LOOKS
