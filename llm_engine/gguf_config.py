"""Translates a GGUF file's metadata into config.json; refuses what is not implemented.

Keys of the model's shape are used, known to change nothing, or refused by name: ignoring one could
compute another model.
"""

import struct
from collections.abc import Sequence
from typing import Any

from llm_engine.config_fields import ConfigFields
from llm_engine.errors import CheckpointCorrupt, UnsupportedModel
from llm_engine.gguf_file import GGUFHeader, GGUFTensor

# general.architecture |-> architecture in config.json
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # also in Mistral's files
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_FACTORS = "rope_freqs.weight"  # one for each frequency, by which it is divided
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"  # absent where it is the embedding

# Keys below the architecture's name. A key with a value here must have it: other values mean other
# models. A key without one does not affect the arithmetic.
_USED = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
}
_FIXED = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "pooling_type": 0,
    "rope.scaling.attn_factor": 1.0,
    "use_parallel_residual": False,
}
_WITHOUT_EFFECT = {
    "rope.scaling.finetuned",
    "tensor_data_layout",  # the rows of q and k are in the same order in both layouts
}


def model_config(header: GGUFHeader) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
        UnsupportedModel: If the file requires something that is not implemented.
        CheckpointCorrupt: If it contradicts itself.
    """
    fields = ConfigFields(header.metadata, str(header.path))
    _check_whole(fields)
    name = fields.string("general.architecture")
    if name not in ARCHITECTURES:
        allowed = f"one of {', '.join(ARCHITECTURES)}"
        raise fields.unsupported("general.architecture", name, allowed)
    _check_keys(header, fields, name)
    num_heads = fields.integer(f"{name}.attention.head_count")
    hidden_size = fields.integer(f"{name}.embedding_length")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": _num_layers(header, fields, name),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer(f"{name}.attention.head_count_kv", num_heads),
        "vocab_size": _vocab_size(header, fields, name),
        "max_position_embeddings": fields.integer(f"{name}.context_length"),
        "rms_norm_eps": fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": OUTPUT not in header.tensors,
        "dtype": _dtype(header),
    }
    head_dim = _head_dim(fields, name, hidden_size, num_heads)
    if name != "qwen2" or head_dim != hidden_size // num_heads:
        config["head_dim"] = head_dim
    config["rope_parameters"] = _rope(header, fields, name, head_dim)
    if name in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if name == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    _add_window(config, fields, name)
    return config


def _check_whole(fields: ConfigFields) -> None:
    if fields.string("general.type", "model") != "model":
        raise fields.unsupported("general.type", fields.string("general.type"), "'model'")
    if fields.integer("split.count", 1, at_least=0) > 1:
        found = fields.integer("split.count")
        allowed = "1: join the parts with `llama-gguf-split --merge`"
        raise fields.unsupported("split.count", found, allowed)


def _check_keys(header: GGUFHeader, fields: ConfigFields, name: str) -> None:
    for key in fields.names():
        if not key.startswith(f"{name}."):
            continue
        rest = key.removeprefix(f"{name}.")
        if rest in _FIXED:
            if (found := header.metadata[key]) != _FIXED[rest]:
                raise fields.unsupported(key, found, f"{_FIXED[rest]!r} or absent")
        elif rest not in _USED | _WITHOUT_EFFECT:
            raise fields.unsupported(key, header.metadata[key], "absent: it is not implemented")


def _num_layers(header: GGUFHeader, fields: ConfigFields, name: str) -> int:
    num_layers = fields.integer(f"{name}.block_count")
    if num_layers > len(header.tensors):  # before any loop over them
        allowed = f"at most the number of tensors ({len(header.tensors)})"
        raise fields.unsupported(f"{name}.block_count", num_layers, allowed)
    return num_layers


def _head_dim(fields: ConfigFields, name: str, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.integer(f"{name}.attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        default = hidden_size // num_heads if key == "attention.value_length" else head_dim
        if (found := fields.integer(f"{name}.{key}", default)) != head_dim:
            allowed = f"the length of a key ({head_dim})"
            raise fields.unsupported(f"{name}.{key}", found, allowed)
    return head_dim


def _vocab_size(header: GGUFHeader, fields: ConfigFields, name: str) -> int:
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise CheckpointCorrupt(f"{header.path}: tensor {EMBEDDING} is not there")
    rows = embedding.shape[0]
    vocab_size = fields.integer(f"{name}.vocab_size", rows)
    if vocab_size != rows:
        allowed = f"the rows of {EMBEDDING} ({rows})"
        raise fields.unsupported(f"{name}.vocab_size", vocab_size, allowed)
    num_tokens = len(fields.strings("tokenizer.ggml.tokens"))
    if num_tokens > rows:
        allowed = f"at most the rows of {EMBEDDING} ({rows})"
        raise fields.unsupported("tokenizer.ggml.tokens", f"{num_tokens} tokens", allowed)
    return rows


def _dtype(header: GGUFHeader) -> str:
    """Return the dtype for GPUs; norms are float32 in all files."""
    types = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(
        frozenset(types), "bfloat16"
    )


def _rope(header: GGUFHeader, fields: ConfigFields, name: str, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": fields.number(f"{name}.rope.freq_base", 10_000.0)}
    linear = fields.number(f"{name}.rope.scale_linear", 1.0)  # the key of old files
    factor = fields.number(f"{name}.rope.scaling.factor", linear)
    key = f"{name}.rope.scaling.type"
    rope_type = fields.string(key, "linear")
    if rope_type not in ("none", "linear", "yarn"):
        raise fields.unsupported(key, rope_type, "'none', 'linear' or 'yarn'")
    is_scaled = rope_type != "none" and factor != 1
    if ROPE_FACTORS in header.tensors:
        if is_scaled:
            raise fields.unsupported(key, rope_type, f"'none' beside {ROPE_FACTORS}")
        factors = _rope_factors(header.tensors[ROPE_FACTORS], header, head_dim)
        return rope | {"rope_type": "factors", "factors": factors}
    if not is_scaled:
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        scaling = f"{name}.rope.scaling"
        if fields.has(key := f"{scaling}.original_context_length"):
            rope["original_max_position_embeddings"] = fields.integer(key)
        for field in ("beta_fast", "beta_slow"):
            if fields.has(key := f"{scaling}.yarn_{field}"):
                rope[field] = fields.number(key)
    return rope


def _rope_factors(tensor: GGUFTensor, header: GGUFHeader, head_dim: int) -> Sequence[float]:
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise UnsupportedModel(
            f"{header.path}: tensor {tensor.name} has type {tensor.type} and shape "
            f"{list(tensor.shape)}, must be F32 [{head_dim // 2}]"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.begin)
        return struct.unpack(f"<{head_dim // 2}f", file.read(tensor.end - tensor.begin))


def _add_window(config: dict[str, Any], fields: ConfigFields, name: str) -> None:
    """Turn a Llama with a window into a Mistral, unless no request is that long."""
    key = f"{name}.attention.sliding_window"
    if not fields.has(key):
        return
    window = fields.integer(key)
    if window >= config["max_position_embeddings"]:
        return
    if name != "llama" or config["attention_bias"] or config["mlp_bias"]:
        raise fields.unsupported(key, window, "absent: of these layers it is unknown which have it")
    config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    config |= {"model_type": "mistral"}
    del config["attention_bias"], config["mlp_bias"]
