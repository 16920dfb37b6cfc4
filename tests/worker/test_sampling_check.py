"""What an engine is never given, whoever asks for it."""

import math
import re
from dataclasses import replace

import pytest

from llm_engine.sampling import SamplingParams
from protos.sampling_limits import RANGES
from tests.support.grammar_cases import JSON_OBJECT
from worker.identity import ModelInfo
from worker.sampling_check import check_sampling

MODEL = ModelInfo(
    name="tiny", fingerprint="f", vocab_size=50, max_context_tokens=64, eos_token_ids=(0, 1)
)
GOOD = SamplingParams(max_tokens=8, min_tokens=8, logprobs=20, top_k=50, stop_token_ids=(2, 49))


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0, 1e30])
def test_numbers_that_are_not_finite_or_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^sampling\.{name}: found .*; allowed: "):
        check_sampling(replace(GOOD, **{name: value}), MODEL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"temperature": 1e-4},
            "temperature: found 0.0001; allowed: 0 for greedy, or 0.001 to 1000",
        ),
        ({"top_p": 0.0}, "top_p: found 0.0; allowed: above 0, up to 1"),
        ({"top_k": 51}, "top_k: found 51; allowed: 0 to 50"),
        ({"seed": 2**64}, f"seed: found {2**64}; allowed: 0 to {2**64 - 1}"),
        ({"max_tokens": 0, "min_tokens": 0}, "max_tokens: found 0; allowed: 1 to "),
        ({"min_tokens": 9}, "min_tokens: found 9; allowed: 0 to 8"),
        ({"logprobs": 21}, "logprobs: found 21; allowed: 0 to 20"),
        ({"stop_token_ids": (2, 50)}, "stop_token_ids: found 50; allowed: 0 to 49"),
        ({"stop_token_ids": tuple(range(2, 50))}, "min_tokens: found 8; allowed: 0 where every"),
        ({"constraint": JSON_OBJECT}, "min_tokens: found 8; allowed: 0 with a constraint"),
        ({"constraint": JSON_OBJECT, "ignore_eos": True}, "constraint: found one; allowed: none"),
    ],
)
def test_each_field_is_checked_and_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"sampling.{words}")):
        check_sampling(replace(GOOD, **changes), MODEL)


@pytest.mark.parametrize(
    "params",
    [
        GOOD,
        SamplingParams(),
        SamplingParams(temperature=0.0, logprobs=None, seed=2**64 - 1),
        SamplingParams(stop_token_ids=tuple(range(50)), min_tokens=0),
        SamplingParams(constraint=JSON_OBJECT),
        SamplingParams(stop_token_ids=tuple(range(2, 50)), min_tokens=4, ignore_eos=True),
    ],
)
def test_what_a_router_allows_passes(params: SamplingParams) -> None:
    check_sampling(params, MODEL)
