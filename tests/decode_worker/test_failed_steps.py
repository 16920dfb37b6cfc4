"""Steps that fail: what a late device still writes then, and what the engine knows of pages."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_worker.request import PrefillGroup, Request
from decode_worker.step_plan import StepPlan
from llm_engine.engine import Engine, ReadResult
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.load_engine import load_engine
from llm_engine.sampling import SampledToken, SamplingParams
from tests.decode_worker.serving import Serving, request_of
from tests.support.checkpoints import write_checkpoint
from worker.errors import PassFailed
from worker.identity import WorkerIdentity

PAGE_SIZE, NUM_PAGES = 8, 6
PREFILL = WorkerIdentity(worker_id="prefill-0", incarnation=1, address="")
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)


class LateDevice:
    """Writes all pages of a long prompt, some time after it was told to, and then has no memory."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self._launch: Callable[[EngineStep], ReadResult] = engine._runner.launch
        self._writes: list[list[int]] = []  # pages that are to be written
        self.num_written = 0  # pages
        patch.setattr(engine._runner, "launch", self.launch)
        patch.setattr(engine.storage, "synchronize", self.synchronize)

    def launch(self, step: EngineStep) -> ReadResult:
        page_ids = [list(each.page_ids) for each in step.slices if len(each.page_ids) == NUM_PAGES]
        if page_ids:
            self._writes += page_ids
            raise torch.OutOfMemoryError("planted")
        return self._launch(step)

    def synchronize(self) -> None:
        for page_ids in self._writes:
            self._engine.storage.words[page_ids] = -1
            self.num_written += len(page_ids)
        self._writes.clear()


class Receiving(Serving):
    """Receives prompts at once, and waits for no work of the device, as transfers do."""

    received: list[int]

    def planned(self, plan: StepPlan) -> None:
        for group in plan.receives:
            asyncio.get_running_loop().call_soon(self._receive, group)

    def _receive(self, group: PrefillGroup) -> None:
        assert group.pages is not None
        storage = self.executor.engine.storage
        self.received = list(group.pages.page_ids)
        storage.words[self.received] = 7
        self.scheduler.receive_committed(group, len(self.received))
        num_tokens = len(group.tokens)
        self.progressed(
            self.scheduler.receive_result(
                group,
                [SampledToken(token_id=1)],
                num_cached_tokens=0,
                num_computed_tokens=num_tokens,
            )
        )
        self.scheduler.receive_done(group, transfer_s=0.0, exposed_s=0.0)
        self.wake.set()


def test_pages_of_a_launch_that_failed_are_received_into_only_when_it_writes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no page for a probe, which would wait for the device."""
    write_checkpoint(tmp_path, "llama")
    engine = load_engine(tmp_path, page_size=PAGE_SIZE, num_pages=NUM_PAGES, device="cpu")
    device = LateDevice(engine, monkeypatch)
    serving = Receiving(engine)
    long_prompt = list(range(1, NUM_PAGES * PAGE_SIZE - 2))
    prompt = list(range(50, 50 + 2 * PAGE_SIZE))

    async def scenario() -> None:
        failing = asyncio.create_task(serving.ask(request_of(long_prompt, PARAMS)))
        await asyncio.sleep(0)  # it comes first
        received = request_of(prompt, PARAMS, candidates=(PREFILL,))
        answer = asyncio.create_task(serving.ask(received))
        with pytest.raises(PassFailed):
            await failing
        await answer

    serving.run(scenario())

    device.synchronize()
    assert device.num_written == NUM_PAGES
    assert len(serving.received) == 2
    assert bool((engine.storage.words[serving.received] == 7).all()), "written after it arrived"


class FailingOnce(Engine):
    """Fails the first step with two rows, behind which its younger request is to run alone.

    Attributes:
        suspect: The younger request; a remote prefill for another choice of it fails just then.
    """

    suspect: Request | None = None  # None: nothing fails

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.num_rows: deque[int] = deque()  # of steps that are not read

    def launch(self, step: EngineStep) -> None:
        super().launch(step)
        self.num_rows.append(len(step.decodes))

    def read(self) -> StepResult:
        result = super().read()
        num_rows = self.num_rows.popleft()
        if self.suspect is not None and num_rows == 2:
            self.suspect = None
            raise RuntimeError("planted")
        if self.suspect is not None and 2 in self.num_rows:
            self.suspect.num_failed_passes = 1
        return result


@pytest.mark.parametrize("num_tokens", [PAGE_SIZE - 1, PAGE_SIZE])
def test_a_step_alone_behind_one_that_fails_tells_the_engine_of_each_page_once(
    tmp_path: Path, num_tokens: int
) -> None:
    """It may have a new page, since it was planned before the other one failed."""
    write_checkpoint(tmp_path, "llama")
    engine = load_engine(tmp_path, page_size=PAGE_SIZE, num_pages=40, device="cpu")
    engine._runner.max_launched = 2
    failing = FailingOnce(engine.config, engine.storage, engine.decoder, engine._runner)

    def answer(*, fails: bool) -> list[list[int]]:
        serving = Serving(failing)
        older = request_of(list(range(1, 10)), replace(PARAMS, max_tokens=60))
        younger = request_of(list(range(20, 20 + num_tokens)), replace(PARAMS, max_tokens=40))
        failing.suspect = younger if fails else None

        async def scenario() -> list[list[int]]:
            first = asyncio.create_task(serving.ask(older))
            await asyncio.sleep(0)  # it is submitted
            while len(older.choices[0].output) < 4:
                await asyncio.sleep(0.001)
            tokens = await serving.ask(younger)
            await first
            return tokens

        return serving.run(scenario())

    expected = answer(fails=False)

    assert answer(fails=True) == expected
    assert failing.suspect is None, "nothing has failed"
