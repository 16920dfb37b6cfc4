"""A real engine behind the decode worker's scheduler and step loop; there is no network."""

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from decode_worker.config import DecodeConfig
from decode_worker.request import Request, TokenDelta
from decode_worker.scheduler import Scheduler
from decode_worker.step_plan import StepPlan
from kv_cache.prefix_cache import PrefixCache
from llm_engine.engine import Engine
from llm_engine.sampling import SamplingParams
from worker.errors import WorkerError
from worker.executor import ThreadExecutor
from worker.host import probing
from worker.identity import ModelInfo, WorkerIdentity
from worker.step_loop import StepLoop
from worker.wake import Wake

Result = TypeVar("Result")


class Serving:
    """Implements worker.step_loop.StepListener, for one run of the loop.

    Args:
        engine: Runs in a thread of its own; its pages may be in any state.
        num_pages: That are used of the engine's; None: all.
        max_running_sequences: As in DecodeConfig; the engine has as many seats.
        max_step_tokens: As in DecodeConfig.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_pages: int | None = None,
        max_running_sequences: int = 16,
        max_step_tokens: int = 256,
    ) -> None:
        layout = engine.layout
        num_pages = num_pages or engine.storage.num_pages
        model = ModelInfo(
            name="tiny",
            fingerprint=layout.model_fingerprint,
            vocab_size=engine.config.vocab_size,
            max_context_tokens=engine.config.max_context_tokens,
            eos_token_ids=(),
        )
        self.cache = PrefixCache(
            num_pages=num_pages, page_size=layout.page_size, fingerprint=layout.model_fingerprint
        )
        self.scheduler = Scheduler(
            config=DecodeConfig(
                max_running_sequences=max_running_sequences,
                max_step_tokens=max_step_tokens,
                local_prefill_max_tokens=0,
            ),
            cache=self.cache,
            model=model.within(num_pages * layout.page_size),
            page_size=layout.page_size,
            page_bytes=layout.page_bytes,
            full_pass=engine.full_pass,
        )
        self.wake = Wake()
        self.executor = ThreadExecutor(engine, max_call_s=60.0)
        self.loop: StepLoop[StepPlan, Request, TokenDelta] = StepLoop(
            scheduler=self.scheduler,
            listener=self,
            executor=self.executor,
            eos_token_ids=(),
            before_step=self.before_step,
            wake=self.wake,
            make_probe=partial(probing, self.cache),
            max_failed_passes=3,
        )
        self._news: dict[Request, asyncio.Event] = {}  # set when there may be some
        self._errors: dict[Request, WorkerError] = {}

    def run(self, scenario: Coroutine[Any, Any, Result], *, timeout_s: float = 60.0) -> Result:
        """Step until a scenario has ended, and return its result."""
        return asyncio.run(self._run(scenario, timeout_s))

    async def ask(self, request: Request, *, cancel_after: int | None = None) -> list[list[int]]:
        """Return the tokens of each choice; with `cancel_after`, cancel when the first has so many.

        Raises:
            WorkerError: The request failed.
        """
        news = self._news[request] = asyncio.Event()
        self.scheduler.submit(request)
        # Not set_by_arrival: among so many arrivals no step would be launched ahead.
        self.wake.set()
        while not request.is_ended:
            await news.wait()
            news.clear()
            if cancel_after is not None and len(request.choices[0].output) >= cancel_after:
                self.scheduler.end(request)
                self.wake.set()
        del self._news[request]
        if error := self._errors.get(request):
            raise error
        return [list(choice.output) for choice in request.choices]

    def check_idle(self) -> None:
        """Assert that nobody holds a page any more; after `run`."""
        self.scheduler.free_ended()
        self.scheduler.check_integrity()
        counts = self.cache.pool.counts()
        assert counts.free + counts.cached == counts.total

    # What the step loop asks for.

    def before_step(self) -> None:
        """Do what a test wants to be done between steps."""

    def planned(self, plan: StepPlan) -> None:
        assert not plan.receives, "there is no prefill worker"

    def progressed(self, progress: Sequence[TokenDelta]) -> None:
        for delta in progress:
            self._tell(delta.request)

    def failed(self, work: Request, error: WorkerError) -> None:
        self._errors[work] = error
        self._tell(work)

    def _tell(self, request: Request) -> None:
        if request in self._news:
            self._news[request].set()

    async def _run(self, scenario: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        stepping = asyncio.create_task(self.loop.run())
        asking = asyncio.create_task(scenario)
        both: set[asyncio.Task[Any]] = {stepping, asking}
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in both:
                each.cancel()
            await asyncio.wait(both)
            self.executor.close()
        if not stepping.cancelled():
            stepping.result()  # raises the reason for its end
        return asking.result()


def request_of(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    n: int = 1,
    salt: bytes = b"",
    candidates: tuple[WorkerIdentity, ...] = (),
) -> Request:
    return Request(
        request_id=f"of {len(prompt)} tokens",
        attempt=0,
        prompt=tuple(prompt),
        params=params,
        emitted=dict.fromkeys(range(n), ()),
        salt=salt,
        candidates=candidates,
    )
