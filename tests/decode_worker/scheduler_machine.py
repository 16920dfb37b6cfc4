"""A state machine that drives the decode scheduler with a fake engine and fake transfers.

Every token is compared with the oracle, so a page that was shared, reused or overwritten wrongly
shows; one that nobody holds is overwritten at once. Up to two steps are in flight: anything may
happen between the launch of one and its end, when it reads and writes its pages. Transfers commit
in pieces, fail, and write late into pages that are in quarantine.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_worker.config import DecodeConfig
from decode_worker.request import Choice, PrefillGroup, Request, TokenDelta
from decode_worker.scheduler import Scheduler
from decode_worker.step_plan import StepPlan
from kv_cache.layout import num_pages_for
from kv_cache.page_pool import PageState, Quarantined
from kv_cache.prefix_cache import PrefixCache
from llm_engine.drawing import next_draw
from llm_engine.engine_step import StepResult
from llm_engine.sampling import SamplingParams, SequenceSlice
from tests.support.fake_engine import (
    FakeEngine,
    FakeModel,
    check_cached_pages,
    fake_tokens,
    overwrite_free_pages,
)
from worker.identity import ModelInfo, WorkerIdentity

MODEL = FakeModel(vocab_size=50, eos_token_ids=(0,))
PAGE_SIZE = 4
NUM_PAGES = 14
MAX_CONTEXT_TOKENS = 40  # 10 pages
CANDIDATES = tuple(
    WorkerIdentity(worker_id=f"prefill-{index}", incarnation=1, address="") for index in range(2)
)
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


# Whether a step fails, and then those that compute its halves and what followed it.
FAILURES = ((True,), (True, True), (True, False, True), (True,) * 6)
MAYBE_FAILURES = st.sampled_from([()] * 16 + [*FAILURES])


def pages_written_by(plan: StepPlan) -> set[int]:
    """Return the pages that the engine writes between the launch of a step and its end."""
    written = {copy.target for copy in plan.copies}
    for choice in plan.decodes:
        assert choice.pages is not None
        # Its step is counted already.
        written.add(choice.pages.page_ids[(choice.num_tokens + choice.num_unread - 2) // PAGE_SIZE])
    for chunk in plan.chunks:
        assert chunk.prompt.pages is not None
        end = num_pages_for(chunk.start + chunk.num_tokens, PAGE_SIZE)
        written.update(chunk.prompt.pages.page_ids[chunk.start // PAGE_SIZE : end])
    return written


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_class = Scheduler
    seen: ClassVar[Counter[str]] = Counter()  # what really happened, over all examples

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(MODEL, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        self.cache = PrefixCache(
            num_pages=NUM_PAGES, page_size=PAGE_SIZE, fingerprint=MODEL.fingerprint
        )
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
        )
        self.requests: list[Request] = []
        self.outputs: dict[tuple[Request, int], list[int]] = {}
        self.finished: set[Request] = set()
        self.cancelled: set[tuple[Request, int]] = set()
        self.transfers: list[Transfer] = []
        self.quarantines: list[Quarantine] = []
        self.plans: deque[StepPlan] = deque()  # launched, not settled
        self.written: deque[set[int]] = deque()  # page ids that each of them writes

    # What may happen, in any order.

    @precondition(lambda self: len(self.requests) - len(self.finished) < 8)
    @rule(
        prefix=st.sampled_from(PREFIXES),
        prefix_len=st.integers(0, 16),
        rest=st.lists(st.integers(1, 49), min_size=1, max_size=12),
        num_choices=st.integers(1, 3),
        max_tokens=st.integers(1, 16),
        is_remote=st.sampled_from([True, True, True, False]),
        seed=st.integers(0, 3),
        num_emitted=st.integers(0, 2),
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
    ) -> None:
        prompt = (*prefix[:prefix_len], *rest)
        params = SamplingParams(seed=seed, max_tokens=max_tokens)
        request = Request(
            request_id=str(len(self.requests)),
            attempt=0,
            prompt=prompt,
            params=params,
            emitted={},
            candidates=CANDIDATES if is_remote else (),
        )
        for choice in range(num_choices):
            whole = self.oracle(request, choice)
            # Resumed with the first tokens, but never past the end.
            request.emitted[choice] = tuple(whole[: min(num_emitted, len(whole) - 1)])
            self.outputs[request, choice] = list(request.emitted[choice])
        self.requests.append(request)
        self.scheduler.submit(request)

    @precondition(lambda self: len(self.plans) < self.engine.max_launched)
    @rule(fails=MAYBE_FAILURES)
    def begin_step(self, fails: Sequence[bool] = ()) -> None:
        plan = self.scheduler.next_step()
        self.write_late()
        self.check_plan(plan)
        for group in plan.receives:
            self.transfers.append(self.prefill(group))
        may_wait = self.is_idle() or self.plans or self.transfers or self.quarantines
        assert may_wait or not plan.is_empty, "work is there, but none is done"
        if plan.is_empty:
            return
        if fails:
            self.seen["failed launches"] += 1
            while self.plans:
                self.end_step()
            self.recover([plan], fails)
            return
        self.seen["steps ahead"] += bool(self.plans and plan.decodes)
        self.engine.launch(plan.engine_step(MODEL.eos_token_ids, is_again=False))
        self.plans.append(plan)
        self.written.append(pages_written_by(plan))

    @precondition(lambda self: len(self.plans) == 1)
    @rule(num_steps=st.integers(1, 6))
    def run_ahead(self, num_steps: int) -> None:
        """Launch each step before the one before it is settled, as the step loop does."""
        for _ in range(num_steps):
            self.begin_step()
            if self.plans:
                self.end_step()

    @precondition(lambda self: self.plans)
    @rule(fails=st.sampled_from(FAILURES))
    def fail_under_another(self, fails: Sequence[bool]) -> None:
        """Launch a step behind one that fails, unless there is one."""
        if len(self.plans) < self.engine.max_launched:
            self.begin_step()
        self.fail_step(fails)

    @precondition(lambda self: self.plans)
    @rule(undrawn=st.sampled_from([None] * 9 + [0, 1, 2]))
    def end_step(self, undrawn: int | None = None) -> None:
        self.written.popleft()
        self.settle(self.plans.popleft(), undrawn)

    @precondition(lambda self: self.plans)
    @rule(fails=st.sampled_from(FAILURES))
    def fail_step(self, fails: Sequence[bool]) -> None:
        self.seen["failed steps"] += 1
        self.seen["steps dropped"] += len(self.plans) - 1
        plans = list(self.plans)
        self.plans.clear()  # at once: what is wrong shows in a read, and must not show again
        for _ in plans:
            self.engine.read()  # so its seats mean nothing
        self.recover(plans, fails)
        self.written.clear()

    def recover(self, plans: Iterable[StepPlan], fails: Sequence[bool]) -> None:
        """Compute the first plan in halves, and those behind it again, as the step loop does.

        Args:
            fails: Of the first plan, then of those computed again, one after the other.
        """
        is_failing = iter(fails)
        due = deque(plans)
        while due:
            plan = due.popleft()
            if next(is_failing, False):
                halves = plan.halves()
                due.extendleft(reversed(halves))
                if not halves:
                    self.finished.update(self.scheduler.fail_step(plan))
            else:
                self.engine.launch(plan.engine_step(MODEL.eos_token_ids, is_again=True))
                self.settle(plan)
            self.scheduler.check_integrity()

    def settle(self, plan: StepPlan, undrawn: int | None = None) -> None:
        result = self.engine.read()
        decodes, slices = list(result.decodes), list(result.slices)
        for drawn in (decodes, slices):
            if undrawn is not None and undrawn < len(drawn):
                drawn[undrawn] = None
        result = StepResult(decodes=decodes, slices=slices)
        self.finished.update(self.scheduler.end_undrawn(plan, result))
        self.seen["superfluous rows"] += sum(choice.is_ended for choice in plan.decodes)
        self.take(self.scheduler.complete_step(plan, result))

    @precondition(lambda self: self.transfers)
    @rule(
        data=st.data(),
        then=st.sampled_from(["go on", "go on", "fail", "write late"]),
        tells_first=st.booleans(),
    )
    def move_pages(self, data: st.DataObject, then: str, tells_first: bool) -> None:
        transfer = data.draw(st.sampled_from(self.transfers))
        if tells_first:  # the first tokens come before the last page
            self.tell_result(transfer)
        pages = transfer.group.pages
        assert pages is not None
        num_pages = len(pages.page_ids)
        assert pages.num_committed_pages < num_pages, "more is committed than has arrived"
        end = data.draw(st.integers(pages.num_committed_pages, num_pages - (then != "go on")))
        self.receive(transfer, end)
        if then != "go on":
            self.fail_transfer(transfer, may_be_written=then == "write late")
        elif end == num_pages:
            self.finish_transfer(transfer)

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

    @precondition(lambda self: any(each.steps_left <= 0 for each in self.quarantines))
    @rule()
    def end_quarantines(self) -> None:
        for quarantine in [each for each in self.quarantines if each.steps_left <= 0]:
            self.quarantines.remove(quarantine)
            self.scheduler.release_quarantine(quarantine.pages)

    @precondition(lambda self: len(self.requests) > len(self.finished))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        alive = [request for request in self.requests if request not in self.finished]
        request = data.draw(st.sampled_from(alive))
        self.finished.add(request)
        self.scheduler.end(request)

    @precondition(lambda self: len(self.requests) > len(self.finished))
    @rule(data=st.data())
    def cancel_choice(self, data: st.DataObject) -> None:
        alive = [request for request in self.requests if request not in self.finished]
        request = data.draw(st.sampled_from(alive))
        choice = data.draw(st.sampled_from(sorted(request.emitted)))
        self.seen["cancelled choices"] += 1
        self.cancelled.add((request, choice))
        self.scheduler.end(request, {choice})
        if request.is_ended:
            self.finished.add(request)

    # What must hold.

    @invariant()
    def is_consistent(self) -> None:
        self.scheduler.check_integrity()
        check_cached_pages(self.cache, self.engine.storage, MODEL)
        for page_id in set().union(*self.written):
            is_kept = self.cache.pool.state(page_id) is PageState.LIVE
            assert is_kept, "a page that a step in flight writes was given back"
        overwrite_free_pages(self.cache, self.engine.storage)

    def teardown(self) -> None:
        """Everyone who was not cancelled finishes, within a number of steps that work explains."""
        for _ in range(60 * (len(self.requests) + 1)):
            if self.plans:
                self.end_step()
            for transfer in list(self.transfers):
                assert transfer.group.pages is not None
                self.receive(transfer, len(transfer.group.pages.page_ids))
                self.finish_transfer(transfer)
            self.end_quarantines()
            while len(self.plans) < self.engine.max_launched:
                num_plans = len(self.plans)
                self.begin_step()
                if len(self.plans) == num_plans:
                    break
            self.is_consistent()
            if self.is_idle():
                break
        assert len(self.finished) == len(self.requests), "a request never finished"
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        counts = self.cache.pool.counts()
        assert counts.free + counts.cached == counts.total, f"leaked: {counts}"

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
        assert plan.num_tokens <= self.config.max_step_tokens, "over the token budget"
        choices: list[Choice] = [*plan.decodes]
        choices += [choice for chunk in plan.chunks for choice in chunk.prompt.choices]
        assert not any(choice.is_ended for choice in choices), "a step for an ended choice"
        for choice in plan.decodes:
            num_output = len(choice.output) + choice.num_unread
            assert num_output <= choice.request.params.max_tokens, "a step behind the length"

    def take(self, deltas: list[TokenDelta]) -> None:
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
                self.finished.add(delta.request)
                self.scheduler.end(delta.request)

    def oracle(self, request: Request, choice: int) -> list[int]:
        return fake_tokens(
            request.prompt,
            request.params,
            model=MODEL,
            choice=choice,
            max_context_tokens=MAX_CONTEXT_TOKENS,
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
