"""Times steps of decode in one engine on the host's clock: run ahead, and one at a time.

    python -m benchmarks.engine_step --model DIR --out benchmarks/results/engine-step-X.json

`ms` is a step of an engine that launches each step before it reads the one before; `one_by_one_ms`
is one that reads each step before it launches the next. Cases are decode/BATCH@CONTEXT, and
shared/BATCH,SHARED,OWN tokens. Pages hold random values, and all is drawn greedily.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kv_cache.layout import num_pages_for
from llm_engine.engine import Engine
from llm_engine.engine_step import EngineStep, SeatPages, SeatStart
from llm_engine.load_engine import load_engine
from llm_engine.sampling import SamplingParams

WARM_UP_STEPS = 4  # the first of a kind loads what it needs, the second is recorded
GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20)


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


CASES = (
    *(Case(batch=batch, shared=0, own=1024) for batch in (1, 8, 16, 32, 64, 128, 256)),
    Case(batch=64, shared=0, own=8192),
    Case(batch=16, shared=0, own=32_768),
    Case(batch=64, shared=8192, own=256),
    Case(batch=256, shared=8192, own=128),
    Case(batch=64, shared=32_768, own=256),
)


class Steps:
    """The steps of one case: sequences take seats at once and get a page when they need it."""

    def __init__(self, engine: Engine, case: Case, first_page: int = 0) -> None:
        self._engine = engine
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

    def run_one_by_one(self, count: int) -> float:
        """Return the median of `count` steps, in ms."""
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self._launch()
            self._engine.read()
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)

    def run_ahead(self, count: int) -> float:
        """Return the mean of `count` steps, of which each is launched before the last is read."""
        self._launch()
        started = time.perf_counter()
        for _ in range(count):
            self._launch()
            self._engine.read()
        seconds = time.perf_counter() - started
        self._engine.read()
        return 1e3 * seconds / count

    def end(self) -> None:
        """Give all seats back."""
        self._engine.launch(EngineStep(ended=self._seats))
        self._engine.read()

    def _launch(self) -> None:
        extended = []
        for seat, length in enumerate(self._lengths):
            if num_pages_for(length, self._page_size) > self._num_pages[seat]:
                self._num_pages[seat] += 1
                extended.append(SeatPages(seat=seat, page_ids=tuple(self._pages(1))))
            self._lengths[seat] += 1
        self._engine.launch(
            EngineStep(started=self._started, extended=tuple(extended), decodes=self._seats)
        )
        self._started = ()

    def _pages(self, count: int) -> list[int]:
        first = self._next_page
        self._next_page += count
        num_pages = self._engine.storage.num_pages
        assert self._next_page <= num_pages, "the pool is too small for the case"
        # Neighbours are far apart in the pool, as after long service; steps are odd numbers.
        return [page_id * 4099 % num_pages for page_id in range(first, self._next_page)]


def run_case(engine: Engine, case: Case, repetitions: int) -> dict[str, Any]:
    """Time one case."""
    steps = Steps(engine, case)
    steps.run_one_by_one(WARM_UP_STEPS)
    result = {
        "case": case.name,
        "one_by_one_ms": round(steps.run_one_by_one(repetitions), 3),
        "ms": round(steps.run_ahead(repetitions), 3),
    }
    steps.end()
    return result


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--num-pages", type=int, default=9001)
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engine = load_engine(
        options.model, page_size=options.page_size, num_pages=options.num_pages, device="cuda"
    )
    engine.storage.pages.normal_()
    cases = []
    for case in CASES:
        cases.append(run_case(engine, case, options.repetitions))
        sys.stdout.write(json.dumps(cases[-1]) + "\n")
        sys.stdout.flush()
    arguments = [Path(argument).name for argument in sys.argv[1:]]  # folders are the host's own
    result = {
        "command": " ".join(["python -m benchmarks.engine_step", *arguments]),
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "cases": cases,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
