"""A fake engine on a late device, and an executor whose calls end when a test lets them.

A step that fails leaves what a real one may leave: nonsense in all that it writes, and seats that
mean nothing. What such a seat draws until it starts afresh is no token at all.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kv_cache.layout import num_pages_for
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.sampling import SampledToken
from tests.support.fake_engine import FakeEngine

NO_TOKEN = SampledToken(token_id=-1)
NONSENSE = 0xDD


class AcceleratorError(RuntimeError):
    """Named as torch's: an error that costs the process its device."""


@dataclass(frozen=True)
class _Begun:
    """A step whose launch has begun, and what it writes."""

    step: EngineStep
    pages: frozenset[int]  # copied to
    slots: tuple[tuple[int, int], ...]  # (page, offset) of each computed token

    def written_pages(self) -> set[int]:
        return {*self.pages, *(page_id for page_id, _ in self.slots)}


class HeldEngine(FakeEngine):
    """Knows page tables and lengths from launches alone, as llm_engine.device_batch does."""

    def __init__(self, *args: Any, page_size: int, **options: Any) -> None:
        super().__init__(*args, page_size=page_size, **options)
        self._page_size = page_size
        self._tables: dict[int, list[int]] = {}  # seat |-> page ids
        self._lengths: dict[int, int] = {}  # seat |-> tokens after the newest launch
        self._invalid: set[int] = set()  # seats of steps that failed
        self._invalid_later: set[int] = set()  # of a failed launch, once the step before it has run
        self._begun: deque[_Begun] = deque()  # not read; the newest may still be at its launch

    @property
    def num_launched(self) -> int:
        """Steps that are launched and not read."""
        return len(self._launched)

    @property
    def has_masks(self) -> bool:
        """Whether a step in flight has masks."""
        return any(each.step.allowed for each in self._begun)

    def written_pages(self) -> set[int]:
        """Return the pages that steps in flight write."""
        return set().union(*(each.written_pages() for each in self._begun))

    def begin(self, step: EngineStep) -> None:
        """Begin a launch, which `launch` or `fail_launch` ends."""
        for started in step.started:
            self._tables[started.seat] = []
            self._add_pages(started.seat, started.page_ids)
            self._lengths[started.seat] = started.num_tokens
        for extended in step.extended:
            self._add_pages(extended.seat, extended.page_ids)
        slots = []
        for seat in step.decodes:
            slots += self._slots(self._tables[seat], self._lengths[seat] - 1, 1)
            self._lengths[seat] += 1
        for each in step.slices:
            slots += self._slots(each.page_ids, each.start, len(each.token_ids))
        assert len(set(slots)) == len(slots), "two sequences of a step write the same slot"
        pages = frozenset(target for _, target in step.copies)
        self._begun.append(_Begun(step, pages, tuple(slots)))

    def fail_launch(self) -> None:
        """Fail half-way; what was launched until then runs behind older steps."""
        failed = self._begun.pop()
        self._spoil_slots(failed)
        if self._begun:
            self._invalid_later.update(failed.step.decodes)
        else:
            self._invalid.update(failed.step.decodes)

    def read(self) -> StepResult:
        begun = self._begun.popleft()
        self._invalid -= {each.seat for each in begun.step.started}
        if self._invalid.isdisjoint(begun.step.decodes):
            self._forget_seats_later()
            return super().read()
        # Behind a step that failed: dropped, unless the step loop is wrong.
        self._run_badly(begun)
        return StepResult(
            decodes=[NO_TOKEN] * len(begun.step.decodes),
            slices=[(NO_TOKEN,) * len(each.draws) for each in begun.step.slices],
        )

    def fail_read(self) -> None:
        """End the oldest step with an error."""
        self._run_badly(self._begun.popleft())

    def _run_badly(self, begun: _Begun) -> None:
        self._launched.popleft()
        self._seats.change(begun.step)
        self._invalid.update(begun.step.decodes)
        self._forget_seats_later()
        self._spoil_slots(begun)

    def _forget_seats_later(self) -> None:
        """Once the step before a failed launch has run, the seats of that launch mean nothing."""
        self._invalid |= self._invalid_later
        self._invalid_later.clear()

    def _spoil_slots(self, begun: _Begun) -> None:
        self._storage.slots[list(begun.pages)] = NONSENSE
        for page_id, offset in begun.slots:
            self._storage.slots[page_id, offset] = NONSENSE

    def _add_pages(self, seat: int, page_ids: Sequence[int]) -> None:
        self._tables[seat] += page_ids
        known = self._tables[seat]
        assert len(set(known)) == len(known), "a page stands twice in a page table"

    def _slots(self, page_ids: Sequence[int], start: int, num: int) -> list[tuple[int, int]]:
        assert num_pages_for(start + num, self._page_size) <= len(page_ids), "no room"
        places = (divmod(position, self._page_size) for position in range(start, start + num))
        return [(page_ids[index], offset) for index, offset in places]


@dataclass(frozen=True)
class _Held:
    outcome: "asyncio.Future[Any]"
    succeed: Callable[[], Any]
    fail: Callable[[], None]


class HeldExecutor:
    """Implements worker.executor.EngineExecutor; each launch and read waits for `let_go`.

    Attributes:
        is_closed: Calls end at once, whatever they are.
        bug: What a test's engine found wrong, which the step loop takes for a failed step.
    """

    def __init__(self, engine: HeldEngine) -> None:
        self.held_engine = engine
        self.is_closed = False
        self.bug: Exception | None = None
        self._held: _Held | None = None

    @property
    def engine(self) -> HeldEngine:
        return self.held_engine

    @property
    def is_held(self) -> bool:
        """Whether a call waits."""
        return self._held is not None

    def let_go(self, error: Exception | None = None, *, undrawn: int | None = None) -> None:
        """Let the call that waits end, with an error or without a token for one row."""
        held, self._held = self._held, None
        assert held is not None
        try:
            if error is not None:
                held.fail()
                raise error
            result = held.succeed()
        except Exception as raised:
            if raised is not error:
                self.bug = raised
            held.outcome.set_exception(raised)
            return
        if isinstance(result, StepResult) and undrawn is not None:
            result = _without_row(result, undrawn)
        held.outcome.set_result(result)

    async def launch(self, step: EngineStep) -> None:
        try:
            self.engine.begin(step)
        except Exception as bug:
            self.bug = bug
            raise
        await self._hold(lambda: self.engine.launch(step), self.engine.fail_launch)

    async def read(self) -> StepResult:
        result = await self._hold(self.engine.read, self.engine.fail_read)
        assert isinstance(result, StepResult)
        return result

    async def record_next(self) -> bool:
        return self.engine.record_next()

    async def _hold(self, succeed: Callable[[], Any], fail: Callable[[], None]) -> Any:
        assert self._held is None, "two calls at once"
        outcome = asyncio.get_running_loop().create_future()
        self._held = _Held(outcome, succeed, fail)
        if self.is_closed:
            self.let_go()
        try:
            return await outcome
        except asyncio.CancelledError:
            # What has begun cannot be stopped.
            if self._held is not None:
                self._held = None
                succeed()
            self.is_closed = True
            raise


def _without_row(result: StepResult, row: int) -> StepResult:
    decodes, slices = list(result.decodes), list(result.slices)
    for drawn in (decodes, slices):
        if row < len(drawn):
            drawn[row] = None  # type: ignore[call-overload]
    return replace(result, decodes=decodes, slices=slices)
