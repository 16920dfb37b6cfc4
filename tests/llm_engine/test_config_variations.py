"""Whatever config.json says, tokens equal those of transformers, or the key is refused by name.

Both load each variation of a small checkpoint and continue a prompt greedily, so a key that one of
them overlooks shows in a token.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from llm_engine.errors import UnsupportedModel
from llm_engine.load_engine import load_engine
from llm_engine.model_config import read_model_config
from llm_engine.sampling import SamplingParams
from tests.llm_engine.driver import generate
from tests.support.checkpoints import CLASSES, edit_json, reference_greedy, write_checkpoint

ALL = tuple(CLASSES)
QWEN = ("qwen2", "qwen3")
ROPE = ("llama",)  # it is read and computed for all families alike
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
NUM_TOKENS = 16
PROMPT = [(7 * i * i + 3 * i + 5) % 61 for i in range(40)]

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
DEFAULT = {"rope_type": "default", "rope_theta": 50.0}


Variation = tuple[tuple[str, ...], dict[str, Any]]  # families, fields; "-" is an absent field


def of(families: tuple[str, ...] = ALL, **changes: Any) -> Variation:
    return families, changes


# Variations that change the tokens of transformers
CHANGING = {
    "window of all layers": of(("mistral",), sliding_window=8),
    "window of all layer types": of(("mistral",), sliding_window=8, layer_types=[SLIDING, SLIDING]),
    "window of all layers by switch": of(
        QWEN, use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types="-"
    ),
    "window of all layer types by switch": of(
        QWEN, use_sliding_window=True, sliding_window=8, layer_types=[SLIDING, SLIDING]
    ),
    "both kinds of rope": of(ROPE, rope_parameters=DEFAULT, rope_scaling=LINEAR),
    "rope_theta beside rope_scaling": of(
        ROPE, rope_parameters="-", rope_scaling=LINEAR, rope_theta=70.0
    ),
    "rope_theta alone": of(ROPE, rope_parameters="-", rope_theta=50.0),
    "an empty rope_scaling": of(ROPE, rope_parameters=DEFAULT, rope_scaling={}),
    "the type as once": of(
        ROPE, rope_parameters="-", rope_scaling={"type": "linear", "factor": 2.0}
    ),
    "yarn": of(ROPE, rope_parameters=YARN),
    "yarn with null": of(ROPE, rope_parameters=YARN | {"truncate": None, "beta_fast": None}),
    "original context beside yarn": of(
        ROPE, rope_parameters=YARN, original_max_position_embeddings=16
    ),
    "original context beside llama3": of(
        ROPE, rope_parameters=LLAMA3, original_max_position_embeddings=16
    ),
    "llama3 without original context": of(ROPE, rope_parameters=LLAMA3),
    "another eps": of(("mistral",), rms_norm_eps=0.5),
}
# Variations that do not
UNCHANGING = {
    "window of no layer type": of(("mistral",), sliding_window=8, layer_types=[FULL, FULL]),
    "window and null layer types": of(("mistral",), sliding_window=200, layer_types=None),
    "no window": of(("mistral",), sliding_window=None),
    "switch without effect": of(("mistral",), sliding_window=None, use_sliding_window=True),
    "switched off": of(QWEN, use_sliding_window=False, sliding_window=8, layer_types="-"),
    "switched on without window": of(
        QWEN, use_sliding_window=True, sliding_window=None, layer_types="-"
    ),
    "switched on for later layers": of(
        QWEN, use_sliding_window=True, sliding_window=8, layer_types="-", max_window_layers="-"
    ),
    "switched on for no layer type": of(
        QWEN, use_sliding_window=True, sliding_window=8, layer_types=[FULL, FULL]
    ),
    "layer types as once": of(
        ("mistral", "qwen2"), layer_types=["attention", "attention"], sliding_window=200
    ),
    "a window as long as the context": of(("llama",), sliding_window=128),
    "layer types of a llama": of(("llama",), sliding_window=8, layer_types=[FULL, FULL]),
    "the other name of silu": of(("qwen2",), hidden_act="swish"),
    "without what has defaults": of(
        hidden_act="-", rms_norm_eps="-", rope_parameters="-", tie_word_embeddings="-", dtype="-"
    ),
    "all that has no effect": of(
        _attn_implementation="eager",
        _name_or_path="elsewhere",
        attention_dropout=0.5,
        attention_bias=False,
        bos_token_id=3,
        chunk_size_feed_forward=2,
        id2label={"0": "one", "1": "other"},
        initializer_range=0.5,
        is_decoder=True,
        output_attentions=True,
        output_hidden_states=True,
        pad_token_id=5,
        pretraining_tp=2,
        tie_encoder_decoder=True,
        torchscript=True,
        transformers_version="4.0.0",
        unsloth_version="1",
        use_cache=False,
        is_causal=True,
        use_mrope=False,
        rope_interleaved=False,
        quantization_config=None,
        unknown_key=None,
    ),
}
# Name |-> variation, and the key that the error must name
REFUSED = {
    "mixed layer types": (
        of(
            ("mistral", *QWEN),
            sliding_window=8,
            use_sliding_window=True,
            layer_types=[FULL, SLIDING],
        ),
        "layer_types",
    ),
    "mixed layer types of a llama": (
        of(("llama",), sliding_window=8, layer_types=[FULL, SLIDING]),
        "layer_types",
    ),
    "sliding layers of a llama": (
        of(("llama",), sliding_window=8, layer_types=[SLIDING, SLIDING]),
        "layer_types",
    ),
    "window of a llama": (of(("llama",), sliding_window=8), "sliding_window"),
    "window of some layers": (
        of(QWEN, use_sliding_window=True, sliding_window=8, max_window_layers=1, layer_types="-"),
        "max_window_layers",
    ),
    "sliding layers without window": (
        of(QWEN, use_sliding_window=False, layer_types=[SLIDING, SLIDING]),
        "layer_types",
    ),
    "too few layer types": (of(layer_types=[FULL]), "layer_types"),
    "foreign layer types": (of(layer_types=[FULL, "linear_attention"]), "layer_types"),
    "another model type": (of(model_type="gemma"), "model_type"),
    "no causal mask": (of(is_causal=False), "is_causal"),
    "a null mask": (of(is_causal=None), "is_causal"),
    "chunks": (of(attention_chunk_size=8), "attention_chunk_size"),
    "layers that differ": (of(per_layer_config={"0": {"head_dim": 4}}), "per_layer_config"),
    "shared caches": (of(kv_sharing_modes=["own", "reuse"]), "kv_sharing_modes"),
    "another file of weights": (
        of(transformers_weights="other.safetensors"),
        "transformers_weights",
    ),
    "another file of keys": (of(configuration_files=["c.json"]), "configuration_files"),
    "encoder and decoder": (of(is_encoder_decoder=True), "is_encoder_decoder"),
    "another activation": (of(hidden_act="gelu"), "hidden_act"),
    "part of a head": (of(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "quantized": (of(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "other code": (
        of(auto_map={"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}),
        "auto_map",
    ),
    "caps of scores": (of(attn_logit_softcapping=2.0), "attn_logit_softcapping"),
    "scaled logits": (of(logit_scale=2.0), "logit_scale"),
    "a key of tomorrow": (of(residual_multiplier=0.5), "residual_multiplier"),
    "longrope": (
        of(
            rope_parameters="-",
            rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        ),
        "rope_type is 'longrope'",
    ),
    "mrope": (
        of(rope_parameters="-", rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}),
        "rope_type is 'mrope'",
    ),
    "mrope that says default": (
        of(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]}),
        "mrope_section",
    ),
    "rope by layer type": (
        of(rope_parameters={FULL: {"rope_type": "default", "rope_theta": 5.0}}),
        FULL,
    ),
}


def cases(table: dict[str, Variation], differs: bool) -> list[Any]:
    return [
        pytest.param(family, changes, differs, id=f"{family}: {name}")
        for name, (families, changes) in table.items()
        for family in families
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family; that of Mistral without a window."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in ALL:
        changes = {"sliding_window": None} if family == "mistral" else {}
        write_checkpoint(folder / family, family, seed=3, **SHAPE, **changes)
    return folder


@pytest.fixture(scope="module")
def own_tokens(checkpoints: Path) -> dict[str, list[int]]:
    """The tokens of transformers for each checkpoint without changes."""
    return {family: their_tokens(checkpoints / family) for family in ALL}


def varied(checkpoints: Path, family: str, folder: Path, **changes: Any) -> Path:
    shutil.copytree(checkpoints / family, folder, dirs_exist_ok=True)
    edit_json(folder / "config.json", **changes)
    return folder


def their_tokens(folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return reference_greedy(model, PROMPT, NUM_TOKENS)


def our_tokens(folder: Path) -> list[int]:
    engine = load_engine(folder, page_size=8, num_pages=16, device="cpu")
    [tokens] = generate(engine, [PROMPT], SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    return tokens


@pytest.mark.parametrize(
    ("family", "changes", "differs"), [*cases(CHANGING, True), *cases(UNCHANGING, False)]
)
def test_a_variation_has_the_tokens_of_transformers(
    checkpoints: Path,
    own_tokens: dict[str, list[int]],
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    differs: bool,
) -> None:
    folder = varied(checkpoints, family, tmp_path, **changes)

    theirs = their_tokens(folder)

    assert (theirs != own_tokens[family]) is differs
    assert our_tokens(folder) == theirs


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(
    checkpoints: Path, tmp_path: Path, name: str
) -> None:
    (families, changes), key = REFUSED[name]
    for family in families:
        folder = varied(checkpoints, family, tmp_path, **changes)

        with pytest.raises(UnsupportedModel, match=rf"config\.json: (rope_\w+: )?{key}"):
            read_model_config(folder)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("other", ALL)
def test_a_model_type_of_another_family_is_refused(
    checkpoints: Path, tmp_path: Path, family: str, other: str
) -> None:
    folder = varied(checkpoints, family, tmp_path, model_type=other)

    if family == other:
        assert read_model_config(folder).family == family
    else:
        with pytest.raises(UnsupportedModel, match=f"model_type is '{other}', must be '{family}'"):
            read_model_config(folder)


# In a shorter context these windows hide nothing.
LONG = {"max_position_embeddings": 32768, "sliding_window": "-", "layer_types": "-"}
DEFAULT_WINDOWS = {
    "mistral": LONG,
    "qwen2": LONG | {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3": LONG | {"use_sliding_window": True, "max_window_layers": 0},
}


@pytest.mark.parametrize("family", DEFAULT_WINDOWS)
def test_a_missing_sliding_window_is_that_of_transformers(
    checkpoints: Path, tmp_path: Path, family: str
) -> None:
    folder = varied(checkpoints, family, tmp_path, **DEFAULT_WINDOWS[family])

    ours = read_model_config(folder).sliding_window

    assert ours == AutoConfig.from_pretrained(folder).sliding_window == 4096


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("value", ["-", None])
def test_missing_and_null_key_value_heads_are_those_of_transformers(
    checkpoints: Path, tmp_path: Path, family: str, value: object
) -> None:
    changes = {"num_attention_heads": 64, "hidden_size": 64, "num_key_value_heads": value}
    folder = varied(checkpoints, family, tmp_path, **changes)

    ours = read_model_config(folder).num_kv_heads

    if family == "mistral" and value is None:  # refused by transformers
        assert ours == 64
    else:
        assert ours == AutoConfig.from_pretrained(folder).num_key_value_heads


@pytest.mark.parametrize("family", ALL)
def test_an_output_of_its_own_counts_also_where_it_is_called_tied(
    checkpoints: Path, own_tokens: dict[str, list[int]], tmp_path: Path, family: str
) -> None:
    folder = varied(checkpoints, family, tmp_path, tie_word_embeddings=True)

    assert our_tokens(folder) == their_tokens(folder) == own_tokens[family]


def test_an_output_that_is_missing_or_equal_is_the_embedding(
    checkpoints: Path, own_tokens: dict[str, list[int]], tmp_path: Path
) -> None:
    folder = varied(checkpoints, "llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    found = []
    for output in (None, tensors["model.embed_tokens.weight"].clone()):
        del tensors["lm_head.weight"]
        save_file(
            tensors | ({} if output is None else {"lm_head.weight": output}),
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        tensors["lm_head.weight"] = torch.empty(0)
        found += [our_tokens(folder), their_tokens(folder)]

    assert found[0] != own_tokens["llama"]
    assert found == [found[0]] * 4


def test_model_safetensors_counts_beside_an_index_of_other_shards(
    checkpoints: Path, own_tokens: dict[str, list[int]], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "llama", seed=4, max_shard_size="4KB", **SHAPE)
    folder = varied(checkpoints, "llama", tmp_path)
    assert len(list(folder.glob("model-*.safetensors"))) > 2

    assert our_tokens(folder) == their_tokens(folder) == own_tokens["llama"]


def test_an_adapter_beside_the_weights_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = varied(checkpoints, "llama", tmp_path)
    (folder / "adapter_config.json").write_text("{}")

    with pytest.raises(UnsupportedModel, match=r"adapter_config\.json: must be absent"):
        our_tokens(folder)
