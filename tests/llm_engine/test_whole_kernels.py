"""What tests compute as a whole instead of in the interpreter is the same, but for rounding."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm_engine import operations_triton  # noqa: F401  # else it stays interpreted
from llm_engine.engine import Engine
from tests.llm_engine.driver import chunked_logits, small_engine
from tests.llm_engine.launch_recorder import LaunchRecorder
from tests.llm_engine.whole_kernels import WHOLE_KERNELS

PROMPT = [5, 90, 7, 31, 2, 6, 150, 44]


def computed(engine: Engine) -> tuple[Tensor, Tensor]:
    """Return logits, and a copy of pages that were full of NaN."""
    engine.storage.pages.fill_(torch.nan)
    logits = chunked_logits(engine, PROMPT, [5, 2, 1])
    return logits, engine.storage.pages.float()


def test_an_engine_computes_the_same(
    tmp_path: Path, recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tmp_path, "qwen2")  # which has biases
    as_a_whole = computed(engine)

    for each in WHOLE_KERNELS.copy():
        monkeypatch.delitem(WHOLE_KERNELS, each)

    for found, expected in zip(as_a_whole, computed(engine), strict=True):
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02, equal_nan=True)
