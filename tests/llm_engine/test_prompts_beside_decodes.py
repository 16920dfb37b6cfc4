"""Prompt tokens in the pass of a step that decodes leave the tokens and pages of separate passes.

Expected is what the same engine computes step by step, launched kernel by kernel.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grammars.bits import TokenBits
from llm_engine import (
    decode_graphs,
    operations_triton,  # noqa: F401  # else it stays interpreted
    prompt_graphs,
)
from llm_engine.decode_graphs import Kind
from llm_engine.engine import Engine
from llm_engine.sampling import SamplingParams
from tests.llm_engine.driver import (
    DrivenSequence,
    assert_equal,
    record_all,
    recording,
    results_of,
    runner_of,
    small_engine,
)
from tests.llm_engine.launch_recorder import LaunchRecorder

PAGE_SIZE = 16
# Of recordings of both: rows of decodes, and tokens of prompts behind two and four of them
ROWS, BEHIND = (2, 4), {2: (4, 18), 4: (4, 16)}


@pytest.fixture
def engine(
    tmp_path: Path,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Engine:
    """An engine of one layer, or a test's parameter, that launches kernel by kernel."""
    monkeypatch.setattr(prompt_graphs, "NUM_TOKENS", (4, 16, 32))
    monkeypatch.setattr(prompt_graphs, "MAX_SLICES", 4)  # a recording has a program for each
    monkeypatch.setattr(prompt_graphs, "FEW_TOKENS", (4,))
    monkeypatch.setattr(prompt_graphs, "NUM_ROWS_OF_BOTH", (20,))
    monkeypatch.setattr(decode_graphs, "NUM_ROWS_BESIDE", ROWS)
    return small_engine(tmp_path, num_layers=getattr(request, "param", 1))


class Passes:
    """An engine over the same pages that records both, and what its passes compute."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, num_seats: int) -> None:
        self.sizes: list[tuple[int, ...]] = []  # of each step: rows of each of its passes
        self.engine = recording(engine, num_seats=num_seats)
        runner = runner_of(self.engine)
        run_layers, launch = engine.decoder.run_layers, runner.launch
        self._rows: list[int] = []

        def counted(token_ids: Tensor) -> Tensor:
            self._rows.append(len(token_ids))
            return run_layers(token_ids)

        def launch_counted(step: Any) -> Any:
            self._rows = []
            with monkeypatch.context() as patch:
                patch.setattr(engine.decoder, "run_layers", counted)
                read = launch(step)
            if step.decodes and step.slices:
                # To record a pass runs it once more, without launching anything.
                self.sizes.append(tuple(dict.fromkeys(self._rows)))
            return read

        monkeypatch.setattr(runner, "launch", launch_counted)


def sequence(length: int, first_page: int, num_tokens: int, **params: Any) -> DrivenSequence:
    prompt = [(7 * length + 3 * index) % 199 for index in range(length)]
    num_pages = (length + num_tokens) // PAGE_SIZE + 1
    options = {"max_tokens": num_tokens, "seed": length} | params
    return DrivenSequence(
        prompt=prompt,
        page_ids=list(range(first_page, first_page + num_pages))[::-1],
        params=SamplingParams(**options),
    )


@pytest.mark.parametrize("engine", [2], indirect=True, ids=["two-layers"])
def test_a_step_with_few_prompt_tokens_has_one_pass(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    # While the first decodes, the others come in chunks: one, two, three slices at a time.
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"repetition_penalty": 1.5, "logprobs": 2},
        {"top_k": 5},
        {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": tuple(range(0, 200, 2))},
    ]
    sequences = [
        sequence(length, 6 * index, num_tokens, ignore_eos=True, **kind)
        for index, (length, num_tokens, kind) in enumerate(
            zip((3, 7, 8, 14), (6, 5, 4, 2), kinds, strict=True)
        )
    ]
    expected = results_of(engine, sequences, chunk_size=3)
    passes = Passes(engine, monkeypatch, num_seats=8)

    for _ in range(2):  # the second of a size is recorded, the third repeated
        assert_equal(results_of(passes.engine, sequences, chunk_size=3), expected)

    assert passes.sizes
    assert {len(sizes) for sizes in passes.sizes} == {1}, "a step had two passes"
    assert {size for (size,) in passes.sizes} == {2 + 4, 4 + 4, 20}
    _, of_decodes = recorders
    assert of_decodes.num_repeated > of_decodes.num_recorded > 0


@pytest.mark.parametrize(
    ("chunk_size", "num_early", "num_seats", "why"),
    [
        (20, 1, 8, "tokens"),
        (3, 5, 8, "rows"),
        (3, 1, 8, "drawn tokens"),
    ],
)
def test_what_does_not_fit_has_a_pass_of_its_own(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    chunk_size: int,
    num_early: int,
    num_seats: int,
    why: str,
) -> None:
    early = [sequence(1 + index % 3, 2 * index, 4, temperature=0.0) for index in range(num_early)]
    late = sequence(60 if why == "tokens" else 10, 40, 2, temperature=0.0)
    if why == "drawn tokens":  # as after a resumption
        late.prompt, late.resumed = late.prompt[:6], late.prompt[6:10]
        late.params = SamplingParams(max_tokens=6, temperature=0)
    sequences = [*early, late]
    expected = results_of(engine, sequences, chunk_size=chunk_size)
    passes = Passes(engine, monkeypatch, num_seats=num_seats)

    for _ in range(2):
        assert_equal(results_of(passes.engine, sequences, chunk_size=chunk_size), expected)

    assert 2 in {len(sizes) for sizes in passes.sizes}


def test_a_mask_holds_beside_prompt_tokens_where_seats_are_fewer_than_rows_of_a_recording(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def only(token: int) -> TokenBits:
        bits = torch.zeros(-(-engine.config.vocab_size // 32), dtype=torch.int32).numpy()
        bits[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        return bits

    held = sequence(3, 0, 4, temperature=0.0)
    # Reads its own masks as the driver asks for them.
    monkeypatch.setattr(held, "grammar", object())
    monkeypatch.setattr(held, "allowed", lambda: only(30 + len(held.tokens)))
    sequences = [held, sequence(9, 10, 1, temperature=0.0)]
    expected = results_of(engine, sequences, chunk_size=4)
    passes = Passes(engine, monkeypatch, num_seats=1)

    for _ in range(2):
        assert_equal(results_of(passes.engine, sequences, chunk_size=4, num_seats=1), expected)

    assert [each.token_id for each in held.drawn] == list(range(30, 34))
    assert set(passes.sizes) == {(1 + 4,)}


def test_passes_of_all_sizes_are_loaded_at_the_start_and_recorded_later(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "NUM_ROWS", ROWS)
    monkeypatch.setattr(prompt_graphs, "NUM_TOKENS", (16,))
    sequences = [sequence(2, 0, 5, temperature=0.0), sequence(14, 8, 2, temperature=0.0)]
    expected = results_of(engine, sequences, chunk_size=4)
    passes = Passes(engine, monkeypatch, num_seats=8)
    runner = runner_of(passes.engine)

    runner.warm_up(max_tokens=40)

    _, of_decodes = recorders
    assert [each.num_recorded for each in recorders] == [0, 0]
    num_recorded = len(ROWS) + sum(map(len, BEHIND.values()))  # too short to share
    assert record_all(passes.engine) == 1 + num_recorded
    assert [each.num_recorded for each in recorders] == [1, num_recorded]
    assert runner._decode is not None
    assert runner._decode._recordings is not None
    kinds: list[Kind] = list(runner._decode._recordings._repeats)
    assert {(each.num_rows, each.num_prompt_tokens) for each in kinds} == {
        (rows, tokens) for rows, behind in BEHIND.items() for tokens in (0, *behind)
    }
    assert_equal(results_of(passes.engine, sequences, chunk_size=4), expected)
    assert of_decodes.num_recorded == num_recorded
    assert of_decodes.num_repeated > 0


def test_a_full_pass_leaves_no_row_empty_unless_much_less_would_be_computed(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "NUM_TOKENS", (4, 16, 20, 32))  # in passes of their own
    full_pass = recording(engine, num_seats=8).full_pass

    assert [full_pass(2, most) for most in (3, 4, 5, 17, 18)] == [3, 4, 4, 17, 18]
    assert [full_pass(2, most) for most in (20, 24)] == [18, 18], "rather in one pass than in two"
    assert [full_pass(2, most) for most in (25, 31, 32, 40)] == [20, 31, 32, 32]
    assert full_pass(3, 18) == 16, "behind four rows"
    assert full_pass(5, 18) == 16, "in a pass of its own: too many rows decode"
    assert full_pass(2, 0) == 0
    assert engine.full_pass(2, 5) == 5, "no pass is padded"
