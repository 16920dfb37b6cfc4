"""What tests compute as a whole instead of in the interpreter is the same, but for rounding."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_kernels.sampling.launch import TokenSampler
from llm_engine import operations_triton  # noqa: F401  # else it stays interpreted
from llm_engine.engine import Engine
from tests.attn_kernels.sampling_case import TINY, logits_of_kind, random_rows, row_params
from tests.llm_engine.driver import chunked_logits, small_engine
from tests.llm_engine.launch_recorder import LaunchRecorder

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

    monkeypatch.setattr("tests.llm_engine.conftest.WHOLE_KERNELS", {})

    for found, expected in zip(as_a_whole, computed(engine), strict=True):
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02, equal_nan=True)


def drawn(mask: Tensor | None) -> tuple[Tensor, ...]:
    """Return tokens of rows of many kinds, the last without any, and their log probabilities."""
    rows = random_rows(12, 40, seed=1)
    logits = logits_of_kind("normal", len(rows), 40)
    logits[-1] = -torch.inf
    sampler = TokenSampler(vocab_size=40, max_rows=len(rows), device="cpu", shape=TINY)
    tokens = sampler.sample(logits, row_params(rows, "cpu"), mask=mask)
    logprobs = sampler.logprobs(logits[:-1], tokens[:-1], 3)
    return tokens, logprobs.chosen, logprobs.top, logprobs.top_tokens


@pytest.mark.parametrize("mask", [None, torch.full((12, 2), 0b1011_0110)], ids=["all", "masked"])
def test_a_sampler_draws_the_same(
    recorders: list[LaunchRecorder], monkeypatch: pytest.MonkeyPatch, mask: Tensor | None
) -> None:
    words = None if mask is None else mask.int()
    as_a_whole = drawn(words)

    monkeypatch.setattr("tests.llm_engine.conftest.WHOLE_KERNELS", {})

    for found, expected in zip(as_a_whole, drawn(words), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
