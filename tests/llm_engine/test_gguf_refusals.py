"""GGUF files that ask for what is not implemented, or contradict themselves: refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_engine.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointMissing,
    EngineError,
    UnsupportedModel,
)
from llm_engine.load_engine import load_engine
from llm_engine.model_files import open_model
from tests.support.gguf_files import CONTROL, tokenizer_keys, write_gguf

TOKENS = tokenizer_keys(272)["tokenizer.ggml.tokens"]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_refused(
    tmp_path: Path, error: type[EngineError], words: tuple[str, ...], **options: Any
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, num_hidden_layers=2, **options)

    with pytest.raises(error) as refusal:
        open_model(path)

    for word in (str(path), *words):
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.type", "adapter", ("'adapter'", "'model'")),
        ("split.count", 3, ("3", "llama-gguf-split --merge")),
        ("llama.expert_count", 8, ("8", "0 or absent")),
        ("llama.attention.causal", False, ("False", "True or absent")),
        ("llama.logit_scale", 0.5, ("0.5", "not implemented")),
        ("llama.rope.scaling.attn_factor", 1.5, ("1.5", "1.0 or absent")),
        ("llama.rope.scaling.type", "longrope", ("'longrope'", "'yarn'")),
        ("llama.rope.scaling.factor", -4.0, ("-4.0", "above 0")),
        ("llama.rope.freq_base", float("nan"), ("nan", "above 0")),
        ("llama.rope.dimension_count", 8, ("8", "the length of a key (16)")),
        ("llama.attention.value_length", 32, ("32", "the length of a key (16)")),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, ("0.0", "above 0")),
        ("llama.attention.head_count", [6, 6], ("an integer",)),
        ("llama.block_count", 10**9, ("1000000000", "number of tensors (21)")),
        ("llama.block_count", None, ("missing",)),
        ("llama.vocab_size", 300, ("300", "the rows of token_embd.weight (272)")),
        ("llama.context_length", "long", ("'long'", "an integer")),
        ("tokenizer.ggml.tokens", [*TOKENS, "more"], ("273 tokens", "(272)")),
    ],
)
def test_a_key_of_the_model_that_cannot_be_served(
    tmp_path: Path, key: str, value: object, words: tuple[str, ...]
) -> None:
    assert_refused(tmp_path, UnsupportedModel, (key, *words), metadata={key: value})


@pytest.mark.parametrize("value", [[4, 4], "long", -1.0])
@pytest.mark.parametrize("key", ["original_context_length", "yarn_beta_fast", "yarn_beta_slow"])
def test_a_constant_of_yarn_that_is_no_number(tmp_path: Path, key: str, value: object) -> None:
    scaling = "llama.rope.scaling"
    keys = {f"{scaling}.type": "yarn", f"{scaling}.factor": 2.0, f"{scaling}.{key}": value}
    words = (f"{scaling}.{key} is ", "must be a")
    assert_refused(tmp_path, UnsupportedModel, words, metadata=keys)


@pytest.mark.parametrize("value", [[0.5, 0.5], "hot", True])
def test_a_recommended_setting_that_is_no_number(tmp_path: Path, value: object) -> None:
    words = ("general.sampling.temp is ", "must be a number")
    assert_refused(tmp_path, UnsupportedModel, words, metadata={"general.sampling.temp": value})


def test_a_refusal_shows_only_the_beginning_of_a_long_value(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata={"general.alignment": "x" * 100_000})

    with pytest.raises(CheckpointCorrupt, match=r"general.alignment is 'xxx.{0,300}$"):
        open_model(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.model", "bert", ("'bert'", "'gpt2' or 'llama'")),
        ("tokenizer.ggml.model", None, ("missing",)),
        ("tokenizer.ggml.pre", "default", ("'default'", "llama-bpe", "smollm")),
        ("tokenizer.ggml.pre", None, ("missing",)),
        ("tokenizer.ggml.merges", None, ("empty or missing",)),
        ("tokenizer.ggml.add_space_prefix", True, ("false for 'gpt2'",)),
        ("tokenizer.ggml.add_sep_token", True, ("false",)),
        ("tokenizer.ggml.bos_token_id", 272, ("272", "within 0..271")),
        ("tokenizer.ggml.eot_token_id", 10**6, ("1000000", "within 0..271")),
        ("tokenizer.ggml.token_type", [9] * 272, ("9", "0 to 6")),
        ("tokenizer.chat_template", 5, ("5", "a string")),
    ],
)
def test_a_key_of_the_tokenizer_that_cannot_be_served(
    tmp_path: Path, key: str, value: object, words: tuple[str, ...]
) -> None:
    assert_refused(tmp_path, UnsupportedModel, (key, *words), metadata={key: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "he"]}, ("tokens[259], 'he', is there twice",)),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "x" * 1025]}, ("1025 characters long", "1024")),
        ({"tokenizer.ggml.merges": ["h e", "one"]}, ("merges[1] is 'one'", "two tokens")),
        ({"tokenizer.ggml.merges": ["q zz"]}, ("merges", "zz")),
        ({"tokenizer.ggml.token_type": [CONTROL] * 3}, ("token_type is 3 numbers", "272 tokens")),
        ({"tokenizer.ggml.token_type": "none"}, ("token_type is 'none'",)),
        ({"tokenizer.ggml.model": "llama"}, ("no tokenizer.ggml.scores",)),
    ],
)
def test_a_vocabulary_that_contradicts_itself(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_refused(tmp_path, CheckpointCorrupt, words, metadata=changes)


def test_a_first_token_that_nothing_names(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}
    words = ("tokenizer.ggml.add_bos_token", "without bos_token_id")
    assert_refused(tmp_path, UnsupportedModel, words, metadata=keys)


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        (
            {"blk.1.ffn_up.weight": None},
            CheckpointMissing,
            ("blk.1.ffn_up.weight [64, 96] is not there",),
        ),
        ({"token_embd.weight": None}, CheckpointCorrupt, ("token_embd.weight is not there",)),
        (
            {"blk.0.attn_k.weight": np.zeros((48, 96))},
            CheckpointMismatch,
            ("blk.0.attn_k.weight has shape [48, 96]", "[32, 96]"),
        ),
        (
            {"blk.0.attn_q.bias": np.zeros(96)},
            CheckpointMissing,
            ("blk.0.attn_k.bias [32] is not there",),
        ),
        (
            {"blk.0.ffn_gate_inp.weight": np.zeros((8, 96))},
            CheckpointMismatch,
            ("blk.0.ffn_gate_inp.weight has no place",),
        ),
        (
            {"rope_freqs.weight": np.ones(7)},
            UnsupportedModel,
            ("rope_freqs.weight has type F32 and shape [7]", "F32 [8]"),
        ),
        ({"rope_freqs.weight": -np.ones(8)}, UnsupportedModel, ("factors", "above 0")),
    ],
)
def test_tensors_that_the_metadata_contradicts(
    tmp_path: Path, tensors: dict[str, Any], error: type[EngineError], words: tuple[str, ...]
) -> None:
    assert_refused(tmp_path, error, words, tensors=tensors)


def test_factors_beside_a_scaling(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert_refused(
        tmp_path,
        UnsupportedModel,
        ("llama.rope.scaling.type", "'none' beside rope_freqs.weight"),
        metadata=keys,
        tensors={"rope_freqs.weight": np.ones(8)},
    )


def test_a_window_of_which_layers_is_unknown(tmp_path: Path) -> None:
    assert_refused(
        tmp_path,
        UnsupportedModel,
        ("qwen2.attention.sliding_window", "which"),
        family="qwen2",
        metadata={"qwen2.attention.sliding_window": 64},
    )


def test_another_architecture(tmp_path: Path) -> None:
    words = ("general.architecture is 'phi3'", "llama, qwen2, qwen3")
    assert_refused(tmp_path, UnsupportedModel, words, metadata={"general.architecture": "phi3"})


def test_what_config_json_would_be_refused_for_names_the_file(tmp_path: Path) -> None:
    keys = {"llama.attention.head_count_kv": 4}
    assert_refused(tmp_path, UnsupportedModel, ("num_key_value_heads is 4",), metadata=keys)


def test_heads_without_a_kernel_are_refused_under_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, head_dim=24)

    with pytest.raises(UnsupportedModel) as raised:
        load_engine(path, page_size=16, num_pages=4, device="cpu", attention="triton")

    assert f"{path}: head_dim is 24, must be a multiple of 16" in str(raised.value)
