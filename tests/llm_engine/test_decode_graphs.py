"""Passes that repeat a recording draw the tokens, and leave the pages, of passes that do not."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from attn_kernels.cascade import CascadeAttention
from attn_kernels.cascade_plan import CascadeEstimate
from llm_engine import (
    decode_graphs,
    operations_triton,  # noqa: F401  # else it stays interpreted
)
from llm_engine.decode_graphs import GraphedDecoder, Work
from llm_engine.engine import Engine
from llm_engine.load_engine import load_engine
from llm_engine.sampling import SamplingParams
from tests.llm_engine.driver import DrivenSequence, computed_kv, run
from tests.support.checkpoints import write_checkpoint
from tests.support.triton_interpreter import interpreted

PREFIX = [(7 * index) % 199 for index in range(256)]  # the least that is read once


class LaunchRecorder:
    """Stands for a CUDA graph: a repetition must make the launches that were recorded.

    Same kernels, same arguments; of tensors the same addresses, unless the pass made them.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self.num_recorded = 0
        self.num_repeated = 0
        self._launches: list[tuple[object, ...]] | None = None
        self._known = known  # kept, so that no address is given out again
        self._addresses: set[int] = set()

    def __call__(self, work: Work) -> Work:
        self.num_recorded += 1
        recorded, _ = self._run(work)
        assert recorded

        def repeat() -> Tensor:
            self.num_repeated += 1
            launches, result = self._run(work)
            assert launches == recorded, "a launch differs from the recorded one"
            return result

        return repeat

    def note(self, kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._launches is not None:
            values = [self._described(each) for each in (*args, *options.values())]
            self._launches.append((kernel.__name__, tuple(options), *values))

    def _run(self, work: Work) -> tuple[list[tuple[object, ...]], Tensor]:
        self._known += unseen_tensors()
        self._addresses = {each.untyped_storage().data_ptr() for each in self._known}
        self._launches = launches = []
        result = work()
        self._launches = None
        return launches, result

    def _described(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        is_outside = value.untyped_storage().data_ptr() in self._addresses
        address = value.data_ptr() if is_outside else None
        return value.dtype, value.shape, value.stride(), address


def unseen_tensors() -> list[Tensor]:
    """Return the tensors that exist, but for those of earlier calls."""
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    gc.freeze()  # the next call need not look at hundreds of thousands of objects again
    return found


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LaunchRecorder]]:
    """Kernels are interpreted; the list gets the recorders that decoders make."""
    made: list[LaunchRecorder] = []
    known: list[Tensor] = []

    def make_recorder() -> LaunchRecorder:
        made.append(LaunchRecorder(known))
        return made[-1]

    with interpreted():
        launch = JITFunction.run

        def noted(self: JITFunction, *args: Any, **options: Any) -> Any:
            if made:
                made[-1].note(self, args, options)
            return launch(self, *args, **options)

        monkeypatch.setattr(JITFunction, "run", noted)
        monkeypatch.setattr(decode_graphs, "CudaGraphRecorder", make_recorder)
        yield made
    gc.unfreeze()


@pytest.fixture
def engine(
    tmp_path: Path, recorders: list[LaunchRecorder], request: pytest.FixtureRequest
) -> Engine:
    """An engine of one layer; a test's parameter says how many it has instead."""
    write_checkpoint(
        tmp_path,
        "llama",
        num_hidden_layers=getattr(request, "param", 1),
        hidden_size=32,
        dtype=torch.bfloat16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    return load_engine(
        tmp_path, page_size=16, num_pages=60, device="cpu", dtype="bfloat16", attention="triton"
    )


def with_recordings(engine: Engine) -> Engine:
    plain = engine.decoder
    decoder = GraphedDecoder(
        plain._config,
        plain._weights,
        plain._attention,  # type: ignore[arg-type]  # load_engine was asked for Triton
        plain._operations,
        decode_graphs.CudaGraphRecorder,
    )
    return Engine(engine.config, engine.storage, decoder)


def sequence(prompt: list[int], page_ids: list[int], num_tokens: int) -> DrivenSequence:
    params = SamplingParams(max_tokens=num_tokens, seed=len(prompt))
    return DrivenSequence(prompt=prompt, page_ids=page_ids, params=params)


def results_of(
    engine: Engine, sequences: list[DrivenSequence], shared_pages: Sequence[int] = ()
) -> list[tuple[list[int], Tensor]]:
    """Run sequences over pages full of NaN; return their tokens and their K and V.

    All begin with `shared_pages`, of which each finds the same random contents.
    """
    pages = engine.storage.pages
    pages.fill_(torch.nan)
    found = (len(shared_pages), *pages.shape[1:])
    pages[list(shared_pages)] = torch.randn(found, generator=torch.Generator().manual_seed(0)).to(
        pages.dtype
    )
    for each in sequences:
        each.tokens.clear()
        each.num_computed = len(shared_pages) * engine.layout.page_size
    run(engine, sequences)
    return [(list(each.tokens), computed_kv(engine, each)) for each in sequences]


def assert_equal(
    found: list[tuple[list[int], Tensor]], expected: list[tuple[list[int], Tensor]]
) -> None:
    for (tokens, kv), (expected_tokens, expected_kv) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        assert torch.equal(kv, expected_kv)


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

    found = results_of(with_recordings(engine), sequences)

    assert_equal(found, expected)
    (recorder,) = recorders
    assert recorder.num_recorded == 3
    assert recorder.num_repeated == 9 - 3  # passes without prompts, less the first of each kind


@pytest.mark.parametrize("growing", ["buffers", "table"])
def test_what_grows_is_recorded_anew(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    growing: str,
) -> None:
    sequences = [sequence([index + 1] * 14, [index, 20 + index], 4) for index in range(3)]
    expected = results_of(engine, sequences)
    monkeypatch.setattr(decode_graphs, "NUM_ROWS", (4,))
    if growing == "table":
        monkeypatch.setattr(decode_graphs, "MIN_TABLE_ENTRIES", 2)
    else:
        engine.decoder._attention._decode._max_rows = 1  # type: ignore[attr-defined]
    recorded = with_recordings(engine)

    assert_equal(results_of(recorded, sequences[:1]), expected[:1])
    assert_equal(results_of(recorded, sequences), expected)
    assert_equal(results_of(recorded, sequences[:1]), expected[:1])

    assert [each.num_recorded for each in recorders] == [1, 1]
    assert min(each.num_repeated for each in recorders) > 0


def test_passes_that_read_prefixes_once_have_recordings_of_their_own(
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
    expected = results_of(engine, sequences, shared)
    monkeypatch.setattr(CascadeAttention, "plan", sharing_now_and_then)

    found = results_of(with_recordings(engine), sequences, shared)

    assert_equal(found, expected)
    assert [each > 0 for each in num_shared] == [True, True, False, True, True, False, True, True]
    (recorder,) = recorders
    assert (recorder.num_recorded, recorder.num_repeated) == (2, 6)


def test_passes_of_few_rows_have_buffers_and_recordings_of_their_own(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = engine.decoder._attention._decode  # type: ignore[attr-defined]
    monkeypatch.setattr(decode, "_few_rows", 2)
    monkeypatch.setattr(decode, "_attentions", decode._make_attentions(256, 1 << 20))
    monkeypatch.setattr(decode_graphs, "NUM_ROWS", (4,))
    sizes = []
    plan = CascadeAttention.plan

    def spy(self: CascadeAttention, *args: Any, **options: Any) -> CascadeEstimate:
        sizes.append(self.decode.max_requests)
        return plan(self, *args, **options)

    # Three steps of three rows, then three of two.
    sequences = [sequence([4] * 14, [index, 20 + index], 4 + 3 * (index > 0)) for index in range(3)]
    expected = results_of(engine, sequences)
    monkeypatch.setattr(CascadeAttention, "plan", spy)

    found = results_of(with_recordings(engine), sequences)

    assert_equal(found, expected)
    assert sizes == [256] * 3 + [2] * 3
    (recorder,) = recorders
    assert (recorder.num_recorded, recorder.num_repeated) == (2, 4)


def test_a_kind_of_pass_is_recorded_only_after_one_has_run(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = with_recordings(engine)
    one = sequence([1, 2], [0], 6)
    run_layers = recorded.decoder._run_layers
    recorded.forward([one.next_slice(9)])
    one.tokens.append(3)

    def fail(token_ids: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(recorded.decoder, "_run_layers", fail)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                recorded.forward([one.next_slice(9)])
            one.num_computed -= 1
    assert recorded.decoder._run_layers == run_layers
    assert [each.num_recorded for each in recorders] == [0]

    one.num_computed = 0
    one.tokens.clear()
    run(recorded, [one])
    assert [each.num_recorded for each in recorders] == [1]


@pytest.mark.parametrize("num_pages", [17, 16])
def test_passes_of_all_sizes_are_recorded_before_service(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    num_pages: int,
) -> None:
    monkeypatch.setattr(decode_graphs, "NUM_ROWS", (2, 4, 8))
    monkeypatch.setattr(decode_graphs, "MIN_DECODE_ROWS", 4)
    recorded = with_recordings(engine)
    sequences = [sequence([index] * 3, [20 + index], 4) for index in range(4)]
    expected = results_of(engine, sequences)

    recorded.decoder.warm_up(page_size=16, max_tokens=16 * num_pages)

    (recorder,) = recorders
    assert recorder.num_recorded == (4 if num_pages == 17 else 2)  # too short to share else
    assert_equal(results_of(recorded, sequences), expected)
    assert recorder.num_repeated == recorder.num_recorded + 3


def test_a_pass_that_memory_does_not_suffice_to_record_is_launched_as_before(
    engine: Engine,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sequences = [sequence([index] * 3, [20 + index], 4) for index in range(3)]
    expected = results_of(engine, sequences)

    def fail(self: LaunchRecorder, work: Work) -> Work:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(LaunchRecorder, "__call__", fail)

    assert_equal(results_of(with_recordings(engine), sequences), expected)
    assert [each.message for each in caplog.records] == ["pass_not_recorded"]


def test_a_recording_over_tensors_of_one_pass_is_noticed(
    engine: Engine, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs._Inputs, "filled", lambda self, batch, num_padded: batch)

    with pytest.raises(AssertionError, match="differs from the recorded one"):
        run(with_recordings(engine), [sequence([1, 2], [0], 6)])
