"""A state machine that drives prefill scheduler and step loop; engine and transfers are fake.

Each page that is sent, each that stays in the cache and each token is compared with the oracle, so
a page that was shared, reused or overwritten wrongly shows; one that nobody holds is overwritten at
once. The step loop is the real one, and anything may happen before a call of its engine ends, well
or badly. What was sent is read late, also after the end of its prompt.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kv_cache.layout import num_pages_for
from llm_engine.engine_step import EngineStep
from llm_engine.sampling import SamplingParams
from prefill_worker.config import PrefillConfig
from prefill_worker.request import FinishedPrompt, Progress, Prompt, ReadyPages
from prefill_worker.scheduler import Scheduler
from prefill_worker.step_plan import StepPlan
from tests.support.fake_engine import (
    FakeModel,
    fake_tokens,
)
from tests.worker.held_engine import HeldEngine
from tests.worker.loop_machine import LoopMachine
from worker.errors import PassFailed, WorkerError

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

PageTable = tuple[int, ...]


def prompt_with(tokens: tuple[int, ...], **fields: Any) -> Prompt:
    return Prompt(
        **{
            "request_id": "r",
            "tokens": tokens,
            "prompt_len": len(tokens),
            "params": SamplingParams(max_tokens=1, ignore_eos=True),
            "choices": (0,),
            "first_page": 0,
            **fields,
        }
    )


class WatchedEngine(HeldEngine):
    """Knows prompts by their page tables: which share a step, and which were alone in a failed one.

    Attributes:
        failed_alone: Of prompts that were.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.failed_alone: set[PageTable] = set()

    @property
    def begun(self) -> list[list[PageTable]]:
        """Of each step in flight, also of one at its launch."""
        return [_page_tables(each.step) for each in self._begun]

    def _spoil_slots(self, begun: Any) -> None:
        super()._spoil_slots(begun)
        tables = _page_tables(begun.step)
        if len(tables) == 1:
            self.failed_alone.update(tables)


def _page_tables(step: EngineStep) -> list[PageTable]:
    return [tuple(each.page_ids) for each in step.slices]


class SchedulerMachine(LoopMachine):
    scheduler_class = Scheduler
    seen: ClassVar[Counter[str]] = Counter()
    engine: WatchedEngine

    def __init__(self) -> None:
        super().__init__(WatchedEngine(MODEL, num_pages=NUM_PAGES, page_size=PAGE_SIZE), MODEL)
        self.scheduler = self.scheduler_class(config=CONFIG, cache=self.cache, page_size=PAGE_SIZE)
        self.prompts: list[Prompt] = []
        self.done: set[Prompt] = set()  # finished, failed or cancelled
        self.num_sent: Counter[Prompt] = Counter()  # pages, with those that are not wanted
        self.unread: list[ReadyPages] = []  # sent; may be read until they are acknowledged
        self.loop = self.make_loop()

    # What may happen, in any order.

    @precondition(lambda self: not self.loop.is_over and len(self.alive) < 8)
    @rule(
        prefix_len=st.integers(0, 32),
        rest=st.lists(st.integers(33, 49), max_size=16),
        first_page=st.integers(0, 3),
        num_choices=st.integers(1, 3),
        is_tenant=st.booleans(),
        is_suspect=st.sampled_from([False, False, False, True]),
        is_arrival=st.booleans(),
    )
    def submit(
        self,
        prefix_len: int,
        rest: list[int],
        first_page: int,
        num_choices: int,
        is_tenant: bool,
        is_suspect: bool,
        is_arrival: bool,
    ) -> None:
        tokens = (*PREFIX[:prefix_len], *rest) or (1,)
        prompt = prompt_with(
            tokens,
            first_page=min(first_page, num_pages_for(len(tokens), PAGE_SIZE) - 1),
            choices=tuple(range(num_choices)),
            salt=b"tenant" if is_tenant else b"",
            cache_share=0.3 if is_tenant else 1.0,
            is_suspect=is_suspect,
        )
        self.prompts.append(prompt)
        self.num_sent[prompt] = prompt.first_page
        self.scheduler.submit(prompt)
        self.run_loop(is_arrival=is_arrival)

    @precondition(lambda self: self.unread)
    @rule(which=st.integers(0, 9))
    def acknowledge(self, which: int) -> None:
        """A receiver has some pages of a prompt."""
        prompt = self.unread.pop(which % len(self.unread)).prompt
        if prompt in self.done:
            self.seen["read after the end"] += prompt.is_ended
            self.end(prompt)
        self.run_loop()

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9), reads_on=st.booleans())
    def cancel(self, which: int, reads_on: bool) -> None:
        """A receiver leaves, or its transfer fails; what was sent may be read none the less."""
        prompt = self.alive[which % len(self.alive)]
        self.seen["cancelled"] += 1
        self.seen["cancelled in flight"] += prompt.num_in_flight > 0
        self.scheduler.end(prompt)
        if not reads_on:
            self.unread = [each for each in self.unread if each.prompt is not prompt]
        self.end(prompt)
        self.run_loop()

    # What the step loop asks for.

    def planned(self, plan: StepPlan) -> None:
        self.progressed(plan.ready)
        may_wait = not self.alive or self.engine.num_launched or self.unread or plan.is_partial
        assert may_wait or plan.chunks, "work is there, but none is done"
        assert plan.num_tokens <= CONFIG.max_step_tokens, "over the token budget"
        prompts = [chunk.prompt for chunk in plan.chunks]
        assert not any(prompt.is_ended for prompt in prompts), "a step for nobody"
        is_suspect = any(prompt.is_suspect for prompt in prompts)
        assert not is_suspect or len(prompts) == 1, "a suspect beside others"
        self.seen["steps alone"] += is_suspect
        self.seen["cached last pages"] += any(
            each.pages and each.pages.twin_copies for each in prompts
        )

    def progressed(self, progress: Sequence[Progress]) -> None:
        for each in progress:
            assert each.prompt not in self.done, "progress after the end"
            if isinstance(each, ReadyPages):
                self.take_pages(each)
            else:
                self.take_tokens(each)

    def failed(self, work: Prompt, error: WorkerError) -> None:
        assert work not in self.done, "a failure after the end"
        if isinstance(error, PassFailed) and not self.is_losing:
            assert work.pages is not None
            was_alone = tuple(work.pages.page_ids) in self.engine.failed_alone
            assert was_alone, "blamed for the failure of another"
        self.seen["failed"] += 1
        self.end(work)

    # How it runs.

    @property
    def alive(self) -> list[Prompt]:
        """Prompts of which something more may come."""
        return [prompt for prompt in self.prompts if prompt not in self.done]

    def end_all(self) -> None:
        for prompt in self.alive:
            self.scheduler.end(prompt)
            self.end(prompt)
        self.scheduler.free_ended()

    def end(self, prompt: Prompt) -> None:
        """No more pages come of it; its transfer ends with the last page that is read."""
        self.done.add(prompt)
        if not any(each.prompt is prompt for each in self.unread):
            self.scheduler.transfer_ended(prompt)

    def take_pages(self, ready: ReadyPages) -> None:
        prompt = ready.prompt
        assert ready.first_page == self.num_sent[prompt], "a gap, or a page that is not wanted"
        assert len(ready.page_ids) <= CONFIG.max_chunk_pages
        self.num_sent[prompt] += len(ready.page_ids)
        num_pages = num_pages_for(len(prompt.tokens), PAGE_SIZE)
        assert ready.is_last == (self.num_sent[prompt] == num_pages)
        self.check_contents(ready)
        self.unread.append(ready)

    def take_tokens(self, finished: FinishedPrompt) -> None:
        prompt = finished.prompt
        num_pages = num_pages_for(len(prompt.tokens), PAGE_SIZE)
        assert self.num_sent[prompt] == num_pages, "a page was not sent"
        for choice, token in zip(prompt.choices, finished.tokens, strict=True):
            expected = fake_tokens(prompt.tokens, prompt.params, model=MODEL, choice=choice)
            assert [token.token_id] == expected, "a wrong token"
        self.seen["finished"] += 1
        self.seen["cached"] += prompt.num_cached > 0
        self.seen["overtakes"] += any(each.arrival < prompt.arrival for each in self.alive)
        self.end(prompt)

    # What must hold.

    def check_others(self) -> None:
        for ready in self.unread:
            self.check_contents(ready)
        suspects = {tuple(p.pages.page_ids) for p in self.prompts if p.pages and p.is_suspect}
        begun = self.engine.begun
        is_alone = len(begun) < 2 or all(map(suspects.isdisjoint, begun))
        assert is_alone, "another step beside a suspect's"

    def check_contents(self, ready: ReadyPages) -> None:
        """Compare pages that a transfer may read with those that a right engine computes."""
        first = ready.first_page * PAGE_SIZE
        slots = MODEL.extend(MODEL.first_hash, ready.prompt.tokens)
        expected = b"".join(slots[first : first + len(ready.page_ids) * PAGE_SIZE])
        found = self.engine.storage.export_pages(ready.page_ids).tobytes()
        assert found[: len(expected)] == expected, "a page changed before it was read"

    def finish(self) -> None:
        for _ in range(20 * (len(self.prompts) + 1)):
            if self.executor.is_held:
                self.let_go(["well"], 0)
            while self.unread:
                self.acknowledge(0)
            self.is_consistent()
            if not self.alive and not self.executor.is_held:
                break
        assert not self.alive, "a prompt never finished"
        self.check_nothing_is_held()
        self.seen["over quota"] += self.cache.num_over_quota


def walk(machine: SchedulerMachine, seed: int, *, num_steps: int = 100) -> None:
    """Take a machine through steps chosen by weight, so that most prompts are computed soon."""
    rng = Random(seed)
    weights = {"let_go": 12, "submit": 6, "read": 4, "cancel": 0.5, "wait": 0.2, "end": 0.05}
    names, shares = zip(*weights.items(), strict=True)
    num_failing = rng.choice([0, 1, 1, 4])  # of 30 calls
    ends = ["well"] * 30 + ["badly"] * num_failing + ["undrawn"] * (num_failing > 0)
    try:
        for name in rng.choices(names, shares, k=num_steps):
            _step(machine, rng, name, ends)
            machine.is_consistent()
            if machine.loop.is_over:
                break
    except BaseException:
        machine.loop.close()
        raise
    machine.teardown()


def _step(machine: SchedulerMachine, rng: Random, name: str, ends: Sequence[str]) -> None:
    which = rng.randrange(10)
    if name == "submit" and len(machine.alive) < 5:
        machine.submit(
            prefix_len=rng.choice([rng.randint(0, 32), 4 * rng.randint(0, 8)]),
            rest=[rng.randint(33, 49) for _ in range(rng.choice([0, 0, rng.randint(1, 16)]))],
            first_page=rng.randint(0, 3),
            num_choices=rng.randint(1, 3),
            is_tenant=rng.random() < 0.2,
            is_suspect=rng.random() < 0.1,
            is_arrival=rng.random() < 0.3,
        )
    elif name == "let_go" and machine.executor.is_held:
        machine.let_go(rng.choices(ends, k=rng.randint(1, 4)), which % 3)
    elif name == "read" and machine.unread:
        machine.acknowledge(which)
    elif name == "cancel" and machine.alive:
        machine.cancel(which, reads_on=rng.random() < 0.5)
    elif name == "wait":
        machine.wait()
    elif name == "end" and machine.executor.is_held:
        machine.end_loop(rng.choice(["the device", "the loop"]))
