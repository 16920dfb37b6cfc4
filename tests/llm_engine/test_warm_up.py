"""A warm-up launches each kernel as all later passes do, so that none is loaded in service.

Loading one waits for a transfer that hangs, and everything waits for the thread that loads it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from llm_engine import prompt_graphs, recordings
from llm_engine.attention_triton import TritonAttention
from llm_engine.forward_batch import ALIGNMENT_BYTES
from llm_engine.sampling import SamplingParams
from tests.llm_engine.driver import DrivenSequence, record_all, recording, run, small_engine
from tests.support.triton_interpreter import interpreted

SIZES = (4, 16, 32)  # of recorded passes
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.1, logprobs=2),
    SamplingParams(repetition_penalty=1.3),
)
Variant = tuple[object, ...]


@pytest.fixture
def variants() -> Iterator[set[Variant]]:
    """What was launched, by all of its arguments that Triton compiles a kernel for; none runs."""
    launched: set[Variant] = set()

    def note(self: JITFunction, *args: Any, **options: Any) -> None:
        launched.add(variant_of(self, args, options))

    def recorder(work: Callable[[], object]) -> Callable[[], object]:
        loaded = set(launched)
        work()
        assert launched == loaded, "a kernel is loaded while it is recorded"
        return work

    # Patches end before the interpreter does: they would put its launch back.
    with interpreted(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(JITFunction, "run", note)
        monkeypatch.setattr(recordings, "CudaGraphRecorder", lambda: recorder)
        # As if tokens had been drawn.
        monkeypatch.setattr(torch, "empty", torch.ones)
        monkeypatch.setattr(torch, "empty_like", torch.ones_like)
        monkeypatch.setattr(Tensor, "new_empty", Tensor.new_ones)
        yield launched


def variant_of(kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    names = [each.name for each in kernel.params]
    given = dict(zip(names, args, strict=False)) | options
    found: list[object] = [kernel.__name__]
    for param in kernel.params:
        if param.name not in given:
            continue  # it has a default, which is one for all
        value = given.pop(param.name)
        if isinstance(value, Tensor):
            is_free = param.do_not_specialize or param.do_not_specialize_on_alignment
            is_aligned = is_free or value.data_ptr() % ALIGNMENT_BYTES == 0
            found.append((param.name, value.dtype, is_aligned))
        elif param.is_constexpr or isinstance(value, bool | None):
            found.append((param.name, value))
        elif isinstance(value, int):
            kind = None if param.do_not_specialize else (value == 1, value % ALIGNMENT_BYTES == 0)
            found.append((param.name, kind))
        else:
            found.append((param.name, type(value)))
    launch = {name: value for name, value in given.items() if name not in ("grid", "warmup")}
    return *found, *sorted(launch.items())


@pytest.mark.parametrize(("num_seats", "num_drawn"), [(0, 1), (5, 2)])
def test_no_later_pass_needs_a_kernel_that_was_not_launched(
    tmp_path: Path,
    variants: set[Variant],
    monkeypatch: pytest.MonkeyPatch,
    num_seats: int,
    num_drawn: int,
) -> None:
    monkeypatch.setattr(prompt_graphs, "NUM_TOKENS", SIZES)
    engine = recording(small_engine(tmp_path), num_seats=num_seats)
    attention = engine.decoder._attention
    assert isinstance(attention, TritonAttention)
    attention.load_kernels()
    engine.warm_up()
    warm = set(variants)
    assert record_all(engine) > 0
    assert not variants - warm

    # Recorded passes and others: of few and many tokens, of drawn ones, of several slices.
    for lengths in ((5, 1, 3), (31,), (33,), (47, 2, 1), (1,) * 5):
        for num_resumed in (0, 1):
            pages = list(range(engine.storage.num_pages))
            sequences = [
                DrivenSequence(
                    prompt=list(range(length)),
                    page_ids=[pages.pop() for _ in range(length // 16 + 2)],
                    params=replace(params, max_tokens=num_resumed + num_drawn),
                    resumed=list(range(num_resumed)),
                )
                for length, params in zip(lengths, cycle(PARAMS), strict=False)
            ]
            for each in sequences:
                each.restart()
            run(engine, sequences, chunk_size=40)

    assert not variants - warm
