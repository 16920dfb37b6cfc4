"""Every key that transformers knows is in a table, so that a release with new ones is noticed."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from transformers import GenerationConfig, modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from llm_engine import config_keys, generation_config, model_config, rope_config, window_config
from tests.support.checkpoints import CLASSES

# Of transformers' objects, not of files
RUNTIME = {
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_output_attentions",
    "_post_init_done",
}


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_of_a_configuration_class_has_a_place(family: str) -> None:
    config_class, _ = CLASSES[family]
    names = {each.name for each in fields(config_class)} | vars(config_class()).keys()

    assert len(names) > 30
    assert names - RUNTIME - config_keys.KNOWN == set()


@pytest.mark.parametrize(
    "module",
    [modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3],
    ids=lambda m: m.__name__.rpartition(".")[2],
)
def test_every_key_that_a_model_computes_with_is_one_that_is_read(module: ModuleType) -> None:
    source = inspect.getsource(module)
    names = set(re.findall(r"\bconfig\.([a-z]\w*)", source))
    names |= set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source))

    without_effect = {"attention_dropout", "pad_token_id"}  # of training; of a row's initialization
    assert "rms_norm_eps" in names
    assert names - without_effect - config_keys.USED == set()


def test_every_constant_of_rotary_scaling_has_a_place() -> None:
    names = set(modeling_rope_utils.RopeParameters.__annotations__)
    of_other_types = {"long_factor", "mrope_section", "short_factor"}

    assert names - of_other_types - rope_config.ROPE_FIELDS == set()
    types = set(modeling_rope_utils.ROPE_INIT_FUNCTIONS) | {"default"}
    assert types - set(rope_config.ROPE_TYPES) == {"dynamic", "longrope", "proportional"}


def test_every_generation_setting_has_a_place() -> None:
    names = vars(GenerationConfig()).keys() | GenerationConfig._get_default_generation_params()

    assert len(names) > 60
    assert names - generation_config.SETTINGS == set()


def test_defaults_of_generation_settings_are_off() -> None:
    defaults = GenerationConfig._get_default_generation_params()

    for name, values in generation_config.OFF.items():
        assert defaults.get(name) is None or defaults[name] in values


def test_no_key_has_two_places() -> None:
    places = [
        config_keys.USED,
        config_keys.FIXED,
        config_keys.REFUSED,
        *config_keys.HARMLESS.values(),
    ]
    settings = [
        generation_config.USED,
        generation_config.OFF,
        *generation_config.HARMLESS.values(),
    ]

    settings_of_both = {"eos_token_id"}
    assert sum(map(len, settings)) == len(generation_config.SETTINGS)
    assert sum(map(len, places)) == len(
        config_keys.KNOWN - generation_config.SETTINGS - {"auto_map"} | settings_of_both
    )


def test_every_key_in_use_is_read_somewhere() -> None:
    source = "".join(
        map(inspect.getsource, (model_config, rope_config, window_config, generation_config))
    )

    assert [name for name in config_keys.USED if f'"{name}"' not in source] == []


def published(architecture: str, model_type: str, **keys: object) -> dict[str, object]:
    """Return a config.json as it lies in a published folder; `keys` are those that vary."""
    common = {
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0",
        "use_cache": True,
    }
    return {"architectures": [architecture], "model_type": model_type} | common | keys


LLAMA31_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# Name |-> config.json; window, key-value heads and context that it asks for
PUBLISHED: dict[str, tuple[dict[str, object], tuple[int | None, int, int]]] = {
    "Llama 2": (
        published(
            "LlamaForCausalLM",
            "llama",
            _name_or_path="meta-llama/Llama-2-7b-hf",
            max_position_embeddings=4096,
            num_key_value_heads=32,
            pretraining_tp=1,
            rope_scaling=None,
            vocab_size=32000,
        ),
        (None, 32, 4096),
    ),
    "Llama 3.1": (
        published(
            "LlamaForCausalLM",
            "llama",
            attention_bias=False,
            eos_token_id=[128001, 128008, 128009],
            max_position_embeddings=131072,
            mlp_bias=False,
            num_key_value_heads=8,
            pretraining_tp=1,
            rope_scaling=LLAMA31_ROPE,
            rope_theta=500000.0,
            vocab_size=128256,
        ),
        (None, 8, 131072),
    ),
    "SmolLM2": (
        published(
            "LlamaForCausalLM",
            "llama",
            is_llama_config=True,
            max_position_embeddings=8192,
            num_key_value_heads=8,
            pretraining_tp=1,
            rope_interleaved=False,
            rope_scaling=None,
            rope_theta=100000,
            vocab_size=49152,
            **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        ),
        (None, 8, 8192),
    ),
    "Falcon 3": (
        published(
            "LlamaForCausalLM",
            "llama",
            activation="swiglu",
            attention_bias=False,
            head_dim=256,
            max_position_embeddings=32768,
            mlp_bias=False,
            num_key_value_heads=4,
            pretraining_tp=1,
            rope_scaling=None,
            rope_theta=1000042,
            vocab_size=131072,
        ),
        (None, 4, 32768),
    ),
    "Mistral 0.1": (
        published(
            "MistralForCausalLM",
            "mistral",
            max_position_embeddings=32768,
            num_key_value_heads=8,
            rope_theta=10000.0,
            sliding_window=4096,
            vocab_size=32000,
        ),
        (4096, 8, 32768),
    ),
    "Mistral 0.3": (
        published(
            "MistralForCausalLM",
            "mistral",
            head_dim=128,
            max_position_embeddings=32768,
            num_key_value_heads=8,
            rope_theta=1000000.0,
            sliding_window=None,
            vocab_size=32768,
        ),
        (None, 8, 32768),
    ),
    "Qwen 2.5": (
        published(
            "Qwen2ForCausalLM",
            "qwen2",
            max_position_embeddings=32768,
            max_window_layers=24,
            num_key_value_heads=2,
            rope_theta=1000000.0,
            sliding_window=32768,
            use_mrope=False,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        (None, 2, 32768),
    ),
    "Qwen 3": (
        published(
            "Qwen3ForCausalLM",
            "qwen3",
            attention_bias=False,
            head_dim=128,
            max_position_embeddings=40960,
            max_window_layers=36,
            num_key_value_heads=8,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        (None, 8, 40960),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(tmp_path: Path, name: str) -> None:
    values, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))

    config = model_config.read_model_config(tmp_path)

    assert (config.sliding_window, config.num_kv_heads, config.max_context_tokens) == expected
