"""Every family gives the same logits and the same greedy tokens as transformers, in float32."""

import random
from pathlib import Path
from typing import Any

import pytest

from llm_engine.load_engine import load_engine
from tests.llm_engine.driver import chunked_logits, generate
from tests.support.checkpoints import (
    LLAMA3_ROPE,
    reference_after,
    reference_logits,
    write_checkpoint,
)

VOCAB_SIZE = 211
LOGIT_TOLERANCE = 1e-4  # logits have a spread of several units; float32 rounding gives about 1e-5

# name |-> family and what differs from the smallest configuration
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 6}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "max_shard_size": "40KB"}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 13}),
    "qwen2": ("qwen2", {"max_shard_size": "60KB"}),
    "qwen2-tied": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
        },
    ),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3-tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}
# test_config_variations has their differences in each run.
VARIED = {"llama-linear", "mistral", "qwen2-yarn"}


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 16, 45, 90)]


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=pytest.mark.thorough if each in VARIED else ()) for each in CASES],
)
def test_logits_and_greedy_tokens_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    model = write_checkpoint(tmp_path, family, seed=3, **changes)
    engine = load_engine(tmp_path, page_size=8, num_pages=120, device="cpu")
    prompts = make_prompts()

    expected = reference_logits(model, prompts[-1])
    logits = chunked_logits(engine, prompts[-1], [17, 1, 30, 5])
    tokens = generate(engine, prompts, chunk_size=11)

    assert expected.std() > 0.5
    assert (logits - expected).abs().max() < LOGIT_TOLERANCE
    assert [len(answer) for answer in tokens] == [64] * len(prompts)
    for prompt, answer in zip(prompts, tokens, strict=True):
        assert answer == reference_after(model, prompt, answer)
    if "max_shard_size" in changes:
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
