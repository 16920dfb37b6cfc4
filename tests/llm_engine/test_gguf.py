"""Models of GGUF files compute what transformers computes with the same weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from llm_engine.engine import Engine
from llm_engine.gguf_file import BLOCKS
from llm_engine.gguf_quants import dequantize
from llm_engine.load_engine import load_engine
from tests.llm_engine.driver import chunked_logits
from tests.support.checkpoints import LLAMA3_ROPE, reference_logits
from tests.support.gguf_files import WIDE, write_gguf

PROMPT = [int(token) for token in np.random.default_rng(3).integers(2, 260, 90)]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(path: Path, **options: Any) -> Engine:
    return load_engine(path, **{"page_size": 16, "num_pages": 12, "device": "cpu"} | options)


def assert_equal_logits(path: Path, model: Any, *, tolerance: float = 1e-4) -> None:
    found = chunked_logits(load(path), PROMPT, [64, 1, 25])
    torch.testing.assert_close(
        found, reference_logits(model, PROMPT), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize(
    "type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
)
def test_logits_equal_those_of_transformers_in_each_type(tmp_path: Path, type_name: str) -> None:
    model = write_gguf(tmp_path / "model.gguf", type_name=type_name)

    assert_equal_logits(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_logits_equal_those_of_transformers_in_each_k_quant(tmp_path: Path, type_name: str) -> None:
    model = write_gguf(tmp_path / "model.gguf", type_name=type_name, **WIDE)

    assert_equal_logits(tmp_path / "model.gguf", model)


SHAPES = {
    "llama": ("llama", {}),
    "llama with one key head": ("llama", {"num_key_value_heads": 1}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": ("llama", {"head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_that_transformers_reads_from_the_file(
    tmp_path: Path, name: str
) -> None:
    family, changes = SHAPES[name]
    path = tmp_path / "model.gguf"
    written = write_gguf(path, family, **changes)
    read = type(written)(written.config).eval()
    weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=read)["tensors"]
    read.load_state_dict(weights, strict=False)

    assert_equal_logits(path, read)
    torch.testing.assert_close(reference_logits(read, PROMPT), reference_logits(written, PROMPT))


def test_a_window_makes_a_mistral(tmp_path: Path) -> None:
    keys = {"llama.attention.sliding_window": 13}
    model = write_gguf(tmp_path / "model.gguf", "mistral", metadata=keys, sliding_window=13)

    assert load(tmp_path / "model.gguf").config.family == "mistral"
    assert_equal_logits(tmp_path / "model.gguf", model)


def test_a_window_that_no_request_fills_is_none(tmp_path: Path) -> None:
    keys = {"qwen2.attention.sliding_window": 512}
    model = write_gguf(tmp_path / "model.gguf", "qwen2", metadata=keys)

    assert_equal_logits(tmp_path / "model.gguf", model)


def test_an_output_of_its_own_is_used(tmp_path: Path) -> None:
    tied = write_gguf(tmp_path / "tied.gguf", tie_word_embeddings=True)
    untied = write_gguf(tmp_path / "untied.gguf", tie_word_embeddings=False)

    assert_equal_logits(tmp_path / "tied.gguf", tied)
    assert_equal_logits(tmp_path / "untied.gguf", untied)
    assert load(tmp_path / "tied.gguf").config.has_tied_embeddings
    assert not load(tmp_path / "untied.gguf").config.has_tied_embeddings


def test_linear_rotary_scaling(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}
    for index, keys in enumerate(
        [
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"llama.rope.scale_linear": 4.0},
        ]
    ):
        path = tmp_path / f"{index}.gguf"
        assert_equal_logits(path, write_gguf(path, metadata=keys, rope_parameters=rope))


def test_a_factor_of_no_scaling_is_without_effect(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    model = write_gguf(tmp_path / "model.gguf", metadata=keys)

    assert_equal_logits(tmp_path / "model.gguf", model)


def test_yarn(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0}
    keys = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
        "qwen2.rope.scaling.yarn_beta_fast": 16.0,
        "qwen2.rope.scaling.yarn_beta_slow": 2.0,
    }
    model = write_gguf(tmp_path / "model.gguf", "qwen2", metadata=keys, rope_parameters=rope)

    assert_equal_logits(tmp_path / "model.gguf", model)


def test_llama_3_scaling_comes_as_factors_of_the_frequencies(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": _llama3_factors(LLAMA3_ROPE, head_dim=16)}
    model = write_gguf(tmp_path / "model.gguf", tensors=factors, rope_parameters=LLAMA3_ROPE)

    assert_equal_logits(tmp_path / "model.gguf", model)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return by what each frequency is divided, as llama.cpp's conversion writes it."""
    turns = rope["original_max_position_embeddings"] / (
        2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept_share = ((turns - low) / (high - low)).clip(0, 1)
    return 1 / ((1 - kept_share) / rope["factor"] + kept_share)


@pytest.mark.parametrize("type_name", sorted(BLOCKS.keys() - {"F32", "F16"}))
def test_dequantized_bits_equal_those_of_the_gguf_package(type_name: str) -> None:
    source = np.random.default_rng(11)
    block_elements, block_bytes = BLOCKS[type_name]
    raw = source.integers(0, 256, (5, 1024 // block_elements * block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are NaN and infinite, too
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])

    ours = dequantize(torch.from_numpy(raw), type_name).numpy()

    same = (ours.view(np.int32) == theirs.view(np.int32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all()
    assert np.isfinite(ours).mean() > 0.9
