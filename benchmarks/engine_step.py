"""Times steps of decode in one engine: as recordings, and launched kernel by kernel.

    python -m benchmarks.engine_step --model DIR --out benchmarks/results/engine-step-X.json

A step takes page tables and tokens in and gives drawn tokens out, on the host's clock. All requests
share a prefix and have keys of their own; pages hold random values.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from kv_cache.layout import num_pages_for
from llm_engine.engine import Engine
from llm_engine.load_engine import load_engine
from llm_engine.sampling import Draw, SamplingParams, SequenceSlice
from llm_engine.transformer import Decoder

BATCHES = (1, 4, 16, 64, 256)
SHARED_TOKENS, OWN_TOKENS = 2048, 200
WARM_UP_STEPS = 3  # the first of a kind loads what it needs, the second is recorded


def make_step(page_size: int, batch: int) -> list[SequenceSlice]:
    """Return the slices of a step."""
    num_shared, num_own = SHARED_TOKENS // page_size, num_pages_for(OWN_TOKENS, page_size)
    end = SHARED_TOKENS + OWN_TOKENS
    draw = Draw(
        params=SamplingParams(temperature=0.0),
        seed=0,
        position=end,
        prompt_token_ids=[],
        output_token_ids=[],
    )
    slices = []
    for index in range(batch):
        first = num_shared + index * num_own
        slices.append(
            SequenceSlice(
                token_ids=[index % 100],
                start=end - 1,
                page_ids=[*range(num_shared), *range(first, first + num_own)],
                num_prompt_tokens=SHARED_TOKENS,
                draws=(draw,),
            )
        )
    return slices


def time_step(engine: Engine, slices: list[SequenceSlice], repetitions: int) -> float:
    """Return the median in ms."""
    for _ in range(WARM_UP_STEPS):
        engine.forward(slices)
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        engine.forward(slices)
        times.append(1e3 * (time.perf_counter() - started))
    return round(statistics.median(times), 3)


def run_cases(engine: Engine, repetitions: int) -> list[dict[str, Any]]:
    """Return one case for each size of batch."""
    engine.storage.pages.normal_()
    cases = []
    for batch in BATCHES:
        slices = make_step(engine.layout.page_size, batch)
        case = {"case": f"step/{batch}", "ms": time_step(engine, slices, repetitions)}
        recorded = engine.decoder.hidden_states
        plain = MethodType(Decoder.hidden_states, engine.decoder)
        engine.decoder.hidden_states = plain  # type: ignore[method-assign]
        case["one_by_one_ms"] = time_step(engine, slices, repetitions)
        engine.decoder.hidden_states = recorded  # type: ignore[method-assign]
        print(json.dumps(case), flush=True)
        cases.append(case)
    return cases


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    num_own = num_pages_for(OWN_TOKENS, options.page_size)
    engine = load_engine(
        options.model,
        page_size=options.page_size,
        num_pages=SHARED_TOKENS // options.page_size + max(BATCHES) * num_own,
        device="cuda",
    )
    arguments = [Path(argument).name for argument in sys.argv[1:]]  # folders are the host's own
    result = {
        "command": " ".join(["python -m benchmarks.engine_step", *arguments]),
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "shared_tokens": SHARED_TOKENS,
        "own_tokens": OWN_TOKENS,
        "cases": run_cases(engine, options.repetitions),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
