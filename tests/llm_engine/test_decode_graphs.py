"""Steps that repeat a recording draw the tokens, and leave the pages, of steps that do not.

Expected is what the same engine draws step by step, the host knowing each token before the next.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.cascade.plan import CascadeEstimate
from llm_engine import (
    attention_triton,
    decode_graphs,
    device_runner,
    operations_triton,  # noqa: F401  # else it stays interpreted
)
from llm_engine.decode_graphs import DrawnRows, GraphedDecode
from llm_engine.device_batch import DeviceBatch
from llm_engine.engine import Engine
from llm_engine.engine_step import EngineStep, SeatStart
from llm_engine.sampling import SampledToken, SamplingParams
from tests.llm_engine.driver import (
    DrivenSequence,
    assert_equal,
    record_all,
    recording,
    results_of,
    run,
    runner_of,
    small_engine,
)
from tests.llm_engine.launch_recorder import LaunchRecorder

PREFIX = [(7 * index) % 199 for index in range(256)]  # the least that is read once


@pytest.fixture
def engine(
    tmp_path: Path, recorders: list[LaunchRecorder], request: pytest.FixtureRequest
) -> Engine:
    """An engine of one layer; a test's parameter says how many it has instead."""
    return small_engine(tmp_path, num_layers=getattr(request, "param", 1))


def set_num_rows(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """Have recordings of so many rows alone."""
    for module in (decode_graphs, device_runner):
        monkeypatch.setattr(module, "NUM_ROWS", sizes)


def ahead(engine: Engine, *, num_seats: int = 8) -> Engine:
    return recording(engine, num_seats=num_seats, records_prompts=False)


def decode_of(engine: Engine) -> GraphedDecode:
    decode = runner_of(engine)._decode
    assert decode is not None
    return decode


def sequence(
    prompt: list[int], page_ids: list[int], num_tokens: int, **params: Any
) -> DrivenSequence:
    options = {"max_tokens": num_tokens, "seed": len(prompt)} | params
    return DrivenSequence(prompt=prompt, page_ids=page_ids, params=SamplingParams(**options))


@pytest.mark.parametrize("engine", [2], indirect=True, ids=["two-layers"])
def test_each_number_of_rows_is_recorded_when_it_comes_a_second_time(
    engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    # Rows as steps pass, three times each: five, padded to eight; three, padded to four; one.
    sequences = [
        sequence([5, 6, 7], [3], 4),
        sequence([8] * 15, [9, 4], 4),
        sequence([1], [0, 1], 7),
        sequence([2] * 20, [7, 2], 7),
        sequence([3] * 14, [5, 8], 10),
    ]
    expected = results_of(engine, sequences)

    found = results_of(ahead(engine), sequences)

    assert_equal(found, expected)
    pages_of_nobody = torch.ones(engine.storage.num_pages, dtype=torch.bool)
    for each in sequences:
        pages_of_nobody[each.page_ids] = False
    assert engine.storage.pages[pages_of_nobody].isnan().all(), "a row that fills up wrote a page"
    for each in sequences:
        contents = engine.storage.pages[each.page_ids]  # [P, layers, 2, K, page_size, H]
        slots = contents.transpose(1, 4).flatten(0, 1)
        assert slots[each.num_computed :].isnan().all(), "... or a slot behind the last token"
    (recorder,) = recorders
    assert recorder.num_recorded == 3
    assert recorder.num_repeated == 9 - 3  # steps of decode, less the first of each kind


def test_penalties_bans_and_logprobs_follow_tokens_that_the_host_does_not_know(
    engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    ends = tuple(range(0, 200, 2))  # more than half of what would be drawn
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "temperature": 0.0},
        {"min_tokens": 6, "stop_token_ids": ends, "temperature": 0.0, "ignore_eos": True},
        {"frequency_penalty": 0.5, "top_k": 5, "logprobs": 3},
        {"logprobs": 0},
        {},
    ]
    sequences = [
        sequence([9 + index] * 3, [3 * index, 3 * index + 1], 9, **kind)
        for index, kind in enumerate(kinds)
    ]
    expected = results_of(engine, sequences)

    found = results_of(ahead(engine), sequences)

    assert_equal(found, expected)
    for (tokens, _), (expected_tokens, _) in zip(found, expected, strict=True):
        for token, wanted in zip(tokens, expected_tokens, strict=True):
            assert (token.logprob is None) == (wanted.logprob is None)
            if token.logprob is not None:
                assert token.logprob == pytest.approx(wanted.logprob, abs=1e-4)
                values = [value for _, value in token.top_logprobs]  # ids may tie
                assert values == pytest.approx([v for _, v in wanted.top_logprobs], abs=1e-4)
    plain = results_of(engine, [sequence([9] * 3, [0, 1], 9, temperature=0.0)])
    assert plain[0][0] != found[0][0], "the penalty changed nothing"
    banned = [each.token_id for each in found[2][0]]
    assert not set(banned[:6]) & set(ends), "an end token came too early"
    assert set(banned[6:]) & set(ends), "the ban did not end"


@pytest.mark.parametrize("min_tokens", range(2, 6))
def test_a_ban_beside_no_other_edit_ends_with_the_last_token_that_needs_it(
    engine: Engine, recorders: list[LaunchRecorder], min_tokens: int
) -> None:
    [(tokens, _)] = results_of(engine, [sequence([9] * 3, [0], 7)])
    end = tokens[min_tokens - 1].token_id  # drawn where it may not come yet
    options: dict[str, Any] = {"min_tokens": min_tokens, "stop_token_ids": (end,)}
    banned = sequence([9] * 3, [0], 7, ignore_eos=True, **options)
    expected = results_of(engine, [banned])

    found = results_of(ahead(engine), [banned])

    assert_equal(found, expected)
    [(answer, _)] = found
    assert answer[: min_tokens - 1] == tokens[: min_tokens - 1]
    assert answer[min_tokens - 1].token_id != end


def test_a_seat_goes_to_another_sequence_in_the_next_step(
    engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    # One sequence runs all the time, the others have the other seat one after the other.
    sequences = [
        sequence([1, 2], [0, 1], 15),
        sequence([5, 6, 7], [3], 4, repetition_penalty=1.2),
        sequence([9] * 20, [8, 2], 4),
        sequence([4] * 3, [5], 4, logprobs=2),
    ]
    expected = results_of(engine, sequences)
    two_seats = ahead(engine, num_seats=2)

    found = results_of(two_seats, sequences, num_seats=2)

    assert_equal(found, expected)


def test_sequences_in_the_seats_of_two_that_shared_a_prefix_read_their_own(
    shared_items: list[int], engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    pages, shared = engine.storage.pages, list(range(16))
    sharing = [sequence([*PREFIX, last], [*shared, 16 + last], 5) for last in (0, 1)]
    others = [
        sequence([last, *PREFIX], list(range(20 * last, 20 * last + 17)), 5) for last in (1, 2)
    ]
    found_pages = torch.randn(pages[shared].shape, generator=torch.Generator().manual_seed(0))

    def drawn(running: Engine) -> list[list[SampledToken]]:
        pages[shared] = found_pages.to(pages.dtype)
        for each in sharing:
            each.restart(len(PREFIX))
        for each in others:
            each.restart()
        run(running, [*sharing, *others], num_seats=2)
        return [each.drawn for each in (*sharing, *others)]

    expected = drawn(engine)
    shared_items.clear()

    found = drawn(ahead(engine, num_seats=2))

    assert found == expected
    assert [each > 0 for each in shared_items] == [True, False]


def test_steps_are_read_in_the_order_of_their_launches_and_no_third_one_is_taken(
    engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    running = ahead(engine)
    one, other = sequence([1, 2], [0], 2), sequence([3] * 5, [1], 2)
    expected = [results_of(engine, [each])[0][0][0] for each in (one, other)]
    for each in (one, other):
        each.restart()

    running.launch(EngineStep(slices=(one.next_slice(9),)))
    running.launch(EngineStep(slices=(other.next_slice(9),)))
    with pytest.raises(AssertionError, match="read comes before another launch"):
        running.launch(EngineStep())

    assert [running.read().slices for _ in range(2)] == [[(token,)] for token in expected]


def test_pages_that_a_sequence_gets_while_it_runs_are_those_that_it_writes(
    engine: Engine, recorders: list[LaunchRecorder]
) -> None:
    long = sequence([1] * 14, [7, 3, 5], 20)
    expected = results_of(engine, [long])

    found = results_of(ahead(engine), [long], grows=True)

    assert_equal(found, expected)


def test_no_larger_batch_and_no_history_costs_what_is_recorded(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_num_rows(monkeypatch, (4, 8))
    sequences = [
        sequence([index + 1] * 4, [index], 6, **params)
        for index, params in enumerate([{}] + [{"repetition_penalty": 1.3}] * 6)
    ]
    expected = results_of(engine, sequences)
    recorded = ahead(engine, num_seats=8)
    for num_sequences in (1, 3, 7):
        found = results_of(recorded, sequences[:num_sequences])
        assert_equal(found, expected[:num_sequences])
    (recorder,) = recorders
    num_recorded = recorder.num_recorded

    for num_sequences in (1, 3, 7):
        found = results_of(recorded, sequences[:num_sequences])
        assert_equal(found, expected[:num_sequences])

    assert recorder.num_recorded == num_recorded
    assert recorder.num_repeated > 15


def test_histories_that_come_while_a_step_is_in_flight_change_no_token(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_num_rows(monkeypatch, (4,))
    # With chunks of five tokens they join one after the other, each behind a step of the others.
    sequences = [
        sequence([index + 1] * (3 + 10 * index), [3 * index, 3 * index + 1, 3 * index + 2], 12)
        for index in range(3)
    ]
    for each in sequences:  # a history that is lost changes the tokens
        each.params = replace(
            each.params, temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0
        )
    sequences[1].params = replace(sequences[1].params, logprobs=2)
    expected = results_of(engine, sequences)
    recorded = ahead(engine, num_seats=4)
    unread: list[int] = []  # steps in flight when a history came
    mark = DeviceBatch._mark

    def mark_seen(self: DeviceBatch, start: SeatStart) -> None:
        unread.append(len(recorded._launched))
        mark(self, start)

    monkeypatch.setattr(DeviceBatch, "_mark", mark_seen)

    found = results_of(recorded, sequences, chunk_size=5)

    assert_equal(found, expected)
    assert unread == [1, 1, 1]
    assert recorders[-1].num_repeated > 0, "nothing was recorded"


def test_steps_that_read_prefixes_once_have_recordings_of_their_own(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_shared = []
    plan = CascadeAttention.plan

    def sharing_now_and_then(self: CascadeAttention, *args: Any, **options: Any) -> CascadeEstimate:
        margin = 0.0 if len(num_shared) % 3 == 2 else float("inf")
        self.model = replace(self.model.sharing_all(), margin=margin)
        estimate = plan(self, *args, **options)
        num_shared.append(self.num_shared_items)
        return estimate

    shared = list(range(16, 32))
    sequences = [sequence([*PREFIX, last], [*shared, 40 + last], 9) for last in (5, 9)]
    expected = results_of(engine, sequences, shared_pages=shared)
    monkeypatch.setattr(CascadeAttention, "plan", sharing_now_and_then)
    monkeypatch.setattr(decode_graphs, "REPLAN_STEPS", 1)

    found = results_of(ahead(engine), sequences, shared_pages=shared)

    assert_equal(found, expected)
    assert [each > 0 for each in num_shared] == [True, True, False, True, True, False, True, True]
    (recorder,) = recorders
    assert (recorder.num_recorded, recorder.num_repeated) == (2, 6)


def test_prefixes_are_looked_for_only_where_the_batch_changed(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("plan", "plan_next_step"):
        known = getattr(CascadeAttention, name)

        def noted(
            self: CascadeAttention,
            *args: Any,
            _name: str = name,
            _known: Any = known,
            **options: Any,
        ) -> Any:
            calls.append(_name)
            return _known(self, *args, **options)

        monkeypatch.setattr(CascadeAttention, name, noted)
    shared = list(range(16, 32))
    sequences = [
        sequence([*PREFIX, *[last] * 10], [*shared, 40 + last, 50 + last], num_tokens)
        for last, num_tokens in ((5, 6), (6, 12))
    ]
    with monkeypatch.context() as plain:
        plain.setattr(CascadeAttention, "plan_next_step", None)
        expected = results_of(engine, sequences, shared_pages=shared)
    calls.clear()

    found = results_of(ahead(engine), sequences, shared_pages=shared)

    assert_equal(found, expected)
    assert calls == ["plan"] + ["plan_next_step"] * 4 + ["plan"] + ["plan_next_step"] * 5


def test_prefixes_are_looked_for_again_now_and_then(
    shared_items: list[int],
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_graphs, "REPLAN_STEPS", 3)
    one = sequence([1, 2], [0], 10)
    expected = results_of(engine, [one])
    shared_items.clear()

    found = results_of(ahead(engine), [one])

    assert_equal(found, expected)
    assert len(shared_items) == 3  # of nine steps


def test_sequences_that_outgrow_the_window_share_their_prefix_no_longer(
    tmp_path: Path, shared_items: list[int], recorders: list[LaunchRecorder]
) -> None:
    engine = small_engine(tmp_path, "mistral", sliding_window=len(PREFIX) + 3)
    shared = list(range(16, 32))
    sequences = [sequence([*PREFIX, last], [*shared, 40 + last], 7) for last in (5, 9)]
    expected = results_of(engine, sequences, shared_pages=shared)
    shared_items.clear()

    found = results_of(ahead(engine), sequences, shared_pages=shared)

    assert_equal(found, expected)
    # Of the six steps with seats, the first has one key less than the window.
    assert [each > 0 for each in shared_items] == [True, True, False, False, False, False]


def test_steps_of_few_rows_have_buffers_and_recordings_of_their_own(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = engine.decoder._attention._decode  # type: ignore[attr-defined]
    monkeypatch.setattr(decode, "_few_rows", 2)
    monkeypatch.setattr(decode, "_attentions", decode._make_attentions())
    set_num_rows(monkeypatch, (4,))
    sizes = []
    plan = CascadeAttention.plan

    def spy(self: CascadeAttention, *args: Any, **options: Any) -> CascadeEstimate:
        sizes.append(self.decode.max_requests)
        return plan(self, *args, **options)

    # Three steps of three rows, then three of two.
    sequences = [sequence([4] * 14, [index, 20 + index], 4 + 3 * (index > 0)) for index in range(3)]
    expected = results_of(engine, sequences)
    monkeypatch.setattr(CascadeAttention, "plan", spy)

    found = results_of(ahead(engine, num_seats=4), sequences)

    assert_equal(found, expected)
    assert sizes == [1024, 2]
    (recorder,) = recorders
    assert (recorder.num_recorded, recorder.num_repeated) == (2, 4)


def test_steps_of_several_launches_are_planned_anew_and_not_recorded(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_triton, "MAX_DECODE_TOKENS", 5)  # of one row
    sequences = [sequence([index] * 3, [index], 8) for index in range(2)]
    expected = results_of(engine, sequences)

    found = results_of(ahead(engine), sequences)

    assert_equal(found, expected)
    assert [each.num_recorded for each in recorders] == [0]


def test_a_kind_of_step_is_recorded_only_after_one_has_run(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = ahead(engine)
    one = sequence([1, 2], [0], 6)
    expected = results_of(engine, [one])
    run_layers = engine.decoder.run_layers

    def fail_for_one(token_ids: Tensor) -> Tensor:
        if len(token_ids) == 1:
            raise torch.OutOfMemoryError("planted")
        return run_layers(token_ids)

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "run_layers", fail_for_one)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                results_of(recorded, [one])
            recorded.launch(EngineStep(ended=(0,)))
            recorded.read()
    assert [each.num_recorded for each in recorders] == [0]

    assert_equal(results_of(recorded, [one]), expected)
    assert [each.num_recorded for each in recorders] == [1]


@pytest.mark.parametrize("num_pages", [17, 16])
def test_steps_of_all_sizes_are_loaded_at_the_start_and_recorded_later(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    num_pages: int,
) -> None:
    set_num_rows(monkeypatch, (2, 4, 8))
    recorded = ahead(engine)
    sequences = [sequence([index] * 3, [20 + index], 4) for index in range(4)]
    expected = results_of(engine, sequences)
    engine.storage.pages.zero_()

    decode_of(recorded).warm_up(max_tokens=16 * num_pages)

    (recorder,) = recorders
    assert recorder.num_recorded == 0
    num_kinds = record_all(recorded)
    assert num_kinds == (6 if num_pages == 17 else 3)  # too short to share else
    assert (recorder.num_recorded, recorder.num_repeated) == (num_kinds, 0)
    assert_equal(results_of(recorded, sequences), expected)
    assert (recorder.num_recorded, recorder.num_repeated) == (num_kinds, 3)


def test_a_step_that_comes_before_its_recording_is_recorded_at_once(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_num_rows(monkeypatch, (2, 4, 8))
    recorded = ahead(engine)
    sequences = [sequence([index] * 3, [20 + index], 4) for index in range(4)]
    expected = results_of(engine, sequences)
    decode_of(recorded).warm_up(max_tokens=16)

    assert_equal(results_of(recorded, sequences), expected)

    (recorder,) = recorders
    assert (recorder.num_recorded, recorder.num_repeated) == (1, 3)
    assert record_all(recorded) == 2  # those of two and eight rows
    assert recorder.num_recorded == 3


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("planted"),
        torch.AcceleratorError("CUDA error: out of memory"),  # where CUDA instantiates the graph
        torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
        ValueError("planted"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_step_that_cannot_be_recorded_is_launched_as_before(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    sequences = [sequence([index] * 3, [20 + index], 4) for index in range(3)]
    expected = results_of(engine, sequences)

    def fail(self: LaunchRecorder, work: object) -> None:
        raise error

    monkeypatch.setattr(LaunchRecorder, "__call__", fail)

    assert_equal(results_of(ahead(engine), sequences), expected)
    assert [each.message for each in caplog.records] == ["step_not_recorded"]


def test_a_recording_over_tensors_of_one_step_is_noticed(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = ahead(engine)
    decode = decode_of(recorded)
    launch, seats = decode.launch, decode._batch.seats
    kept: list[Tensor] = []  # so that each has another address

    def launch_over_new_tensors(*args: Any, **options: Any) -> DrawnRows:
        kept.append(seats.positions)
        seats.positions = seats.positions.clone()
        return launch(*args, **options)

    monkeypatch.setattr(decode, "launch", launch_over_new_tensors)

    with pytest.raises(AssertionError, match="differs from the recorded one"):
        results_of(recorded, [sequence([1, 2], [0], 6)])
