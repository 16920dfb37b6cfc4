"""Passes that are recorded between steps: nobody notices but by the time of later passes.

Meanwhile sequences have seats and tokens in pages, page 0 among them.
"""

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm_engine import (
    decode_graphs,
    device_runner,
    operations_triton,  # noqa: F401  # else it stays interpreted
    prompt_graphs,
)
from llm_engine.device_runner import DeviceRunner
from llm_engine.engine import Engine
from llm_engine.engine_step import StepResult
from llm_engine.host_runner import HostRunner
from llm_engine.load_engine import load_engine
from llm_engine.recordings import CudaGraphRecorder
from llm_engine.sampling import SamplingParams
from tests.llm_engine.driver import (
    DrivenSequence,
    Results,
    assert_equal,
    computed_kv,
    record_all,
    recording,
    results_of,
    run,
    runner_of,
    small_engine,
)
from tests.llm_engine.launch_recorder import LaunchRecorder
from tests.support.checkpoints import write_checkpoint
from tests.support.log_records import logged
from tests.support.rarely import rarely

ROWS, TOKENS = (2, 4), (4, 16, 32)
NUM_DECODE_KINDS = len(ROWS) * (1 + 2)  # too short to share


@pytest.fixture
def engine(
    tmp_path: Path, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """An engine that launches kernel by kernel; over its pages others record few sizes."""
    monkeypatch.setattr(prompt_graphs, "NUM_TOKENS", TOKENS)
    monkeypatch.setattr(prompt_graphs, "MAX_SLICES", 4)  # a recording has a program for each
    monkeypatch.setattr(prompt_graphs, "FEW_TOKENS", (4,))
    monkeypatch.setattr(prompt_graphs, "NUM_ROWS_OF_BOTH", (20,))
    for module in (decode_graphs, device_runner):
        monkeypatch.setattr(module, "NUM_ROWS", ROWS)
    monkeypatch.setattr(decode_graphs, "NUM_ROWS_BESIDE", ROWS)
    return small_engine(tmp_path)


def sequences(
    lengths: tuple[int, int, int] = (1, 14, 27), max_tokens: int = 5
) -> list[DrivenSequence]:
    """Of one token on page 0, of several chunks, and of kinds that a start does not load."""
    kinds = [{}, {"temperature": 0.0}, {"logprobs": 2, "repetition_penalty": 1.3}]
    return [
        DrivenSequence(
            prompt=[(7 * length + 3 * index) % 199 for index in range(length)],
            page_ids=list(range(4 * order, 4 * order + 4)),
            params=SamplingParams(max_tokens=max_tokens, seed=length, **params),  # type: ignore[arg-type]
        )
        for order, (length, params) in enumerate(zip(lengths, kinds, strict=True))
    ]


def short_sequences() -> list[DrivenSequence]:
    """As many chunks of five tokens as the interpreter has time for."""
    return sequences((1, 9, 19), max_tokens=4)


def state_of(engine: Engine) -> list[Tensor]:
    """Return copies of all that steps pass on to later ones."""
    runner = runner_of(engine)
    tensors = [engine.storage.pages.view(torch.int16)]
    if runner._batch is not None:
        seats = runner._batch.seats
        tensors += [seats.state, seats.row_seats, seats.page_table, seats.marks]
        tensors += [torch.from_numpy(runner._batch.lengths)]
    return [each.clone() for each in tensors]


class RecordsBetween(Engine):
    """Records a pass after each step, and looks whether that changes anything."""

    num_recorded = 0  # that way

    def read(self) -> StepResult:
        result = super().read()
        before = state_of(self)
        self.num_recorded += self.record_next()
        for found, expected in zip(state_of(self), before, strict=True):
            assert torch.equal(found, expected), "a recording has changed what steps pass on"
        return result


def recording_between(engine: Engine, monkeypatch: pytest.MonkeyPatch, num_seats: int) -> Engine:
    monkeypatch.setattr(DeviceRunner, "max_launched", 1)  # else a step is in flight
    own = recording(engine, num_seats=num_seats)
    return RecordsBetween(own.config, own.storage, own.decoder, own._runner)


def test_a_start_records_nothing_and_what_is_recorded_later_is_told_once(
    engine: Engine, recorders: list[LaunchRecorder], caplog: pytest.LogCaptureFixture
) -> None:
    ahead = recording(engine, num_seats=4)
    caplog.set_level(logging.INFO)

    ahead.warm_up()

    assert [each.num_recorded for each in recorders] == [0, 0]
    num_kinds = record_all(ahead)
    assert num_kinds == sum(each.num_recorded for each in recorders)
    assert not ahead.record_next()
    (told,) = logged("passes_recorded", caplog)
    assert told["passes"] == num_kinds


@pytest.mark.parametrize("num_seats", [*rarely(0), 4], ids=["prefill", "decode"])
def test_what_is_recorded_between_steps_changes_no_seat_no_page_and_no_token(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    num_seats: int,
) -> None:
    driven = short_sequences()
    if num_seats == 0:
        for each in driven:
            each.params = SamplingParams(max_tokens=1, seed=1)
    expected = results_of(engine, driven, chunk_size=5)
    between = recording_between(engine, monkeypatch, num_seats)
    runner_of(between).warm_up(max_tokens=40)

    found = results_of(between, driven, chunk_size=5)

    assert_equal(found, expected)
    num_before_decodes = len(TOKENS) if num_seats else 0  # at most: prompts come first
    assert between.num_recorded > num_before_decodes, "none was recorded between steps"
    of_prompts = recorders[0]
    assert of_prompts.num_recorded == len(TOKENS)
    record_all(between)
    assert_equal(results_of(between, driven, chunk_size=5), expected)
    assert of_prompts.num_recorded == len(TOKENS)


# All rows of a recording have a seat, or not.
@pytest.mark.parametrize("num_seats", [3, *rarely(4)])
def test_tokens_are_the_same_whenever_passes_are_recorded(
    engine: Engine, recorders: list[LaunchRecorder], num_seats: int
) -> None:
    driven = short_sequences()
    expected = results_of(engine, driven, chunk_size=5)
    at_first_use, when_idle = (recording(engine, num_seats=num_seats) for _ in range(2))
    for each in (at_first_use, when_idle):
        runner_of(each).warm_up(max_tokens=40)

    assert record_all(when_idle) == len(TOKENS) + NUM_DECODE_KINDS
    for each in (at_first_use, when_idle):
        assert_equal(results_of(each, driven, chunk_size=5), expected)
    assert all(each.num_repeated > 0 for each in recorders)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), ValueError("planted")])
def test_a_pass_that_cannot_be_recorded_costs_no_other_its_recording(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    driven = short_sequences()[:1]
    expected = results_of(engine, driven, chunk_size=5)
    ahead = recording(engine, num_seats=4)
    runner_of(ahead).warm_up(max_tokens=40)

    def fail(self: LaunchRecorder, work: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LaunchRecorder, "__call__", fail)
        assert ahead.record_next()
    assert [each.message for each in caplog.records] == ["step_not_recorded"]
    assert record_all(ahead) == len(TOKENS) - 1 + NUM_DECODE_KINDS
    assert_equal(results_of(ahead, driven, chunk_size=5), expected)


def test_a_recording_that_finds_the_device_lost_says_so(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = recording(engine, num_seats=4)
    runner_of(ahead).warm_up(max_tokens=40)

    def fail(self: LaunchRecorder, work: object) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(LaunchRecorder, "__call__", fail)

    with pytest.raises(torch.AcceleratorError):
        ahead.record_next()


def gpu_engine(folder: Path) -> Engine:
    write_checkpoint(
        folder,
        "llama",
        num_hidden_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        dtype=torch.bfloat16,
    )
    return load_engine(
        folder,
        page_size=16,
        num_pages=60,
        device="cuda",
        num_seats=16,
    )


def gpu_results(engine: Engine, driven: list[DrivenSequence]) -> Results:
    engine.storage.pages.fill_(torch.nan)
    for each in driven:
        each.restart()
    run(engine, driven, chunk_size=5)
    return [(each.drawn, computed_kv(engine, each)) for each in driven]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_another_thread_than_the_one_that_loads_an_engine_records_between_steps_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = gpu_engine(tmp_path)
    monkeypatch.setattr(DeviceRunner, "max_launched", 1)
    plain = Engine(own.config, own.storage, own.decoder, HostRunner(own.storage, own.decoder))
    between = RecordsBetween(own.config, own.storage, own.decoder, own._runner)
    driven = sequences()

    expected = gpu_results(plain, driven)
    with ThreadPoolExecutor(1) as other:
        found = [other.submit(gpu_results, between, driven).result() for _ in range(2)]
        assert between.num_recorded > 0
        other.submit(record_all, between).result()
        found.append(other.submit(gpu_results, between, driven).result())

    for each in found:
        assert_equal(each, expected)
        assert [len(tokens) for tokens, _ in each] == [len(tokens) for tokens, _ in expected]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_first_recording_that_fails_costs_later_ones_nothing_on_a_gpu() -> None:
    """The largest is the first, and the likeliest to find too little memory."""
    record = CudaGraphRecorder()
    ones = torch.ones(4, device="cuda")
    assert (ones + 1).tolist() == [2.0] * 4

    def fail() -> Tensor:
        made = ones + 1
        raise torch.OutOfMemoryError(f"planted beside {made.shape}")

    with contextlib.suppress(torch.OutOfMemoryError):  # it keeps no frame, and so no graph, alive
        record(fail)
    repeat = record(lambda: ones + 1)
    again = record(lambda: ones + 2)

    assert repeat().tolist() == [2.0] * 4
    assert again().tolist() == [3.0] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_cuda_refuses_to_record_is_launched_and_what_comes_later_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = gpu_engine(tmp_path)
    plain = Engine(own.config, own.storage, own.decoder, HostRunner(own.storage, own.decoder))
    driven = sequences()
    expected = gpu_results(plain, driven)
    run_layers, replay = own.decoder.run_layers, torch.cuda.CUDAGraph.replay
    num_refused = num_replayed = 0

    def run_layers_and_wait(token_ids: Tensor) -> Tensor:
        nonlocal num_refused
        hidden = run_layers(token_ids)
        if torch.cuda.is_current_stream_capturing():
            num_refused += 1
            torch.cuda.synchronize()
        return hidden

    def replay_and_count(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal num_replayed
        num_replayed += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay_and_count)
    with monkeypatch.context() as patch:
        patch.setattr(own.decoder, "run_layers", run_layers_and_wait)
        assert own.record_next(), "a pass of a prompt, while nothing is to be computed"
        assert_equal(gpu_results(own, driven[:1]), expected[:1])  # and steps, in service
    refused = logged("step_not_recorded", caplog)
    assert len(refused) == num_refused > 1
    assert all("captur" in str(each["error"]) for each in refused)
    assert num_replayed == 0

    caplog.clear()
    assert record_all(own) > 0
    assert_equal(gpu_results(own, driven), expected)

    assert not logged("step_not_recorded", caplog)
    assert num_replayed > 0
    assert_equal(gpu_results(own, driven[:1]), expected[:1])
