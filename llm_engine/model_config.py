"""config.json of a checkpoint as a checked value; refuses by name what is not implemented.

One decoder serves all families: they differ in biases, in the normalization of queries and keys,
in the sliding window and in rotary scaling, and each of these is a field here.
"""

from dataclasses import dataclass
from pathlib import Path

from attn_kernels.linear.plan import GATE_GROUP
from llm_engine.config_fields import MAX_INTEGER, ConfigFields, read_json
from llm_engine.config_keys import check_keys
from llm_engine.generation_config import read_eos_token_ids
from llm_engine.rope_config import FactorsRope, RopeConfig, YarnRope, read_rope_config
from llm_engine.window_config import read_sliding_window

# architecture |-> family, which is also the model_type
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = ("float32", "float16", "bfloat16")

# transformers' defaults for missing keys. A null num_key_value_heads means as many as query heads,
# and so does a missing one in a Llama.
DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
DEFAULT_QWEN3_HEAD_DIM = 128  # not derived

# Bounds far above any model, so that no loop or allocation runs away
MAX_LAYERS = 2**12
MAX_HEADS = 2**16
MAX_WIDTH = 2**24  # of a vector, and of the vocabulary
MIN_CONTEXT_TOKENS = 3  # what warm-up computes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and arithmetic of a decoder."""

    family: str  # a value of FAMILIES
    dtype: str  # of the published weights, one of DTYPES
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
    has_tied_embeddings: bool  # the output projection is the embedding, unless the file has its own
    eos_token_ids: tuple[int, ...]  # tokens that end generation; may be empty

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json, and the end tokens of generation_config.json where there is one.

    Raises:
        CheckpointError: If config.json is missing or is not JSON.
        UnsupportedModel: If it requires something that is not implemented.
    """
    fields = read_json(model_dir / "config.json")
    family = _read_family(fields)
    check_keys(fields)
    if fields.string("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        raise fields.unsupported("hidden_act", fields.string("hidden_act"), "'silu'")
    hidden_size = fields.integer("hidden_size", at_most=MAX_WIDTH)
    num_qo_heads = fields.integer("num_attention_heads", at_most=MAX_HEADS)
    num_kv_heads = _read_kv_heads(fields, family, num_qo_heads)
    default_head_dim = DEFAULT_QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // num_qo_heads
    head_dim = fields.integer("head_dim", default_head_dim, at_least=2, at_most=MAX_WIDTH)
    if head_dim % 2:
        raise fields.unsupported("head_dim", head_dim, "even")
    has_attention_bias = family in ("llama", "qwen3") and fields.boolean("attention_bias", False)
    dtype = fields.string("dtype", fields.string("torch_dtype", "float32"))
    if dtype not in DTYPES:
        raise fields.unsupported("dtype", dtype, f"one of {', '.join(DTYPES)}")
    num_layers = fields.integer("num_hidden_layers", at_most=MAX_LAYERS)
    rope = read_rope_config(fields)
    if isinstance(rope, FactorsRope) and len(rope.factors) != head_dim // 2:
        found = f"a list of {len(rope.factors)}"
        raise fields.unsupported("factors", found, f"one for each frequency ({head_dim // 2})")
    max_context_tokens = _read_context(fields, rope)
    vocab_size = fields.integer("vocab_size", at_most=MAX_WIDTH)
    return ModelConfig(
        family=family,
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_read_intermediate_size(fields),
        num_layers=num_layers,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        sliding_window=read_sliding_window(
            fields, family, num_layers=num_layers, max_context_tokens=max_context_tokens
        ),
        has_qkv_bias=has_attention_bias or family == "qwen2",
        has_output_bias=has_attention_bias,
        has_mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
        has_qk_norm=family == "qwen3",
        has_tied_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=read_eos_token_ids(model_dir, fields, vocab_size=vocab_size),
    )


def _read_family(fields: ConfigFields) -> str:
    architectures = fields.strings("architectures")
    if len(architectures) != 1 or architectures[0] not in FAMILIES:
        allowed = f"exactly one of {', '.join(sorted(FAMILIES))}"
        raise fields.unsupported("architectures", architectures, allowed)
    family = FAMILIES[architectures[0]]
    if fields.string("model_type", family) != family:
        allowed = f"{family!r}, as architectures is {architectures}"
        raise fields.unsupported("model_type", fields.string("model_type"), allowed)
    return family


def _read_kv_heads(fields: ConfigFields, family: str, num_qo_heads: int) -> int:
    is_null = fields.is_null("num_key_value_heads")
    default = num_qo_heads if is_null else DEFAULT_KV_HEADS.get(family, num_qo_heads)
    num_kv_heads = fields.integer("num_key_value_heads", default, at_most=MAX_HEADS)
    if num_qo_heads % num_kv_heads:
        allowed = f"a divisor of num_attention_heads ({num_qo_heads})"
        raise fields.unsupported("num_key_value_heads", num_kv_heads, allowed)
    return num_kv_heads


def _read_intermediate_size(fields: ConfigFields) -> int:
    size = fields.integer("intermediate_size", at_most=MAX_WIDTH)
    if size % GATE_GROUP:
        raise fields.unsupported("intermediate_size", size, f"multiples of {GATE_GROUP}")
    return size


def _read_context(fields: ConfigFields, rope: RopeConfig) -> int:
    context = fields.integer("max_position_embeddings", at_least=MIN_CONTEXT_TOKENS)
    if isinstance(rope, YarnRope):
        # Published configurations add the scaling to an unchanged max_position_embeddings.
        return max(context, int(min(rope.original_context_tokens * rope.factor, MAX_INTEGER)))
    return context
