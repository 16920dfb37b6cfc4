"""Constraints do not occupy the threads that all need, and cancelled ones take none."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from decode_worker.masks import TokenMasks
from decode_worker.request import Choice, Request
from grammars.constraint import Constraint
from grammars.matcher import Matcher
from grammars.store import Grammars
from llm_engine.sampling import SamplingParams
from tests.decode_worker.harness import ScriptedRouter, WorkerCluster, prompt_of, run
from tests.support.grammar_cases import choice
from tests.support.virtual_time import run_virtual
from worker.background import BackgroundTasks
from worker.grammar_threads import MAX_RUNNING, GrammarThreads
from worker.wake import Wake

T = TypeVar("T")


class Threads:
    """Pretends to run functions in threads, for a second each."""

    def __init__(self) -> None:
        self.num_running = 0
        self.most_running = 0

    async def __call__(self, function: Callable[[], T], /) -> T:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(1.0)
        self.num_running -= 1
        return function()


def test_few_threads_work_on_the_constraints_of_many_requests() -> None:
    threads = Threads()

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = [
            await router.submit(prompt_of(8), constraint=choice(f"{number}"), ignore_eos=False)
            for number in range(20)
        ]
        await asyncio.gather(*(stream.ended.wait() for stream in streams))
        told = {each.failure.message for each in streams}
        assert len(told) == 1, "of a model without texts"
        assert "this worker has none" in told.pop()

    run(scenario, WorkerCluster(run_blocking=threads))
    assert threads.most_running <= MAX_RUNNING


def test_nothing_is_computed_for_choices_that_have_ended() -> None:
    begun: list[Constraint] = []

    class NotedGrammars(Grammars):
        def begin(self, constraint: Constraint, salt: bytes = b"") -> Matcher:
            begun.append(constraint)
            raise AssertionError

    async def main() -> None:
        tasks = BackgroundTasks()
        masks = TokenMasks(
            NotedGrammars(lambda: None, ()),  # type: ignore[arg-type,return-value]
            threads=GrammarThreads(Threads(), tasks),
            wake=Wake(),
            on_failure=lambda *_: None,
        )
        params = SamplingParams(constraint=choice("a"))
        request = Request(request_id="r", attempt=0, prompt=(1,), params=params, emitted={})
        request.choices = [Choice(request, index, [], is_ended=True) for index in range(64)]
        masks.follow(request.choices)
        await tasks.wait()
        assert not masks._busy

    run_virtual(main())
    assert not begun
