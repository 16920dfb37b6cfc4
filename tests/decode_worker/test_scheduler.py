"""The decode scheduler: decisions as tables, and everything else by a state machine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from decode_worker import masks
from decode_worker.config import DecodeConfig
from decode_worker.masks import TokenMasks
from decode_worker.request import (
    Choice,
    GroupState,
    PrefillGroup,
    Request,
    TokenDelta,
    group_by_tokens,
)
from decode_worker.scheduler import Scheduler, prefills_locally
from decode_worker.step_plan import StepPlan
from grammars.constraint import Constraint, ConstraintKind
from kv_cache.errors import CacheError
from kv_cache.prefix_cache import PrefixCache
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.sampling import SampledToken, SamplingParams
from tests.decode_worker.scheduler_machine import CANDIDATES, SchedulerMachine, walk
from tests.support.planted_bugs import Plant, Right, instead_of
from tests.support.rarely import rarely
from worker import step_loop
from worker.identity import ModelInfo, WorkerIdentity
from worker.step_loop import StepLoop

SETTINGS = settings(
    stateful_step_count=70,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# A planted bug only has to be found, not explained. In shorter examples it mostly is so sooner.
HUNT = settings(
    SETTINGS,
    max_examples=400,
    stateful_step_count=40,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


@pytest.fixture(autouse=True)
def no_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of failed steps, which take longer than all the rest."""
    monkeypatch.setattr(step_loop.logger, "disabled", True)
    monkeypatch.setattr(masks.logger, "disabled", True)


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let queues be longer than what is looked at, as they are under load."""
    monkeypatch.setattr("decode_worker.scheduler.ADMISSION_WINDOW", 2)


@pytest.mark.parametrize("max_examples", [100, pytest.param(1000, marks=pytest.mark.thorough)])
def test_state_machine(max_examples: int) -> None:
    SchedulerMachine.seen.clear()
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(SETTINGS, max_examples=max_examples)
    )
    seen = SchedulerMachine.seen
    # A run in which nothing happens would prove nothing.
    wanted = ["preemptions", "copies", "failed transfers", "shared steps", "steps ahead"]
    wanted += ["steps alone", "superfluous rows", "steps with masks"]
    missing = {each: seen[each] for each in wanted if seen[each] < 2}
    assert not missing, missing
    # How often Hypothesis loses the device differs between checkouts; walks are the same in all.
    walk_all(SchedulerMachine, 30)
    assert seen["lost the device"] >= 2, seen


@pytest.mark.parametrize(
    ("num_uncached", "has_candidate", "limit", "expected"),
    [
        (1, True, 0, False),
        (64, True, 64, True),
        (65, True, 64, False),
        (10_000, False, 64, True),
        (10_000, False, 0, True),
    ],
)
def test_a_prompt_is_prefilled_locally_when_it_is_short_or_nobody_else_can(
    num_uncached: int, has_candidate: bool, limit: int, expected: bool
) -> None:
    is_local = prefills_locally(
        num_uncached_tokens=num_uncached, has_candidate=has_candidate, max_local_tokens=limit
    )
    assert is_local is expected


def request_with(outputs: dict[int, tuple[int, ...]]) -> Request:
    request = Request(
        request_id="r",
        attempt=0,
        prompt=(1, 2),
        params=SamplingParams(),
        emitted=outputs,
        candidates=CANDIDATES,
    )
    request.choices = [Choice(request, index, list(output)) for index, output in outputs.items()]
    return request


def test_choices_with_equal_tokens_share_one_prefill() -> None:
    request = request_with({0: (), 1: (7,), 2: (), 3: (7, 8)})
    groups = group_by_tokens(request.choices)
    assert [[choice.index for choice in group.choices] for group in groups] == [[0, 2], [1], [3]]
    assert [list(group.tokens) for group in groups] == [[1, 2], [1, 2, 7], [1, 2, 7, 8]]


# Planted bugs: each must be found by the state machine.


class OverTheBudget(Scheduler):
    def __init__(self, *, config: DecodeConfig, **options: Any) -> None:
        more = replace(config, max_step_tokens=config.max_step_tokens + 3)
        super().__init__(config=more, **options)


class ForgetsQuarantine(Scheduler):
    def receive_failed(self, group: PrefillGroup, *, may_be_written: bool) -> tuple[Any, ...]:
        return super().receive_failed(group, may_be_written=False)

    def release_quarantine(self, pages: Any) -> None:
        pass


class ForgetsEndedChoices(Scheduler):
    def free_ended(self) -> None:
        self._waiting = [group for group in self._waiting if not group.is_ended]


class TakesFromTheOldest(Scheduler):
    def _youngest_after(self, choice: Choice) -> Choice | PrefillGroup | None:
        oldest = self._running[0]
        return None if oldest is choice else oldest


class NeverPreempts(Scheduler):
    def _youngest_after(self, choice: Choice) -> Choice | PrefillGroup | None:
        return None


class ForgetsWhatWasEmitted(Scheduler):
    def _wait_again(self, choice: Choice) -> None:
        choice.output.pop()
        super()._wait_again(choice)


class ForgetsCopies(Scheduler):
    def _join(self) -> list[Any]:
        super()._join()
        return []


class CommitsTooMuch(Scheduler):
    def receive_committed(self, group: PrefillGroup, num_pages: int) -> None:
        assert group.pages is not None
        super().receive_committed(group, min(num_pages + 1, len(group.pages.page_ids)))


class DropsFailedTransfers(Scheduler):
    def _wait(self, group: PrefillGroup) -> None:
        if not group.failed:
            super()._wait(group)
        else:
            group.state = GroupState.WAITING


class AdvancesEndedRequests(Scheduler):
    def complete_step(self, plan: Any, result: Any) -> list[TokenDelta]:
        is_ended = [choice.is_ended for choice in plan.decodes]
        deltas = super().complete_step(plan, result)
        for choice, was_ended in zip(plan.decodes, is_ended, strict=True):
            if was_ended:
                deltas.append(self._advance(choice, SampledToken(token_id=1)))
        return deltas


class FreesPagesInFlight(Scheduler):
    """Frees what ended at once, although a step in flight still writes behind its last token."""

    def free_ended(self) -> None:
        for choice in self._running:
            if choice.is_ended:
                choice.num_in_flight = 0
        super().free_ended()

    def check_integrity(self) -> None:
        pass


class FreesPromptsInFlight(Scheduler):
    def free_ended(self) -> None:
        for group in self._computing:
            if group.is_ended:
                group.num_in_flight = 0
        super().free_ended()

    def check_integrity(self) -> None:
        pass


class PlansBehindTheLength(Scheduler):
    def _is_last_token_launched(self, choice: Choice) -> bool:
        return False


class ComputesChunksTwice(Scheduler):
    def next_step(self) -> StepPlan:
        for group in self._computing:
            group.num_launched = 0
        return super().next_step()


class PreemptsInFlight(Scheduler):
    def _num_pages_due(self) -> int:
        return 0


class CommitsUnreadTokens(Scheduler):
    """Enters pages into the tree of which steps in flight have yet to draw the last token."""

    def _stop_running(self, choice: Choice) -> None:
        assert choice.pages is not None
        self._cache.insert(choice.pages, choice.tokens())
        super()._stop_running(choice)


class ForgetsNewPages(Scheduler):
    def next_step(self) -> StepPlan:
        plan = super().next_step()
        return replace(plan, extended=plan.extended[1:])


@pytest.mark.parametrize(
    "bug",
    [
        OverTheBudget,
        ForgetsQuarantine,
        ForgetsEndedChoices,
        TakesFromTheOldest,
        NeverPreempts,
        ForgetsWhatWasEmitted,
        ForgetsCopies,
        CommitsTooMuch,
        DropsFailedTransfers,
        AdvancesEndedRequests,
        PlansBehindTheLength,
        ComputesChunksTwice,
        CommitsUnreadTokens,
        ForgetsNewPages,
        *rarely(FreesPagesInFlight, FreesPromptsInFlight, PreemptsInFlight),
    ],
)
def test_state_machine_finds_planted_bug(bug: type[Scheduler]) -> None:
    machine = type(f"{bug.__name__}Machine", (SchedulerMachine,), {"scheduler_class": bug})
    # Where a step fails for the bug's sake, the end of the machine misses its result.
    with pytest.raises((AssertionError, CacheError, IndexError, ValueError)):
        run_state_machine_as_test(machine, settings=HUNT)


class AsPlanned:
    """A plan that is launched as it was planned, at first or again and again."""

    def __init__(self, plan: StepPlan, *, num_launches: int) -> None:
        self._plan = plan
        self._num_launches = num_launches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def engine_step(self, eos_token_ids: tuple[int, ...], *, is_again: bool) -> EngineStep:
        self._num_launches -= 1
        return self._plan.engine_step(eos_token_ids, is_again=self._num_launches < 0)


class AloneOnOldSeats(StepLoop[Any, Any, Any]):
    """Launches a step alone as it was planned, though an older one may have failed since."""

    async def _begin(self, plan: Any) -> None:
        await super()._begin(AsPlanned(plan, num_launches=1) if plan.is_alone else plan)


class AgainOnOldSeats(StepLoop[Any, Any, Any]):
    """What follows a failed step goes on from tokens that nobody read."""

    async def _begin(self, plan: Any) -> None:
        await super()._begin(plan if plan.is_alone else AsPlanned(plan, num_launches=100))


class LeavesStepsToRun(StepLoop[Any, Any, Any]):
    """Begins the halves of a failed step while one that was launched behind it runs."""

    async def _drop_launched(self) -> None:
        pass


class KeepsPagesOfUnlaunchedSteps(StepLoop[Any, Any, Any]):
    """Ends while a step waits to be launched alone, and leaves it planned for ever."""

    async def _begin(self, plan: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if plan.is_alone:
                fail_step = self._scheduler.fail_step
                patch.setattr(
                    self._scheduler,
                    "fail_step",
                    lambda failed: () if failed is plan else fail_step(failed),
                )
            await super()._begin(plan)


# (bug, seeds within which it is found)
LOOP_BUGS = [
    (AloneOnOldSeats, 200),
    (AgainOnOldSeats, 20),
    (LeavesStepsToRun, 20),
    (KeepsPagesOfUnlaunchedSteps, 200),
]


def walk_all(machine: type[SchedulerMachine], num_seeds: int, *, has_masks: bool = False) -> None:
    for seed in range(num_seeds):
        walk(machine(), seed, has_masks=has_masks)


@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize("num_seeds", [30, pytest.param(2000, marks=pytest.mark.thorough)])
def test_two_failures_at_once_cost_no_page_and_no_right_token(
    num_seeds: int, has_masks: bool
) -> None:
    SchedulerMachine.seen.clear()
    walk_all(SchedulerMachine, num_seeds, has_masks=has_masks)
    wanted = ["failed before a step alone", "dropped steps", "preemptions", "probes", "copies"]
    wanted += ["failed requests", "failed after the first tokens", "superfluous rows"]
    wanted += ["failed steps with masks", "failed grammars"] if has_masks else []
    assert min(SchedulerMachine.seen[each] for each in wanted) >= 5, SchedulerMachine.seen


@pytest.mark.parametrize(("bug", "num_seeds"), LOOP_BUGS)
def test_walks_find_planted_bug_of_the_loop(
    bug: type[StepLoop[Any, Any, Any]], num_seeds: int
) -> None:
    machine = type(f"{bug.__name__}Machine", (SchedulerMachine,), {"loop_class": bug})
    with pytest.raises((AssertionError, ValueError)):
        walk_all(machine, num_seeds)


@instead_of(Scheduler, "_advance")
def masks_outlive_their_tokens(right: Right, self: Scheduler, choice: Choice, token: Any) -> Any:
    """A choice need not wait for a mask, since it still has one."""
    allowed = choice.allowed
    delta = right(self, choice, token)
    choice.allowed = allowed
    return delta


@instead_of(TokenMasks, "_followed")
def late_masks_are_taken(right: Right, self: TokenMasks, text: Any, bug: Any) -> None:
    """A first token may have come from a prefill worker while the mask before it was computed."""
    text.output = tuple(text.choice.output)
    right(self, text, bug)


@instead_of(StepPlan, "engine_step")
def masks_are_of_other_seats(right: Right, *args: Any, **options: Any) -> Any:
    step = right(*args, **options)
    others = reversed(step.allowed.values())
    return replace(step, allowed=dict(zip(step.allowed, others, strict=True)))


@instead_of(StepPlan, "engine_step")
def steps_again_have_no_masks(right: Right, *args: Any, is_again: bool) -> Any:
    """What failed, or followed a failed step, is drawn as if there were no grammars."""
    step = right(*args, is_again=is_again)
    return replace(step, allowed={}) if is_again else step


# (bug, seeds within which it is found)
MASK_BUGS = [
    (masks_outlive_their_tokens, 5),
    (late_masks_are_taken, 40),
    (masks_are_of_other_seats, 20),
    (steps_again_have_no_masks, 20),
]


@pytest.mark.parametrize(("plant", "num_seeds"), MASK_BUGS)
def test_walks_find_planted_bug_of_masks(
    plant: Plant, num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="a wrong token"):
        walk_all(SchedulerMachine, num_seeds, has_masks=True)


def scheduler_with(
    num_pages: int,
    max_running_sequences: int = 64,
    full_pass: Callable[[int, int], int] = lambda num_decodes, most: most,
) -> Scheduler:
    """A scheduler that may compute four short prompts itself."""
    model = ModelInfo(
        name="m",
        fingerprint="f",
        vocab_size=1000,
        max_context_tokens=4 * num_pages,
        eos_token_ids=(),
    )
    return Scheduler(
        config=DecodeConfig(max_running_sequences=max_running_sequences, max_step_tokens=128),
        cache=PrefixCache(num_pages=num_pages, page_size=4, fingerprint="f"),
        model=model,
        page_size=4,
        page_bytes=1,
        full_pass=full_pass,
    )


def prompt_request(*tokens: int) -> Request:
    return Request(
        request_id="r",
        attempt=0,
        prompt=tokens,
        params=SamplingParams(max_tokens=2),
        emitted={0: ()},
        candidates=CANDIDATES,
    )


def test_requests_that_wait_for_one_prefix_hold_up_nobody_behind_them() -> None:
    scheduler = scheduler_with(num_pages=1000)
    prefix = range(100)
    scheduler.submit(prompt_request(*prefix, 100))
    [receiving] = scheduler.next_step().receives
    for index in range(60):
        scheduler.submit(prompt_request(*prefix, 200 + index))
    scheduler.submit(prompt_request(*range(500, 600)))

    # Looked at in portions, without anything happening in between.
    plans = [scheduler.next_step()]
    while plans[-1].is_partial:
        plans.append(scheduler.next_step())

    received = [group for plan in plans for group in plan.receives]
    assert [group.tokens[0] for group in received] == [500]
    assert len(plans) <= 1 + 61 // 2, "the window is two in these tests"
    assert scheduler.num_waiting == 62

    scheduler.receive_failed(receiving, may_be_written=False)
    assert [group.tokens[-1] for group in scheduler.next_step().receives] == [100]


def all_asked(scheduler: Scheduler) -> list[WorkerIdentity | None]:
    """Let each prefill worker that is asked for the only request fail."""
    asked = []
    while receives := scheduler.next_step().receives:
        [group] = receives
        asked.append(group.candidate)
        scheduler.receive_failed(group, may_be_written=False)
    return asked


@pytest.mark.parametrize("has_waited", [True, False])
def test_a_candidate_is_not_asked_if_another_start_of_it_was_named_while_the_request_waited(
    has_waited: bool,
) -> None:
    scheduler = scheduler_with(num_pages=100)
    first, second = CANDIDATES
    restarted = replace(first, incarnation=2)
    if has_waited:
        scheduler.submit(prompt_request(*range(100)))
        scheduler.meet([restarted])
        assert all_asked(scheduler) == [second, restarted]
    else:  # the request's router may have heard of still another start
        scheduler.meet([restarted])
        scheduler.submit(prompt_request(*range(100)))
        assert all_asked(scheduler) == [first, second, restarted]


def test_a_request_that_waits_for_a_prefix_is_not_looked_up_again_with_every_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = scheduler_with(num_pages=1000)
    prefix = range(400)
    scheduler.submit(prompt_request(*prefix, 400))
    [receiving] = scheduler.next_step().receives
    matches: list[int] = []
    right = PrefixCache.match
    monkeypatch.setattr(
        PrefixCache, "match", lambda self, *args: matches.append(1) or right(self, *args)
    )
    for index in range(20):
        scheduler.submit(prompt_request(*prefix, 500 + index))
    for num_pages in range(1, 101):
        scheduler.receive_committed(receiving, num_pages)
        while scheduler.next_step().is_partial:
            pass

    assert len(matches) <= 2 * 20 + 1
    assert scheduler.num_waiting == 21


def test_a_step_with_decodes_computes_prompt_tokens_of_a_full_pass() -> None:
    asked = []

    def full_pass(num_decodes: int, most: int) -> int:
        asked.append((num_decodes, most))
        return most - 1

    scheduler = scheduler_with(num_pages=64, full_pass=full_pass)
    first = prompt_request(1, 2, 3)
    scheduler.submit(replace(first, candidates=(), params=replace(first.params, max_tokens=3)))
    drawn = (SampledToken(token_id=4),)
    scheduler.complete_step(scheduler.next_step(), StepResult(decodes=[], slices=[drawn]))
    scheduler.complete_step(scheduler.next_step(), StepResult(decodes=[drawn[0]], slices=[]))
    assert asked == [], "no step had both"
    scheduler.submit(replace(prompt_request(*range(100, 120)), candidates=()))

    plan = scheduler.next_step()

    assert len(plan.decodes) == 1
    assert asked == [(1, 4)], "a page: what a step of unknown time may compute"
    assert [chunk.num_tokens for chunk in plan.chunks] == [3]


def test_a_suspect_that_waits_for_its_mask_takes_no_turn_from_others() -> None:
    scheduler = scheduler_with(num_pages=100)
    other, suspect = prompt_request(1, 2, 3), prompt_request(4, 5, 6)
    suspect.num_failed_passes = 1
    constraint = Constraint(kind=ConstraintKind.REGEX, text="x+")
    suspect.params = replace(suspect.params, constraint=constraint)
    scheduler.submit(suspect)
    scheduler.submit(other)

    plan = scheduler.next_step()

    assert [chunk.prompt.request for chunk in plan.chunks] == [other]


def test_a_request_that_ended_with_its_first_token_leaves_its_place_before_its_last_page() -> None:
    scheduler = scheduler_with(num_pages=1000, max_running_sequences=1)
    first = prompt_request(*range(100))
    first.params = replace(first.params, max_tokens=1)
    scheduler.submit(first)
    [group] = scheduler.next_step().receives
    scheduler.submit(prompt_request(*range(500, 600)))
    assert not scheduler.next_step().receives

    scheduler.receive_result(
        group, [SampledToken(token_id=7)], num_cached_tokens=0, num_computed_tokens=100
    )

    assert [each.tokens[0] for each in scheduler.next_step().receives] == [500]
