"""The prefill scheduler: order of admission, budget, one computation per page, leases."""

from collections import Counter, deque
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kv_cache.errors import CacheError
from kv_cache.layout import num_pages_for
from kv_cache.page_pool import PagePool
from kv_cache.prefix_cache import PrefixCache, PrefixMatch
from llm_engine.engine_step import StepResult
from llm_engine.sampling import SamplingParams
from prefill_worker.config import PrefillConfig
from prefill_worker.request import FinishedPrompt, Progress, Prompt, PromptState, ReadyPages
from prefill_worker.scheduler import MAX_LOOKS, NUM_REFRESHED, Scheduler
from prefill_worker.step_plan import StepPlan
from tests.support.fake_engine import FakeEngine, FakeModel, fake_tokens, overwrite_free_pages
from worker.prompt_order import in_turn

MODEL = FakeModel(vocab_size=50)
PAGE_SIZE = 4
NUM_PAGES = 24
PREFIX = tuple(range(1, 33))
CONFIG = PrefillConfig(
    max_step_tokens=10,
    max_computing_prompts=3,
    max_overtaken_s=0.3,
    chunk_pages=2,
    max_chunk_pages=3,
)


def prompt_with(
    tokens: tuple[int, ...], *, first_page: int = 0, choices: tuple[int, ...] = (0,)
) -> Prompt:
    return Prompt(
        request_id="r",
        tokens=tokens,
        prompt_len=len(tokens),
        params=SamplingParams(max_tokens=1, ignore_eos=True),
        choices=choices,
        first_page=first_page,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Drives the scheduler with a fake engine, up to two steps of it in flight.

    A receiver acknowledges or leaves at any time.
    """

    scheduler_class = Scheduler
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(MODEL, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        self.cache = PrefixCache(
            num_pages=NUM_PAGES, page_size=PAGE_SIZE, fingerprint=MODEL.fingerprint
        )
        self.scheduler = self.scheduler_class(config=CONFIG, cache=self.cache, page_size=PAGE_SIZE)
        self.prompts: list[Prompt] = []
        self.done: set[Prompt] = set()
        self.received: dict[Prompt, dict[int, Any]] = {}  # page of the prompt |-> contents
        self.unread: list[tuple[ReadyPages, Any]] = []  # handed over, with contents at that time
        self.plans: deque[StepPlan] = deque()  # launched, not settled

    @rule(
        prefix_len=st.integers(0, 32),
        rest=st.lists(st.integers(33, 49), min_size=1, max_size=16),
        first_page=st.integers(0, 3),
        num_choices=st.integers(1, 3),
    )
    def submit(self, prefix_len: int, rest: list[int], first_page: int, num_choices: int) -> None:
        tokens = (*PREFIX[:prefix_len], *rest)
        num_pages = num_pages_for(len(tokens), PAGE_SIZE)
        prompt = prompt_with(
            tokens,
            first_page=min(first_page, num_pages - 1),
            choices=tuple(range(num_choices)),
        )
        self.prompts.append(prompt)
        self.received[prompt] = {}
        self.scheduler.submit(prompt)

    @precondition(lambda self: len(self.plans) < self.engine.max_launched)
    @rule()
    def begin_step(self) -> None:
        waiting = {p for p in self.prompts if p.state is PromptState.WAITING and not p.is_ended}
        plan = self.scheduler.next_step()
        self.take(plan.ready)
        may_wait = not self.scheduler.num_waiting or self.unread or self.plans
        assert may_wait or plan.chunks, "work is there, but none is done"
        assert plan.num_tokens <= CONFIG.max_step_tokens, "over the token budget"
        assert not any(chunk.prompt.is_ended for chunk in plan.chunks), "a step for nobody"
        admitted = [p for p in waiting if p.state is PromptState.COMPUTING]
        self.seen["admitted"] += len(admitted)
        self.seen["cached"] += sum(p.num_cached > 0 for p in admitted)
        oldest = min((p.arrival for p in waiting.difference(admitted)), default=0)
        self.seen["overtakes"] += sum(p.arrival > oldest for p in admitted)
        if plan.chunks:
            self.seen["steps ahead"] += bool(self.plans)
            self.engine.launch(plan.engine_step((), is_again=False))
            self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule(
        fails=st.sampled_from([False] * 9 + [True]),
        undrawn=st.sampled_from([None] * 9 + [0, 1, 2]),
    )
    def end_step(self, fails: bool, undrawn: int | None = None) -> None:
        plan = self.plans.popleft()
        # The engine refuses a page that two prompts of a pass write.
        drawn = list(self.engine.read().slices)
        if fails:
            self.recover(plan)
            return
        if undrawn is not None and undrawn < len(drawn):
            drawn[undrawn] = None
        result = StepResult(decodes=(), slices=drawn, seconds=plan.num_tokens / 100)
        self.end(*self.scheduler.end_undrawn(plan, result))
        self.take(self.scheduler.complete_step(plan, result))

    def recover(self, plan: StepPlan) -> None:
        """Fail half of a plan; compute the other half, and what followed it, again."""
        dropped = list(self.plans)
        self.plans.clear()
        for _ in dropped:
            self.engine.read()
        failed, *others = plan.halves() or (plan,)
        self.end(*self.scheduler.fail_step(failed))
        for part in (*others, *dropped):
            self.engine.launch(part.engine_step((), is_again=True))
            self.plans.append(part)
            self.end_step(False)

    @precondition(lambda self: self.unread)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        self.read(data.draw(st.integers(0, len(self.unread) - 1)))

    @precondition(lambda self: len(self.prompts) > len(self.done))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from([p for p in self.prompts if p not in self.done]))
        self.scheduler.end(prompt)
        self.end(prompt)
        self.seen["cancelled"] += 1

    @invariant()
    def is_consistent(self) -> None:
        self.scheduler.check_integrity()
        overwrite_free_pages(self.cache, self.engine.storage)

    def teardown(self) -> None:
        for _ in range(20 * (len(self.prompts) + 1)):
            while self.plans:
                self.end_step(False)
            while self.unread:
                self.read(0)
            if len(self.done) == len(self.prompts):
                break
            self.begin_step()
            self.is_consistent()
        assert len(self.done) == len(self.prompts), "a prompt never finished"
        self.scheduler.next_step()
        counts = self.cache.pool.counts()
        assert counts.free + counts.cached == counts.total, f"leaked: {counts}"

    def take(self, progress: Any) -> None:
        for each in progress:
            assert each.prompt not in self.done, "progress after the end"
            if isinstance(each, ReadyPages):
                self.take_pages(each)
            else:
                self.take_tokens(each)

    def take_pages(self, ready: ReadyPages) -> None:
        pages = self.received[ready.prompt]
        expected = max(pages) + 1 if pages else ready.prompt.first_page
        assert ready.first_page == expected, "a gap, or a page that is not wanted"
        assert len(ready.page_ids) <= CONFIG.max_chunk_pages
        contents = self.engine.storage.export_pages(ready.page_ids)
        for index in range(len(ready.page_ids)):
            pages[ready.first_page + index] = contents[index]
        num_pages = num_pages_for(len(ready.prompt.tokens), PAGE_SIZE)
        assert ready.is_last == (max(pages) + 1 == num_pages)
        self.unread.append((ready, contents))

    def take_tokens(self, finished: FinishedPrompt) -> None:
        prompt = finished.prompt
        last_page = max(self.received[prompt], default=-1)
        assert last_page + 1 == num_pages_for(len(prompt.tokens), PAGE_SIZE)
        for choice, token in zip(prompt.choices, finished.tokens, strict=True):
            expected = fake_tokens(prompt.tokens, prompt.params, model=MODEL, choice=choice)
            assert [token.token_id] == expected, "a wrong token"
        self.end(prompt)
        self.seen["finished"] += 1

    def end(self, *prompts: Prompt) -> None:
        """No more pages come of these; their transfers end with the last page that is read."""
        self.done.update(prompts)
        reading = {ready.prompt for ready, _ in self.unread}
        for prompt in prompts:
            if prompt not in reading:
                self.scheduler.transfer_ended(prompt)

    def read(self, index: int) -> None:
        ready, contents = self.unread.pop(index)
        self.check_contents(ready, contents)
        if ready.prompt in self.done:
            self.end(ready.prompt)

    def check_contents(self, ready: ReadyPages, contents: Any) -> None:
        now = self.engine.storage.export_pages(ready.page_ids)
        last_len = (len(ready.prompt.tokens) - 1) % PAGE_SIZE + 1 if ready.is_last else PAGE_SIZE
        slot_bytes = now.shape[1] // PAGE_SIZE
        assert (now[:-1] == contents[:-1]).all(), "a page changed before it was read"
        used = last_len * slot_bytes
        assert (now[-1, :used] == contents[-1, :used]).all(), "a page changed before it was read"


SETTINGS = settings(
    max_examples=120,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
HUNT = settings(SETTINGS, max_examples=400, phases=[Phase.generate], report_multiple_bugs=False)


def test_state_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_worker.scheduler.NUM_REFRESHED", 2)
    monkeypatch.setattr("prefill_worker.scheduler.MAX_LOOKS", 3)
    SchedulerMachine.seen.clear()
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)
    seen = SchedulerMachine.seen
    assert min(seen.values()) > 50, seen
    things = {"admitted", "cached", "cancelled", "finished", "overtakes", "steps ahead"}
    assert seen.keys() == things


# Planted bugs: each must be found by the state machine.


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
def test_state_machine_finds_planted_bug(bug: type[Scheduler]) -> None:
    machine = type(f"{bug.__name__}Machine", (SchedulerMachine,), {"scheduler_class": bug})
    with pytest.raises((AssertionError, CacheError)):
        run_state_machine_as_test(machine, settings=HUNT)


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
