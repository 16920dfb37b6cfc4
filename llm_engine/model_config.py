"""config.json of a checkpoint as a checked value; what is not implemented is refused by name.

One decoder serves all families: they differ in biases, in the normalization of queries and keys,
in the sliding window and in rotary scaling, and each of these is a field here.
"""

from dataclasses import dataclass
from pathlib import Path

from llm_engine.config_fields import ConfigFields, read_json
from llm_engine.rope_config import RopeConfig, YarnRope, read_rope_config

# architecture |-> family
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and arithmetic of a decoder."""

    family: str  # a value of FAMILIES
    dtype: str  # of the weights as published, one of DTYPES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int  # a multiple of num_kv_heads
    num_kv_heads: int
    head_dim: int  # even
    max_context_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_window: int | None  # a token sees itself and the sliding_window - 1 before it
    has_qkv_bias: bool
    has_output_bias: bool  # of the attention's output projection
    has_mlp_bias: bool
    has_qk_norm: bool  # RMS norm of each query and key head before rotation
    has_tied_embeddings: bool  # the output projection is the embedding table
    eos_token_ids: tuple[int, ...]  # tokens that end generation; may be empty

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json, and the end tokens of generation_config.json where there is one.

    Raises:
        CheckpointError: If config.json is missing or is not JSON.
        UnsupportedModel: If it asks for something that is not implemented.
    """
    fields = read_json(model_dir / "config.json")
    family = _read_family(fields)
    if fields.has("quantization_config"):
        raise fields.unsupported("quantization_config", "present", "absent: no quantized weights")
    if fields.string("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", fields.string("hidden_act"), "'silu'")
    hidden_size = fields.integer("hidden_size")
    num_qo_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_qo_heads)
    if num_qo_heads % num_kv_heads:
        allowed = f"a divisor of num_attention_heads ({num_qo_heads})"
        raise fields.unsupported("num_key_value_heads", num_kv_heads, allowed)
    # Qwen3's default is a constant in transformers, not derived.
    default_head_dim = 128 if family == "qwen3" else hidden_size // num_qo_heads
    head_dim = fields.integer("head_dim", default_head_dim, at_least=2)
    if head_dim % 2:
        raise fields.unsupported("head_dim", head_dim, "even")
    has_attention_bias = family in ("llama", "qwen3") and fields.boolean("attention_bias", False)
    dtype = fields.string("dtype", fields.string("torch_dtype", "float32"))
    if dtype not in DTYPES:
        raise fields.unsupported("dtype", dtype, f"one of {', '.join(DTYPES)}")
    rope = read_rope_config(fields)
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        family=family,
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=_read_context(fields, rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        sliding_window=_read_sliding_window(fields, family),
        has_qkv_bias=has_attention_bias or family == "qwen2",
        has_output_bias=has_attention_bias,
        has_mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
        has_qk_norm=family == "qwen3",
        has_tied_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=_read_eos_token_ids(model_dir, fields, vocab_size),
    )


def _read_family(fields: ConfigFields) -> str:
    architectures = fields.strings("architectures")
    if len(architectures) != 1 or architectures[0] not in FAMILIES:
        allowed = f"exactly one of {', '.join(sorted(FAMILIES))}"
        raise fields.unsupported("architectures", architectures, allowed)
    return FAMILIES[architectures[0]]


def _read_context(fields: ConfigFields, rope: RopeConfig) -> int:
    context = fields.integer("max_position_embeddings")
    if isinstance(rope, YarnRope):
        # Published configurations add the scaling to an unchanged max_position_embeddings.
        return max(context, int(rope.original_context_tokens * rope.factor))
    return context


def _read_sliding_window(fields: ConfigFields, family: str) -> int | None:
    if family == "llama" or not fields.has("sliding_window"):
        return None
    if family == "mistral":
        return fields.integer("sliding_window")
    if not fields.boolean("use_sliding_window", False):
        return None
    num_layers = fields.integer("num_hidden_layers")
    num_full_layers = fields.integer("max_window_layers", 28, at_least=0)
    layer_types = set(fields.strings("layer_types")) or {
        "full_attention" if layer < num_full_layers else "sliding_attention"
        for layer in range(num_layers)
    }
    match sorted(layer_types):
        case ["full_attention"]:
            return None
        case ["sliding_attention"]:
            return fields.integer("sliding_window")
    raise fields.unsupported(
        "layer_types", sorted(layer_types), "the same for all layers, full or sliding attention"
    )


def _read_eos_token_ids(model_dir: Path, fields: ConfigFields, vocab_size: int) -> tuple[int, ...]:
    source = fields
    if (model_dir / "generation_config.json").exists():
        generation = read_json(model_dir / "generation_config.json")
        source = generation if generation.has("eos_token_id") else fields
    token_ids = source.integers("eos_token_id")
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise source.unsupported("eos_token_id", token_ids, f"within 0..{vocab_size - 1}")
    return token_ids
