"""Passes of prompt tokens that repeat a recording leave the tokens and pages of others."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llm_engine import (
    operations_triton,  # noqa: F401  # else it stays interpreted
    prompt_graphs,
)
from llm_engine.attention_triton import TritonAttention
from llm_engine.engine import Engine
from llm_engine.limits import MAX_RECORDED_TOKENS
from llm_engine.prompt_graphs import GraphedPrompts
from llm_engine.sampling import SamplingParams
from llm_engine.transformer import Decoder
from prefill_worker.config import PrefillConfig
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

ALL_SIZES = prompt_graphs.NUM_TOKENS
PAGE_SIZE, NUM_PAGES = 16, 40
SIZES = (4, 16, 32)


# A window cuts what a full mask shows.
both_masks = pytest.mark.parametrize(
    "engine",
    [pytest.param(None, id="full", marks=pytest.mark.thorough), pytest.param(20, id="window")],
    indirect=True,
)


@pytest.fixture
def engine(
    tmp_path: Path,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Engine:
    """An engine that launches kernel by kernel: of two layers, or of one with a test's window."""
    monkeypatch.setattr(prompt_graphs, "NUM_TOKENS", SIZES)
    monkeypatch.setattr(prompt_graphs, "MAX_SLICES", 4)
    size = getattr(request, "param", None)
    window: dict[str, Any] = {"sliding_window": size} if size else {}
    family, num_layers = ("mistral", 1) if window else ("llama", 2)
    return small_engine(tmp_path, family, num_layers=num_layers, num_pages=NUM_PAGES, **window)


def test_a_full_step_of_a_prefill_worker_is_the_largest_recording() -> None:
    assert list(ALL_SIZES) == sorted(set(ALL_SIZES))
    assert ALL_SIZES[-1] == PrefillConfig().max_step_tokens == MAX_RECORDED_TOKENS


def prompts_of(engine: Engine) -> GraphedPrompts:
    prompts = runner_of(engine)._prompts
    assert prompts is not None
    return prompts


def sequences_of(*lengths: int) -> list[DrivenSequence]:
    pages = list(range(NUM_PAGES))[::-1]
    params = SamplingParams(temperature=0, max_tokens=1)
    return [
        DrivenSequence(
            prompt=[(7 * length + index) % 199 for index in range(length)],
            page_ids=[pages.pop() for _ in range(length // PAGE_SIZE + 1)],
            params=params,
        )
        for length in lengths
    ]


@both_masks
def test_passes_of_a_size_repeat_one_recording_whatever_their_slices(
    engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    ahead = recording(engine, num_seats=0)
    # Padded to 32; a slice is as long as a page, one has a token of its own.
    batches = [(31,), (1, 16, 3), (32,), (2, 3, 5, 16)]

    for lengths in batches:
        sequences = sequences_of(*lengths)
        expected = results_of(engine, sequences)
        assert_equal(results_of(ahead, sequences), expected)

    (recorder,) = recorders
    assert recorder.num_recorded == 1
    assert recorder.num_repeated == len(batches) - 1  # less the first, launched kernel by kernel


@both_masks
def test_chunks_of_a_prompt_go_on_where_the_last_one_ended(
    engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    ahead = recording(engine, num_seats=0)
    for lengths, chunk_sizes in (((36, 21), (16, 13)), ((11, 2), (3, 1))):
        sequences = sequences_of(*lengths)
        expected = results_of(engine, sequences)
        for chunk_size in chunk_sizes:
            assert_equal(results_of(ahead, sequences, chunk_size=chunk_size), expected)

    (recorder,) = recorders
    assert recorder.num_recorded == len(SIZES)


@pytest.mark.parametrize(
    ("lengths", "why"),
    [((33,), "tokens"), ((1, 1, 1, 1, 1), "slices"), ((30,), "pages"), ((5,), "drawn tokens")],
)
def test_what_does_not_fit_is_launched_kernel_by_kernel(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...],
    why: str,
) -> None:
    monkeypatch.setattr(prompt_graphs, "MAX_PAGES", 1)
    ahead = recording(engine, num_seats=0)
    sequences = sequences_of(*lengths)
    if why == "drawn tokens":  # as after a resumption
        (each,) = sequences
        each.prompt, each.resumed = each.prompt[:4], each.prompt[4:]
        each.params = SamplingParams(temperature=0, max_tokens=2)
    expected = results_of(engine, sequences)

    for _ in range(2):  # the second of a size would be recorded
        assert_equal(results_of(ahead, sequences), expected)

    (recorder,) = recorders
    assert recorder.num_recorded == 0


def test_passes_of_all_sizes_are_loaded_at_the_start_and_recorded_later(
    engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    ahead = recording(engine, num_seats=0)
    expected = [results_of(engine, sequences_of(size)) for size in SIZES]

    with patch.object(Decoder, "_attend", autospec=True, side_effect=Decoder._attend) as attend:
        prompts_of(ahead).warm_up(max_tokens=31)
        (recorder,) = recorders
        assert recorder.num_recorded == 0
        assert record_all(ahead) == 2  # 32 tokens are more than a sequence may have

    # One layer loads the kernels of each; later both are recorded, and computed by nobody.
    assert [call.args[1] for call in attend.call_args_list] == [0, 0, *(0, 1), *(0, 1)]
    assert (recorder.num_recorded, recorder.num_repeated) == (2, 0)
    for size, each in zip(SIZES, expected, strict=True):
        assert_equal(results_of(ahead, sequences_of(size)), each)
    assert (recorder.num_recorded, recorder.num_repeated) == (2, 2)


def test_a_pass_that_only_loads_kernels_is_not_recorded_though_its_size_has_run(
    engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    ahead = recording(engine, num_seats=0)
    sequences = sequences_of(SIZES[0])
    expected = results_of(engine, sequences)
    results_of(ahead, sequences)

    prompts_of(ahead).warm_up(max_tokens=SIZES[0])

    assert_equal(results_of(ahead, sequences), expected)
    assert [each.num_recorded for each in recorders] == [1]


def test_no_pass_of_more_tokens_than_a_step_has_is_recorded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(recording(engine, num_seats=0, max_step_tokens=10))
    sizes: list[int] = []
    monkeypatch.setattr(
        prompts, "hidden_states", lambda batch: sizes.append(batch.of_tokens.shape[1])
    )

    prompts.warm_up(max_tokens=100)

    assert sizes == [16, 4]  # 10 are padded to 16
    assert not prompts.takes(prompts._any_batch(17))


def test_a_pass_that_memory_does_not_suffice_to_record_is_launched_as_before(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sequences = sequences_of(5)
    expected = results_of(engine, sequences)

    def fail(self: LaunchRecorder, work: object) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(LaunchRecorder, "__call__", fail)
    ahead = recording(engine, num_seats=0)

    for _ in range(3):
        assert_equal(results_of(ahead, sequences), expected)
    assert [each.message for each in caplog.records] == ["step_not_recorded"]


def test_a_recording_over_another_plan_is_noticed(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan in tensors of its own, as passes that are not recorded have it."""
    ahead = recording(engine, num_seats=0)
    attention = engine.decoder._attention
    assert isinstance(attention, TritonAttention)
    monkeypatch.setattr(prompts_of(ahead), "_prefill", attention._prefill)

    sequences = sequences_of(20, 5)
    for _ in range(2):  # launched, then recorded
        results_of(ahead, sequences)

    with pytest.raises(AssertionError, match="differs from the recorded one"):
        results_of(ahead, sequences)
