"""What the state machines of both schedulers have in common: an engine, a cache, the step loop."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_cache.page_pool import PageState
from kv_cache.prefix_cache import PrefixCache
from llm_engine.sampling import SequenceSlice
from tests.support.fake_engine import FakeModel, check_cached_pages, overwrite_free_pages
from tests.worker.held_engine import HeldEngine, HeldExecutor
from tests.worker.held_loop import HeldLoop
from worker.errors import EngineLost
from worker.host import probing
from worker.step_loop import StepLoop

# How a call of the engine ends.
ENDS = ["well"] * 12 + ["badly"] * 2 + ["undrawn"]


class LoopMachine(RuleBasedStateMachine):
    """Anything may happen before a call of the engine ends, well or badly.

    A subclass makes the scheduler, and then the loop, whose listener it is. It adds the rules of
    its requests.
    """

    loop_class: type[StepLoop[Any, Any, Any]] = StepLoop
    seen: ClassVar[Counter[str]]  # what really happened, over all examples
    scheduler: Any
    loop: HeldLoop

    def __init__(self, engine: HeldEngine, model: FakeModel) -> None:
        super().__init__()
        self.engine = engine
        self.model = model
        self.executor = HeldExecutor(engine)
        self.cache = PrefixCache(
            num_pages=engine.storage.num_pages,
            page_size=engine.layout.page_size,
            fingerprint=model.fingerprint,
        )
        self.is_losing = False  # the device or the loop
        self.has_ended = False

    def make_loop(self) -> HeldLoop:
        """Return the loop of the scheduler."""
        return HeldLoop(
            self.loop_class,
            self.executor,
            scheduler=self.scheduler,
            listener=self,
            eos_token_ids=self.model.eos_token_ids,
            before_step=self.before_step,
            make_probe=self.probe,
            max_failed_passes=3,
        )

    # What may happen, in any order.

    @precondition(lambda self: self.executor.is_held)
    @rule(ends=st.lists(st.sampled_from(ENDS), min_size=1, max_size=6), row=st.integers(0, 2))
    def let_go(self, ends: Sequence[str], row: int) -> None:
        """Let calls of the engine end, one after the other."""
        for end in ends:
            if not self.executor.is_held:
                break
            self.before_end(end)
            self.loop.end_call(end, row=row)
            self.run_loop()

    @precondition(lambda self: self.executor.is_held)
    @rule(loses=st.sampled_from(["nothing"] * 30 + ["the device", "the loop"]))
    def end_loop(self, loses: str) -> None:
        """Lose the device, or stop the loop as a worker does that ends."""
        if loses == "nothing":
            return
        self.seen[f"lost {loses}"] += 1
        self.is_losing = True
        if loses == "the device":
            self.loop.lose_device()
        else:
            self.loop.stop()
        self.run_loop()
        assert self.loop.is_over

    @rule()
    def wait(self) -> None:
        """Let time pass, so that an idle loop asks after the device."""
        self.run_loop(seconds=6.0)

    # What the step loop asks for.

    def before_step(self) -> None:
        """Look at what there is before a step is planned."""

    @contextmanager
    def probe(self) -> Iterator[SequenceSlice | None]:
        with probing(self.cache) as probe:
            self.seen["probes"] += probe is not None
            yield probe

    # How it runs.

    def before_end(self, end: str) -> None:
        """Count how a call of the engine ends."""
        is_ahead = self.engine.num_launched == 2
        self.seen["steps ahead"] += is_ahead
        self.seen["dropped steps"] += is_ahead and end == "badly"

    def run_loop(self, **options: Any) -> None:
        self.loop.run(**options)
        if self.loop.is_over and not self.has_ended:
            self.has_ended = True
            if self.loop.error is not None and not isinstance(self.loop.error, EngineLost):
                raise self.loop.error
            self.end_all()

    def end_all(self) -> None:
        """End everything as a worker does whose loop has ended."""
        raise NotImplementedError

    # What must hold.

    @invariant()
    def is_consistent(self) -> None:
        self.scheduler.check_integrity()
        check_cached_pages(self.cache, self.engine.storage, self.model)
        for page_id in self.engine.written_pages():
            is_kept = self.cache.pool.state(page_id) is PageState.LIVE
            assert is_kept, "a page that a step in flight writes was given back"
        self.check_others()
        overwrite_free_pages(self.cache, self.engine.storage)

    def check_others(self) -> None:
        """Check what else must hold, before all pages that nobody holds are overwritten."""
        raise NotImplementedError

    def check_nothing_is_held(self) -> None:
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        counts = self.cache.pool.counts()
        assert counts.free + counts.cached == counts.total, f"leaked: {counts}"

    def teardown(self) -> None:
        """Everyone who was not cancelled finishes, within a number of steps that work explains."""
        try:
            self.finish()
        finally:
            self.loop.close()

    def finish(self) -> None:
        raise NotImplementedError
