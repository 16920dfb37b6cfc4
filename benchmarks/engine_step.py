"""Times steps of one engine on the host's clock: run ahead, and one at a time.

    python -m benchmarks.engine_step --model DIR --out benchmarks/results/engine-step-X.json

`ms` is a step of an engine that launches each step before it reads the previous one;
`one_by_one_ms` is a step if each is read before the next is launched. Cases are
decode/BATCH@CONTEXT, and shared/BATCH,SHARED,OWN tokens; prefill/TOKENS@CONTEXT is a pass of that
many prompt tokens after a context in the pages, prefill/NxTOKENS@CONTEXT one of N such prompts, and
beside/BATCH@CONTEXT,TOKENS@CONTEXT a step of sequences that decode and a prompt. Pages hold random
values, and draws are greedy. Cases that need more pages than fit on the device are listed as not
run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.case_runs import selected
from benchmarks.measured_host import add_commit, conditions
from benchmarks.result_file import write_result
from kv_cache.layout import num_pages_for
from llm_engine.engine import Engine
from llm_engine.engine_step import EngineStep, SeatPages, SeatStart
from llm_engine.load_engine import load_engine
from llm_engine.sampling import Draw, SamplingParams, SequenceSlice

# Measures steps: of an engine, by what launches one, with the name of the case and repetitions
Measure = Callable[[Engine, Callable[[], None], str, int], dict[str, Any]]

WARM_UP_STEPS = 4  # the first of a kind loads what it needs, the second is recorded
ROOM_FOR_STEPS = 192  # tokens of each sequence of a case for which the pool must have room
GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20)


class Run(NamedTuple):
    """How one case runs."""

    name: str
    num_pages: int  # that it may need
    run: Callable[[int], dict[str, Any]]  # by its repetitions


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Sequences that have `shared` tokens in common and `own` tokens for themselves."""

    batch: int
    shared: int
    own: int

    @property
    def name(self) -> str:
        if self.shared:
            return f"shared/{self.batch},{self.shared},{self.own}"
        return f"decode/{self.batch}@{self.own}"

    def num_pages(self, page_size: int) -> int:
        """Return the pages that it may need."""
        own = num_pages_for(self.own + ROOM_FOR_STEPS, page_size)
        return num_pages_for(self.shared, page_size) + self.batch * own


CASES = (
    *(Case(batch=batch, shared=0, own=1024) for batch in (1, 8, 16, 32, 64, 128, 256)),
    Case(batch=64, shared=0, own=8192),
    Case(batch=16, shared=0, own=32_768),
    Case(batch=64, shared=8192, own=256),
    Case(batch=256, shared=8192, own=128),
    Case(batch=64, shared=32_768, own=256),
)


class Prompts(NamedTuple):
    """Prompts of which a pass computes the last tokens."""

    tokens: int
    context: int  # tokens before these
    number: int = 1  # of prompts

    @property
    def name(self) -> str:
        each = f"{self.tokens}@{self.context}"
        return f"prefill/{self.number}x{each}" if self.number > 1 else f"prefill/{each}"

    def num_pages(self, page_size: int) -> int:
        """Return the pages of all prompts."""
        return self.number * num_pages_for(self.context + self.tokens, page_size)


PROMPTS = (
    *(Prompts(1, context) for context in (1023, 8191, 32_767)),
    *(Prompts(1, 1023, count) for count in (8, 32)),  # cached prompts that come at once
    *(Prompts(tokens, 0) for tokens in (16, 64, 128, 256, 384, 512, 640, 768, 1024, 2048)),
    Prompts(256, 8192),
    Prompts(2048, 30_720),
)

# Numbers of sequences of 1,024 tokens that decode, and of prompt tokens after 1,024 others. Of the
# latter, 1,024 have a pass of their own.
BESIDE = (
    *((16, 1), (16, 64), (16, 256)),
    *((64, 4), (64, 64), (64, 256), (64, 512), (64, 960), (64, 1024)),
    *((192, 832), (256, 16)),
)
BESIDE_CONTEXT = 1024


def beside_name(batch: int, tokens: int) -> str:
    """Name the case of `batch` sequences that decode beside `tokens` of a prompt."""
    return f"beside/{batch}@{BESIDE_CONTEXT},{tokens}@{BESIDE_CONTEXT}"


def one_by_one_ms(engine: Engine, launch: Callable[[], None], count: int) -> float:
    """Return the median of `count` steps, in ms, each read before the next is launched."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        launch()
        engine.read()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def ahead_ms(engine: Engine, launch: Callable[[], None], count: int) -> float:
    """Return the mean of `count` steps, each launched before the previous one is read."""
    launch()
    started = time.perf_counter()
    for _ in range(count):
        launch()
        engine.read()
    seconds = time.perf_counter() - started
    engine.read()
    return 1e3 * seconds / count


class Steps:
    """The steps of one case: sequences take seats at once and get a page when they need it."""

    def __init__(
        self,
        engine: Engine,
        case: Case,
        first_page: int = 0,
        slices: tuple[SequenceSlice, ...] = (),
    ) -> None:
        self._engine = engine
        self._slices = slices  # of each step
        self._page_size = page_size = engine.layout.page_size
        self._lengths = [case.shared + case.own] * case.batch
        num_shared = case.shared // page_size
        shared = list(range(first_page, first_page + num_shared))
        self._next_page = first_page + num_shared
        self._num_pages = [num_pages_for(case.shared + case.own, page_size)] * case.batch
        self._seats = tuple(range(case.batch))
        self._started: tuple[SeatStart, ...] = tuple(
            SeatStart(
                seat=seat,
                prompt_token_ids=[1] * (case.shared + case.own - 1),
                output_token_ids=[seat % 100],
                page_ids=shared + self._pages(self._num_pages[seat] - num_shared),
                params=GREEDY,
                choice=0,
                eos_token_ids=(),
            )
            for seat in self._seats
        )

    def end(self) -> None:
        """Give all seats back."""
        self._engine.launch(EngineStep(ended=self._seats))
        self._engine.read()

    def launch(self) -> None:
        """Launch the next step of all sequences."""
        extended = []
        for seat, length in enumerate(self._lengths):
            if num_pages_for(length, self._page_size) > self._num_pages[seat]:
                self._num_pages[seat] += 1
                extended.append(SeatPages(seat=seat, page_ids=tuple(self._pages(1))))
            self._lengths[seat] += 1
        self._engine.launch(
            EngineStep(
                started=self._started,
                extended=tuple(extended),
                decodes=self._seats,
                slices=self._slices,
            )
        )
        self._started = ()

    def _pages(self, count: int) -> list[int]:
        first = self._next_page
        self._next_page += count
        num_pages = self._engine.storage.num_pages
        assert self._next_page <= num_pages, "the pool is too small for the case"
        # Consecutive pages are far apart in the pool, as after long service; strides are odd.
        return [page_id * 4099 % num_pages for page_id in range(first, self._next_page)]


def run_case(engine: Engine, case: Case, repetitions: int, *, measure: Measure) -> dict[str, Any]:
    """Measure steps that decode."""
    steps = Steps(engine, case)
    result = measure(engine, steps.launch, case.name, repetitions)
    steps.end()
    return result


def timed(
    engine: Engine, launch: Callable[[], None], name: str, repetitions: int
) -> dict[str, Any]:
    """Time steps of one kind, both ways."""
    one_by_one_ms(engine, launch, WARM_UP_STEPS)
    return {
        "case": name,
        "one_by_one_ms": round(one_by_one_ms(engine, launch, repetitions), 3),
        "ms": round(ahead_ms(engine, launch, repetitions), 3),
    }


def run_prompts(
    engine: Engine, prompts: Prompts, repetitions: int, *, measure: Measure
) -> dict[str, Any]:
    """Measure passes over the ends of prompts, after each of which a token is drawn."""
    step = EngineStep(slices=ends_of_prompts(engine, prompts))
    return measure(engine, partial(engine.launch, step), prompts.name, repetitions)


def run_beside(engine: Engine, batch: int, tokens: int, repetitions: int) -> dict[str, Any]:
    """Time steps that decode, and compute the end of a prompt."""
    (end,) = ends_of_prompts(engine, Prompts(tokens, BESIDE_CONTEXT))
    case = Case(batch=batch, shared=0, own=BESIDE_CONTEXT)
    steps = Steps(engine, case, first_page=len(end.page_ids), slices=(end,))
    result = timed(engine, steps.launch, beside_name(batch, tokens), repetitions)
    steps.end()
    return result


def ends_of_prompts(engine: Engine, prompts: Prompts) -> tuple[SequenceSlice, ...]:
    """Return the last tokens of prompts, which share no page; a token is drawn after each."""
    length = prompts.context + prompts.tokens
    each = num_pages_for(length, engine.layout.page_size)
    num_pages = engine.storage.num_pages
    assert each * prompts.number <= num_pages, "the pool is too small for the case"
    draw = Draw(params=GREEDY, seed=0, position=length, prompt_token_ids=[], output_token_ids=[])
    return tuple(
        SequenceSlice(
            token_ids=[index % 1000 for index in range(prompts.tokens)],
            start=prompts.context,
            page_ids=[page_id * 4099 % num_pages for page_id in range(first, first + each)],
            num_prompt_tokens=length,
            draws=(draw,),
        )
        for first in range(0, each * prompts.number, each)
    )


def runs_of(engine: Engine, *, measure: Measure) -> Iterator[Run]:
    """Yield the cases that decode, and those of a prompt alone."""
    page_size = engine.layout.page_size
    for case in CASES:
        run = partial(run_case, engine, case, measure=measure)
        yield Run(case.name, case.num_pages(page_size), run)
    for prompts in PROMPTS:
        run = partial(run_prompts, engine, prompts, measure=measure)
        yield Run(prompts.name, prompts.num_pages(page_size), run)


def timed_runs(engine: Engine) -> Iterator[Run]:
    """Yield all cases of this benchmark."""
    yield from runs_of(engine, measure=timed)
    page_size = engine.layout.page_size
    for batch, tokens in BESIDE:
        case = Case(batch=batch, shared=0, own=BESIDE_CONTEXT)
        num_pages = case.num_pages(page_size) + num_pages_for(BESIDE_CONTEXT + tokens, page_size)
        yield Run(beside_name(batch, tokens), num_pages, partial(run_beside, engine, batch, tokens))


def count_or_auto(text: str) -> int | Literal["auto"]:
    """Parse a number of pages."""
    return "auto" if text == "auto" else int(text)


def main_of(
    name: str, description: str | None, runs_of: Callable[[Engine], Iterator[Run]], repetitions: int
) -> None:
    """Run a benchmark of one engine from the command line; show each case, and write all.

    Args:
        name: The benchmark's.
        description: For --help.
        runs_of: Yields the cases of an engine.
        repetitions: Of each case, unless the command line says otherwise.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument(
        "--num-pages", type=count_or_auto, default="auto", help="default: as many as fit"
    )
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--out", type=Path)
    add_commit(parser)
    options = parser.parse_args()
    engine = load_engine(
        options.model, page_size=options.page_size, num_pages=options.num_pages, device="cuda"
    )
    engine.storage.pages.normal_()
    runs = list(runs_of(engine))
    chosen = selected([run.name for run in runs], options.cases)
    cases = []
    for run in runs:
        if run.name in chosen and run.num_pages <= engine.storage.num_pages:
            cases.append(run.run(options.repetitions))
            sys.stdout.write(json.dumps(cases[-1]) + "\n")
            sys.stdout.flush()
    done = {case["case"] for case in cases}
    not_run = [run.name for run in runs if run.name not in done]
    head = conditions(name, options.commit) | {"num_pages": engine.storage.num_pages}
    write_result(options.out, head | {"not_run": not_run, "cases": cases})


if __name__ == "__main__":
    main_of("engine_step", __doc__, timed_runs, repetitions=60)
