"""A state machine that drives decode scheduler and step loop; engine and transfers are fake.

Every token is compared with the oracle, so a page that was shared, reused or overwritten wrongly
shows; one that nobody holds is overwritten at once. The step loop is the real one. Each of its
calls of the engine waits until the machine lets it end, well or badly, and anything may happen
meanwhile: so also while a plan is made and not launched, and between two failures. So does each
piece of work on grammars. Transfers commit in pieces, fail, and write late into pages that are in
quarantine.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from decode_worker.config import DecodeConfig
from decode_worker.masks import TokenMasks
from decode_worker.request import Choice, PrefillGroup, Request, TokenDelta
from decode_worker.scheduler import Scheduler
from decode_worker.step_plan import StepPlan
from grammars.constraint import Constraint
from kv_cache.layout import num_pages_for
from kv_cache.page_pool import Quarantined
from llm_engine.drawing import next_draw
from llm_engine.sampling import SamplingParams, SequenceSlice
from tests.decode_worker.held_grammars import (
    VOCAB_SIZE,
    FakeGrammars,
    HeldThreads,
    allowed_after,
)
from tests.support.fake_engine import (
    FakeEngine,
    FakeModel,
    fake_tokens,
)
from tests.support.grammar_cases import regex
from tests.worker.held_engine import HeldEngine
from tests.worker.loop_machine import ENDS, LoopMachine
from worker.errors import InternalError, WorkerError
from worker.identity import ModelInfo, WorkerIdentity

MODEL = FakeModel(vocab_size=VOCAB_SIZE, eos_token_ids=(0,))
PAGE_SIZE = 4
NUM_PAGES = 14
MAX_CONTEXT_TOKENS = 40  # 10 pages
CANDIDATES = tuple(
    WorkerIdentity(worker_id=f"prefill-{index}", incarnation=1, address="") for index in range(2)
)
CONSTRAINTS = [regex("a"), regex("b")]
PREFIXES = [tuple(range(1 + 20 * i, 17 + 20 * i)) for i in range(2)]


@dataclass(eq=False)
class Transfer:
    """One attempt: the pages as a prefill worker would send them."""

    group: PrefillGroup
    contents: Any
    drawn: tuple[Any, ...]
    is_told: bool = False  # the drawn tokens were taken


@dataclass(eq=False)
class Quarantine:
    """Pages that a failed transfer writes into again and again, for some steps at least."""

    pages: tuple[Quarantined, ...]
    page_ids: tuple[int, ...]
    steps_left: int = 3


# Whether a thread meets a bug in a grammar.
RAISES = [False] * 15 + [True]


class SchedulerMachine(LoopMachine):
    scheduler_class = Scheduler
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__(HeldEngine(MODEL, num_pages=NUM_PAGES, page_size=PAGE_SIZE), MODEL)
        self.config = DecodeConfig(
            max_running_sequences=5, max_step_tokens=12, local_prefill_max_tokens=1
        )
        self.scheduler = self.scheduler_class(
            config=self.config,
            cache=self.cache,
            model=ModelInfo(
                name="fake",
                fingerprint=MODEL.fingerprint,
                vocab_size=MODEL.vocab_size,
                max_context_tokens=MAX_CONTEXT_TOKENS,
                eos_token_ids=MODEL.eos_token_ids,
            ),
            page_size=PAGE_SIZE,
            page_bytes=self.engine.storage.page_bytes,
            full_pass=self.engine.full_pass,
        )
        self.requests: list[Request] = []
        self.outputs: dict[tuple[Request, int], list[int]] = {}
        self.finished: set[Request] = set()
        self.cancelled: set[tuple[Request, int]] = set()
        self.transfers: list[Transfer] = []
        self.quarantines: list[Quarantine] = []
        self.loop = self.make_loop()
        self.waits_alone = False  # the newest plan is to run alone, and was made behind others
        self.threads = HeldThreads()
        grammars: Any = FakeGrammars()
        threads: Any = self.threads
        wake = self.loop.wake
        self.masks = TokenMasks(grammars, threads=threads, wake=wake, on_failure=self.failed)

    # What may happen, in any order.

    @precondition(
        lambda self: not self.loop.is_over and len(self.requests) - len(self.finished) < 8
    )
    @rule(
        prefix=st.sampled_from(PREFIXES),
        prefix_len=st.integers(0, 16),
        rest=st.lists(st.integers(1, 49), min_size=1, max_size=12),
        num_choices=st.integers(1, 3),
        max_tokens=st.integers(1, 16),
        is_remote=st.sampled_from([True, True, True, False]),
        seed=st.integers(0, 3),
        num_emitted=st.integers(0, 2),
        num_failed_passes=st.sampled_from([0, 0, 0, 1]),
        constraint=st.sampled_from([None] * 6 + CONSTRAINTS),
        is_arrival=st.booleans(),
    )
    def submit(
        self,
        prefix: tuple[int, ...],
        prefix_len: int,
        rest: list[int],
        num_choices: int,
        max_tokens: int,
        is_remote: bool,
        seed: int,
        num_emitted: int,
        num_failed_passes: int,
        constraint: Constraint | None,
        is_arrival: bool,
    ) -> None:
        prompt = (*prefix[:prefix_len], *rest)
        params = SamplingParams(seed=seed, max_tokens=max_tokens, constraint=constraint)
        request = Request(
            request_id=str(len(self.requests)),
            attempt=0,
            prompt=prompt,
            params=params,
            emitted={},
            candidates=CANDIDATES if is_remote else (),
            num_failed_passes=num_failed_passes,
        )
        for choice in range(num_choices):
            whole = self.oracle(request, choice)
            # Resumed with the first tokens, but never past the end.
            request.emitted[choice] = tuple(whole[: min(num_emitted, len(whole) - 1)])
            self.outputs[request, choice] = list(request.emitted[choice])
        self.requests.append(request)
        self.scheduler.submit(request)
        if constraint is not None:
            self.masks.follow(request.choices)
        self.run_loop(is_arrival=is_arrival)

    @precondition(lambda self: self.executor.is_held)
    @rule(which=st.integers(0, 4), ends=st.lists(st.sampled_from(ENDS), max_size=3))
    def fail_twice(self, which: int, ends: Sequence[str]) -> None:
        """Fail a pass of a prefill worker for a running request, and a step behind which it waits.

        From the first failure on the request computes alone, so its next plan is not launched until
        the older steps are settled.
        """
        has_failed = False
        for _ in range(12):
            if self.waits_alone or not self.executor.is_held:
                break
            running = [each for each in self.requests if any(c.pages for c in each.choices)]
            if running and self.engine.num_launched and not has_failed:
                has_failed = True
                running[which % len(running)].num_failed_passes = 1  # of a pass for another choice
            self.let_go(["well"], 0)
        if self.waits_alone:
            self.seen["failed before a step alone"] += 1
            self.let_go(["badly", *ends], 0)

    @precondition(lambda self: self.threads.is_held)
    @rule(which=st.lists(st.integers(0, 9), min_size=1, max_size=8), raises=st.sampled_from(RAISES))
    def compute_masks(self, which: Sequence[int], raises: bool) -> None:
        """Let pieces of work on grammars go on, the first one perhaps to an error."""
        for piece in which:
            if self.threads.is_held:
                self.threads.let_go(piece, RuntimeError("planted") if raises else None)
                raises = False
        self.run_loop()

    # What the step loop asks for.

    def planned(self, plan: StepPlan) -> None:
        self.check_plan(plan)
        for group in plan.receives:
            self.transfers.append(self.prefill(group))
        self.seen["steps alone"] += plan.is_alone
        self.waits_alone = plan.is_alone and self.engine.num_launched > 0
        may_wait = self.is_idle() or self.engine.num_launched or self.transfers or self.quarantines
        may_wait = may_wait or self.threads.is_held
        assert may_wait or not plan.is_empty, "work is there, but none is done"

    def progressed(self, progress: Sequence[TokenDelta]) -> None:
        self.take(progress)

    def before_step(self) -> None:
        running = [choice for each in self.requests for choice in each.choices if choice.pages]
        self.seen["superfluous rows"] += sum(each.is_ended for each in running)

    def failed(self, work: Request, error: WorkerError) -> None:
        self.seen["failed requests"] += 1
        self.seen["failed grammars"] += isinstance(error, InternalError)
        if work not in self.finished:
            self.forget(work)

    # How it runs.

    def before_end(self, end: str) -> None:
        super().before_end(end)
        self.seen[f"calls that end {end}"] += 1
        self.seen["failed steps with masks"] += end == "badly" and self.engine.has_masks
        self.write_late()

    def end_all(self) -> None:
        self.seen["lost engines"] += self.loop.error is not None
        for transfer in list(self.transfers):
            self.fail_transfer(transfer, may_be_written=False)
        for request in self.requests:
            if request not in self.finished:
                self.forget(request)
        self.scheduler.free_ended()

    # Transfers.

    @precondition(lambda self: self.transfers)
    @rule(
        which=st.integers(0, 9),
        share=st.integers(0, 4),
        then=st.sampled_from(["go on", "go on", "fail", "write late"]),
        tells_first=st.booleans(),
        is_pass=st.booleans(),
    )
    def move_pages(
        self, which: int, share: int, then: str, tells_first: bool, is_pass: bool
    ) -> None:
        transfer = self.transfers[which % len(self.transfers)]
        if tells_first:  # the first tokens come before the last page
            self.tell_result(transfer)
        pages = transfer.group.pages
        assert pages is not None
        num_pages = len(pages.page_ids)
        assert pages.num_committed_pages < num_pages, "more is committed than has arrived"
        num_left = num_pages - pages.num_committed_pages - (then != "go on")
        end = pages.num_committed_pages + num_left * share // 4
        self.receive(transfer, end)
        if then != "go on":
            # It runs alone from now on if a pass failed, which may be told while others run.
            transfer.group.request.num_failed_passes += is_pass
            self.fail_transfer(transfer, may_be_written=then == "write late")
        elif end == num_pages:
            self.finish_transfer(transfer)
        self.run_loop()

    def tell_result(self, transfer: Transfer) -> None:
        if transfer.is_told:
            return
        transfer.is_told = True
        self.take(
            self.scheduler.receive_result(
                transfer.group, transfer.drawn, num_cached_tokens=0, num_computed_tokens=0
            )
        )

    def write_late(self) -> None:
        for quarantine in self.quarantines:
            quarantine.steps_left -= 1
            for page_id in quarantine.page_ids:
                self.engine.storage.slots[page_id] = 0xEE

    @precondition(lambda self: self.quarantines)
    @rule()
    def end_quarantines(self) -> None:
        for quarantine in [each for each in self.quarantines if each.steps_left <= 0]:
            self.quarantines.remove(quarantine)
            self.scheduler.release_quarantine(quarantine.pages)
        self.run_loop()

    # Clients.

    @precondition(lambda self: len(self.requests) > len(self.finished))
    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        self.forget(self.alive(which))
        self.run_loop()

    @precondition(lambda self: len(self.requests) > len(self.finished))
    @rule(which=st.integers(0, 9), of_request=st.integers(0, 2))
    def cancel_choice(self, which: int, of_request: int) -> None:
        request = self.alive(which)
        choice = of_request % len(request.emitted)
        self.seen["cancelled choices"] += 1
        self.cancelled.add((request, choice))
        self.scheduler.end(request, {choice})
        if request.is_ended:
            self.forget(request)
        self.run_loop()

    def alive(self, which: int) -> Request:
        alive = [request for request in self.requests if request not in self.finished]
        return alive[which % len(alive)]

    def forget(self, request: Request) -> None:
        """End a request as the worker does."""
        self.finished.add(request)
        self.scheduler.end(request)
        request.choices = []

    # What must hold.

    def check_others(self) -> None:
        foreign = {page_id for each in self.quarantines for page_id in each.page_ids}
        for transfer in self.transfers:
            pages = transfer.group.pages
            assert pages is not None
            foreign.update(pages.page_ids[pages.num_committed_pages :])
        is_apart = foreign.isdisjoint(self.engine.written_pages())
        assert is_apart, "a step in flight and a transfer write the same page"

    def finish(self) -> None:
        for _ in range(60 * (len(self.requests) + 1)):
            if self.executor.is_held:
                self.let_go(["well"], 0)
            while self.threads.is_held:
                self.compute_masks([0], raises=False)
            for transfer in list(self.transfers):
                assert transfer.group.pages is not None
                self.receive(transfer, len(transfer.group.pages.page_ids))
                self.finish_transfer(transfer)
            for quarantine in self.quarantines:
                quarantine.steps_left = 0
            self.end_quarantines()
            self.is_consistent()
            if self.is_idle() and not self.executor.is_held:
                break
        assert len(self.finished) == len(self.requests), "a request never finished"
        self.check_nothing_is_held()

        totals = self.scheduler.totals
        self.seen["finished"] += len(self.finished)
        self.seen["preemptions"] += totals.preemptions
        self.seen["pages moved"] += totals.pages_moved
        self.seen["cached tokens"] += totals.cached_tokens

    def is_idle(self) -> bool:
        """Whether no request is left, not even one that only waits for its pages to be freed."""
        counts = self.cache.pool.counts()
        is_free = counts.free + counts.cached == counts.total
        return is_free and len(self.finished) == len(self.requests)

    def check_plan(self, plan: StepPlan) -> None:
        self.seen["copies"] += len(plan.copies)
        self.seen["shared steps"] += bool(plan.decodes and plan.chunks)
        self.seen["steps with masks"] += any(choice.allowed is not None for choice in plan.decodes)
        assert plan.num_tokens <= self.config.max_step_tokens, "over the token budget"
        choices: list[Choice] = [*plan.decodes]
        choices += [choice for chunk in plan.chunks for choice in chunk.prompt.choices]
        assert not any(choice.is_ended for choice in choices), "a step for an ended choice"
        for choice in plan.decodes:
            num_output = len(choice.output) + choice.num_unread
            assert num_output <= choice.request.params.max_tokens, "a step behind the length"

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        self.masks.progressed(deltas)
        for delta in deltas:
            assert delta.request not in self.finished, "a token after the end"
            assert (delta.request, delta.choice) not in self.cancelled, "a token for nobody"
            output = self.outputs[delta.request, delta.choice]
            assert delta.first_index == len(output), "a gap or a repetition"
            output += [token.token_id for token in delta.tokens]
            whole = self.oracle(delta.request, delta.choice)
            assert output == whole[: len(output)], "a wrong token"
            assert (delta.finish_reason is not None) == (len(output) == len(whole))
            if delta.is_last_of_request:
                self.forget(delta.request)

    def oracle(self, request: Request, choice: int) -> list[int]:
        return fake_tokens(
            request.prompt,
            request.params,
            model=MODEL,
            choice=choice,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            allowed_after=partial(allowed_after, request.params.constraint),
        )

    def finish_transfer(self, transfer: Transfer) -> None:
        self.transfers.remove(transfer)
        self.tell_result(transfer)
        self.scheduler.receive_done(transfer.group, transfer_s=0.0, exposed_s=0.0)

    def fail_transfer(self, transfer: Transfer, *, may_be_written: bool) -> None:
        self.seen["failed transfers"] += 1
        self.seen["failed after the first tokens"] += transfer.is_told
        self.transfers.remove(transfer)
        pages = transfer.group.pages
        assert pages is not None
        written = tuple(pages.page_ids[pages.num_committed_pages :])
        quarantined = self.scheduler.receive_failed(transfer.group, may_be_written=may_be_written)
        if may_be_written:
            is_told = [page.page_id for page in quarantined] == list(written)
            assert is_told or self.scheduler_class is not Scheduler
            self.quarantines.append(Quarantine(quarantined, written))

    def prefill(self, group: PrefillGroup) -> Transfer:
        """Compute a group's pages as a prefill worker does."""
        num_pages = num_pages_for(len(group.tokens), PAGE_SIZE)
        engine = FakeEngine(MODEL, num_pages=num_pages, page_size=PAGE_SIZE)
        draws = tuple(
            next_draw(
                group.request.params,
                choice=choice.index,
                prompt_token_ids=group.request.prompt,
                output_token_ids=choice.output,
                eos_token_ids=MODEL.eos_token_ids,
                allowed=allowed_after(group.request.params.constraint, choice.output),
            )
            for choice in group.choices
        )
        everything = SequenceSlice(
            token_ids=group.tokens,
            start=0,
            page_ids=range(num_pages),
            num_prompt_tokens=len(group.request.prompt),
            draws=draws,
        )
        drawn = engine.forward([everything])[0]
        return Transfer(group, engine.storage.export_pages(range(num_pages)), drawn)

    def receive(self, transfer: Transfer, end: int) -> None:
        pages = transfer.group.pages
        assert pages is not None
        begin = pages.num_committed_pages
        if begin < end:
            page_ids = pages.page_ids[begin:end]
            self.engine.storage.import_pages(page_ids, transfer.contents[begin:end])
            self.scheduler.receive_committed(transfer.group, end)


def walk(
    machine: SchedulerMachine, seed: int, *, has_masks: bool = False, num_steps: int = 100
) -> None:
    """Take a machine through steps chosen by weight.

    Hypothesis chooses evenly, so that few of its examples get far; here most requests run soon, and
    two failures come together often. With masks half of the requests have constraints, and fewer
    steps run ahead.
    """
    rng = Random(seed)
    weights = {"let_go": 12, "submit": 4, "move": 6, "twice": 3, "cancel": 0.3, "choice": 0.5}
    weights |= {"quarantine": 1, "wait": 0.2, "end": 0.05}
    if has_masks:
        weights["masks"] = 8
    names, shares = zip(*weights.items(), strict=True)
    num_failing = rng.choice([0, 1, 1, 4])  # of 30 calls
    try:
        for _ in range(num_steps):
            _step(machine, rng, rng.choices(names, shares)[0], num_failing, has_masks)
            machine.is_consistent()
            if machine.loop.is_over:
                break
    except BaseException:
        machine.loop.close()
        raise
    machine.teardown()


def _step(
    machine: SchedulerMachine, rng: Random, name: str, num_failing: int, has_masks: bool
) -> None:
    is_held, num_alive = machine.executor.is_held, len(machine.requests) - len(machine.finished)
    ends = ["well"] * 30 + ["badly"] * num_failing + ["undrawn"] * (num_failing > 0)
    which = rng.randrange(10)
    if name == "submit" and num_alive < 5:
        machine.submit(
            prefix=rng.choice(PREFIXES),
            prefix_len=rng.randint(0, 16),
            rest=[rng.randint(1, 49) for _ in range(rng.randint(1, 12))],
            num_choices=rng.choice([1, 1, 2, 3]),
            max_tokens=rng.randint(1, 24),
            is_remote=rng.random() < 0.5,
            seed=rng.randint(0, 3),
            num_emitted=rng.choice([0, 0, 1, 2]),
            num_failed_passes=rng.choice([0] * 7 + [1]),
            constraint=rng.choice([None, None, *CONSTRAINTS]) if has_masks else None,
            is_arrival=rng.random() < 0.3,
        )
    elif name == "let_go" and is_held:
        machine.let_go(rng.choices(ends, k=rng.randint(1, 4)), which % 3)
    elif name == "twice" and is_held:
        machine.fail_twice(which, rng.choices(["well", "well", "badly"], k=3))
    elif name == "masks" and machine.threads.is_held:
        machine.compute_masks(
            [rng.randrange(10) for _ in range(rng.randint(1, 12))], raises=rng.random() < 0.1
        )
    elif name == "end" and is_held:
        machine.end_loop(rng.choice(["the device", "the loop"]))
    elif name == "wait":
        machine.wait()
    elif name == "move" and machine.transfers:
        machine.move_pages(
            which=which,
            share=rng.choice([1, 2, 4, 4, 4]),
            then=rng.choice(["go on"] * 6 + ["fail", "write late"]),
            tells_first=rng.random() < 0.5,
            is_pass=rng.random() < 0.5,
        )
    elif name == "quarantine":
        machine.end_quarantines()
    elif name == "cancel" and num_alive:
        machine.cancel(which)
    elif name == "choice" and num_alive:
        machine.cancel_choice(which, rng.randint(0, 2))
